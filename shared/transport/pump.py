"""The thread that owns UCX: context, worker, endpoints, and every message until UCX lets go of it.

Orders come through a deque and an eventfd; what settled goes back to the loop in batches. With
nothing to do the thread sleeps in arm + poll: an idle worker costs no CPU (``nap.py`` says what it
does while something is in flight). It imports no UCXX: ``ucxx.py`` hands the library in.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from shared.bell import LoopBell
from shared.errors import LocalProtocolError, TransferFailed
from shared.lanes import Certainty, LaneFinding
from shared.transport.base import Buffer, Outcome, Window
from shared.transport.nap import Nap
from shared.transport.protocol_table import name_of, read_lane
from shared.transport.pump_records import PumpEndpoint, PumpOperation
from shared.transport.settings import UcxSettings
from shared.transport.ucp import CANCELED, OK, TagApi
from shared.transport.windows import WindowApi

T = TypeVar("T")

_logger = logging.getLogger(__name__)
_PROGRESS_BATCH = 64
_SETTLE_S = 1.0
"""After an endpoint is closed UCX settles what it carried at once, or within a few turns where a
NIC is involved."""
_MAX_SINKS = 16384
"""Of sinks whose message never came. One more ends the oldest: should its message come after all,
UCX keeps it until the transport ends."""
_CLOSING_LOOK_MS = 20
"""What closes is given up after a time, and no signal tells when that has passed."""

_Order = tuple[Callable[[Any], None], Any]
_Report = tuple[Callable[[Any, Any], None], Any, Any]


class Pump:
    """The thread. Methods below ``_run`` are its own; those above it are called from the
    loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        settings: UcxSettings,
        lib: Any,
        prepare_thread: Callable[[], None] | None = None,
    ) -> None:
        self._lib = lib
        self._prepare_thread = prepare_thread
        self.loop = loop
        self.thread = threading.Thread(target=self._run, name="ucx-pump", daemon=True)
        self._settings = settings
        self._orders: deque[_Order] = deque()
        self._reports: deque[_Report] = deque()
        self._is_delivering = False
        self._bell = LoopBell(loop, self._deliver)
        self._is_asleep = False
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._started: asyncio.Future[bytes]
        self.num_submitted = 0  # the loop's
        self._is_stopping = False
        self._is_finished = False
        self._stopped: asyncio.Future[None] | None = None
        self._worker: Any = None
        self._context: Any = None
        self._tags: Any = None
        self._windows: Any = None
        # Never 0: a callback of C gets that as None.
        self._next_token = 1
        self._in_flight: dict[int, PumpOperation] = {}  # the pin table
        self._sinks: dict[int, tuple[PumpEndpoint, int]] = {}
        self._endpoints: dict[PumpEndpoint, None] = {}
        self._lost: list[PumpEndpoint] = []
        self._closing: list[PumpEndpoint] = []

    # --- called from the loop ---------------------------------------------------------------------

    @property
    def num_endpoints(self) -> int:
        """Endpoints that are open or closing; a snapshot."""
        return len(self._endpoints)

    def start(self, started: asyncio.Future[bytes]) -> None:
        self._started = started
        self.thread.start()
        atexit.register(self._stop_at_exit)

    def order(self, act: Callable[[Any], None], argument: Any) -> None:
        """Have ``act(argument)`` run on the pump, after all earlier orders; answer it as failed if
        there is none."""
        self._orders.append((act, argument))
        if self._is_finished:
            self._refuse_orders()
        elif self._is_asleep:
            os.eventfd_write(self._wakeup_fd, 1)

    def release(self, act: Callable[[Any], None], argument: Any) -> None:
        """As ``order``, from any thread, for what nobody waits for."""
        if not self._is_finished:
            self._orders.append((act, argument))
            if self._is_asleep:
                with contextlib.suppress(OSError):  # the pump has ended meanwhile
                    os.eventfd_write(self._wakeup_fd, 1)

    def call(self, trouble: str, work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Have ``work`` run on the pump and return its result. What it raises is a TransferFailed
        that begins with ``trouble``: a peer's strange bytes are not this thread's end."""
        result: asyncio.Future[T] = self.loop.create_future()
        self.order(self._answer, (result, trouble, work, arguments))
        return result

    def submit(self, operation: PumpOperation) -> None:
        if self.num_submitted >= self._settings.max_in_flight:
            raise LocalProtocolError("too many transfer operations in flight")
        self.num_submitted += 1
        self.order(self.post, operation)

    def _deliver(self) -> None:
        self._is_delivering = (
            False  # first: a report that comes from now on schedules its own delivery
        )
        reports = self._reports
        # Not those that come meanwhile: they ring again, and the loop has others to serve.
        for _ in range(len(reports)):
            act, first, second = reports.popleft()
            act(first, second)

    def _bury(self) -> None:
        """The thread is past its last use of anything: answer what is left."""
        self._deliver()
        self._is_finished = True
        self._refuse_orders()
        self._bell.close()
        os.close(self._wakeup_fd)
        atexit.unregister(self._stop_at_exit)

    def _refuse_orders(self) -> None:
        while self._orders:
            act, argument = self._orders.popleft()
            if act == self.post:
                argument.settle(Outcome.FAILED, "the transport is closed")
            elif act == self._answer:
                _fail_future(argument[0], TransferFailed("the transport is closed"))
            elif act == self.close_endpoint and argument[1] is not None:
                _set_future(argument[1], None)
            elif act == self.stop and argument is not None:
                _set_future(argument, None)

    def _stop_at_exit(self) -> None:
        """For a process that ends without closing: the thread must not run into the interpreter's
        end."""
        if self.thread.is_alive():
            self._orders.append((self.stop, None))
            os.eventfd_write(self._wakeup_fd, 1)
            self.thread.join(2 * _SETTLE_S)

    # --- the pump's own ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
            self._pump_until_stopped()
        except Exception as error:
            remedy = " (UCX needs a /tmp that can be written, whatever TMPDIR says)"
            text = f"UCX failed: {error}{remedy if 'tmpfile' in str(error) else ''}"
            self._report(_fail_future, self._started, TransferFailed(text))
            _logger.exception("the UCX pump failed")
        finally:
            self._finish()

    def _open(self) -> None:
        if self._prepare_thread is not None:
            self._prepare_thread()
        self._context = self._lib.UCXContext(
            feature_flags=(self._lib.Feature.TAG, self._lib.Feature.WAKEUP)
        )
        self._worker = self._lib.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._tags = TagApi(self._worker.handle, self._on_complete)
        self._windows = WindowApi(self._context.handle, self.release)
        self._report(_set_future, self._started, self._worker.address.tobytes())
        self._flush_reports()

    def _pump_until_stopped(self) -> None:
        orders, worker = self._orders, self._worker
        progress_once, spin_s, clock = (
            worker.progress_once,
            self._settings.spin_s,
            time.perf_counter,
        )
        poller = select.poll()
        signal_fd = worker.epoll_file_descriptor
        poller.register(signal_fd, select.POLLIN)
        poller.register(self._wakeup_fd, select.POLLIN)
        sleep_at = 0.0
        nap, has_timed_out = Nap(), False
        while True:
            was_busy = bool(orders)
            for _ in range(len(orders)):
                act, argument = orders.popleft()
                act(argument)
            has_progressed = False
            for _ in range(_PROGRESS_BATCH):
                if not progress_once():
                    break
                was_busy = has_progressed = True
            if has_timed_out:
                nap.timed_out(found_work=has_progressed)
                has_timed_out = False
            if self._lost:
                self._lose_endpoints()
            if self._closing:
                self._finish_closing()
            if self._reports:
                self._flush_reports()
            if self._is_stopping and not self._closing:
                return
            if was_busy:
                sleep_at = clock() + spin_s
                continue
            if clock() < sleep_at:
                os.sched_yield()  # the loop, or the peer, may share this core
                continue
            self._is_asleep = (
                True  # before the last look: an order that comes later writes the eventfd
            )
            if not orders and worker.arm():
                # When to look even if nothing wakes the thread; None = never.
                look_ms = nap.limit_ms if self._in_flight else None
                woken_by = poller.poll(_CLOSING_LOOK_MS if self._closing else look_ms)
                has_timed_out = not woken_by
                if any(fd == signal_fd for fd, _ in woken_by):
                    nap.signalled()
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wakeup_fd)
            self._is_asleep = False

    def _report(self, act: Callable[[Any, Any], None], first: Any, second: Any = None) -> None:
        self._reports.append((act, first, second))

    def _flush_reports(self) -> None:
        if not self._is_delivering:
            self._is_delivering = True
            self._bell.ring()
            if self.loop.is_closed():  # without us
                self._reports.clear()
                if not self._is_stopping:
                    self.stop(None)

    def _answer(
        self, call: tuple[asyncio.Future[Any], str, Callable[..., Any], tuple[Any, ...]]
    ) -> None:
        result, trouble, work, arguments = call
        try:
            self._report(_set_future, result, work(*arguments))
        except TransferFailed as error:
            self._report(_fail_future, result, error)
        except Exception as error:
            self._report(_fail_future, result, TransferFailed(f"{trouble}: {error}"))

    def connect(self, endpoint: PumpEndpoint, payload: bytes) -> None:
        try:
            address = self._lib.UCXAddress.create_from_buffer(payload)
            # True: with error handling, or a dead peer would never be told of.
            endpoint.ucx = self._worker.create_endpoint_from_worker_address(address, True)
            endpoint.ucx.set_close_callback(self._lost.append, (endpoint,))
            endpoint.handle = endpoint.ucx.handle
        except Exception:
            endpoint.is_open = False
            raise
        self._endpoints[endpoint] = None

    def new_window(self, num_bytes: int) -> Window | None:
        return self._windows.allocate(num_bytes)

    def map_window(self, endpoint: PumpEndpoint, key: bytes) -> Buffer | None:
        _require_open(endpoint)
        return self._windows.map(endpoint.handle, key)

    def find_lane(
        self, endpoint: PumpEndpoint, sends: bool, memory: str, num_bytes: int
    ) -> LaneFinding:
        # Of one that is closed UCX would read freed memory.
        _require_open(endpoint)
        about = self._tags.describe(endpoint.handle)
        finding = read_lane(*about, sends=sends, memory=memory, num_bytes=num_bytes)
        if finding.certainty is not Certainty.UNKNOWN:
            return finding
        return LaneFinding(name_of(self._tags.lanes(endpoint.handle)), Certainty.LISTED)

    def post(self, operation: PumpOperation) -> None:
        endpoint = operation.peer
        if not endpoint.is_open:
            self._settle(operation, Outcome.FAILED, "the endpoint is closed")
            return
        if operation.is_cancelled:
            self._settle(operation, Outcome.CANCELLED)
            if operation.is_receive:
                self._post_sink(endpoint, operation.tag)
            return
        token = self._next_token
        self._next_token = token + 1
        # Before UCX is called: it may complete the operation within the call.
        self._in_flight[token] = operation
        if operation.is_receive:
            operation.request = self._tags.receive(
                operation.pointer, operation.num_bytes, operation.tag, token
            )
        else:
            operation.request = self._tags.send(
                endpoint.handle, operation.pointer, operation.num_bytes, operation.tag, token
            )

    def _on_complete(self, token: int, status: int, num_bytes: int) -> None:
        """UCX will not touch the buffer again. Runs inside post, cancel, progress and close."""
        operation = self._in_flight.pop(token, None)
        if operation is None:
            if sink := self._sinks.pop(token, None):
                sink[0].sinks.discard(token)
            return
        operation.request = 0
        endpoint = operation.peer
        if status == OK and (num_bytes == operation.num_bytes or not operation.is_receive):
            self._reports.append((operation.settle, Outcome.DONE, ""))
        elif status == OK:
            text = f"{num_bytes} bytes came where {operation.num_bytes} were due"
            self._settle(operation, Outcome.FAILED, text)
        elif status == CANCELED and not endpoint.is_lost:
            self._settle(operation, Outcome.CANCELLED)
        else:
            text = "the peer is lost" if endpoint.is_lost else self._tags.text_of(status)
            self._settle(operation, Outcome.FAILED, text)

    def _settle(self, operation: PumpOperation, outcome: Outcome, error: str = "") -> None:
        self._reports.append((operation.settle, outcome, error))

    def _abandon(self, operation: PumpOperation, error: str) -> None:
        """UCX may still touch the buffer, whenever it likes: keep all of it to the end of the
        process, and tell the owner."""
        _abandoned.append((operation.buffer, self._worker, self._tags))
        self._settle(operation, Outcome.ABANDONED, error)

    def cancel(self, operation: PumpOperation) -> None:
        # UCX can withdraw receives only. A send ends when its message is matched, by a sink if need
        # be.
        if operation.request and operation.is_receive:
            self._tags.cancel(operation.request)
            if not operation.request:
                self._post_sink(operation.peer, operation.tag)

    def _post_sink(self, endpoint: PumpEndpoint, tag: int) -> None:
        if len(self._sinks) >= _MAX_SINKS:
            _, oldest = next(iter(self._sinks.values()))
            self._tags.cancel(oldest)
        token = self._next_token
        self._next_token += 1
        # In the books first: a message that is here already is swallowed within the call.
        self._sinks[token] = (endpoint, 0)
        endpoint.sinks.add(token)
        if request := self._tags.receive(None, 0, tag, token):
            self._sinks[token] = (endpoint, request)

    def close_endpoint(self, argument: tuple[PumpEndpoint, asyncio.Future[None] | None]) -> None:
        endpoint, closed = argument
        if endpoint.is_open:
            endpoint.is_open = False
            if endpoint in self._endpoints:
                endpoint.ucx.close_blocking()  # forced, as error handling is on: it does not wait
                self._begin_closing(endpoint)
        if closed is None:
            return
        if endpoint in self._endpoints:
            endpoint.waiting_close = closed
        else:
            self._report(_set_future, closed)

    def _lose_endpoints(self) -> None:
        lost, self._lost = self._lost, []
        for endpoint in lost:
            if endpoint.is_open and endpoint in self._endpoints:
                endpoint.is_open = False
                endpoint.is_lost = True
                self._tags.force_close(endpoint.handle)
                self._begin_closing(endpoint)
                self._report(endpoint.report_lost, None)

    def _begin_closing(self, endpoint: PumpEndpoint) -> None:
        """Withdraw the receives, which UCX does not count as the endpoint's; the rest the close has
        ended."""
        for operation in self._operations_of(endpoint).values():
            if operation.is_receive and operation.request:
                self._tags.cancel(operation.request)
        for token in list(endpoint.sinks):
            self._tags.cancel(self._sinks[token][1])
        endpoint.settle_by = time.perf_counter() + _SETTLE_S
        self._closing.append(endpoint)

    def _finish_closing(self) -> None:
        for endpoint in list(self._closing):
            operations = self._operations_of(endpoint)
            if operations and time.perf_counter() < endpoint.settle_by:
                continue
            for token, operation in operations.items():
                self._abandon(operation, "did not settle when its endpoint closed")
                del self._in_flight[token]
            self._closing.remove(endpoint)
            del self._endpoints[endpoint]
            endpoint.ucx = None
            if endpoint.waiting_close is not None:
                self._report(_set_future, endpoint.waiting_close)

    def _operations_of(self, endpoint: PumpEndpoint) -> dict[int, PumpOperation]:
        return {token: one for token, one in self._in_flight.items() if one.peer is endpoint}

    def stop(self, stopped: asyncio.Future[None] | None) -> None:
        self._stopped = stopped
        self._is_stopping = True
        for endpoint in list(self._endpoints):
            self.close_endpoint((endpoint, None))

    def _finish(self) -> None:
        """Close UCX on the thread that opened it. Only after a failure is anything still in flight
        here."""
        for operation in list(self._in_flight.values()):
            self._abandon(operation, "the transport failed")
        for endpoint in list(self._endpoints):
            _abandoned.append((endpoint.ucx, self._worker, self._tags))
            self._report(endpoint.report_lost, None)
            if endpoint.waiting_close is not None:
                self._report(_set_future, endpoint.waiting_close)
        if self._tags is not None:
            self._tags.swallow_unexpected()
        if self._windows is not None and self._windows.num_live:
            # Somebody still holds such memory: not even the interpreter's end may take UCX down.
            for owner in (self._context, self._worker):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
        self._tags = self._worker = self._context = None
        if self._stopped is not None:
            self._report(_set_future, self._stopped)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self.loop.call_soon_threadsafe(self._bury)


_abandoned: list[object] = []
"""What UCX may still point to: operations that did not settle. Never freed."""


def _require_open(endpoint: PumpEndpoint) -> None:
    if not endpoint.is_open:
        raise TransferFailed("the endpoint is closed")


def _set_future(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail_future(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
