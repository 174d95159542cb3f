"""How one request finds its workers: at first, and again after each attempt that failed.

It stands beside the request's life (``lifecycle.py``: attempts, legs, tokens) and decides what that
does not know: how long a pair is waited for, whom the next attempt avoids, how long decode may let
it wait for room, and what a passed deadline means.

    begin ──▶ LookForPair ──pair_found──▶ Send ──attempt_failed──▶ LookForPair ...
                  └──wait_over, deadline_passed──▶ End

Whoever performs it asks routing at once, and again whenever who may be chosen has changed. Pure:
``now`` is an argument, every event returns what is to be done, in order.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from services.gateway.core import lifecycle
from services.gateway.core.admission.overload import ChosenPair
from services.gateway.core.index.prefixes import HashedPrompt
from services.gateway.core.lifecycle import Leg, Lifecycle, Reroute
from services.gateway.core.routing.routing import RouteDecision
from services.gateway.core.routing.sides import RouteRequest
from shared.errors import DeadlinePassed, MeshError, NoBlocks, ShuttingDown, WorkerLost
from shared.ids import Incarnation
from shared.request import SamplingParams
from shared.transfer.effects import MAX_RESERVE_WAIT_S

LEAST_WAIT_S = 0.05
"""A wait for blocks shorter than this is not worth another attempt."""


class LookForPair(NamedTuple):
    """Ask routing until it names a pair (``pair_found``), or until then (``wait_over``)."""

    request: RouteRequest
    until: float


class BlamePair(NamedTuple):
    """One of the two failed the other: nothing goes to this pair until its prefill worker names it
    again."""

    prefill: Incarnation
    decode: Incarnation


class WorkerDrains(NamedTuple):
    """It refuses what is new, and its next report will say why: nothing goes to it until then."""

    worker: Incarnation


class Send(NamedTuple):
    """Send these legs in the same instant: prefill computes while decode makes room.

    wait_s: how long decode may let it wait for blocks. deadline_s: seconds left, 0 = no deadline.
    after: why the attempt before failed.
    """

    attempt: int
    decision: RouteDecision
    legs: dict[Leg, Incarnation]
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    wait_s: float
    deadline_s: float
    after: MeshError | None


Effect = lifecycle.Effect | LookForPair | BlamePair | WorkerDrains | Send


def no_pair(why_not_ready: str) -> WorkerLost:
    """Return the error of who has waited for workers as long as it may. why_not_ready: of the
    mesh; '' = it takes other requests."""
    reason = why_not_ready or "none is large enough"
    return WorkerLost(
        f"no pair of workers can take the request: {reason}", code="no_pair", retry_after_s=1.0
    )


class Dispatcher:
    """Finds the workers of one request, attempt by attempt.

    pair_wait_s: the longest wait for a pair, and for room on decode beyond what the prompt takes,
    which needs none before; one whose client has tokens, or that may not be refused for it, waits
    for room until its deadline. failover_wait_s: the longest that a client hears
    nothing because a worker was lost. prompt: see ``RouteRequest``.
    """

    def __init__(
        self,
        life: Lifecycle,
        *,
        deadline_at: float | None,
        pair_wait_s: float,
        failover_wait_s: float,
        may_be_refused: bool = True,
        prompt: HashedPrompt | None = None,
    ) -> None:
        self._life = life
        self._may_be_refused = may_be_refused
        self._deadline_at = deadline_at
        self._pair_wait_s = pair_wait_s
        self._failover_wait_s = failover_wait_s
        self._prompt = prompt
        self._avoid: frozenset[Incarnation] = frozenset()
        self._legs: dict[Leg, Incarnation] = {}
        self._search: LookForPair | None = None
        self._after: MeshError | None = None
        self._blocks_by = 0.0

    def begin(self, now: float) -> list[Effect]:
        """The request was admitted."""
        self._blocks_by = self._room_by(now)
        return self._look(now + self._pair_wait_s)

    def attempt_failed(self, failure: Reroute, *, silence_s: float, now: float) -> list[Effect]:
        """The life of the request wants another attempt, after its workers were silent so long."""
        effects: list[Effect] = []
        failed = [self._legs[leg] for leg in failure.avoid if leg in self._legs]
        self._avoid = self._avoid.union(failed)
        if len(failed) == 2:
            effects.append(BlamePair(self._legs[Leg.PREFILL], self._legs[Leg.DECODE]))
        elif isinstance(failure.error, ShuttingDown):
            effects += map(WorkerDrains, failed)
        self._after = failure.error
        if not isinstance(failure.error, NoBlocks):
            self._blocks_by = self._room_by(now)
            # The client has waited through the silence, too.
            return effects + self._look(now + max(0.0, self._failover_wait_s - silence_s))
        # One wait for room in all, however many workers are asked.
        if self._blocks_by - now < LEAST_WAIT_S:
            return [*effects, *self._life.fail(failure.error)]
        return effects + self._look(min(self._blocks_by, now + self._pair_wait_s))

    def pair(self, decision: RouteDecision) -> ChosenPair:
        """Return whom it would be sent to, for admission to judge."""
        prefill, decode = decision.workers
        has_decode = decision.is_colocated or self._life.needs_decode
        return ChosenPair(
            prefill, decode if has_decode else None, decision.num_cached, decision.prefix_s
        )

    def pair_found(self, decision: RouteDecision, now: float) -> list[Effect]:
        """Routing has named a pair, and admission does not mind. Nothing comes of it if the request
        is over."""
        if self._search is None:
            return []
        self._search = None
        life = self._life
        if decision.is_colocated:
            self._legs = {Leg.WHOLE: decision.decode}
        else:
            self._legs = {Leg.PREFILL: decision.prefill}
            if life.needs_decode:
                self._legs[Leg.DECODE] = decision.decode
        takes_s = 0.0 if decision.prediction is None else decision.prediction.ttft_s
        deadline_s = 0.0
        if self._deadline_at is not None:
            # Never 0, which would be none: one that passes at this instant is still a deadline.
            deadline_s = max(0.001, self._deadline_at - now)
        send = Send(
            attempt=life.dispatched(is_whole=decision.is_colocated),
            decision=decision,
            legs=self._legs,
            token_ids=life.token_ids,
            sampling=life.sampling,
            wait_s=min(max(LEAST_WAIT_S, self._blocks_by - now) + takes_s, MAX_RESERVE_WAIT_S),
            deadline_s=deadline_s,
            after=self._after,
        )
        return [send]

    def wait_over(self, why_not_ready: str) -> list[Effect]:
        """No pair was found in time. why_not_ready: of the mesh; '' = it takes other requests."""
        if self._search is None:
            return []
        if self.is_late(self._search.until):
            return self.deadline_passed()
        # After a failed attempt its error says more than that nobody can take the next one.
        return self.give_up(self._after or no_pair(why_not_ready))

    def is_late(self, now: float) -> bool:
        """Whether the deadline has passed."""
        return self._deadline_at is not None and now >= self._deadline_at

    def deadline_passed(self) -> list[Effect]:
        """It passed, whatever the request was doing."""
        if self._search is not None:
            return self.give_up(DeadlinePassed("the deadline passed while no worker was free"))
        return self.give_up(DeadlinePassed("the request's deadline passed"))

    def give_up(self, error: MeshError) -> list[Effect]:
        """End the request with this error (the drain's limit, for one); after its end, nothing."""
        self._search = None
        return [*self._life.fail(error)]

    def _room_by(self, now: float) -> float:
        may_be_refused = self._may_be_refused and not self._life.num_output_tokens
        return now + self._pair_wait_s if may_be_refused else math.inf

    def _look(self, limit_at: float) -> list[Effect]:
        until = limit_at if self._deadline_at is None else min(limit_at, self._deadline_at)
        request = RouteRequest(
            num_tokens=self._life.num_prompt_tokens + self._life.num_output_tokens,
            max_new_tokens=self._life.num_tokens_left,
            avoid=self._avoid,
            prompt=self._prompt,
        )
        self._search = LookForPair(request, until)
        return [self._search]
