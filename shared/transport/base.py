"""The data plane's one page: tagged, two-sided messages between two processes.

Implementations: ``ucxx.py`` (shared memory, tcp, RDMA where a system UCX has it) and, in memory,
``tests/support/loopback.py``, which keeps the same contract. Semantics that the mesh relies on, and
that tests assert for both:

- A tag is used once in the life of a transport. A message goes to the receive posted with exactly
  its tag.
- ``Operation`` is settled only when the transport will never touch the buffer again. Cancelling
  asks for that; it is not that. Until then the buffer belongs to the transport.
- The one exception says so: an operation that settles as ABANDONED keeps its buffer for ever. Its
  owner never uses that memory again; the transport sees to it that nobody else gets it.
- A completed send is not a receipt.
- A receive is DONE only if exactly ``num_bytes`` came.
- A message whose receive was cancelled is swallowed: no byte of it lands anywhere, and its send
  settles.
- A lost peer fails every operation of its endpoint, within ``detect_s``, if the process died; a
  stopped process looks alive: only heartbeats above can tell.

Between processes that share memory there is a shorter way: a *window* is memory that the peer maps
and writes by itself, and what is sent is only its word that it has (``Window``). One copy of the
bytes is left of three; the semantics above hold for the word. No operation covers what the peer
writes: it stops when the peer says so, and for nothing else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

from shared.lanes import LaneFinding

Buffer = Any
"""``__cuda_array_interface__`` or buffer protocol; contiguous; writable for receives."""


class Window(NamedTuple):
    """Memory of this process that a peer on the same host may map and write.

    memory: a Buffer; given back when nothing refers to it any more. A peer keeps its own mapping
    for as long as it likes: what it writes after that lands nowhere. key: opaque; a peer's
    ``map_window`` takes it. Travels over gRPC.
    """

    memory: Buffer
    key: bytes


class Outcome(Enum):
    """How an operation settled."""

    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    ABANDONED = "abandoned"  # failed, and the transport may still read or write the buffer


class Operation(Protocol):
    """A send or receive in flight."""

    @property
    def outcome(self) -> Outcome | None:
        """None while somebody must wait: the transport may still touch the buffer."""
        ...

    @property
    def error(self) -> str:
        """Why it failed, or ''."""
        ...

    def cancel(self) -> None:
        """Ask for an early end; wait for ``settled`` before touching the buffer. Never blocks."""
        ...

    async def settled(self) -> Outcome:
        """Wait until settled. Cancelling this wait does not cancel the operation."""
        ...


class Endpoint(Protocol):
    """One peer's transport."""

    @property
    def alive(self) -> bool: ...

    async def find_lane(self, buffer: Buffer, num_bytes: int, *, sends: bool) -> LaneFinding:
        """Find out what carries messages of this size from (sends) or into such a buffer.

        Asked at both ends, after a message like it has crossed; ``more_certain`` says whose answer
        counts.
        """
        ...

    def send(self, buffer: Buffer, num_bytes: int, tag: int) -> Operation: ...

    async def map_window(self, key: bytes) -> Buffer | None:
        """Map the peer's window for writing; None: this endpoint's peer shares no memory with us.

        Given back when nothing refers to the buffer any more.
        Raises TransferFailed: the key is malformed, or the endpoint is closed.
        """
        ...

    async def close(self) -> None:
        """Abort what is in flight and wait until the peer's data can no longer arrive through this
        endpoint."""
        ...


class Transport(Protocol):
    """All endpoints of this process."""

    @property
    def address(self) -> bytes:
        """Opaque; a peer's ``connect`` takes it. Travels over gRPC."""
        ...

    @property
    def num_endpoints(self) -> int:
        """Endpoints that were made and are not closed to the end."""
        ...

    async def connect(self, address: bytes, on_lost: Callable[[], None]) -> Endpoint:
        """Make an endpoint. ``on_lost`` is called once on the loop when the transport sees the peer
        die.

        Raises TransferFailed: the address is malformed or unreachable.
        """
        ...

    def receive(self, endpoint: Endpoint, buffer: Buffer, num_bytes: int, tag: int) -> Operation:
        """Post a receive for the message with exactly this tag from this endpoint's peer."""
        ...

    async def new_window(self, num_bytes: int) -> Window | None:
        """Allocate memory that peers on this host may write; None: this transport has none."""
        ...

    async def close(self) -> None:
        """Abort everything; returns when no buffer is in use and no thread runs."""
        ...


TransportFactory = Callable[[], Awaitable[Transport]]
