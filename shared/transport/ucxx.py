"""UCX through UCXX: one thread owns all of it, the event loop never waits for it. The only ``import
ucxx``.

Here is the loop's side: transport, endpoints and operations; the thread is ``pump.py``. Both know
neither frames nor credit, and trust their callers in one thing: that a tag is used once.

Three properties beyond plain UCX:

- A receive settles as FAILED unless exactly ``num_bytes`` arrived.
- A receive that was cancelled before its message came leaves a *sink* behind: the late message is
  matched with no room at all, so the sender's send settles, no byte lands anywhere, and UCX does
  not hoard the message.
- Endpoints are made with peer error handling, or not at all; closing one aborts it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import addressof, c_char
from typing import Any

from shared.errors import LocalProtocolError, TransferFailed
from shared.lanes import LaneFinding
from shared.transport.address import seal, unseal
from shared.transport.base import Buffer, Outcome, Window
from shared.transport.late_events import keep_what_closed
from shared.transport.operation import require_tag, require_usable
from shared.transport.pump import Pump
from shared.transport.pump_records import PumpEndpoint, PumpOperation
from shared.transport.settings import UcxSettings

_MAGIC = b"UCX1"


class UcxOperation(PumpOperation):
    """A tag message in flight."""

    __slots__ = ("_pump",)

    def __init__(
        self,
        pump: Pump,
        peer: UcxEndpoint,
        is_receive: bool,
        buffer: Buffer,
        num_bytes: int,
        tag: int,
    ) -> None:
        super().__init__()
        is_contiguous, is_readonly = True, False
        try:
            # Nearly all memory is the host's and writable, and this costs a third of an Array.
            held = memoryview(buffer)
            pointer, buffer_bytes = addressof(c_char.from_buffer(held)), held.nbytes
        except (TypeError, ValueError, BufferError):
            array = _as_array(buffer)
            held = array.obj if array.cuda else memoryview(buffer)
            pointer, buffer_bytes = array.ptr, array.nbytes
            is_contiguous, is_readonly = array.c_contiguous, array.readonly
        require_usable(
            is_contiguous=is_contiguous,
            is_readonly=is_readonly,
            buffer_bytes=buffer_bytes,
            num_bytes=num_bytes,
            writes=is_receive,
        )
        require_tag(tag)
        self._pump = pump
        self.buffer = held
        self.pointer = pointer
        self.peer = peer
        self.is_receive = is_receive
        self.num_bytes = num_bytes
        self.tag = tag

    def cancel(self) -> None:
        if self.outcome is None and not self.is_cancelled:
            self.is_cancelled = True
            self._pump.order(self._pump.cancel, self)

    def settle(self, outcome: Outcome, error: str = "") -> None:
        super().settle(outcome, error)
        self.buffer = None
        self._pump.num_submitted -= 1


def _as_array(buffer: Buffer) -> Any:
    """Return UCXX's view of constants, of a device's memory, and of what is too odd for ctypes.

    Raises LocalProtocolError: it is no memory at all.
    """
    try:
        return _Array(buffer)
    except (TypeError, BufferError) as error:
        raise LocalProtocolError(f"not a transfer buffer: {error}") from error


class UcxEndpoint(PumpEndpoint):
    """One peer."""

    def __init__(self, pump: Pump, on_lost: Callable[[], None]) -> None:
        super().__init__()
        self._pump = pump
        self._on_lost = on_lost
        self.alive = True
        self._closed: asyncio.Future[None] | None = None

    def send(self, buffer: Buffer, num_bytes: int, tag: int) -> UcxOperation:
        """Order a send; on an endpoint that is closed or lost the operation settles as FAILED.

        Raises LocalProtocolError: the buffer or tag is unusable, or too much is in flight.
        """
        operation = UcxOperation(self._pump, self, False, buffer, num_bytes, tag)
        self._pump.submit(operation)
        return operation

    async def map_window(self, key: bytes) -> Buffer | None:
        return await self._pump.call("cannot map a window", self._pump.map_window, self, key)

    async def find_lane(self, buffer: Buffer, num_bytes: int, *, sends: bool) -> LaneFinding:
        memory = "cuda" if hasattr(buffer, "__cuda_array_interface__") else "host"
        trouble = "cannot tell what carries messages"
        find = self._pump.find_lane
        return await self._pump.call(trouble, find, self, sends, memory, num_bytes)

    async def close(self) -> None:
        """Abort what is in flight; all operations are settled on return. The peer may take it for
        our death.

        An operation that UCX does not settle within a second after the abort is ABANDONED: what it
        pinned is kept to the end of the process.
        """
        self.alive = False
        if self._closed is None:
            self._closed = self._pump.loop.create_future()
            self._pump.order(self._pump.close_endpoint, (self, self._closed))
        # One that waits may be cancelled; the answer is for all who wait.
        await asyncio.shield(self._closed)

    def report_lost(self, _unused: object, _also_unused: object) -> None:
        """Tell the owner, on the loop, unless it closed the endpoint itself meanwhile."""
        if self.alive:
            self.alive = False
            self._on_lost()


class UcxTransport:
    """The worker of this process and its pump. Make it with ``open_ucx``, inside a running loop."""

    def __init__(self, pump: Pump, address: bytes) -> None:
        self._pump = pump
        self.address = address
        self._closed: asyncio.Future[None] | None = None

    @property
    def num_endpoints(self) -> int:
        return self._pump.num_endpoints

    async def connect(self, address: bytes, on_lost: Callable[[], None]) -> UcxEndpoint:
        payload = unseal(_MAGIC, address)
        endpoint = UcxEndpoint(self._pump, on_lost)
        try:
            await self._pump.call(
                "cannot connect to the peer", self._pump.connect, endpoint, payload
            )
        except asyncio.CancelledError:
            # The pump makes it all the same, and nobody else knows of it.
            self._pump.order(self._pump.close_endpoint, (endpoint, None))
            raise
        return endpoint

    def receive(
        self, endpoint: UcxEndpoint, buffer: Buffer, num_bytes: int, tag: int
    ) -> UcxOperation:
        """Post a receive; it fails unless exactly ``num_bytes`` arrive. UCX matches by tag alone,
        whoever sent."""
        operation = UcxOperation(self._pump, endpoint, True, buffer, num_bytes, tag)
        self._pump.submit(operation)
        return operation

    async def new_window(self, num_bytes: int) -> Window | None:
        return await self._pump.call("no window", self._pump.new_window, num_bytes)

    async def close(self) -> None:
        if self._closed is None:
            self._closed = self._pump.loop.create_future()
            self._pump.order(self._pump.stop, self._closed)
        await asyncio.shield(self._closed)
        self._pump.thread.join()  # it reported as its last act


async def open_ucx(
    settings: UcxSettings | None = None, *, prepare_thread: Callable[[], None] | None = None
) -> UcxTransport:
    """Start UCX and its pump. The settings of a process's first call decide for all its transports.

    prepare_thread: called on the pump's thread before UCX is (``Engine.enter_thread``).
    Raises TransferFailed: UCXX is not installed, or UCX finds no usable device.
    """
    loop = asyncio.get_running_loop()
    settings = settings or UcxSettings()
    with _told(settings):
        _load()
        pump = Pump(loop, settings, _lib, prepare_thread)
        started: asyncio.Future[bytes] = loop.create_future()
        pump.start(started)
        return UcxTransport(pump, seal(_MAGIC, await started))


_lib: Any = None
_Array: Any = None
_beside: dict[str, str] = {}
"""What UCX finds in its environment beside the user's own."""
_users: frozenset[str] = frozenset()
_num_starting = 0


@contextmanager
def _told(settings: UcxSettings) -> Iterator[None]:
    """Tell UCX its settings in its environment, which it reads when it is loaded and when a worker
    is made. Afterwards they are gone: whatever else this process starts must not find them, nor
    what UCXX adds."""
    global _users, _num_starting
    if not _num_starting:
        _users = frozenset(os.environ)
    _num_starting += 1
    try:
        for name, value in _beside.items():
            os.environ.setdefault(name, value)
        settings.apply_to(os.environ)
        yield
    finally:
        _num_starting -= 1
        if not _num_starting:
            for name in os.environ.keys() - _users:
                if name.startswith("UCX_"):
                    _beside[name] = os.environ.pop(name)


def _load() -> None:
    global _lib, _Array
    if _lib is not None:
        return
    try:
        import ucxx._lib.libucxx as lib
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise TransferFailed(f"UCXX cannot be loaded: {error}") from error
    keep_what_closed()
    _lib, _Array = lib, Array
