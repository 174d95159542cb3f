"""One request's shell: performs what its two cores decide. ``Dispatcher`` says which workers are
looked for, how long, and what is sent to them; ``Lifecycle`` what their events mean.

There is no task per request here: the client's own task (the HTTP or gRPC handler) drives it by
waiting for it. Worker sessions call in synchronously, and what has arrived by the end of the loop's
turn is the consumer's; who waits wakes where the consumer wants it, and to dispatch again when an
attempt has failed. Leaving the block in any way cancels both legs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from services.gateway.core.admission.admission import Admission, TurnAway
from services.gateway.core.admission.admission import Effect as AdmissionEffect
from services.gateway.core.dispatcher import (
    BlamePair,
    Dispatcher,
    Effect,
    LookForPair,
    Send,
    WorkerDrains,
)
from services.gateway.core.index.prefixes import HashedPrompt
from services.gateway.core.lifecycle import CancelLeg, End, Leg, Lifecycle, Reroute
from services.gateway.core.routing.routing import RouteDecision
from services.gateway.mesh import GenerationRequest, Take
from services.gateway.workers.delivery import Delivery
from services.gateway.workers.membership import Membership
from services.gateway.workers.peers import WorkerSession
from services.gateway.workers.timeline import Timeline, Transfer
from shared import wire
from shared.errors import MeshError
from shared.ids import ID_BYTES, LeaseToken, StreamId
from shared.messages import codec
from shared.messages.columns import pack_u32
from shared.request import AnswerToken
from shared.schedule.plan import PromptTimes


@dataclass(slots=True, eq=False)
class LegShell:
    """One leg of one attempt: passes its worker's events on with the attempt's number. Sessions
    call it on the loop; every call returns at once."""

    _request: RequestShell
    _attempt: int
    leg: Leg
    session: WorkerSession
    stream_id: StreamId = field(default=StreamId(0))

    def token(self, token: AnswerToken) -> None:
        request = self._request
        request.apply(request.lifecycle.token_arrived(self._attempt, self.leg, token))

    def first_token(self, token: AnswerToken, times: PromptTimes) -> None:
        """The token of the prompt, with prefill's own times and cache hits."""
        self._request.timeline.prefilled(times)
        # An answer that ends with its first token takes nothing of decode: nobody need be asked.
        if token.finish_reason or not self._request.is_refused_now():
            self.token(token)

    def pushed(self, event: wire.PrefillDone) -> None:
        """Prefill has nothing left to do."""
        self._request.timeline.pushed(
            Transfer(
                event.bytes_sent,
                codec.told_s(event.transfer_s),
                codec.told_s(event.exposed_s),
                event.lane,
                event.mode,
            )
        )
        self._request.lifecycle.prefill_done(self._attempt)

    def granted(self, event: wire.Granted) -> None:
        """Decode reserved the blocks."""
        self._request.timeline.granted(
            cached_tokens=event.cached_tokens, wait_s=codec.told_s(event.wait_s)
        )
        self._request.granted(self._attempt)

    def joined(self, event: wire.Joined) -> None:
        self._request.timeline.joined(
            num_bytes=event.bytes_received,
            receive_s=codec.told_s(event.receive_s),
            lane=event.lane,
        )
        self._request.lifecycle.joined(self._attempt)

    def failed(self, error: MeshError, *, lost: bool) -> None:
        self._request.apply(
            self._request.lifecycle.leg_failed(self._attempt, self.leg, error, lost=lost)
        )


class RequestShell:
    """One running answer (the ``Generation`` of ``mesh.py``), from ``dispatch`` to ``leave``."""

    def __init__(
        self,
        request: GenerationRequest,
        take: Take,
        membership: Membership,
        timeline: Timeline,
        delivery: Delivery,
        admission: Admission,
        admit: Callable[[Iterable[AdmissionEffect]], None],
        *,
        max_attempts: int,
        pair_wait_s: float,
        failover_wait_s: float,
        may_be_refused: bool = True,
        prompt: HashedPrompt | None = None,
    ) -> None:
        self.lifecycle = Lifecycle(request.token_ids, request.sampling, max_attempts=max_attempts)
        self.timeline = timeline
        self._request = request
        self._membership = membership
        self._dispatcher = Dispatcher(
            self.lifecycle,
            deadline_at=request.deadline_at,
            pair_wait_s=pair_wait_s,
            failover_wait_s=failover_wait_s,
            may_be_refused=may_be_refused,
            prompt=prompt,
        )
        self._delivery = delivery
        self._admission, self._admit = admission, admit
        self._pending: list[AnswerToken] = []  # have arrived in this turn of the loop
        self._take: Take | None = take
        self._is_called = False  # who waits, by ``take``
        self._failure: Exception | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.is_due = False
        self._waiter: asyncio.Future[None] | None = None
        self._end: End | None = None
        self._search: LookForPair | None = None
        self._reroute: Reroute | None = None
        self._legs: dict[Leg, LegShell] = {}

    # --- the client's side ----------------------------------------------------------------------

    async def dispatch(self) -> None:
        """Find a pair and send both legs; waits a bounded while for a pair. ``leave`` follows,
        unless it fails.

        Raises WorkerLost: no pair came. DeadlinePassed. ShuttingDown.
        """
        loop = asyncio.get_running_loop()
        try:
            if self._request.deadline_at is not None:
                self._deadline = loop.call_at(self._request.deadline_at, self._pass_deadline)
            self.apply(self._dispatcher.begin(loop.time()))
            if not await self._find_pair() and self._end is not None and self._end.error:
                raise self._end.error
        except BaseException as failure:
            self.leave(failure)
            raise

    async def wait(self) -> bool:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._is_called:
                self._is_called = False
                return True
            if self._end is not None:
                if self._end.error is not None:
                    raise self._end.error
                return False
            if self._reroute is not None:
                await self._dispatch_again(self._reroute)
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        """Something has changed that ``wait`` looks at."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def deliver(self, now: float) -> tuple[float, int]:
        """See ``Recipient``: what has arrived is its consumer's."""
        self.is_due = False
        tokens, self._pending = self._pending, []
        told = self.timeline.emitted(now, len(tokens))
        admitted = self._admission.emitted(
            self._request.request_id, len(tokens), now, cached_tokens=self.timeline.cached_tokens
        )
        if admitted:
            self._admit(admitted)
        if self._take is not None:  # else the consumer failed, or left in this very turn
            try:
                if self._take(tokens):
                    self._is_called = True
                    self._wake()
            except Exception as failure:
                self._failure, self._take = failure, None
                self._wake()
        return told

    @property
    def cached_tokens(self) -> int:
        return self.timeline.cached_tokens

    @property
    def first_token_at(self) -> float | None:
        return self.timeline.first_token_at

    def receipt(self) -> dict[str, Any]:
        return self.timeline.receipt().as_dict()

    def granted(self, attempt: int) -> None:
        """Decode has room for it; whoever waited for that may be next."""
        self.apply(self.lifecycle.granted(attempt))
        now = asyncio.get_running_loop().time()
        self._admit(self._admission.granted(self._request.request_id, now))

    def is_refused_now(self) -> bool:
        """Ask admission once more, now that the prompt is computed; whether that was the end."""
        now = asyncio.get_running_loop().time()
        return self._is_turned_away(self._admission.prompt_computed(self._request.request_id, now))

    def _is_turned_away(self, effects: Iterable[AdmissionEffect]) -> bool:
        for effect in effects:
            if isinstance(effect, TurnAway):  # none but this request is
                self.fail(effect.error)
                return True
        return False

    # --- dispatch -------------------------------------------------------------------------------

    async def _dispatch_again(self, reroute: Reroute) -> None:
        self._reroute = None
        # Whichever of its workers was silent, the client has waited for it as long.
        silence_s = max(leg.session.silence_s for leg in self._legs.values())
        now = asyncio.get_running_loop().time()
        self.apply(self._dispatcher.attempt_failed(reroute, silence_s=silence_s, now=now))
        await self._find_pair()

    async def _find_pair(self) -> bool:
        """Look for a pair, as long as it is wanted, and send to it; False: the request ended."""
        while (search := self._search) is not None:
            changed = self._membership.usability.next
            decision = self._membership.route(search.request)
            if decision is not None:
                return self._take_pair(decision, search)
            try:
                async with asyncio.timeout_at(search.until):
                    await changed.wait()
            except TimeoutError:
                self.apply(self._dispatcher.wait_over(self._membership.table.why_not_ready()))
        return False

    def _take_pair(self, decision: RouteDecision, search: LookForPair) -> bool:
        """Send to it, unless that would be late; False: the request ended."""
        now, pair = asyncio.get_running_loop().time(), self._dispatcher.pair(decision)
        effects = self._admission.pair_found(self._request.request_id, pair, now)
        if self._is_turned_away(effects):
            return False
        self._membership.router.sent(decision, search.request.prompt, now)
        self.apply(self._dispatcher.pair_found(decision, now))
        self._admit(effects)
        return True

    def _send(self, send: Send) -> None:
        self._search = None
        if send.after is not None:
            self.timeline.rerouted(send.after)
        decision, legs, attempt = send.decision, send.legs, send.attempt
        has_decode = self.lifecycle.needs_decode
        same: dict[str, Any] = {
            "request_id": self._request.request_id,
            "attempt": attempt,
            "token_ids": pack_u32(send.token_ids),
            "num_prompt_tokens": self.lifecycle.num_prompt_tokens,
            "sampling": codec.sampling_to_wire(send.sampling),
            "deadline_s": send.deadline_s,
            "cache_salt": self._request.cache_salt,
            "trace_context": self.timeline.dispatched(decision, has_decode=has_decode),
            "lease_token": LeaseToken(self._membership.random_bytes(ID_BYTES)),
        }
        fetch = decision.fetch_order(len(send.token_ids))
        prefix = fetch and wire.PrefixSource(
            incarnation=fetch.worker, num_tokens=fetch.num_tokens, wait_s=fetch.wait_s
        )
        num_cached = decision.num_cached
        self._legs = {}
        for kind, worker in legs.items():
            session = self._membership.sessions[worker]
            leg = self._legs[kind] = LegShell(self, attempt, kind, session)
            is_prefill = kind is Leg.PREFILL
            order = wire.WorkOrder(
                **same,
                role=wire.Role.PREFILL if is_prefill else wire.Role.DECODE,
                peer_incarnation=legs.get(Leg.DECODE, 0) if is_prefill else decision.prefill,
                wait_s=0.0 if is_prefill else send.wait_s,
                prefix=None if kind is Leg.DECODE else prefix,
            )
            leg.stream_id = session.send(leg, order, num_cached=num_cached)

    # --- effects --------------------------------------------------------------------------------

    def apply(self, effects: Iterable[Effect]) -> None:
        """Carry out what a core decided; never waits."""
        for effect in effects:
            match effect:
                case AnswerToken():
                    self._pending.append(effect)
                    self._delivery.due(self)
                case CancelLeg(leg):
                    self._legs[leg].session.cancel(self._legs[leg].stream_id)
                case Reroute():
                    self._reroute = effect
                    self.timeline.attempt_failed(effect.error)
                    self._wake()
                case LookForPair():
                    self._search = effect
                case BlamePair(prefill, decode):
                    self._membership.pair_failed(prefill, decode)
                case WorkerDrains(worker):
                    self._membership.drains(worker)
                case Send():
                    self._send(effect)
                case End():
                    self._end, self._search = effect, None
                    # First what has arrived: with the end the receipt is made, which counts it.
                    self._delivery.deliver(self)
                    self.timeline.ended(effect.error, self.lifecycle.finish_reason)
                    self._wake()

    def fail(self, error: MeshError) -> None:
        """End the request with this error; after its end, do nothing."""
        self.apply(self._dispatcher.give_up(error))

    def _pass_deadline(self) -> None:
        self.apply(self._dispatcher.deadline_passed())

    def leave(self, failure: BaseException | None) -> None:
        """The consumer has left, with or without a failure: cancel whatever is still running.

        Legs, consumer and the error that it ended with know this request: it forgets them, or only
        the garbage collector would free it.
        """
        if isinstance(failure, MeshError):
            self.fail(failure)
        elif failure is not None:
            if self._dispatcher.is_late(asyncio.get_running_loop().time()):
                self._pass_deadline()  # a server that watches it, too, has cancelled its handler
            else:
                self.timeline.abandoned()
        self.apply(self.lifecycle.cancel())
        if self._deadline is not None:
            self._deadline.cancel()
        self._legs = {}
        self._take = self._failure = self._end = None
