"""The life of a process: one root TaskGroup, signals, a bounded drain, and an exit code that says
how it ended.

    sys.exit(run_service("gateway", main, drain_s=config.drain_s))

``main`` gets a ``Process`` and serves until ``process.stop`` is set, then drains and returns. The
first SIGTERM, SIGINT or SIGHUP (the terminal's end; under ``nohup`` it is ignored) sets it, as does
the end of the parent (``parent.py``); what has not ended when the limit comes is cancelled; a
second SIGTERM or SIGINT ends the process at once, as the first signal does before ``main`` has said
that it is ready. Knows no role.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, TypeVar

import structlog

from shared.config import ServiceConfig
from shared.errors import InvalidRequest, MeshError
from shared.log import configure_logs
from shared.runtime import realtime
from shared.runtime.groups import first_error
from shared.runtime.parent import Parent
from shared.runtime.realtime import RealTime
from shared.settings import read_config

_log = structlog.get_logger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_BAD_CONFIG: Final = 2
EXIT_DRAIN_LIMIT: Final = 3

GRACE_S = 5.0
"""Beyond the drain limit, for closing what was drained."""

CANCEL_WITHIN_S = 5.0
"""A cancelled service that does not end is left behind by ending the process."""

GC_THRESHOLD = (20_000, 10, 100)
"""Container objects made and not freed until the collector looks at the young ones, and how often
the older ones are looked at (CPython: 700, 10, 10). Cyclic garbage is rare here; the default looked
at live requests again and again, 4 to 7 % of a gateway's time (bench/gateway/README.md)."""


class Process:
    """What ``main`` sees of its process."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self.is_ready = False
        self.stop = asyncio.Event()
        """Set when the process should drain and end."""

    def begins(self, part: str) -> None:
        """Tell whoever started us, and the log, which slow part of the start comes now. From any
        thread."""
        self._parent.tell(part=part)
        _log.info("starting", part=part)

    def tell(self, **facts: Any) -> None:
        """Tell whoever started us."""
        self._parent.tell(**facts)

    def ready(self, **facts: Any) -> None:
        """Tell whoever started us that we serve; facts: our ports, in the gateway's words
        (``http_port``, ``grpc_port``)."""
        # What has been loaded stays to the end. A full collection that looks at it again would hold
        # the loop up: 26 ms in a gateway, 190 ms in a worker with torch.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLD)
        self.is_ready = True
        self._parent.tell(**facts)
        _log.info("ready", **facts)


Config = TypeVar("Config", bound=ServiceConfig)
Main = Callable[[Process], Coroutine[Any, Any, bool]]
"""Returns False if the drain limit came before everything was done."""


def run_service(name: str, main: Main, *, drain_s: float = 30.0, is_realtime: bool = False) -> int:
    """Run ``main`` on a fresh loop to its end and return the exit code.

    is_realtime: the loop's thread, this one, takes real-time priority.

    0 = it ended after a drain, 1 = it failed, 2 = its configuration is wrong, 3 = the drain limit
    came first. A second signal does not return: the process ends with 128 + its number.
    """
    parent = Parent()
    allow_many_connections()
    try:
        if is_realtime:
            realtime.take(RealTime.LOOP)
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(_supervise(name, main, parent, drain_s))
    except BaseExceptionGroup as group:
        return _report(first_error(group), parent)
    except Exception as error:
        return _report(error, parent)
    finally:
        parent.close()


def run_configured(name: str, kind: type[Config], run: Callable[[Config], int]) -> int:
    """Set logging up and ``run`` with the configuration of ``PDMESH_*``; return the exit code.

    A configuration that is wrong is told like any failure to start: in one line, and to the parent.
    Likewise an argument: there are none but --help, and a flag must not be overlooked.
    """
    usage = f"takes no arguments, PDMESH_* configure it; `pdmesh {name}` takes flags (--help)"
    if sys.argv[1:] in (["--help"], ["-h"]):
        print(f"python -m services.{name} {usage}")
        return EXIT_OK
    try:
        if len(sys.argv) > 1:
            raise InvalidRequest(f"{sys.argv[1]!r}: this process {usage}")
        config = read_config(kind, os.environ)
    except InvalidRequest as error:
        refusal = error

        async def refuse(_: Process) -> NoReturn:
            raise refusal

        configure_logs(service=name)
        return run_service(name, refuse)
    configure_logs(service=name, level=config.log_level, form=config.log_format)
    return run(config)


def allow_many_connections() -> None:
    """Raise our limit of open files as far as the system lets us, which needs no right.

    Each client is a file, and 1,024, with which shells and systemd begin, is for what calls
    ``select``: past it connections were reset without a word.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return what asks a process to end: under ``nohup`` not the end of its terminal."""
    asked = (signal.SIGINT, signal.SIGTERM)
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return asked if is_nohup else (*asked, signal.SIGHUP)


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop  # not for commands that look at exit codes alone

    class FineLoop(uvloop.Loop):
        """uvloop, with a clock that measures: its own is read once an iteration, in milliseconds.

        Both count from the same origin, so timers fall where they did.
        """

        time = staticmethod(time.monotonic)  # pyright: ignore[reportAssignmentType]

    return FineLoop()


def _report(error: BaseException, parent: Parent) -> int:
    """Say once why the process ends: in a sentence for what the operator can mend, with a traceback
    for our bugs."""
    parent.tell(error=str(error) or type(error).__name__)
    if isinstance(error, (MeshError, OSError)):
        _log.error("stopped", error=str(error), error_type=type(error).__name__)
    else:
        _log.error("stopped by a bug", exc_info=error)
    return EXIT_BAD_CONFIG if isinstance(error, InvalidRequest) else EXIT_FAILED


async def _supervise(name: str, main: Main, parent: Parent, drain_s: float) -> int:
    loop = asyncio.get_running_loop()
    process = Process(parent)
    is_over_limit = False

    def stop() -> None:
        if not process.is_ready:
            # Nothing is in hand, and a thread that loads a model cannot be cancelled.
            sys.stderr.flush()
            os._exit(EXIT_OK)
        process.stop.set()

    def on_signal(number: signal.Signals) -> None:
        if process.stop.is_set():
            if number is signal.SIGHUP:
                return  # a shell and the kernel may both say it
            sys.stderr.flush()
            os._exit(128 + number)
        _log.info("stopping", signal=number.name, drain_s=drain_s)
        stop()

    async def limit(service: asyncio.Task[bool]) -> None:
        nonlocal is_over_limit
        await process.stop.wait()
        await asyncio.sleep(drain_s + GRACE_S)
        is_over_limit = True
        _log.warning("the drain limit came first", limit_s=drain_s)
        service.cancel()
        # Cancelled work may hang in a thread, which nothing can end but the process.
        await asyncio.sleep(CANCEL_WITHIN_S)
        sys.stderr.flush()
        os._exit(EXIT_DRAIN_LIMIT)

    signals = ending_signals()
    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    parent.watch(stop)
    try:
        async with asyncio.TaskGroup() as tasks:
            service = tasks.create_task(main(process), name=name)
            guard = tasks.create_task(limit(service), name=f"{name} drain limit")
            # Waited for, not awaited: a service that was cancelled at its limit would look like our
            # own cancellation.
            await asyncio.wait([service])
            guard.cancel()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
    if is_over_limit or (not service.cancelled() and not service.result()):
        return EXIT_DRAIN_LIMIT
    return EXIT_OK
