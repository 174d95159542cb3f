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
from heapq import nsmallest
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from services.gateway.core.pools import Splitwise, pool_of
from services.gateway.core.sides import Places, RouteRequest, Scores, Sides
from services.gateway.core.turns import Turns, least
from services.gateway.core.worker import Worker
from shared.ids import Incarnation

MAX_RECORDED = 8
"""Candidates of a side in a decision's record."""


class Candidate(NamedTuple):
    """One worker of a side and its score there; lower is better."""

    score: float
    worker: Incarnation


class RouteDecision(NamedTuple):
    """Which pair, and why: of each side the best few that the policy saw, best first, and how many
    there were."""

    policy: str
    prefill: Incarnation
    decode: Incarnation
    prefills: tuple[Candidate, ...] = ()
    decodes: tuple[Candidate, ...] = ()
    num_prefills: int = 0
    num_decodes: int = 0
    prefill_pool: str = ""
    decode_pool: str = ""
    """What the two workers were when they were chosen."""

    @property
    def is_colocated(self) -> bool:
        """Whether one worker does it all."""
        return self.prefill == self.decode

    def as_dict(self) -> dict[str, Any]:
        """Return the record as it is logged: incarnations in hexadecimal."""
        return {
            "policy": self.policy,
            "prefill": f"{self.prefill:016x}",
            "decode": f"{self.decode:016x}",
            "prefill_pool": self.prefill_pool,
            "decode_pool": self.decode_pool,
            "num_prefills": self.num_prefills,
            "prefills": [_candidate_body(candidate) for candidate in self.prefills],
            "num_decodes": self.num_decodes,
            "decodes": [_candidate_body(candidate) for candidate in self.decodes],
        }


def _candidate_body(candidate: Candidate) -> dict[str, Any]:
    return {"worker": f"{candidate.worker:016x}", "score": round(candidate.score, 4)}


class RoutingPolicy(Protocol):
    """Chooses among workers that can all take the request; never called with empty sides."""

    name: str
    moves_roles: bool
    """Whether it borrows workers from the other side. All others leave workers that serve both
    roles to their home, unless nobody is there."""

    score_prefill: Callable[[Worker], float]
    """What this policy compares of a worker that would compute the prompt."""
    score_decode: Callable[[Worker], float]
    """What it compares of one that would continue the answer."""

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return a prefill worker and one of its partners. random: uniform in [0, 1), drawn by
        the shell for this decision."""
        ...


def _nothing(worker: Worker) -> float:
    """The score of a policy that compares nothing."""
    return 0.0


class RoundRobin:
    """Each role in turn, each with its own counter, so that 2 x 2 workers see all four pairs."""

    name = "round_robin"
    moves_roles = False
    score_prefill = staticmethod(_nothing)
    score_decode = staticmethod(_nothing)

    def __init__(self) -> None:
        self._num_decisions = 0

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return the next pair."""
        turn = self._num_decisions
        self._num_decisions += 1
        round_number, prefill = divmod(turn, len(sides.prefills))
        partners = sides.partners_of(prefill)
        return prefill, partners[round_number % len(partners)]


class Random:
    """Any pair with equal probability."""

    name = "random"
    moves_roles = False
    score_prefill = staticmethod(_nothing)
    score_decode = staticmethod(_nothing)

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return a random pair."""
        num_pairs = sides.num_pairs
        pick = min(int(random * num_pairs), num_pairs - 1)
        prefill = 0
        while pick >= (num_partners := sides.partners[prefill].bit_count()):
            pick -= num_partners
            prefill += 1
        return prefill, sides.partners_of(prefill)[pick]


class LeastLoaded:
    """Join the shortest queue: pending tokens for prefill, share of reserved blocks for decode.

    Ties go to the one chosen longest ago, so that idle workers share the work.
    """

    name = "least_loaded"
    moves_roles = False
    score_prefill = staticmethod(attrgetter("pending_tokens"))
    score_decode = staticmethod(attrgetter("reserved_share"))

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return the shortest prefill queue, then the emptiest decode worker that it reaches; of
        equal queues one that reaches the emptiest."""
        prefills, partners, decodes = sides.prefills, sides.partners, sides.decodes
        shortest = least(scores.prefills, range(len(prefills)))
        reached = 0
        for place in shortest:
            reached |= partners[place]
        emptiest = least(scores.decodes, sides.places_of(reached))
        if len(shortest) > 1:
            best = sum(decodes[place].bit for place in emptiest)
            shortest = [place for place in shortest if partners[place] & best]
        prefill = self._turns.longest_ago(prefills, shortest)
        mask = partners[prefill]
        emptiest = [place for place in emptiest if decodes[place].bit & mask]
        decode = self._turns.longest_ago(decodes, emptiest)
        self._turns.chosen(prefills[prefill].incarnation, decodes[decode].incarnation)
        return prefill, decode


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
    "splitwise": Splitwise,
}
"""Name on the command line -> policy."""


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
    scores = Scores(
        list(map(policy.score_prefill, sides.prefills)),
        list(map(policy.score_decode, sides.decodes)),
    )
    prefill, decode = policy.choose(request, sides, scores, random)
    return RouteDecision(
        policy=policy.name,
        prefill=sides.prefills[prefill].incarnation,
        decode=sides.decodes[decode].incarnation,
        prefills=_best(scores.prefills, sides.prefills),
        decodes=_best(scores.decodes, sides.decodes),
        num_prefills=len(sides.prefills),
        num_decodes=len(sides.decodes),
        prefill_pool=pool_of(sides.prefills[prefill]).value,
        decode_pool=pool_of(sides.decodes[decode]).value,
    )


def _best(scores: Sequence[float], workers: Sequence[Worker]) -> tuple[Candidate, ...]:
    """Return the best few of a side, equal ones in joining order."""
    ranked = zip(scores, range(len(scores)), strict=True)
    best = sorted(ranked) if len(scores) <= MAX_RECORDED else nsmallest(MAX_RECORDED, ranked)
    return tuple(Candidate(score, workers[place].incarnation) for score, place in best)


def _usable(sides: Sides, request: RouteRequest, *, moves_roles: bool) -> Sides:
    """Return who can take the request: at home if possible, with the fewest workers to avoid."""
    options = (sides,) if moves_roles or sides.at_home is None else (sides.at_home, sides)
    for option in options:
        fitting = option.fitting(request.num_tokens)
        if request.avoid:
            fitting = fitting.without(request.avoid, most=0)
        if fitting:
            return fitting
    fitting = sides.fitting(request.num_tokens)
    return fitting.without(request.avoid, most=1) or fitting
