"""One request on a decode worker: what was asked for, what it holds, and whom it tells. Records
and one protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.decode.core.lease import Lease, LeaseKey
from services.decode.receiver import ReceiveStats
from shared.errors import MeshError
from shared.ids import Incarnation, StreamId
from shared.request import WorkItem
from shared.schedule.plan import NewToken, PromptTimes
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.tracing import Phases


class AnswerLine(Protocol):
    """One gateway, as its requests speak to it; every call returns at once."""

    def granted(self, stream_id: StreamId, *, cached_tokens: int, wait_s: float) -> None:
        """Room is promised."""
        ...

    def joined(self, stream_id: StreamId, stats: ReceiveStats, lane: str) -> None:
        """All KV is placed: tokens follow from the next step on. lane: what carried it."""
        ...

    def first_token(self, stream_id: StreamId, token: NewToken, times: PromptTimes) -> None:
        """Token 1 of a request whose prompt was computed here."""
        ...

    def step_tokens(self, tokens: Sequence[tuple[StreamId, NewToken]]) -> None:
        """One step's tokens of this gateway; a finish reason is a request's last word."""
        ...

    def failed(self, stream_id: StreamId, error: MeshError) -> None:
        """The request has failed; its last word."""
        ...

    def ended(self, stream_id: StreamId) -> None:
        """The request holds nothing and will say nothing any more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRequest:
    """One attempt to decode. prefill: who may push. wait_s: how long it may wait for blocks.
    deadline_at: loop time. trace_context: see ``tracing.TraceSpan.context``.
    """

    key: LeaseKey
    item: WorkItem
    prefill: Incarnation
    wait_s: float
    deadline_at: float | None
    trace_context: str = ""


@dataclass(slots=True)
class OwnPrompt:
    """A prompt that this worker computes itself. started_at: its first step was planned; None = it
    waits."""

    arrived_at: float
    started_at: float | None = None


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request and what it holds. Identity is the object.

    One that a prefill worker computes holds a lease, then a sequence; one that is computed here
    holds a sequence from the start, and ``prompt`` until its first token.
    is_told: the gateway has had, or wants, no further word. error: type of what ended it.
    """

    line: AnswerLine
    stream_id: StreamId
    key: LeaseKey
    phases: Phases
    lease: Lease | None = None
    prompt: OwnPrompt | None = None
    error: str = ""
    sequence: TokenSequence | None = None
    deadline: asyncio.TimerHandle | None = None
    is_told: bool = False
