"""Serves ``Transfer.Push``: shakes hands with sources, tries canaries, keeps their streams.

What flows over a pair is the receiver's business (``SinkLinkUser``). The counterpart is
``shared/worker/dial.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from shared import wire
from shared.engine import staging
from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.errors import (
    IncompatiblePeer,
    MeshError,
    RemoteProtocolError,
    ShuttingDown,
    TransferFailed,
    WorkerLost,
)
from shared.ids import Incarnation
from shared.lanes import more_certain
from shared.liveness import LivenessRule
from shared.messages import codec
from shared.messages.transfer_codec import (
    PairIdentity,
    agree,
    command_from_wire,
    finding_of,
    hello_to_wire,
    reply_to_wire,
    windows_to_wire,
)
from shared.rpc.heartbeat_stream import HeartbeatStream
from shared.rpc.methods import TRANSFER_PUSH
from shared.rpc.service import ServerStream, Servicer, bind
from shared.transfer.messages import LinkId, PushMessage, PushReply, WindowOffer
from shared.transfer.plan import FrameRule
from shared.transfer.receivers import TagRanges
from shared.transport.base import Endpoint, Outcome, Transport
from shared.transport.pairing import (
    CANARY_BYTES,
    HANDSHAKE_S,
    PairRules,
    close_endpoint,
    is_refusal,
)

_log = structlog.get_logger(__name__)

NUM_CANARIES = 3

_Stream = ServerStream[wire.PushCommand, wire.PushEvent]


class SinkLink:
    """One life of one pair stream, from the sink's side."""

    def __init__(self, link_id: LinkId, source: Incarnation, endpoint: Endpoint) -> None:
        self.id = link_id
        self.source = source
        self.endpoint = endpoint
        self.lane = ""
        self.control: HeartbeatStream[wire.PushEvent, wire.PushCommand] | None = None
        self.lost: MeshError | None = None
        self.windows: list[WindowOffer] = []
        """What the source has mapped and writes; empty: its frames come as whole messages."""

    def send(self, reply: PushReply) -> None:
        """Send a control message; never waits. On a link that is lost it goes nowhere."""
        if self.control is not None:
            self.control.send(reply_to_wire(reply))

    def offer(self, windows: Sequence[WindowOffer]) -> None:
        """Have the source map these, too, before any credit that names them."""
        if self.windows and windows and self.control is not None:
            self.control.send(windows_to_wire(windows))

    def close(self, reason: str) -> None:
        """Declare the link lost; ``SinkLinkUser.link_lost`` follows."""
        self.lose(TransferFailed(reason))

    def lose(self, error: MeshError) -> None:
        """As ``close``, with a typed reason; the first one counts."""
        self.lost = self.lost or error
        if self.control is not None:
            self.control.close(error)


class SinkLinkUser(Protocol):
    """Who uses the links: the receiver. All calls come on the loop and return at once."""

    @property
    def windows(self) -> tuple[list[WindowOffer], object]:
        """Staging that the source may write, as it is now; and what keeps it so while held."""
        ...

    def link_up(self, link: SinkLink, rule: FrameRule) -> None: ...

    def link_message(self, link: SinkLink, message: PushMessage) -> None: ...

    def link_lost(self, link: SinkLink, error: MeshError) -> None:
        """Nothing more arrives. The endpoint is closed next, and its operations settle."""
        ...


class PairServer:
    """All pairs of this sink. ``run`` owns what outlives a call."""

    def __init__(
        self,
        identity: PairIdentity,
        *,
        engine: Engine,
        compute: ComputeRunner,
        transport: Transport,
        tags: TagRanges,
        sink: SinkLinkUser,
        liveness: LivenessRule | None,
        rules: PairRules,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """rules: pairs to refuse. on_change: ``not_ready_reason`` may have changed."""
        self._identity = identity
        self._engine = engine
        self._compute = compute
        self._transport = transport
        self._tags = tags
        self._sink = sink
        self._liveness = liveness
        self._rules = rules
        self._on_change = on_change
        self._refusal = ""
        self._links: list[SinkLink] = []
        self._next_link = 0
        self._tasks: asyncio.TaskGroup | None = None
        self.servicer = Servicer(bind(TRANSFER_PUSH, self._serve))

    @property
    def not_ready_reason(self) -> str:
        """Why no pair may be used although sources came; '' otherwise."""
        return "" if self._links else self._refusal

    async def run(self) -> None:
        """Accept pairs until cancelled; then every link is lost and every endpoint closed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._tasks = None
        finally:
            links = list(self._links)
            for link in links:
                self._lose(link, ShuttingDown("the decode worker is shutting down"))
            for link in links:
                await close_endpoint(link.endpoint)

    async def _serve(self, stream: _Stream) -> None:
        """Handler of ``Transfer.Push``; runs in grpclib's task, so what must outlive it is not
        its."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                link, rule = await self._pair(stream)
        except TimeoutError:
            raise RemoteProtocolError(f"no handshake within {HANDSHAKE_S:g} s") from None
        error: MeshError = WorkerLost("the prefill worker is gone")
        try:
            if link.lost is None:
                link.control = HeartbeatStream(
                    stream,
                    heartbeat=wire.PushEvent(heartbeat=wire.Heartbeat()),
                    peer="prefill worker",
                    rule=self._liveness,
                    sends_at_once=False,  # a step that begins goes before its KV's receipt
                )
                self._refusal = ""
                self._links.append(link)
                self._on_change()
                self._sink.link_up(link, rule)
                error = await link.control.run(lambda command: self._hear(link, command))
            raise link.lost or error
        finally:
            self._lose(link, error)
            self._close_later(link.endpoint)
            _log.info("pair lost", prefill=f"{link.source:016x}", error=error.message)

    async def _pair(self, stream: _Stream) -> tuple[SinkLink, FrameRule]:
        """Shake hands and try canaries. Raises MeshError: the pair is refused, and why."""
        command = await stream.receive()
        self._require_running()
        try:
            terms = agree(
                self._identity, None if command is None else command.hello, wire.Role.PREFILL
            )
            self._rules.check_host(terms.host)
            self._rules.check_engine(self._identity.spec.engine, terms.engine)
        except MeshError as error:
            await self._refuse(stream, error)
            raise
        link: SinkLink | None = None

        def on_lost() -> None:
            if link is not None:
                link.lose(WorkerLost("the transport lost the prefill worker"))

        endpoint = await self._transport.connect(terms.transport_address, on_lost)
        try:
            self._next_link += 1
            link = SinkLink(LinkId(self._next_link), terms.peer, endpoint)
            await stream.send(wire.PushEvent(hello=hello_to_wire(wire.Role.DECODE, self._identity)))
            link.lane = await self._try_canaries(stream, endpoint, terms.rule)
            link.windows = await self._offer_windows(stream)
            self._require_running()  # still
        except BaseException:
            self._close_later(endpoint)
            raise
        return link, terms.rule

    def _require_running(self) -> None:
        if self._tasks is None:
            raise ShuttingDown("the decode worker is not running")

    async def _try_canaries(
        self,
        stream: _Stream,
        endpoint: Endpoint,
        rule: FrameRule,
    ) -> str:
        """Receive a few test frames, say whether their bytes were right, and return their lane."""
        num_bytes = min(CANARY_BYTES, rule.max_frame_bytes)
        buffer = self._engine.new_buffer(num_bytes)
        tag = self._tags.take()
        last_tag = tag + NUM_CANARIES - 1
        result = wire.CanaryResult(ok=True, tag=tag)
        while True:
            operation = self._transport.receive(endpoint, buffer, num_bytes, tag)
            await stream.send(wire.PushEvent(canary=result))
            asked_at = self._now()
            command = await stream.receive()
            canary = None if command is None else command.canary
            if canary is None or canary.tag != tag or canary.num_bytes != num_bytes:
                raise RemoteProtocolError("a pair begins with canaries")
            is_whole = await operation.settled() is Outcome.DONE
            if is_whole:
                digest = await self._compute.copy(lambda: staging.digest(buffer))
                is_whole = digest == canary.digest
            result = wire.CanaryResult(
                ok=is_whole,
                seconds=self._now() - asked_at,
                tag=tag + 1 if is_whole and tag < last_tag else 0,
            )
            if not result.ok:
                await stream.send(wire.PushEvent(canary=result))
                raise TransferFailed("a canary arrived damaged", code="canary")
            if not result.tag:
                ours = await endpoint.find_lane(buffer, num_bytes, sends=False)
                result.lane = more_certain(ours, finding_of(canary)).lane
                try:
                    self._rules.check_lane(result.lane)
                except IncompatiblePeer as error:
                    await self._refuse(stream, error)
                    raise
                await stream.send(wire.PushEvent(canary=result))
                return result.lane
            tag = result.tag

    async def _offer_windows(self, stream: _Stream) -> list[WindowOffer]:
        """Return the windows that the source has mapped: all or none."""
        offers, _held = self._sink.windows  # a slot may be replaced meanwhile: link_up tells
        await stream.send(windows_to_wire(offers))
        command = await stream.receive()
        if command is None or command.windows_mapped is None:
            raise RemoteProtocolError("prefill did not say whether it has mapped the windows")
        return offers if command.windows_mapped.mapped else []

    async def _refuse(self, stream: _Stream, error: MeshError) -> None:
        if is_refusal(error):
            self._refusal = error.message
            self._on_change()
        await stream.send(wire.PushEvent(refused_pair=codec.error_to_wire(error)))

    def _hear(self, link: SinkLink, command: wire.PushCommand) -> None:
        message = command_from_wire(command)
        if message is not None:
            self._sink.link_message(link, message)

    def _lose(self, link: SinkLink, error: MeshError) -> None:
        link.lose(error)
        if link in self._links:
            self._links.remove(link)
            self._sink.link_lost(link, link.lost or error)

    def _close_later(self, endpoint: Endpoint) -> None:
        # Not in the handler's task: the call may be torn down, the endpoint must be closed.
        if self._tasks is not None:
            self._tasks.create_task(close_endpoint(endpoint))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
