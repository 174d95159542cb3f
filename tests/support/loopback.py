"""The transport's twin in memory: the contract of ``base.py``, UCX's manners, and a switch for each
bad day.

For the mesh in one process and for tests. All time is the loop's, so that under virtual time a run
is exact and repeatable. Like UCX: small messages are buffered and their send settles at once;
larger ones meet their receive first (rendezvous); matching is by tag alone; a cancelled receive
that already matched goes on writing until it is through; a send cannot be withdrawn; closing an
endpoint tells the peer nothing. It is reliable and ordered, as UCX is: nothing is dropped or sent
twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from shared.errors import LocalProtocolError, TransferFailed
from shared.lanes import Certainty, LaneFinding
from shared.transport.address import seal, unseal
from shared.transport.base import Buffer, Outcome, Window
from shared.transport.operation import PendingOperation, require_tag, require_usable

_MAGIC = b"LOOP"
_WINDOW_MAGIC = b"LOOW"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopbackSettings:
    """How the fabric behaves.

    latency_s: of every message and every rendezvous answer, one way.
    bytes_per_s: of each direction of each pair; 0 = no limit.
    eager_bytes: up to here a message is buffered.
    num_slices: a rendezvous writes its data in so many parts, evenly over its duration. With more
    than 1, a buffer that is reused after ``cancel`` but before it settled is overwritten late, as
    with UCX.
    detect_s: from a peer's death to ``on_lost``.
    max_unexpected: messages without a receive, per transport; one more fails at its sender.
    max_in_flight: operations at once, per transport; one more is refused with LocalProtocolError.
    has_windows: whether its processes share memory (``Transport.new_window``).
    settles_on_close: False = a rendezvous that is under way when its endpoint closes is ABANDONED:
    the fabric goes on reading and writing.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    eager_bytes: int = 8192
    num_slices: int = 1
    detect_s: float = 0.1
    max_unexpected: int = 4096
    max_in_flight: int = 65536
    has_windows: bool = False
    settles_on_close: bool = True


class LoopbackFabric:
    """What connects the transports of one loop, and the hand that breaks things."""

    def __init__(self, settings: LoopbackSettings | None = None) -> None:
        self.settings = settings or LoopbackSettings()
        self._transports: dict[bytes, LoopbackTransport] = {}
        self._num_made = 0
        self._windows: list[bytearray] = []  # as long as the fabric: a late write needs a place
        self._link_free_at: dict[tuple[bytes, bytes], float] = {}
        self._frozen: set[bytes] = set()
        self._parked: list[tuple[bytes, bytes, Callable[[], None]]] = []

    async def open(self) -> LoopbackTransport:
        """Make one more transport; fits ``TransportFactory``."""
        self._num_made += 1
        transport = LoopbackTransport(self, seal(_MAGIC, self._num_made.to_bytes(8, "little")))
        self._transports[transport.address] = transport
        return transport

    def kill(self, address: bytes) -> None:
        """The process dies: nothing of it moves any more, peers notice after ``detect_s``."""
        if (transport := self._transports.pop(address, None)) is None:
            return
        self._frozen.discard(address)
        transport.die()
        for other in self._transports.values():
            other.notice_death(address)

    def freeze(self, address: bytes) -> None:
        """The process stops (SIGSTOP): it looks alive, and nothing moves."""
        if address in self._transports:
            self._frozen.add(address)

    def thaw(self, address: bytes) -> None:
        """The process goes on, with what waited for it, in order."""
        self._frozen.discard(address)
        parked, self._parked = self._parked, []
        for source, target, act in parked:
            self._run(source, target, act)

    # --- for the transports -----------------------------------------------------------------------

    def find(self, address: bytes) -> LoopbackTransport | None:
        """The live transport behind an address."""
        return self._transports.get(address)

    def new_window(self, num_bytes: int) -> Window | None:
        """Memory that every process of the fabric may write, if they share any."""
        if not self.settings.has_windows:
            return None
        self._windows.append(bytearray(num_bytes))
        number = len(self._windows) - 1
        return Window(self._windows[-1], seal(_WINDOW_MAGIC, number.to_bytes(8, "little")))

    def find_window(self, payload: bytes) -> Buffer | None:
        """The memory behind a key, if this fabric made it."""
        number = int.from_bytes(payload, "little")
        return self._windows[number] if number < len(self._windows) else None

    def forget(self, address: bytes) -> None:
        """The transport was closed in good order; to its peers that is a death as any other."""
        self.kill(address)

    def after(
        self, delay_s: float, source: bytes, target: bytes, act: Callable[[], None]
    ) -> asyncio.TimerHandle:
        """Run ``act`` after the delay if both ends still live; if one is frozen, when it thaws."""
        loop = asyncio.get_running_loop()
        return loop.call_later(delay_s, self._run, source, target, act)

    def reserve(self, source: bytes, target: bytes, num_bytes: int) -> tuple[float, float]:
        """Book the link for a message; return (delay until its first byte moves, its duration)."""
        if not self.settings.bytes_per_s:
            return 0.0, 0.0
        now = asyncio.get_running_loop().time()
        begins_at = max(now, self._link_free_at.get((source, target), 0.0))
        duration_s = num_bytes / self.settings.bytes_per_s
        self._link_free_at[source, target] = begins_at + duration_s
        return begins_at - now, duration_s

    def _run(self, source: bytes, target: bytes, act: Callable[[], None]) -> None:
        if source not in self._transports or target not in self._transports:
            return
        if source in self._frozen or target in self._frozen:
            self._parked.append((source, target, act))
        else:
            act()


class LoopbackOperation(PendingOperation):
    """A send or receive. ``is_active``: the fabric may still read or write ``data``."""

    __slots__ = (
        "data", "endpoint", "is_abandoned", "is_active", "is_matched", "is_receive", "tag",
    )  # fmt: skip

    def __init__(
        self, endpoint: LoopbackEndpoint, is_receive: bool, buffer: Buffer, num_bytes: int, tag: int
    ) -> None:
        super().__init__()
        try:
            view = memoryview(buffer)
        except (TypeError, BufferError) as error:
            raise LocalProtocolError(f"not a transfer buffer: {error}") from error
        require_usable(
            is_contiguous=view.c_contiguous,
            is_readonly=view.readonly,
            buffer_bytes=view.nbytes,
            num_bytes=num_bytes,
            writes=is_receive,
        )
        require_tag(tag)
        self.endpoint = endpoint
        self.is_receive = is_receive
        self.tag = tag
        self.data = view.cast("B")[:num_bytes] if num_bytes else memoryview(bytearray())
        self.is_active = True
        self.is_matched = False
        self.is_abandoned = False

    def cancel(self) -> None:
        if self.is_active and self.is_receive and not self.is_matched:
            self.endpoint.transport.withdraw(self)

    def finish(self, outcome: Outcome, error: str = "") -> None:
        """Stop touching the buffer now and say so in the loop's next turn, as an answer from a
        thread would."""
        if self.is_active:
            self.is_active = False
            if not self.is_abandoned:
                self._leave(outcome, error)

    def abandon(self, error: str) -> None:
        """Say that it is over, and go on touching the buffer."""
        self.is_abandoned = True
        self._leave(Outcome.ABANDONED, error)

    def _leave(self, outcome: Outcome, error: str) -> None:
        self.endpoint.operations.pop(self, None)
        self.endpoint.transport.num_in_flight -= 1
        asyncio.get_running_loop().call_soon(self.settle, outcome, error)

    def settle(self, outcome: Outcome, error: str = "") -> None:
        super().settle(outcome, error)
        if not self.is_abandoned:
            self.data = memoryview(b"")


class LoopbackEndpoint:
    """One peer."""

    def __init__(
        self, transport: LoopbackTransport, peer: bytes, on_lost: Callable[[], None]
    ) -> None:
        self.transport = transport
        self.peer = peer
        self.is_alive = True
        self.sinks: set[int] = set()
        self.operations: dict[LoopbackOperation, None] = {}
        self._on_lost = on_lost

    @property
    def alive(self) -> bool:
        return self.is_alive

    async def find_lane(self, buffer: Buffer, num_bytes: int, *, sends: bool) -> LaneFinding:
        return LaneFinding("loopback", Certainty.KNOWN)

    def send(self, buffer: Buffer, num_bytes: int, tag: int) -> LoopbackOperation:
        operation = LoopbackOperation(self, False, buffer, num_bytes, tag)
        self.transport.start_send(operation, self)
        return operation

    async def map_window(self, key: bytes) -> Buffer | None:
        payload = unseal(_WINDOW_MAGIC, key)
        if not self.is_alive:
            raise TransferFailed("the endpoint is closed")
        return self.transport.find_window(payload)

    async def close(self) -> None:
        self.is_alive = False
        operations = list(self.operations)
        self.abort(Outcome.CANCELLED, "")
        for operation in operations:
            await operation.settled()

    def abort(self, outcome: Outcome, error: str) -> None:
        """Settle all; nothing of this endpoint is read or written any more, but for what it
        abandons."""
        for operation in list(self.operations):
            self.transport.unpost(operation)
            if operation.is_matched and not self.transport.settles_on_close:
                operation.abandon("did not settle when its endpoint closed")
            else:
                operation.finish(outcome, error)
        self.transport.sunk.difference_update(self.sinks)
        self.sinks.clear()

    def lose(self) -> None:
        """The peer is dead."""
        if self.is_alive:
            self.is_alive = False
            self.abort(Outcome.FAILED, "the peer is lost")
            self._on_lost()


@dataclass(slots=True, eq=False)
class _Message:
    """A message on its way. data: a copy of an eager message, or None: fetch it from ``send``
    (rendezvous)."""

    tag: int
    num_bytes: int
    source: bytes
    data: bytes | None
    send: LoopbackOperation


class LoopbackTransport:
    """One process's end of the fabric."""

    def __init__(self, fabric: LoopbackFabric, address: bytes) -> None:
        self._fabric = fabric
        self._address = address
        self._endpoints: list[LoopbackEndpoint] = []
        self._posted: dict[int, list[LoopbackOperation]] = {}
        self._unexpected: dict[int, list[_Message]] = {}
        self._num_unexpected = 0
        self.sunk: set[int] = set()
        self.num_in_flight = 0
        self._is_open = True

    @property
    def address(self) -> bytes:
        return self._address

    @property
    def num_endpoints(self) -> int:
        return sum(endpoint.is_alive for endpoint in self._endpoints)

    async def connect(self, address: bytes, on_lost: Callable[[], None]) -> LoopbackEndpoint:
        unseal(_MAGIC, address)
        if not self._is_open or self._fabric.find(address) is None:
            raise TransferFailed("cannot connect to the peer: nobody is there")
        endpoint = LoopbackEndpoint(self, address, on_lost)
        self._endpoints.append(endpoint)
        return endpoint

    def receive(
        self, endpoint: LoopbackEndpoint, buffer: Buffer, num_bytes: int, tag: int
    ) -> LoopbackOperation:
        operation = LoopbackOperation(endpoint, True, buffer, num_bytes, tag)
        if not self._admit(operation, endpoint):
            return operation
        if messages := self._unexpected.get(tag):
            message = messages.pop(0)
            self._num_unexpected -= 1
            if not messages:
                del self._unexpected[tag]
            self._match(message, operation)
        else:
            self._posted.setdefault(tag, []).append(operation)
        return operation

    async def new_window(self, num_bytes: int) -> Window | None:
        return self._fabric.new_window(num_bytes)

    async def close(self) -> None:
        self._is_open = False
        for endpoint in list(self._endpoints):
            await endpoint.close()
        self._endpoints.clear()
        self._fabric.forget(self._address)

    # --- for endpoints, operations and the fabric -------------------------------------------------

    @property
    def settles_on_close(self) -> bool:
        """See ``LoopbackSettings``."""
        return self._fabric.settings.settles_on_close

    def find_window(self, payload: bytes) -> Buffer | None:
        """See ``LoopbackFabric.find_window``."""
        return self._fabric.find_window(payload)

    def start_send(self, send: LoopbackOperation, endpoint: LoopbackEndpoint) -> None:
        """Put a message on the wire."""
        if not self._admit(send, endpoint):
            return
        settings, peer = self._fabric.settings, endpoint.peer
        num_bytes = len(send.data)
        message = _Message(send.tag, num_bytes, self._address, None, send)
        wait_s = duration_s = 0.0
        if num_bytes <= settings.eager_bytes:
            message.data = bytes(send.data)
            wait_s, duration_s = self._fabric.reserve(self._address, peer, num_bytes)
            send.finish(Outcome.DONE)
        delay_s = settings.latency_s + wait_s + duration_s
        self._fabric.after(delay_s, self._address, peer, lambda: self._arrive_at(peer, message))

    def withdraw(self, receive: LoopbackOperation) -> None:
        """Cancel a receive that matched nothing; its message, should it come, is swallowed."""
        self.unpost(receive)
        endpoint = receive.endpoint
        endpoint.sinks.add(receive.tag)
        self.sunk.add(receive.tag)
        receive.finish(Outcome.CANCELLED)

    def unpost(self, operation: LoopbackOperation) -> None:
        """Take a receive that matched nothing out of the matching."""
        posted = self._posted.get(operation.tag, [])
        if operation in posted:
            posted.remove(operation)
            if not posted:
                del self._posted[operation.tag]

    def die(self) -> None:
        """This process is dead; its own code may still run in the same loop and must not hang."""
        self._is_open = False
        for endpoint in self._endpoints:
            endpoint.is_alive = False
            endpoint.abort(Outcome.FAILED, "this transport was killed")

    def notice_death(self, address: bytes) -> None:
        """Data stops now; the loss is reported after ``detect_s``."""
        loop = asyncio.get_running_loop()
        for endpoint in self._endpoints:
            if endpoint.peer == address:
                loop.call_later(self._fabric.settings.detect_s, endpoint.lose)

    def _admit(self, operation: LoopbackOperation, endpoint: LoopbackEndpoint) -> bool:
        if self.num_in_flight >= self._fabric.settings.max_in_flight:
            raise LocalProtocolError("too many transfer operations in flight")
        self.num_in_flight += 1
        endpoint.operations[operation] = None
        if not endpoint.is_alive:
            operation.finish(Outcome.FAILED, "the endpoint is closed")
        return operation.is_active

    def _arrive_at(self, peer: bytes, message: _Message) -> None:
        if (target := self._fabric.find(peer)) is not None:
            target.arrive(message)

    def arrive(self, message: _Message) -> None:
        """Match a message, or keep it until its receive is posted."""
        if posted := self._posted.get(message.tag):
            receive = posted.pop(0)
            if not posted:
                del self._posted[message.tag]
            self._match(message, receive)
        elif message.tag in self.sunk:
            self.sunk.discard(message.tag)
            self._answer(message, Outcome.DONE)
        elif self._num_unexpected >= self._fabric.settings.max_unexpected:
            self._answer(message, Outcome.FAILED)
        else:
            self._num_unexpected += 1
            self._unexpected.setdefault(message.tag, []).append(message)

    def _match(self, message: _Message, receive: LoopbackOperation) -> None:
        receive.is_matched = True
        if message.num_bytes != len(receive.data):
            error = f"{message.num_bytes} bytes came where {len(receive.data)} were due"
            receive.finish(Outcome.FAILED, error)
            self._answer(message, Outcome.DONE)
        elif message.data is not None:
            receive.data[:] = message.data
            receive.finish(Outcome.DONE)
        else:
            self._begin_rendezvous(message, receive)

    def _begin_rendezvous(self, message: _Message, receive: LoopbackOperation) -> None:
        fabric, settings = self._fabric, self._fabric.settings
        message.send.is_matched = True
        wait_s, duration_s = fabric.reserve(message.source, self._address, message.num_bytes)
        begin_s = 2 * settings.latency_s + wait_s  # the answer there, the first byte back
        num_slices = settings.num_slices
        edges = [message.num_bytes * i // num_slices for i in range(num_slices + 1)]
        for index in range(num_slices):
            start, stop = edges[index], edges[index + 1]
            is_last = index == num_slices - 1
            fabric.after(
                begin_s + duration_s * (index + 1) / num_slices,
                message.source,
                self._address,
                lambda start=start, stop=stop, is_last=is_last: self._write(
                    message, receive, start, stop, is_last
                ),
            )

    def _write(
        self, message: _Message, receive: LoopbackOperation, start: int, stop: int, is_last: bool
    ) -> None:
        if not receive.is_active or not message.send.is_active:
            return  # one side closed its endpoint: no byte moves, and nobody tells the other
        receive.data[start:stop] = message.send.data[start:stop]
        if is_last:
            receive.finish(Outcome.DONE)
            self._answer(message, Outcome.DONE)

    def _answer(self, message: _Message, outcome: Outcome) -> None:
        """Tell a rendezvous sender how it ended."""
        error = "" if outcome is Outcome.DONE else "the receiver holds too many unexpected messages"
        self._fabric.after(
            self._fabric.settings.latency_s,
            self._address,
            message.source,
            lambda: message.send.finish(outcome, error),
        )
