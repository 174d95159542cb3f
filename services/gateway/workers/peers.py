"""Streams to workers: one long-lived session per worker, dialled for as long as the worker is a
member.

A session multiplexes every request's leg on that worker by ``stream_id``: the fence of an attempt,
because an id is used once and forgotten when its leg ends, so what a late or zombie worker still
says finds nobody. This module knows wire messages and heartbeats; what an event means for a
request is ``session.py``'s and the lifecycle core's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import structlog

from services.gateway.core.lifecycle import Leg
from services.gateway.core.worker import Role, Worker
from shared import wire
from shared.address import Address
from shared.errors import MeshError, RemoteProtocolError, WorkerLost, without_frames
from shared.ids import Incarnation, StreamId
from shared.messages import codec
from shared.request import AnswerToken, FinishReason
from shared.rpc.heartbeat_stream import HeartbeatStream
from shared.rpc.methods import WORKER_SESSION
from shared.rpc.network import Network
from shared.rpc.stream import ClientStream, open_stream

if TYPE_CHECKING:
    from services.gateway.workers.session import LegShell

_log = structlog.get_logger(__name__)

_REASONS = tuple(FinishReason)
"""By their numbers: a column's are checked."""

MAX_STREAM_ID = (1 << 32) - 1
"""Of a session: 50 days at a thousand orders a second to one worker."""

_REDIAL_S = (0.05, 0.2, 0.5, 1.0)

SessionStream: TypeAlias = ClientStream[wire.WorkerCommand, wire.WorkerEvent]


class WorkerSession:
    """The gateway's end of a worker's session stream, across reconnections.

    on_change: called when the worker's usability changed.
    """

    def __init__(
        self,
        worker: Worker,
        network: Network,
        incarnation: Incarnation,
        on_change: Callable[[], None],
    ) -> None:
        self.worker = worker
        self._network = network
        self._hello = codec.own_hello(wire.Role.GATEWAY, incarnation)
        self._on_change = on_change
        self._legs: dict[StreamId, LegShell] = {}
        self._control: HeartbeatStream[wire.WorkerCommand, wire.WorkerEvent] | None = None
        self._next_stream_id = 1
        self._num_failures = 0
        self._last_silence_s = 0.0

    @property
    def silence_s(self) -> float:
        """How long the worker has been silent, or had been when the session was lost."""
        return self._last_silence_s if self._control is None else self._control.silence_s

    @property
    def _address(self) -> Address:
        """Where the worker said last that it is."""
        return Address(self.worker.host, self.worker.port)

    @property
    def num_legs(self) -> int:
        """Legs that have not ended here."""
        return len(self._legs)

    # --- what requests do -----------------------------------------------------------------------

    def send(self, leg: LegShell, order: wire.WorkOrder, *, num_cached: int = 0) -> StreamId:
        """Send an order under a new stream id; events come to ``leg`` until its end, a failure or
        ``cancel``. It counts as the worker's load until its report has seen it.

        num_cached: of the prompt need not be computed, as far as is known.
        """
        order.stream_id = stream_id = StreamId(self._next_stream_id)
        self._next_stream_id += 1
        if stream_id == MAX_STREAM_ID:
            # What is on this session goes on over the next one, or elsewhere.
            self._next_stream_id = 1
            if self._control is not None:
                self._control.close(WorkerLost("the session has had all orders that it can number"))
        self._legs[stream_id] = leg
        self.worker.ordered(
            Role.PREFILL if leg.leg is Leg.PREFILL else Role.DECODE,
            stream_id,
            len(order.token_ids) // 4,  # packed: four bytes a token
            computes=leg.leg is not Leg.DECODE,
            now=asyncio.get_running_loop().time(),
            num_cached=num_cached,
        )
        self._post(wire.WorkerCommand(order=order))
        return stream_id

    def cancel(self, stream_id: StreamId) -> None:
        """Tell the worker to stop this leg, and forget it. Idempotent."""
        if self._close(stream_id) is not None:
            self._post(wire.WorkerCommand(cancel=wire.CancelOrder(stream_id=stream_id)))

    def _close(self, stream_id: StreamId) -> LegShell | None:
        """Forget a leg and its load; None if it is not open."""
        leg = self._legs.pop(stream_id, None)
        if leg is not None:
            self.worker.ended(stream_id)
        return leg

    def _post(self, command: wire.WorkerCommand) -> None:
        if self._control is not None:
            self._control.send(command)

    # --- the stream -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the session up until cancelled: the worker's membership is the length of this
        call."""
        while True:
            try:
                await self._run_once()
            except MeshError as error:
                self._lose(without_frames(error))
            await asyncio.sleep(_REDIAL_S[min(self._num_failures, len(_REDIAL_S) - 1)])
            self._num_failures += 1

    def abandon(self, error: MeshError) -> None:
        """The worker has left the mesh: fail what is on it."""
        self._down()
        self._fail_all(error)

    def _lose(self, error: MeshError) -> None:
        """The session has ended, or did not begin: from here on nothing is sent to it."""
        self._down()
        _log.warning(
            "worker session lost",
            worker=self.worker.incarnation,
            role=self.worker.role.value,
            address=str(self._address),
            error=error.message,
            at_s=asyncio.get_running_loop().time(),
        )
        self._fail_all(error)

    def _down(self) -> None:
        self.worker.is_connected = False
        self._last_silence_s, self._control = self.silence_s, None
        self._on_change()

    def _fail_all(self, error: MeshError) -> None:
        if not isinstance(error, WorkerLost):
            error = WorkerLost(f"the worker's session broke: {error.message}")
        legs, self._legs = list(self._legs.values()), {}
        self.worker.lost()
        for leg in legs:
            leg.failed(error, lost=True)

    async def _run_once(self) -> None:
        async with (
            self._network.channel(self._address) as channel,
            open_stream(channel, WORKER_SESSION) as stream,
        ):
            try:
                await stream.send(wire.WorkerCommand(hello=self._hello))
                await self._shake_hands(stream)
                control = self._control = HeartbeatStream(
                    stream,
                    heartbeat=lambda asks: wire.WorkerCommand(heartbeat=wire.Heartbeat(asks=asks)),
                    peer=f"{self.worker.role.value} worker",
                    is_busy=lambda: bool(self._legs),
                    on_suspect=self._suspect,
                )
                self.worker.is_connected = True
                self._num_failures = 0
                # The session before may have been silent when it was lost.
                self._suspect(False)
                error = await control.run(self._on_event)
                # Not after the block: while its connection closes it must get no new requests.
                self._lose(error)
            finally:
                stream.drop()

    def _suspect(self, is_suspect: bool) -> None:
        if is_suspect:
            _log.warning(
                "worker suspected",
                worker=self.worker.incarnation,
                role=self.worker.role.value,
                silence_s=self.silence_s,
                at_s=asyncio.get_running_loop().time(),
            )
        self.worker.is_silent = is_suspect
        self._on_change()

    async def _shake_hands(self, stream: SessionStream) -> None:
        try:
            async with asyncio.timeout(3.0):
                event = await stream.receive()
        except TimeoutError:
            raise WorkerLost("the worker did not say hello within 3 s") from None
        hello = event.hello if event is not None else None
        if codec.require_hello(hello).incarnation != self.worker.incarnation:
            raise WorkerLost("another process answers at this worker's address")

    # --- events ---------------------------------------------------------------------------------

    def _on_event(self, event: wire.WorkerEvent) -> None:
        if event.tokens is not None:
            self._on_step_tokens(event.tokens)
        elif event.token is not None:
            self._on_first_token(event.token)
        elif event.done is not None:
            leg = self._close(StreamId(event.done.stream_id))
            if leg is not None:
                leg.pushed(event.done)
        elif event.joined is not None:
            leg = self._legs.get(StreamId(event.joined.stream_id))
            if leg is not None:
                leg.joined(event.joined)
        elif event.granted is not None:
            leg = self._legs.get(StreamId(event.granted.stream_id))
            if leg is not None:
                leg.granted(event.granted)
        elif event.failed is not None:
            self._on_failed(event.failed.stream_id, event.failed.error)

    def _on_first_token(self, event: wire.PrefillToken) -> None:
        stream_id = StreamId(event.stream_id)
        leg = self._legs.get(stream_id)
        if leg is None:
            return
        token, times = codec.prefill_token_from_wire(event)
        self._check_ids([token.token_id])
        self.worker.computed(stream_id)
        if leg.leg is Leg.WHOLE and token.finish_reason is not FinishReason.NONE:
            self._close(stream_id)  # of a prefill leg PrefillDone is the last word
        leg.first_token(token, times)

    def _on_failed(self, stream_id: int, error: wire.Error | None) -> None:
        leg = self._close(StreamId(stream_id))
        if leg is not None:
            reason = (
                codec.error_from_wire(error) if error is not None else WorkerLost("no reason given")
            )
            leg.failed(reason, lost=False)

    def _on_step_tokens(self, step: wire.StepTokens) -> None:
        columns = codec.step_columns_from_wire(step)
        ids, indices, token_ids, reasons, logprobs = columns
        self._check_ids(token_ids)
        rows = zip(ids, indices, token_ids, reasons, logprobs or [None] * len(ids), strict=True)
        legs: dict[Any, LegShell] = self._legs
        for stream_id, index, token_id, reason, row_logprobs in rows:
            leg = legs.get(stream_id)
            if leg is not None:
                if reason:
                    self._close(StreamId(stream_id))
                leg.token(AnswerToken(index, token_id, _REASONS[reason], row_logprobs))

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """Refuse what is no token of the model: the client would read it, and the next attempt's
        prompt be refused as the client's."""
        if max(token_ids, default=0) >= self.worker.model.vocab_size:
            raise RemoteProtocolError(
                f"token_ids must be below the vocabulary size {self.worker.model.vocab_size}",
                param="token_ids",
            )
