"""Routing: choose the pair (prefill, decode) for a request in one decision.

The two sides are scored apart and each worker once; of those that are paired, the policy takes one
of each. A colocated worker is a pair with itself and competes as any other does.

A policy is a pure function of the workers' views, the request's size and one random number; its
answer is a record that can be logged and replayed. JSQ as in Splitwise (arXiv 2311.18677, section
4.1: pending tokens for prompts) with the decode side by reserved memory, as in its public
simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from services.gateway.core.index.fetches import LEAST_FETCH_S, Fetch
from services.gateway.core.routing.conductor import Conductor, LeastLoaded, Local
from services.gateway.core.routing.expectations import Prediction
from services.gateway.core.routing.pools import Splitwise, pool_of
from services.gateway.core.routing.rendezvous import BoundedHash
from services.gateway.core.routing.sides import (
    Memory,
    Places,
    PromptTerms,
    RouteRequest,
    RoutingPolicy,
    Scores,
    Sides,
)
from services.gateway.core.worker import Worker, WorkerView
from shared.errors import InvariantViolated
from shared.ids import Incarnation
from shared.kv.prefix_hash import UNIT
from shared.transfer.orders import PrefixAt


class Seen(NamedTuple):
    """What a decision went by, beside the sides: enough to make it again."""

    request: RouteRequest
    random: float
    memory: Memory
    views: Sequence[WorkerView | None]
    """By the workers' places."""


class RouteDecision(NamedTuple):
    """Which pair, and why: the sides as the policy saw them, and its scores."""

    policy: str
    prefill: Incarnation
    decode: Incarnation
    places: Places
    """Where the two are in the sides."""
    sides: Sides
    scores: Scores
    prefill_pool: str
    decode_pool: str
    """What the two workers were when they were chosen."""
    seen: Seen
    terms: PromptTerms | None = None
    """What the prefill worker's score is made of; None = it is no sum."""
    prediction: Prediction | None = None
    """What was expected of it; None = the prefill worker reports no step times."""

    @property
    def num_cached(self) -> int:
        """Of the prompt's tokens, those that the prefill worker need not compute."""
        terms = self.terms
        return 0 if terms is None else terms.cached_tokens

    @property
    def fetch(self) -> Fetch | None:
        """What the prefill worker is to fetch first."""
        it = self.terms
        if it is None or not it.source:
            return None
        return Fetch(it.source, it.cached_tokens, it.fetch)

    @property
    def prefix_s(self) -> float:
        """What a prefix that is fetched or loaded is expected to take longer than the queue."""
        it = self.prediction
        return 0.0 if it is None else it.fetch_s + it.load_s

    @property
    def workers(self) -> tuple[Worker, Worker]:
        """The two, as they are now."""
        prefill, decode = self.places
        return self.sides.prefills[prefill], self.sides.decodes[decode]

    def fetch_order(self, num_tokens: int) -> PrefixAt | None:
        """Return what the prompt's worker is to be told to fetch. num_tokens: of the prompt.

        The source has as many as is known of it, and perhaps some of the next granule. While the
        prompt waits for its turn it may wait for the prefix, too; beyond that for twice as long as
        was predicted."""
        fetch, expected = self.fetch, self.prediction
        if fetch is None:
            return None
        queue_s = 0.0 if expected is None else expected.queue_s + expected.own_s
        return PrefixAt(
            fetch.source,
            min(fetch.num_tokens + UNIT, num_tokens),
            max(queue_s, 2 * fetch.seconds) + LEAST_FETCH_S,
        )

    @property
    def is_colocated(self) -> bool:
        """Whether one worker does it all."""
        return self.prefill == self.decode


class RoundRobin(RoutingPolicy):
    """Each role in turn, each with its own counter, so that 2 x 2 workers see all four pairs."""

    name = "round_robin"
    memory: int = 0

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return the next pair."""
        round_number, prefill = divmod(self.memory, len(sides.prefills))
        self.memory += 1
        partners = sides.partners_of(prefill)
        return prefill, partners[round_number % len(partners)]


class Random(RoutingPolicy):
    """Any pair with equal probability."""

    name = "random"

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return a random pair."""
        num_pairs = sides.num_pairs
        pick = min(int(random * num_pairs), num_pairs - 1)
        prefill = 0
        while pick >= (num_partners := sides.partners[prefill].bit_count()):
            pick -= num_partners
            prefill += 1
        return prefill, sides.partners_of(prefill)[pick]


class TwoChoices(RoutingPolicy):
    """The less loaded of two random workers, as in Mitzenmacher, "The power of two choices" (2001);
    of decode workers, two partners of the prefill worker.

    Many gateways that hear of loads a little late do not all send to the one that seems emptiest.
    """

    name = "p2c"
    score_prefill = staticmethod(attrgetter("pending_tokens"))
    score_decode = staticmethod(attrgetter("reserved_share"))

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return the better of two on each side; one number draws all four."""
        places = range(len(sides.prefills))
        prefill, random = self._better_of_two(places, scores.prefills, random)
        decode, _ = self._better_of_two(sides.partners_of(prefill), scores.decodes, random)
        return prefill, decode

    def _better_of_two(
        self, places: Sequence[int], scores: Sequence[float], random: float
    ) -> tuple[int, float]:
        """Return the less loaded of two different places, and what is left of the random number."""
        number = len(places)
        if number == 1:
            return places[0], random
        pick, rest = divmod(random * number * (number - 1), 1.0)
        first, second = divmod(int(pick), number - 1)
        second += second >= first  # any other than the first, each as likely
        return min(places[first], places[second], key=scores.__getitem__), rest


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
    "splitwise": Splitwise,
    "p2c": TwoChoices,
    "hash": BoundedHash,
    "local": Local,
    "conductor": Conductor,
}
"""Name on the command line -> policy."""


class PairWanted(NamedTuple):
    """The best choice is a pair that is not made yet: have its prefill worker make it."""

    prefill: Incarnation
    decode: Incarnation


def route(
    policy: RoutingPolicy, request: RouteRequest, sides: Sides, random: float
) -> RouteDecision | None:
    """Choose a pair, or return None if none can take the request now.

    Workers too small for the prompt are left out; pairs with workers to avoid are used only if
    nothing else is left.
    """
    sides = _usable(sides, request, moves_roles=policy.moves_roles)
    if not sides:
        return None
    scores = policy.scores(request, sides)
    # Taken before ``choose``, which changes the memory: a record must decide as it was then.
    seen = Seen(request, random, policy.memory, sides.views())
    places = prefill, decode = policy.choose(request, sides, scores, random)
    if not sides.decodes[decode].bit & sides.partners[prefill]:
        raise InvariantViolated(f"policy {policy.name} chose {places}, which are no pair")
    return RouteDecision(
        policy=policy.name,
        places=places,
        prefill=sides.prefills[prefill].incarnation,
        decode=sides.decodes[decode].incarnation,
        sides=sides,
        scores=scores,
        prefill_pool=pool_of(sides.prefills[prefill]).value,
        decode_pool=pool_of(sides.decodes[decode]).value,
        seen=seen,
        terms=scores.terms[prefill] if scores.terms else None,
    )


def _usable(sides: Sides, request: RouteRequest, *, moves_roles: bool) -> Sides:
    """Return who can take the request: at home if possible, with the fewest workers to avoid."""
    options = (sides,) if moves_roles or sides.at_home is None else (sides.at_home, sides)
    for option in options:
        fitting = option.fitting(request.num_tokens, request.max_new_tokens)
        if request.avoid:
            fitting = fitting.without(request.avoid, most=0)
        if fitting:
            return fitting
    fitting = sides.fitting(request.num_tokens, request.max_new_tokens)
    return fitting.without(request.avoid, most=1) or fitting
