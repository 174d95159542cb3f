"""Serves ``Prefill.Session`` and ``Decode.Session``: one stream per gateway and kind carries its
orders in and its tokens out.

What a request is and when it ends is ``requests.py``'s; here is only its wire form. One
``StepTokens`` per step and gateway holds the tokens of all its sequences as packed columns, so the
cost of streaming does not grow with the batch. Losing a session cancels its requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shared import wire
from shared.errors import (
    MeshError,
    RemoteProtocolError,
    TooLarge,
    WorkerLost,
    without_frames,
)
from shared.home import Role
from shared.ids import Incarnation, StreamId
from shared.messages import codec
from shared.messages.message_codec import MAX_MESSAGE_BYTES
from shared.request import WorkItem
from shared.rpc.gateway_session import EVENT_BYTES, GatewaySession, GatewaySessions
from shared.rpc.methods import DECODE_SESSION, PREFILL_SESSION
from shared.schedule.plan import NewToken, PromptTimes
from shared.transfer.effects import HandOver
from shared.transfer.orders import Order
from shared.worker.core.life import Task
from shared.worker.pusher import PushStats
from shared.worker.request import Request
from shared.worker.requests import Requests

_ROW_BYTES = 13
"""Of a row of ``StepTokens``: stream, index and token of 4 bytes each, and a finish reason."""
_STEP_BYTES = MAX_MESSAGE_BYTES // 2
"""Where a step's message is cut: so far below the limit that what is not counted never matters."""
_FIRST_BYTES = 256
"""Most that a PrefillToken takes beside its columns."""


class Door(GatewaySessions):
    """One of a worker's two doors. on_silent: a gateway stopped talking; its incarnation."""

    def __init__(
        self,
        requests: Requests,
        incarnation: Incarnation,
        *,
        on_silent: Callable[[Incarnation], None] = lambda _: None,
    ) -> None:
        super().__init__(incarnation)
        self.requests = requests
        self._on_silent = on_silent
        self._opened: dict[GatewaySession, SessionRequests] = {}

    @abstractmethod
    def read(self, order: Any) -> tuple[Task, Order]:
        """Check the message of an order. Raises RemoteProtocolError."""

    def session_opened(self, session: GatewaySession) -> None:
        self._opened[session] = SessionRequests(session, self.event)

    def session_order(self, session: GatewaySession, order: Any) -> None:
        asked, stream_id = self._opened[session], StreamId(order.stream_id)
        if stream_id in asked.requests:
            # Ends the session: under this id a failure would be the other request's.
            raise RemoteProtocolError("a stream_id is used once", param="stream_id")
        try:
            task, checked = self.read(order)
            # Token 1 of an answer, with its prompt's logprobs, is sent where the prompt is
            # computed.
            if task is not Task.ANSWER:
                _require_sendable(checked.item)
            request = self.requests.take(task, checked, asked)
        except MeshError as error:
            # What refuses the prompt's open keeps it, maybe for long; its frames keep the order.
            asked.failed(stream_id, without_frames(error))
            return
        if request is not None:
            asked.requests[stream_id] = request

    def session_cancel(self, session: GatewaySession, stream_id: StreamId) -> None:
        request = self._opened[session].requests.get(stream_id)
        if request is not None:
            self.requests.cancel(request)

    def session_closed(self, session: GatewaySession, *, is_silent: bool) -> None:
        # To the worker at the other end of a push this is an error: its own session may live on.
        error = WorkerLost("the gateway's session with the other worker ended")
        for request in list(self._opened.pop(session).requests.values()):
            self.requests.cancel(request, error)
        # A later session of the same gateway shows that it is there: this one's end was lost.
        if is_silent and all(it.gateway != session.gateway for it in self._opened):
            self._on_silent(session.gateway)


class PromptDoor(Door):
    """Where gateways order prompts."""

    role = Role.PREFILL
    method = PREFILL_SESSION
    event = wire.PrefillEvent
    orders = "start"

    def read(self, order: wire.StartPrefill) -> tuple[Task, Order]:
        return Task.PROMPT, codec.start_prefill_from_wire(order)


class AnswerDoor(Door):
    """Where gateways order answers: with KV that another worker pushes, or whole."""

    role = Role.DECODE
    method = DECODE_SESSION
    event = wire.DecodeEvent
    orders = "reserve"

    def read(self, order: wire.Reserve) -> tuple[Task, Order]:
        read = codec.reserve_from_wire(order)
        return Task.WHOLE if read.peer == self.incarnation else Task.ANSWER, read


class SessionRequests:
    """What one session has asked for. It is their ``AskingGateway``: what happens goes into the
    session's outbox.

    event: ``PrefillEvent`` or ``DecodeEvent``; where they say the same, they differ in names.
    """

    def __init__(self, session: GatewaySession, event: Callable[..., Any]) -> None:
        self._session = session
        self._event = event
        self._is_prompt = event is wire.PrefillEvent
        self.requests: dict[StreamId, Request] = {}

    def granted(self, stream_id: StreamId, *, cached_tokens: int, wait_s: float) -> None:
        granted = wire.Granted(stream_id=stream_id, cached_tokens=cached_tokens, wait_s=wait_s)
        self._session.send(wire.DecodeEvent(granted=granted))

    def joined(self, stream_id: StreamId, receive: HandOver, lane: str) -> None:
        joined = wire.Joined(
            stream_id=stream_id,
            bytes_received=receive.num_bytes,
            num_frames=receive.num_frames,
            receive_s=receive.receive_s,
            lane=lane,
        )
        self._session.send(wire.DecodeEvent(joined=joined))

    def first_token(self, stream_id: StreamId, token: NewToken, times: PromptTimes) -> None:
        message = codec.prefill_token_to_wire(stream_id, token, times)
        # Twice: alternatives are ids and logprobs, rows logprobs and counts, all of 4 bytes.
        num_bytes = EVENT_BYTES + 2 * len(message.top_ids)
        if (rows := message.prompt_logprobs) is not None:
            num_bytes += 2 * (len(rows.logprobs) + len(rows.top_ids))
        name = "token" if self._is_prompt else "first"
        self._session.send(self._event(**{name: message}), num_bytes)

    def step_tokens(self, tokens: Sequence[tuple[StreamId, NewToken]]) -> None:
        for part in _messages(tokens):
            step = codec.step_tokens_to_wire(part)
            num_bytes = EVENT_BYTES + _ROW_BYTES * len(part)
            num_bytes += 2 * (len(step.logprobs) + len(step.top_ids))
            self._session.send(wire.DecodeEvent(tokens=step), num_bytes)

    def pushed(self, stream_id: StreamId, stats: PushStats) -> None:
        done = wire.PrefillDone(
            stream_id=stream_id,
            bytes_sent=stats.num_bytes,
            transfer_s=stats.transfer_s,
            exposed_s=stats.exposed_s,
            lane=stats.lane,
            mode=stats.mode,
        )
        self._session.send(wire.PrefillEvent(done=done))

    def failed(self, stream_id: StreamId, error: MeshError) -> None:
        kind = wire.PrefillFailed if self._is_prompt else wire.DecodeFailed
        failed = kind(stream_id=stream_id, error=codec.error_to_wire(error))
        self._session.send(self._event(failed=failed), EVENT_BYTES + len(error.message))

    def ended(self, stream_id: StreamId) -> None:
        self.requests.pop(stream_id, None)


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


def _require_sendable(item: WorkItem) -> None:
    """Refuse, before anything is computed, a prompt whose first token would not fit one message.

    Sending it would end the session, and every other request of the gateway with it.
    Raises TooLarge.
    """
    k = item.sampling.prompt_logprobs
    if k is None:
        return
    own = codec.logprobs_bytes(1, item.sampling.logprobs or 0)
    num_bytes = codec.logprobs_bytes(len(item.token_ids), k) + own + _FIRST_BYTES
    if num_bytes > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"logprobs of {len(item.token_ids)} prompt tokens with {k} alternatives each take "
            f"{num_bytes} bytes, over the limit of {MAX_MESSAGE_BYTES}: ask for fewer alternatives "
            "or send a shorter prompt",
            param="prompt_logprobs",
            code="prompt_logprobs_too_large",
        )
