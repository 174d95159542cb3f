"""A gRPC server without its socket: calls, health, reflection, draining, closing.

``tcp.py``, or ``memory_network.py`` in tests, gives it connections. What grpclib's own server
lacks: a deadline on the loop's clock, damaged headers that end one call only, a drain that refuses
new calls with a typed error while running ones finish, and a close that tells every caller. It
knows no service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from grpclib.const import Handler as MethodHandler
from grpclib.events import _DispatchServerEvents  # pyright: ignore[reportPrivateUsage]
from grpclib.health.check import ServiceStatus
from grpclib.health.service import Health
from grpclib.metadata import decode_bin_value, decode_timeout
from grpclib.protocol import Stream
from grpclib.reflection.service import ServerReflection
from grpclib.server import Handler as GrpclibServerHandler
from h2.errors import ErrorCodes

from shared.address import Address
from shared.errors import ShuttingDown, without_frames
from shared.http2.complaints import Complaints
from shared.http2.connection import ConnectionLimits, GuardedProtocol
from shared.messages.descriptors import descriptors
from shared.messages.message_codec import CODEC
from shared.rpc.service import DEADLINE_KEY, refuse

CLOSE_WITHIN_S = 5.0
"""Cancelled handlers get this long to clean up."""

KNOWN_WITHIN_S = 10.0
"""A stranger's connection lives so long: time for a proof, and for a health check."""

LONGEST_S = 1e8
"""A caller who waits longer (three years) waits for ever: some libraries have such a number for
it."""

_STANDARD_SERVICES = ("/grpc.health.", "/grpc.reflection.")

IsKnown = Callable[[Any], bool]
"""Whether a connection (``ServerStream.connection``) is somebody's that we know."""

Headers = list[tuple[str, str]]


def checked_headers(headers: Headers, now: float) -> Headers | None:
    """Return the headers as grpclib may read them, or None for a request that is not one.

    ``grpc-timeout`` becomes an absolute time of our loop under DEADLINE_KEY, beyond LONGEST_S none;
    binary metadata that is not base64, and a caller's own DEADLINE_KEY, are dropped.
    """
    names = {name for name, _ in headers}
    if not {":method", ":path"} <= names:
        return None
    kept: Headers = []
    for name, value in headers:
        if name == DEADLINE_KEY:
            continue
        if name == "grpc-timeout":
            try:
                timeout_s = decode_timeout(value)
            except OverflowError:
                continue
            except ValueError:
                pass  # grpclib refuses the call
            else:
                if timeout_s > LONGEST_S:
                    continue
                name, value = DEADLINE_KEY, repr(now + timeout_s)
        elif name.endswith("-bin"):
            try:
                decode_bin_value(value.encode("ascii"))
            except ValueError:
                continue
        kept.append((name, value))
    return kept


def once(act: Callable[[], Any]) -> Callable[[], None]:
    """Return what does it at the first call, and nothing at any other."""
    acts = [act]

    def act_once() -> None:
        if acts:
            acts.pop()()

    return act_once


def _forget(stream: Stream, release: Callable[[], None], _: object) -> None:
    """A call is over."""
    # Reset before its first turn it never runs, and would keep its stream and what came on it.
    release()
    wrapper: Any = stream.wrapper
    if wrapper is not None and wrapper._error is not None:
        without_frames(wrapper._error)  # the call's own, which know the wrapper


class _CallHandler(GrpclibServerHandler):
    """The calls of one connection."""

    def __init__(self, server: CallServer) -> None:
        super().__init__(server.mapping, CODEC, None, _DispatchServerEvents())
        self._server = server

    def accept(self, stream: Stream, headers: Headers, release_stream: Callable[[], Any]) -> None:
        checked = checked_headers(headers, self.loop.time())
        if checked is None:
            stream.reset_nowait(ErrorCodes.PROTOCOL_ERROR)
            release_stream()
            return
        release = once(release_stream)
        super().accept(stream, checked, release)
        call = self._tasks[stream]
        call.add_done_callback(partial(_forget, stream, release))
        path = dict(checked)[":path"]
        # A health check that watches is a call that never ends: a drain must not wait for it.
        if not path.startswith(_STANDARD_SERVICES):
            self._server.started(call)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Those in progress, health and reflection included."""
        return list(self._tasks.values())

    def cancel(self, stream: Stream) -> None:
        if stream in self._tasks:  # a call may be over, or never have become a task
            super().cancel(stream)


class _ServerProtocol(GuardedProtocol):
    """One connection to the server."""

    def __init__(self, server: CallServer, limits: ConnectionLimits) -> None:
        self.calls = _CallHandler(server)
        super().__init__(self.calls, limits, is_client=False, complaints=server.complaints)
        self._server = server
        self._judging: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Only once the connection stands can it be told why it ends.
        if not self._server.connected(self):
            self.goodbye(ErrorCodes.REFUSED_STREAM)
        elif (is_known := self._server.is_known) is not None:
            loop = asyncio.get_running_loop()
            self._judging = loop.call_later(KNOWN_WITHIN_S, self._close_stranger, is_known)

    def _close_stranger(self, is_known: IsKnown) -> None:
        if not is_known(self.connection):
            self.goodbye()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        if self._judging is not None:
            self._judging.cancel()
        self._server.disconnected(self)


async def _refuse(stream: Any) -> None:
    await refuse(stream, ShuttingDown("this process is shutting down", retry_after_s=1.0))


class CallServer:
    """Serves handlers on the connections that ``protocol`` makes."""

    def __init__(
        self,
        handlers: Sequence[Any],
        *,
        limits: ConnectionLimits | None = None,
        max_connections: int = 1024,
        is_known: IsKnown | None = None,
    ) -> None:
        """is_known: see ``Network.serve``."""
        self.address = Address("", 0)
        """Where somebody listens for it, with the real port if 0 was asked for."""
        self._limits = limits or ConnectionLimits()
        self._max_connections = max_connections
        self.is_known = is_known
        self.complaints = Complaints()
        self._statuses = [ServiceStatus() for _ in handlers]
        health = Health(dict(zip(handlers, ([status] for status in self._statuses), strict=True)))
        services = ServerReflection.extend([*handlers, health], pool=descriptors())
        self.mapping: dict[str, MethodHandler] = {}
        for service in services:
            self.mapping.update(service.__mapping__())
        self._protocols: dict[_ServerProtocol, None] = {}
        self._calls: dict[asyncio.Task[None], None] = {}
        self._is_draining = False
        self.set_ready(True)

    def protocol(self) -> GuardedProtocol:
        return _ServerProtocol(self, self._limits)

    def set_ready(self, is_ready: bool) -> None:
        """Say SERVING or NOT_SERVING to health checks, for all services."""
        for status in self._statuses:
            status.set(is_ready and not self._is_draining)

    def connected(self, protocol: _ServerProtocol) -> bool:
        """Count a connection; False = there are too many with calls. One without makes room, the
        oldest: else connections that ask nothing would lock everybody out."""
        if len(self._protocols) >= self._max_connections:
            oldest_idle = next((one for one in self._protocols if not one.calls.tasks), None)
            if oldest_idle is None:
                return False
            self.disconnected(oldest_idle)
            oldest_idle.goodbye()  # which a client's next call survives: on a connection anew
        self._protocols[protocol] = None
        return True

    def disconnected(self, protocol: _ServerProtocol) -> None:
        self._protocols.pop(protocol, None)

    def started(self, call: asyncio.Task[None]) -> None:
        """Count a call until it is over."""
        self._calls[call] = None
        call.add_done_callback(lambda task: self._calls.pop(task, None))

    async def drain(self, limit_s: float) -> bool:
        """Refuse new calls with ShuttingDown, wait for running ones; False if the limit came first.

        Whoever listens goes on, so that refusals are typed and health answers. Long-lived sessions
        count as running: end them first.
        """
        self._refuse_calls()
        running = list(self._calls)
        if not running:
            return True
        _, pending = await asyncio.wait(running, timeout=limit_s)
        return not pending

    def _refuse_calls(self) -> None:
        self._is_draining = True
        self.set_ready(False)
        # grpclib looks a method up at each call: replaced in its table, it refuses from the next
        # call on.
        for path, method in list(self.mapping.items()):
            if not path.startswith(_STANDARD_SERVICES):
                self.mapping[path] = method._replace(func=_refuse)

    async def close(self) -> None:
        """Cancel what still runs, which tells its callers, and close every connection."""
        self._refuse_calls()
        tasks = [task for protocol in self._protocols for task in protocol.calls.tasks]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_WITHIN_S)
        protocols = list(self._protocols)
        for protocol in protocols:
            protocol.goodbye()
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                for protocol in protocols:
                    await protocol.closed.wait()
        except TimeoutError:
            for protocol in protocols:
                protocol.abort()
