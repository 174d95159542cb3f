"""Keeps this worker's pairs: dials and answers, tries them, keeps their streams, closes them.

Which ones, when, and whose call counts is decided by ``core/pairs.py``; what flows over a pair is
its users' business (``link.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from shared import wire
from shared.engine.base import Engine
from shared.engine.worker import ComputeRunner
from shared.errors import (
    IncompatiblePeer,
    MeshError,
    RemoteProtocolError,
    Retry,
    ShuttingDown,
    WorkerLost,
    without_frames,
)
from shared.ids import Incarnation, MeshPeer, RandomBytes
from shared.messages.transfer_codec import (
    PairIdentity,
    PairTerms,
    message_from_wire,
    windows_from_wire,
)
from shared.rpc.heartbeat_stream import HeartbeatStream
from shared.rpc.methods import TRANSFER_PAIR
from shared.rpc.network import Network
from shared.rpc.service import ServerStream, Servicer, bind
from shared.rpc.stream import open_stream
from shared.runtime.effect_loop import EffectLoop
from shared.runtime.loops import loop_time
from shared.telemetry.worker import PairSpeed
from shared.transfer.messages import Abort, Commit, LinkId, Open, Span
from shared.transfer.plan import DEFAULT_MAX_FRAME_BYTES
from shared.transport.base import Endpoint, Transport
from shared.transport.pairing import HANDSHAKE_S, PairRules, close_endpoint, is_refusal
from shared.worker.core.pairs import Dial, Effect, LetGo, Pairs, StopDial
from shared.worker.handshake import Handshake, Stream
from shared.worker.link import PairLink
from shared.worker.pusher import Pusher
from shared.worker.receiver import KvReceiver

_log = structlog.get_logger(__name__)

MAX_WARM = 32

NO_WORD = (
    f"no word of the handshake for {HANDSHAKE_S:g} s: the other worker is busy or cut off, or test "
    "frames are lost on UCX's connection (a firewall, or a path that drops packets of its own MTU)"
)


class PairTable:
    """All pairs of this worker. ``run`` owns every task.

    source, sink: who uses the two ways; None = KV does not flow that way. max_warm: see ``Pairs``.
    on_change: called on the loop whenever who is paired or ``not_ready_reason`` has changed.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        engine: Engine,
        compute: ComputeRunner,
        transport: Transport,
        network: Network,
        random_bytes: RandomBytes,
        source: Pusher | None = None,
        sink: KvReceiver | None = None,
        max_warm: int = MAX_WARM,
        on_change: Callable[[], None] = lambda: None,
        group_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES,
        rules: PairRules | None = None,
    ) -> None:
        """group_bytes: the largest groups that may be agreed on; the default leaves that to the
        peer. rules: pairs to refuse."""
        rules = rules or PairRules()
        identity = PairIdentity(
            incarnation,
            engine.spec,
            engine.layout,
            transport.address,
            group_bytes,
            max_frame_bytes,
            rules.host,
            source is not None,
            sink is not None,
        )
        self._handshake = Handshake(identity, engine, compute, transport, random_bytes, rules)
        self._transport = transport
        self._network = network
        self._source = source
        self._sink = sink
        self._on_change = on_change
        self._core = Pairs(incarnation, max_warm=max_warm)
        self._effects: EffectLoop[Effect] = EffectLoop(self._core, self._do)
        self._calls: dict[Incarnation, asyncio.Task[None]] = {}
        self._links: dict[Incarnation, PairLink] = {}
        self._endpoints: set[Endpoint] = set()
        self._refusal = ""
        self._next_link = 0
        self.servicer = Servicer(bind(TRANSFER_PAIR, self._answer))

    async def run(self) -> None:
        """Dial, answer and keep pairs until cancelled; then all are lost, and their endpoints
        closed."""
        try:
            await self._effects.run()
        finally:
            for link in list(self._links.values()):
                self._lose(link, ShuttingDown("this worker is shutting down"))
            for endpoint in list(self._endpoints):
                await close_endpoint(endpoint)

    def set_peers(self, peers: Sequence[MeshPeer]) -> None:
        """These are the standing partners. Works before ``run``."""
        self._effects.perform(self._core.listed(peers, loop_time()))

    def ask(self, peer: MeshPeer) -> None:
        """Make a pair with this one, too."""
        self._effects.perform(self._core.asked(peer, loop_time()))

    @property
    def speeds(self) -> dict[Incarnation, float]:
        """Whom this worker may push to, ascending, and the bytes a second of one more push to each:
        what canaries and pushes have measured, shared with those that are on their way."""
        num_on = (lambda _: 0) if self._source is None else self._source.num_on
        return {
            peer: link.bytes_per_s / (1 + num_on(link))
            for peer, link in sorted(self._links.items())
            if link.goes_out
        }

    @property
    def not_ready_reason(self) -> str:
        """Why no pair may be used although there was a partner; '' otherwise."""
        return "" if self._links else self._refusal

    def statistics(self) -> list[PairSpeed]:
        """One record for each way out, ordered by name."""
        return [
            PairSpeed(decode=link.name, lane=link.lane_out, bytes_per_s=link.bytes_per_s)
            for link in sorted(self._links.values(), key=lambda link: link.name)
            if link.goes_out
        ]

    # --- performing what the core decides ---------------------------------------------------------

    def _do(self, effect: Effect) -> None:
        match effect:
            case Dial(peer):
                if (tasks := self._effects.tasks) is None:
                    self._ended(peer.incarnation, ShuttingDown("this worker is not running"))
                else:
                    self._calls[peer.incarnation] = tasks.create_task(self._call(peer))
            case StopDial(peer):
                self._calls.pop(peer).cancel()
            case LetGo(peer):
                self._links[peer].lose(WorkerLost("the pair was not used for long", code="unused"))

    async def _call(self, peer: MeshPeer) -> None:
        try:
            error = await self._dial(peer)
        except MeshError as failure:
            error = without_frames(failure)  # this one, too, which names it
        except TimeoutError:
            error = WorkerLost(NO_WORD)
        del self._calls[peer.incarnation]
        note = _log.warning if isinstance(error, IncompatiblePeer) else _log.info
        note("pair lost", peer=str(peer.address), error=error.message, code=error.code)
        self._ended(peer.incarnation, error)

    async def _dial(self, peer: MeshPeer) -> MeshError:
        """One life of one pair; returns why it ended, or raises why it never began."""
        # Connecting counts: a host that drops packets would hold us for minutes.
        async with (
            asyncio.timeout(HANDSHAKE_S) as patience,
            self._network.channel(peer.address) as channel,
            open_stream(channel, TRANSFER_PAIR) as stream,
        ):
            await self._handshake.say_hello(stream)
            terms = await self._handshake.hear_hello(stream, patience)
            # Pairs are kept by incarnation: under this one another worker would pass for it.
            if terms.peer != peer.incarnation:
                raise WorkerLost("another worker lives at this address now")
            return await self._live(stream, terms, str(peer.address), patience, is_ours=True)

    async def _answer(self, stream: ServerStream[wire.PairMessage, wire.PairMessage]) -> None:
        """Handler of ``Transfer.Pair``; runs in grpclib's task."""
        try:
            async with asyncio.timeout(HANDSHAKE_S) as patience:
                try:
                    terms = await self._handshake.hear_hello(stream, patience)
                except MeshError as error:
                    self._note_refusal(error)
                    raise
                self._require_running()
                self._effects.perform(self._core.dialled(terms.peer))
                name, error = f"{terms.peer:016x}", WorkerLost("the stream was cancelled")
                try:
                    await self._handshake.say_hello(stream)
                    error = await self._live(stream, terms, name, patience, is_ours=False)
                except MeshError as failure:
                    error = failure
                finally:
                    self._ended(terms.peer, error)
                _log.info("pair lost", peer=name, error=error.message, code=error.code)
                raise error
        except TimeoutError:
            raise RemoteProtocolError(NO_WORD) from None

    async def _live(
        self,
        stream: Stream,
        terms: PairTerms,
        name: str,
        patience: asyncio.Timeout,
        *,
        is_ours: bool,
    ) -> MeshError:
        """Try the ways of a pair, then keep it; returns why it ended."""
        link: PairLink | None = None

        def on_lost() -> None:
            if link is not None:
                link.lose(WorkerLost("the transport lost the other worker"))

        endpoint = await self._transport.connect(terms.transport_address, on_lost)
        self._endpoints.add(endpoint)
        try:
            self._next_link += 1
            link = PairLink(LinkId(self._next_link), terms, name, endpoint)
            for is_out in (is_ours, not is_ours):  # who has dialled is the source first
                if is_out and terms.goes_out:
                    await self._handshake.try_out(stream, link, patience)
                elif not is_out and terms.comes_in:
                    assert self._sink is not None
                    await self._handshake.try_in(stream, link, self._sink, patience)
            self._require_running()  # still
            patience.reschedule(None)
            if link.lost is not None:
                return link.lost
            return await self._keep(link, stream)
        finally:
            if link is not None:
                link.windows.drop()
            link = None  # which ``on_lost`` knows, and that its endpoint
            await close_endpoint(endpoint)
            self._endpoints.discard(endpoint)

    async def _keep(self, link: PairLink, stream: Stream) -> MeshError:
        link.control = HeartbeatStream(
            stream,
            heartbeat=lambda asks: wire.PairMessage(heartbeat=wire.Heartbeat(asks=asks)),
            peer="other worker",
            is_busy=lambda: self._is_used(link),
        )
        self._refusal = ""
        self._links[link.peer] = link
        for user in self._users(link):
            user.link_up(link)
        self._effects.perform(self._core.made(link.peer, self._idle()))
        self._on_change()
        _log.info(
            "pair ready",
            peer=link.name,
            lane=link.lane_out or link.lane_in,
            mode="windows" if link.windows or link.offered else "messages",
            mbytes_per_s=round(link.bytes_per_s / 1e6, 2),
        )
        error: MeshError = WorkerLost("the other worker is gone")
        try:
            error = await link.control.run(lambda message: self._hear(link, message))
        finally:
            self._lose(link, error)
        return link.lost or error

    def _hear(self, link: PairLink, message: wire.PairMessage) -> None:
        link.used_at = loop_time()
        if message.windows is not None:
            link.windows.replace(windows_from_wire(message.windows))
            return
        said = message_from_wire(message)
        if isinstance(said, Open | Span | Commit | Abort):
            if self._sink is None or not link.comes_in:
                raise RemoteProtocolError("this worker takes no KV over")
            self._sink.link_message(link, said)
        elif self._source is None or not link.goes_out:
            raise RemoteProtocolError("this worker pushes no KV")
        else:
            self._source.link_message(link, said)

    def _lose(self, link: PairLink, error: MeshError) -> None:
        link.lose(error)
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
            error = link.lost or error
            if error.retry is Retry.NEVER:  # of this stream; no request on the pair has made it
                error = WorkerLost(f"the pair broke: {error.message}")
            for user in self._users(link):
                user.link_lost(link, error)
            self._on_change()

    def _ended(self, peer: Incarnation, error: MeshError) -> None:
        self._note_refusal(error)
        self._effects.perform(self._core.ended(peer, loop_time()))

    def _note_refusal(self, error: MeshError) -> None:
        if is_refusal(error):
            self._refusal = error.message
            self._on_change()

    def _require_running(self) -> None:
        if self._effects.tasks is None:
            raise ShuttingDown("this worker is not running")

    def _users(self, link: PairLink) -> list[Pusher | KvReceiver]:
        users: list[Pusher | KvReceiver] = []
        if self._source is not None and link.goes_out:
            users.append(self._source)
        if self._sink is not None and link.comes_in:
            users.append(self._sink)
        return users

    def _idle(self) -> list[Incarnation]:
        """Peers whose pairs nothing uses, those used longest ago first."""
        by_use = sorted(self._links.values(), key=lambda link: link.used_at)
        return [link.peer for link in by_use if not self._is_used(link)]

    def _is_used(self, link: PairLink) -> bool:
        return any(user.is_using(link) for user in self._users(link))
