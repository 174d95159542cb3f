"""One gateway's decisions: what is known of a prompt and of the workers goes in, a pair comes out,
and the pairs that would have been better and are not made yet.

It joins the policy, the peer table, the index of prefixes and what is predicted. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from services.gateway.core.index.fetches import NOTHING, Hit, OffersOf
from services.gateway.core.index.prefixes import HashedPrompt, Prefixes
from services.gateway.core.routing.expectations import EndedAnswer, Expectations
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.rendezvous import affinity_of
from services.gateway.core.routing.routing import PairWanted, RouteDecision, RoutingPolicy, route
from services.gateway.core.routing.sides import NO_HITS, RouteRequest, Sides
from services.gateway.core.worker import Worker

SMALL_SURPRISE = 0.05
"""Share of a prompt that may be cached without having been expected (indices know granules, caches
have blocks) in an answer by which predictions are judged."""


class Routed(NamedTuple):
    """decision: None = nobody can take the request now. wanted: pairs to be made."""

    decision: RouteDecision | None
    wanted: Sequence[PairWanted]


class Router:
    """Decides for every request of one gateway. index_bytes: most memory of the index."""

    def __init__(self, policy: RoutingPolicy, table: PeerTable, *, index_bytes: int) -> None:
        self.expectations = Expectations()
        self.prefixes = (
            Prefixes(index_bytes, of_everybody=policy.fetches) if policy.needs_prefixes else None
        )
        self.policy = policy
        self._table = table

    @property
    def needs_prompt(self) -> bool:
        """Whether the policy goes by ``RouteRequest.prompt``."""
        return self.policy.needs_affinity or self.policy.needs_prefixes

    @property
    def sides(self) -> Sides:
        """Who may be chosen now: workers at home, if the policy leaves them there; and where no
        pair is made, those of which one could be, for a request makes it."""
        sides = self._table.sides or self._table.reach
        return sides if self.policy.moves_roles or not sides.at_home else sides.at_home

    def cached(self, prompt: HashedPrompt | None, now: float) -> Mapping[int, Hit]:
        """Return what workers have of a prompt, by their places, as far as the policy knows."""
        if prompt is None or self.prefixes is None:
            return NO_HITS
        return self.prefixes.found(prompt, now) or NO_HITS

    def left(self, worker: Worker) -> None:
        """Forget a worker that has left."""
        self.policy.left(worker.incarnation)
        self.expectations.left(worker.incarnation)
        if self.prefixes is not None:
            self.prefixes.left(worker)

    def route(self, request: RouteRequest, now: float, random: float) -> Routed:
        """Choose among all pairs that could be made. A request never waits for that if another pair
        can take it: it goes to the best one that is made, and the next one finds the better.

        random: see ``RoutingPolicy``."""
        policy, prompt, offers = self.policy, request.prompt, None
        if prompt is not None:
            found = None if self.prefixes is None else self.prefixes.found(prompt, now)
            if policy.fetches and found:
                offers = OffersOf(self._table.at, found, self.expectations.fetches) or None
            request = RouteRequest(  # without the prompt: decisions are remembered, prompts are not
                request.num_tokens,
                request.max_new_tokens,
                request.avoid,
                affinity=affinity_of(prompt.column, prompt.salt) if policy.needs_affinity else 0,
                cached=found or NO_HITS,
                fetches=offers,
                num_output_tokens=self.expectations.expected_output(request.num_tokens) or 0,
                now=now,
            )
        memory, pairs = policy.memory, list[PairWanted]()
        decision = route(policy, request, self._table.reach, random)
        if decision is not None and not self._table.is_paired(decision.prefill, decision.decode):
            policy.memory = memory  # one request takes one turn
            pairs.append(PairWanted(decision.prefill, decision.decode))
            decision = route(policy, request, self._table.sides, random)
        if decision is None:
            return Routed(None, pairs)
        prefill, decode = decision.workers
        if offers is not None and (source := offers.missing(prefill)) is not None:
            pairs.append(PairWanted(prefill.incarnation, source.incarnation))
        hit, terms = request.cached.get(prefill.place, NOTHING), decision.terms
        prediction = self.expectations.predict(
            prefill,
            decode,
            request.num_tokens,
            now,
            num_cached=hit.tokens if terms is None else terms.cached_tokens,
            fetch_s=0.0 if terms is None else terms.fetch,
            load_s=0.0 if terms is None else terms.load,
        )
        return Routed(decision._replace(prediction=prediction), pairs)

    def sent(self, decision: RouteDecision, prompt: HashedPrompt | None, now: float) -> None:
        """The prompt goes where the decision says: not all that is routed is not late."""
        if self.prefixes is None or prompt is None:
            return
        prefill, _ = decision.workers
        hit = decision.seen.request.cached.get(prefill.place, NOTHING)
        due = now if decision.prediction is None else now + decision.prediction.ttft_s
        self.prefixes.sent(prompt, prefill, hit.tokens, due, now)

    def learn(self, came: EndedAnswer, now: float) -> bool | None:
        """Hold what was expected of an answer against what came of it. Returns whether the prompt's
        worker is to be believed from now on; None = as before.

        Another attempt was not promised, nor more or less in the prefix cache than was thought:
        such answers say nothing of a worker's predictions.
        """
        expectations = self.expectations
        if came.is_whole:
            expectations.lengths.ended(came.prompt_tokens, came.output_tokens)
        if came.num_attempts > 1 or came.ttft_s is None:
            return None
        # Without a source it waited for what another prompt had sent, whose client has left.
        if came.fetched_bytes and came.fetched_from is not None:
            expectations.fetches.fetched(
                came.fetched_from, came.prefill, num_bytes=came.fetched_bytes, seconds=came.fetch_s
            )
        surprise = abs(came.cached_tokens - came.predicted_cached_tokens)
        if surprise > SMALL_SURPRISE * came.prompt_tokens:
            return None
        is_colocated = came.prefill == came.decode
        expectations.handed_over(came.handover_s, is_colocated=is_colocated)
        worker, predicted_s = self._table.get(came.prefill), came.predicted_ttft_s
        if worker is None or predicted_s is None:
            return None
        is_believed = expectations.answered(
            came.prefill, predicted_s=predicted_s, actual_s=came.ttft_s, now=now
        )
        if is_believed is not None:
            worker.is_believed = is_believed
        return is_believed
