"""Serves ``Decode.Session``: one stream per gateway carries its reservations in and all its tokens
out.

One ``StepTokens`` per step and gateway holds the tokens of all its sequences as packed columns, so
the cost of streaming does not grow with the batch. What a request is and when it ends is
``reservation.py``'s; here is only its wire form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import structlog

from services.decode.core.lease import LeaseKey
from services.decode.receiver import ReceiveStats
from services.decode.request import DecodeRequest, ReserveRequest
from services.decode.reservation import Reservations
from shared import wire
from shared.errors import MeshError, RemoteProtocolError
from shared.ids import Incarnation, StreamId
from shared.liveness import LivenessRule
from shared.rpc import codec
from shared.rpc.first_token import first_token_to_wire, require_sendable
from shared.rpc.gateway_session import (
    EVENT_BYTES,
    MAX_OUTBOX_BYTES,
    GatewaySession,
    GatewaySessions,
)
from shared.rpc.message_codec import MAX_MESSAGE_BYTES
from shared.rpc.methods import DECODE_SESSION
from shared.schedule.plan import NewToken, PromptTimes
from shared.transfer.effects import MAX_RESERVE_WAIT_S

_log = structlog.get_logger(__name__)

_ROW_BYTES = 13
_STEP_BYTES = MAX_MESSAGE_BYTES // 2
"""Where a step's message is cut: so far below the limit that what is not counted never matters."""


class Intake:
    """The sessions of all gateways. is_colocated: orders that name this very worker as their
    prefill worker are taken. on_silent: a gateway stopped talking; its incarnation."""

    def __init__(
        self,
        reservations: Reservations,
        incarnation: Incarnation,
        version: str,
        *,
        is_colocated: bool = False,
        on_silent: Callable[[Incarnation], None] = lambda _: None,
        liveness: LivenessRule | None = None,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
    ) -> None:
        self._reservations = reservations
        self._incarnation = incarnation
        self._is_colocated = is_colocated
        self._on_silent = on_silent
        self._lines: dict[GatewaySession, _Line] = {}
        self.sessions = GatewaySessions(
            self,
            method=DECODE_SESSION,
            event_type=wire.DecodeEvent,
            role=wire.Role.DECODE,
            incarnation=incarnation,
            version=version,
            rule=liveness,
            max_outbox_bytes=max_outbox_bytes,
        )

    # --- SessionHost -----------------------------------------------------------------------------

    def session_opened(self, session: GatewaySession) -> None:
        """See ``SessionHost``."""
        self._lines[session] = _Line(session)

    def session_command(self, session: GatewaySession, command: Any) -> None:
        """See ``SessionHost``."""
        line = self._lines[session]
        if command.reserve is not None:
            self._reserve(line, command.reserve)
        elif command.cancel is not None:
            request = line.requests.get(StreamId(command.cancel.stream_id))
            if request is not None:
                self._reservations.cancel(request)
        else:
            raise RemoteProtocolError("a command of no known kind")

    def session_closed(self, session: GatewaySession, *, is_silent: bool) -> None:
        """See ``SessionHost``."""
        line = self._lines.pop(session)
        for request in list(line.requests.values()):
            self._reservations.cancel(request)
        if is_silent:
            self._on_silent(session.gateway)

    def _reserve(self, line: _Line, command: wire.Reserve) -> None:
        stream_id = StreamId(command.stream_id)
        if stream_id in line.requests:
            raise RemoteProtocolError("a stream_id is used once", param="stream_id")
        now = asyncio.get_running_loop().time()
        try:
            order = codec.reserve_from_wire(command)
            request = ReserveRequest(
                key=LeaseKey(order.request_id, order.attempt, order.lease_token),
                item=order.item,
                prefill=order.prefill_incarnation,
                wait_s=min(order.wait_s, MAX_RESERVE_WAIT_S),
                deadline_at=None if order.deadline_s is None else now + order.deadline_s,
                trace_context=order.trace_context,
            )
            record = self._start(request, line, stream_id)
        except MeshError as error:
            line.failed(stream_id, error)
            return
        if record is not None:
            line.requests[stream_id] = record

    def _start(
        self, request: ReserveRequest, line: _Line, stream_id: StreamId
    ) -> DecodeRequest | None:
        if request.prefill != self._incarnation:
            return self._reservations.reserve(request, line, stream_id)
        if not self._is_colocated:
            raise RemoteProtocolError("this decode worker computes no prompts", code="colocated")
        require_sendable(request.item)
        return self._reservations.compute(request, line, stream_id)


def _messages(
    rows: Sequence[tuple[StreamId, NewToken]],
) -> Iterator[Sequence[tuple[StreamId, NewToken]]]:
    """Cut a step whose logprobs would not fit one message; any other step is one message."""
    first, num_bytes = 0, 0
    for idx, (_, token) in enumerate(rows):
        row_bytes = _ROW_BYTES
        if token.logprobs is not None:
            row_bytes += codec.logprobs_bytes(1, len(token.logprobs.top))
        if num_bytes + row_bytes > _STEP_BYTES and idx > first:
            yield rows[first:idx]
            first, num_bytes = idx, 0
        num_bytes += row_bytes
    yield rows[first:]


class _Line:
    """One gateway's ``AnswerLine``: events become wire messages in its session's outbox."""

    def __init__(self, session: GatewaySession) -> None:
        self._session = session
        self.requests: dict[StreamId, DecodeRequest] = {}

    def granted(self, stream_id: StreamId, *, cached_tokens: int, wait_s: float) -> None:
        """See ``AnswerLine``."""
        self._session.send(
            wire.DecodeEvent(
                granted=wire.Granted(
                    stream_id=stream_id, cached_tokens=cached_tokens, wait_s=wait_s
                )
            )
        )

    def joined(self, stream_id: StreamId, stats: ReceiveStats, lane: str) -> None:
        """See ``AnswerLine``."""
        self._session.send(
            wire.DecodeEvent(
                joined=wire.Joined(
                    stream_id=stream_id,
                    bytes_received=stats.num_bytes,
                    num_frames=stats.num_frames,
                    receive_s=stats.receive_s,
                    lane=lane,
                )
            )
        )

    def first_token(self, stream_id: StreamId, token: NewToken, times: PromptTimes) -> None:
        """See ``AnswerLine``."""
        message, num_bytes = first_token_to_wire(stream_id, token, times)
        self._session.send(wire.DecodeEvent(first=message), num_bytes)

    def step_tokens(self, tokens: Sequence[tuple[StreamId, NewToken]]) -> None:
        """See ``AnswerLine``."""
        for part in _messages(tokens):
            step = codec.step_tokens_to_wire(part)
            num_bytes = EVENT_BYTES + _ROW_BYTES * len(part)
            num_bytes += 2 * (len(step.logprobs) + len(step.top_ids))
            self._session.send(wire.DecodeEvent(tokens=step), num_bytes)

    def failed(self, stream_id: StreamId, error: MeshError) -> None:
        """See ``AnswerLine``."""
        self._session.send(
            wire.DecodeEvent(
                failed=wire.DecodeFailed(stream_id=stream_id, error=codec.error_to_wire(error))
            ),
            EVENT_BYTES + len(error.message),
        )

    def ended(self, stream_id: StreamId) -> None:
        """See ``AnswerLine``."""
        self.requests.pop(stream_id, None)
