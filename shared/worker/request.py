"""One request on a worker: what was ordered, what it holds, and whom it tells. Records and one
protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shared.errors import MeshError
from shared.ids import StreamId
from shared.schedule.plan import NewToken, PromptTimes
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.moments import Moment, note
from shared.telemetry.tracing import Phases, TraceSpan, Value
from shared.transfer.effects import HandOver
from shared.transfer.orders import Order
from shared.worker.core.lease import Lease
from shared.worker.core.life import Life, Task
from shared.worker.core.lower_tiers import Loaded, prompt_times
from shared.worker.core.prefixes import Fetched, PrefixFetch
from shared.worker.pusher import PushHandle, PushStats

_NOTHING = Fetched()
_NOT_LOADED = Loaded()


class AskingGateway(Protocol):
    """Who ordered a request, as the request speaks to it; every call returns at once. Who orders a
    prefix leaves out what that never says."""

    def granted(self, stream_id: StreamId, *, cached_tokens: int, wait_s: float) -> None:
        """Room is promised."""
        ...

    def joined(self, stream_id: StreamId, receive: HandOver, lane: str) -> None:
        """All KV is placed: tokens of an answer follow from the next step on. lane: what carried
        it."""
        ...

    def first_token(self, stream_id: StreamId, token: NewToken, times: PromptTimes) -> None:
        """Token 1 of a prompt that was computed here."""

    def step_tokens(self, tokens: Sequence[tuple[StreamId, NewToken]]) -> None:
        """One step's tokens of this gateway; a finish reason is a request's last word."""

    def pushed(self, stream_id: StreamId, stats: PushStats) -> None:
        """A prompt's KV is where it belongs, or not needed; its last word."""

    def failed(self, stream_id: StreamId, error: MeshError) -> None:
        """The request has failed; its last word."""
        ...

    def ended(self, stream_id: StreamId) -> None:
        """The request holds nothing and will say nothing any more."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """A request and what it holds. Identity is the object.

    An answer holds a lease until its KV is here, then a sequence; all others hold a sequence from
    the start. started_at: its first step was planned; None = it waits. error: type of what ended
    it. prefix: what the prompt waited for, on its way from another worker. fetched: what came.
    loaded: what came from below the pool.
    """

    order: Order
    gateway: AskingGateway
    life: Life
    arrived_at: float
    span: TraceSpan
    phases: Phases
    started_at: float | None = None
    sequence: TokenSequence | None = None
    lease: Lease | None = None
    push: PushHandle | None = None
    stats: PushStats = field(default_factory=PushStats)
    deadline: asyncio.TimerHandle | None = None
    error: str = ""
    prefix: PrefixFetch[Request] | None = None
    fetched: Fetched = _NOTHING
    loaded: Loaded = _NOT_LOADED

    @property
    def task(self) -> Task:
        """What this worker does for it."""
        return self.life.task

    def tell_first(self, token: NewToken, now: float) -> None:
        """Token 1 is sampled: the gateway hears it, and what it took."""
        times = prompt_times(self, now)
        attributes: dict[str, Value] = {
            "pdmesh.prompt_tokens": token.sequence.num_prompt_tokens,
            "pdmesh.cached_tokens": times.cached_tokens,
            "pdmesh.dram_tokens": times.dram_tokens,
            "pdmesh.ssd_tokens": times.ssd_tokens,
        }
        if self.task is Task.PROMPT:
            note(Moment.SAMPLED, self.order.key.request_id, seconds=times.compute_s)
            self.phases.end(attributes)
        else:
            self.phases.turn("decode.steps", now, attributes)
        self.gateway.first_token(self.order.stream_id, token, times)

    def trace_push(self, error: str = "") -> None:
        """Report a transfer that is over, if anything was sent or should have been."""
        push = self.push
        if push is None or not self.span.is_recording or not (push.num_frames or error):
            return
        attributes: dict[str, Value] = {
            "pdmesh.bytes": push.num_bytes,
            "pdmesh.frames": push.num_frames,
            "pdmesh.lane": push.link.lane_out,
        }
        if not error:
            attributes |= {
                "pdmesh.mode": self.stats.mode,
                "pdmesh.exposed_s": self.stats.exposed_s,
                "pdmesh.overlap": self.stats.overlap,
            }
        began_at = self.arrived_at if push.first_sent_at is None else push.first_sent_at
        self.span.phase("prefill.push", began_at, attributes, error=error)
