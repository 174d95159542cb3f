"""Keeps one live pair stream to every sink: dial, handshake, canary, heartbeats,
reconnect.

A pair is ready when canary frames crossed and came back as "right bytes". What flows over it
then is the pusher's business (``SourceLinkUser``); which sinks exist is the gateway's
(``set_peers``). A lost pair is dialled again for as long as its peer is listed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from shared import wire
from shared.address import Address
from shared.engine import staging
from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.errors import (
    IncompatiblePeer,
    MeshError,
    RemoteProtocolError,
    TransferFailed,
    WorkerLost,
)
from shared.ids import Incarnation, RandomBytes
from shared.lanes import Certainty, LaneFinding
from shared.liveness import LivenessRule
from shared.membership.decode_peers import DecodePeer
from shared.messages import codec
from shared.messages.transfer_codec import (
    PairIdentity,
    PairTerms,
    agree,
    command_to_wire,
    hello_to_wire,
    lane_of,
    reply_from_wire,
    windows_from_wire,
)
from shared.rpc.heartbeat_stream import HeartbeatStream
from shared.rpc.methods import TRANSFER_PUSH
from shared.rpc.network import Network
from shared.rpc.stream import ClientStream, open_stream
from shared.transfer.messages import LinkId, PushMessage, PushReply
from shared.transfer.plan import DEFAULT_GROUP_BYTES, DEFAULT_MAX_FRAME_BYTES, FrameRule
from shared.transport.base import Endpoint, Outcome, Transport
from shared.transport.pairing import (
    CANARY_BYTES,
    HANDSHAKE_S,
    PairRules,
    close_endpoint,
    is_refusal,
)
from shared.worker.windows import PeerWindows

_log = structlog.get_logger(__name__)

_REDIAL_S = (0.1, 0.2, 0.5, 1.0, 2.0)

_Stream = ClientStream[wire.PushCommand, wire.PushEvent]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStatistics:
    """One ready pair. gbytes_per_s: 1e9 bytes a second, from the canary, then from pushes."""

    incarnation: Incarnation
    address: Address
    lane: str
    gbytes_per_s: float


class SourceLink:
    """A ready pair stream, as the pusher uses it. One life: a reconnected peer has another link.

    rule: how the handshake agreed to cut frames. lane: what carried the canaries. bytes_per_s:
    measured; the pusher refines it. windows: the sink's staging, where we can write it.
    """

    def __init__(
        self,
        link_id: LinkId,
        peer: DecodePeer,
        endpoint: Endpoint,
        rule: FrameRule,
        lane: str,
        bytes_per_s: float,
        windows: PeerWindows,
        control: HeartbeatStream[wire.PushCommand, wire.PushEvent],
    ) -> None:
        self.id = link_id
        self.peer = peer
        self.endpoint = endpoint
        self.rule = rule
        self.lane = lane
        self.bytes_per_s = bytes_per_s
        self.windows = windows
        self._control = control

    def send(self, message: PushMessage) -> None:
        """Send a control message; never waits. On a link that is lost it goes nowhere."""
        self._control.send(command_to_wire(message))

    def close(self, reason: str) -> None:
        """Declare the link lost; ``SourceLinkUser.link_lost`` follows."""
        self._control.close(TransferFailed(reason))


class SourceLinkUser(Protocol):
    """Who uses the links: the pusher. All calls come on the loop and return at once."""

    def link_up(self, link: SourceLink) -> None: ...

    def link_message(self, link: SourceLink, message: PushReply) -> None: ...

    def link_lost(self, link: SourceLink, error: MeshError) -> None:
        """Nothing more arrives. The endpoint is closed next, and its operations settle."""
        ...


class PairTable:
    """All pairs of this source. ``run`` owns every task."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        version: str,
        engine: Engine,
        compute: ComputeRunner,
        transport: Transport,
        network: Network,
        sink: SourceLinkUser,
        random_bytes: RandomBytes,
        on_change: Callable[[], None] = lambda: None,
        group_bytes: int = DEFAULT_GROUP_BYTES,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        liveness: LivenessRule | None = None,
        rules: PairRules | None = None,
    ) -> None:
        """on_change: called on the loop whenever ``paired`` has changed. rules: pairs to refuse."""
        self._rules = rules or PairRules()
        self._identity = PairIdentity(
            incarnation,
            version,
            engine.spec,
            engine.layout,
            transport.address,
            group_bytes,
            max_frame_bytes,
            self._rules.host,
        )
        self._engine = engine
        self._compute = compute
        self._transport = transport
        self._network = network
        self._sink = sink
        self._random_bytes = random_bytes
        self._on_change = on_change
        self._liveness = liveness
        self._refusal = ""
        self._peers: dict[DecodePeer, asyncio.Task[None] | None] = {}
        self._links: dict[DecodePeer, SourceLink] = {}
        self._next_link = 0
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Dial and keep all listed peers until cancelled; then every link is lost and closed."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                for peer in self._peers:
                    self._start(peer)
                await asyncio.get_running_loop().create_future()
            finally:
                self._tasks = None

    def set_peers(self, peers: Sequence[DecodePeer]) -> None:
        """Replace the list: new ones are dialled, missing ones are closed. Works before ``run``."""
        for peer in [peer for peer in self._peers if peer not in peers]:
            task = self._peers.pop(peer)
            if task is not None:
                task.cancel()
        for peer in peers:
            if peer not in self._peers:
                self._peers[peer] = None
                self._start(peer)

    @property
    def paired(self) -> tuple[Incarnation, ...]:
        """Sinks whose canary has crossed and whose stream lives, ascending."""
        return tuple(sorted({peer.incarnation for peer in self._links}))

    @property
    def not_ready_reason(self) -> str:
        """Why no pair may be used although there is a peer; '' otherwise."""
        return "" if self._links else self._refusal

    def statistics(self) -> list[PairStatistics]:
        """One record per ready pair, ordered by address."""
        return [
            PairStatistics(
                incarnation=peer.incarnation,
                address=peer.address,
                lane=link.lane,
                gbytes_per_s=link.bytes_per_s / 1e9,
            )
            for peer, link in sorted(self._links.items(), key=lambda item: str(item[0].address))
        ]

    def _start(self, peer: DecodePeer) -> None:
        if self._tasks is not None:
            self._peers[peer] = self._tasks.create_task(self._keep(peer))

    async def _keep(self, peer: DecodePeer) -> None:
        """Pair up again and again."""
        num_failed = 0
        while True:
            links_before = self._next_link
            try:
                error = await self._pair(peer)
            except MeshError as failure:
                error = failure
            except TimeoutError:
                error = WorkerLost(f"no handshake within {HANDSHAKE_S:g} s")
            if self._next_link > links_before:
                num_failed = 0
            if is_refusal(error):
                self._refusal = error.message
                self._on_change()
            note = _log.warning if isinstance(error, IncompatiblePeer) else _log.info
            note("pair lost", decode=str(peer.address), error=error.message, code=error.code)
            await asyncio.sleep(_REDIAL_S[min(num_failed, len(_REDIAL_S) - 1)])
            num_failed += 1

    async def _pair(self, peer: DecodePeer) -> MeshError:
        """One life of one pair; returns why it ended, or raises why it never began."""
        control: HeartbeatStream[wire.PushCommand, wire.PushEvent] | None = None
        lost_early = WorkerLost("the transport lost the decode worker")

        def on_lost() -> None:
            if control is not None:
                control.close(lost_early)

        # Connecting counts: a host that drops packets would hold us for minutes.
        async with (
            asyncio.timeout(HANDSHAKE_S) as patience,
            self._network.channel(peer.address) as channel,
            open_stream(channel, TRANSFER_PUSH) as stream,
        ):
            endpoint: Endpoint | None = None
            try:
                terms = await self._shake_hands(stream, peer)
                endpoint = await self._transport.connect(terms.transport_address, on_lost)
                lane, bytes_per_s = await self._try_canaries(stream, endpoint, terms.rule)
                self._rules.check_lane(lane)
                windows = await self._map_windows(stream, endpoint, terms.rule)
                patience.reschedule(None)
                control = HeartbeatStream(
                    stream,
                    heartbeat=wire.PushCommand(heartbeat=wire.Heartbeat()),
                    peer="decode worker",
                    rule=self._liveness,
                )
                if not endpoint.alive:
                    return lost_early
                self._next_link += 1
                link = SourceLink(
                    LinkId(self._next_link),
                    peer,
                    endpoint,
                    terms.rule,
                    lane,
                    bytes_per_s,
                    windows,
                    control,
                )
                return await self._serve(link, control)
            finally:
                if endpoint is not None:
                    await close_endpoint(endpoint)

    async def _serve(
        self, link: SourceLink, control: HeartbeatStream[wire.PushCommand, wire.PushEvent]
    ) -> MeshError:
        def on_event(event: wire.PushEvent) -> None:
            if event.windows is not None:
                link.windows.replace(windows_from_wire(event.windows))
                return
            reply = reply_from_wire(event)
            if reply is not None:
                self._sink.link_message(link, reply)

        error: MeshError = WorkerLost("this prefill worker let the pair go")
        self._refusal = ""
        self._links[link.peer] = link
        self._sink.link_up(link)
        self._on_change()
        _log.info(
            "pair ready",
            decode=str(link.peer.address),
            lane=link.lane,
            mode="windows" if link.windows else "messages",
            gbytes_per_s=round(link.bytes_per_s / 1e9, 2),
        )
        try:
            error = await control.run(on_event)
        finally:
            del self._links[link.peer]
            self._sink.link_lost(link, error)
            self._on_change()
        return error

    async def _shake_hands(self, stream: _Stream, peer: DecodePeer) -> PairTerms:
        await stream.send(wire.PushCommand(hello=hello_to_wire(wire.Role.PREFILL, self._identity)))
        event = await _next_event(stream)
        terms = agree(self._identity, event.hello, wire.Role.DECODE)
        if terms.peer != peer.incarnation:
            raise WorkerLost("another decode worker lives at this address now")
        self._rules.check_host(terms.host)
        self._rules.check_engine(self._identity.spec.engine, terms.engine)
        return terms

    async def _map_windows(
        self, stream: _Stream, endpoint: Endpoint, rule: FrameRule
    ) -> PeerWindows:
        offers = windows_from_wire((await _next_event(stream)).windows)
        windows = PeerWindows(endpoint, rule.max_frame_bytes)
        is_mapped = await windows.map_all(offers)
        await stream.send(wire.PushCommand(windows_mapped=wire.WindowsMapped(mapped=is_mapped)))
        return windows

    async def _try_canaries(
        self, stream: _Stream, endpoint: Endpoint, rule: FrameRule
    ) -> tuple[str, float]:
        """Send test frames for as long as the sink names tags for them; return lane and best speed.

        Bytes per second. They lie in memory of KV's kind and are as large as KV's frames, so that
        UCX treats them alike. The first one pays for wiring up, so the sink asks for more than one.
        """
        num_bytes = min(CANARY_BYTES, rule.max_frame_bytes)
        buffer = self._engine.new_buffer(num_bytes)
        data = self._random_bytes(num_bytes)
        loop = asyncio.get_running_loop()

        def fill() -> int:
            staging.write(buffer, data)
            return staging.digest(buffer)

        digest = await self._compute.copy(fill)
        fastest_s = float("inf")
        found = LaneFinding("", Certainty.UNKNOWN)
        result = (await _next_event(stream)).canary
        while result is not None and result.ok and result.tag:
            began_at = loop.time()
            operation = endpoint.send(buffer, num_bytes, result.tag)
            await stream.send(
                wire.PushCommand(
                    canary=wire.Canary(
                        tag=result.tag,
                        num_bytes=num_bytes,
                        digest=digest,
                        lane=found.lane,
                        certainty=found.certainty,
                    )
                )
            )
            result = (await _next_event(stream)).canary
            fastest_s = min(fastest_s, loop.time() - began_at)
            if await operation.settled() is not Outcome.DONE:
                raise TransferFailed(f"a canary was not sent: {operation.error}", code="canary")
            found = await endpoint.find_lane(buffer, num_bytes, sends=True)
        if result is None:
            raise RemoteProtocolError("decode did not answer a canary")
        if not result.ok:
            raise TransferFailed("a canary arrived damaged", code="canary")
        return lane_of(result), num_bytes / fastest_s if 0 < fastest_s < float("inf") else 0.0


async def _next_event(stream: _Stream) -> wire.PushEvent:
    """Receive during the handshake. Raises the peer's reason if it refuses the pair."""
    event = await stream.receive()
    if event is None:
        raise WorkerLost("the decode worker ended the handshake")
    if event.refused_pair is not None:
        raise codec.error_from_wire(event.refused_pair)
    return event
