"""Starts commands and services of ours in a tenth of the time: forked from a process that has
imported them and has done nothing else. It has no loop, no thread of Python and no UCX worker.

Most of a short process is its imports, and tests start processes by the hundred. These are
processes like others, with an environment, a folder, files, a session and an end of their own.
What differs: the kernel shows the server's command line, hashes have one seed, and the server is
their parent.

    with forked_starts():
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "services.gateway")
        done = subprocess.run([sys.executable, "-m", "services.cli", "version"])

Executed as ever is what runs under another command, and what has other variables that interpreter
and libraries read when they are loaded.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
from asyncio.base_subprocess import BaseSubprocessTransport
from asyncio.unix_events import _UnixSelectorEventLoop
from collections.abc import Iterator, Mapping
from typing import Any

from shared import failpoints
from shared.transport.settings import UcxSettings
from tests.support.house import ROOT

CLI = "services.cli"
BENCH = "tests.support.small_bench"
WORKERS = ("services.prefill", "services.decode")
TAKEN = (CLI, BENCH, "services.gateway", *WORKERS)
IMPORTED_LATE = ("shared.engine.fake", "ucxx._lib.libucxx", "uvloop")

COMPUTING = {"prefill", "decode", "profile"}
"""Commands that load torch, unless told otherwise."""

_execute = _UnixSelectorEventLoop._make_subprocess_transport
_Popen = subprocess.Popen

GPU = "/dev/nvidiactl"
"""Where this is nothing is forked: a library may look at the GPU when it is loaded, and CUDA that
has begun does not live on in a fork."""

MOST_BYTES = 1 << 18
MOST_FILES = 16


# --- those who ask --------------------------------------------------------------------------------


class ForkServer:
    """A server, as those see it who ask.

    environment: that it has. orders: our end, on which it ends when nobody has it any more.
    """

    def __init__(self, environment: Mapping[str, str], orders: socket.socket | None = None) -> None:
        self._environment = environment
        self._orders = orders
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def orders(self) -> socket.socket:
        """Start it, unless it runs."""
        if self._orders is None:
            self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
        return self._orders

    def takes(self, args: Any, env: Any = None, preexec_fn: Any = None) -> bool:
        """Whether it can start this."""
        if isinstance(args, (str, bytes, os.PathLike)) or preexec_fn not in (None, take_terminal):
            return False
        match [it for it in args if it != "-P"]:
            case [sys.executable, "-m", module, *_] if module in TAKEN:
                wanted = os.environ if env is None else env
                folders = wanted.get("PYTHONPATH", "").split(os.pathsep)
                same = _read_when_loaded(wanted) == _read_when_loaded(self._environment)
                is_vllm = wanted.get("PDMESH_ENGINE") == "vllm"  # forks in its own way
                has_gpu = os.path.exists(GPU)
                return same and not is_vllm and not has_gpu and {*folders} <= {"", *sys.path}
        return False

    def close(self) -> None:
        """Have it end."""
        if self._orders is not None and self._process is not None:
            self._orders.close()
            self._process.wait()


def _read_when_loaded(variables: Mapping[str, str]) -> dict[str, str]:
    beginnings = ("PYTHON", "UCX_", "OMP_", "LD_", "TORCH_")
    followed = ("PYTHONPATH", "PYTHONUNBUFFERED")
    return {k: v for k, v in variables.items() if k.startswith(beginnings) and k not in followed}


def take_terminal() -> None:
    """Before a command begins: the terminal that it has as files is its own."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def forked_starts() -> Iterator[None]:
    """Have asyncio and ``subprocess`` fork what a server takes."""
    server = ForkServer({k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")})
    try:
        with _starts():
            _fork_with(server)
            yield
    finally:
        server.close()


@contextlib.contextmanager
def executed_starts() -> Iterator[None]:
    """Amid ``forked_starts``: as if it were not."""
    with _starts():
        _UnixSelectorEventLoop._make_subprocess_transport = _execute
        subprocess.Popen = _Popen
        yield


@contextlib.contextmanager
def _starts() -> Iterator[None]:
    before = _UnixSelectorEventLoop._make_subprocess_transport, subprocess.Popen
    try:
        yield
    finally:
        _UnixSelectorEventLoop._make_subprocess_transport, subprocess.Popen = before


def _fork_with(server: ForkServer) -> None:
    class Popen(_ForkedPopen):
        """Forks what the server takes, and executes the rest."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, server=server, **options)

    async def start(
        loop: Any, protocol: Any, args: Any, shell: Any, stdin: Any, stdout: Any, stderr: Any,
        bufsize: Any, extra: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        begun = (protocol, args, shell, stdin, stdout, stderr, bufsize)
        asked = {it: options.get(it) for it in ("env", "preexec_fn")}
        if shell or not server.takes(args, **asked):
            return await _execute(loop, *begun, extra, **options)
        waiter = loop.create_future()
        transport = _ForkedTransport(loop, *begun, waiter, extra, server=server, **options)
        await waiter
        return transport

    _UnixSelectorEventLoop._make_subprocess_transport = start
    subprocess.Popen = Popen


class _ForkedTransport(BaseSubprocessTransport):
    def _start(self, args: Any, shell: Any, stdin: Any, stdout: Any, stderr: Any, bufsize: Any,
               **options: Any) -> None:  # fmt: skip
        self._proc = _ForkedPopen(
            args, bufsize, stdin=stdin, stdout=stdout, stderr=stderr, **options
        )
        self._proc.poll = lambda: self._proc.returncode  # the transport notes it
        self._loop.add_reader(self._proc.told, self._ended)

    def _ended(self) -> None:
        told = self._proc.told
        self._loop.remove_reader(told)
        with told:
            self._process_exited(int(told.recv(64)))


class _ForkedPopen(_Popen[Any]):
    """Makes files as ever. told: of one that is forked, its pid, and at its end the exit code."""

    told: socket.socket | None = None

    def __init__(self, *args: Any, server: ForkServer, **options: Any) -> None:
        self._server = server
        super().__init__(*args, **options)

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
        env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any,
    ) -> None:  # fmt: skip
        if shell or executable or not self._server.takes(args, env, preexec_fn):
            options = (close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            super()._execute_child(args, executable, preexec_fn, *options, *rest)
            return
        pipes, start_new_session = rest[:6], rest[-2]
        child_ends = (pipes[0], pipes[3], pipes[5])
        order = {
            "command": args[args.index("-m") + 1 :],
            "environment": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
            "finds_modules_there": "-P" not in args,
            "is_leader": start_new_session,
            "takes_terminal": preexec_fn is take_terminal,
            "passed": list(pass_fds),
        }
        orders = self._server.orders
        self.told, theirs = socket.socketpair()
        with theirs:
            standard = [end if end >= 0 else number for number, end in enumerate(child_ends)]
            files = [theirs.fileno(), orders.fileno(), *standard, *pass_fds]
            socket.send_fds(orders, [json.dumps(order).encode()], files)
        self._close_pipe_fds(*pipes)
        self.pid = int(self.told.recv(64))

    def _internal_poll(self, *args: Any, **options: Any) -> int | None:
        if self.told is None:
            return super()._internal_poll(*args, **options)
        self._hear(0.0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self.told is None:
            return super()._wait(timeout)
        self._hear(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _hear(self, timeout: float | None) -> None:
        """Wait at most so many seconds for its end; None is for ever."""
        with self._waitpid_lock:
            if self.returncode is None and select.select([self.told], [], [], timeout)[0]:
                with self.told:
                    self.returncode = int(self.told.recv(64))


# --- the server -----------------------------------------------------------------------------------


def _serve(orders: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork for each order. Returns in each child what it is to be and the files that it got, and in
    the server nothing, when nobody is left to ask."""
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    children: dict[int, tuple[int, int]] = {}  # pid and who is told, by what is ready at the end
    while True:
        for ready, _ in poll.poll():
            if ready != orders.fileno():
                pid, told = children.pop(ready)
                poll.unregister(ready)
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):  # who asked may have gone
                    os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(told)
                os.close(ready)
                continue
            text, files, *_ = socket.recv_fds(orders, MOST_BYTES, MOST_FILES)
            if not text:
                return None
            order = json.loads(text)
            if (
                order["environment"].get("PDMESH_ENGINE") == "torch"
                or order["command"][0] == BENCH
                or {*order["command"][1:2]} & COMPUTING
            ):
                importlib.import_module("shared.engine.torch_engine")
            gc.freeze()
            if not (pid := os.fork()):
                for end, (_, told) in children.items():
                    os.close(end)
                    os.close(told)
                orders.close()
                return order, files
            told, *others = files
            for file in others:
                os.close(file)
            os.write(told, str(pid).encode())
            end = os.pidfd_open(pid)
            poll.register(end, select.POLLIN)
            children[end] = pid, told


def _become(order: dict[str, Any], files: list[int], server: dict[str, str]) -> None:
    """Make of a fork what would have been executed. server: the environment of the server."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["is_leader"]:
        os.setsid()
    places = [0, 1, 2, *order["passed"]]
    # Above them all first: what was received may stand where another one belongs.
    told, orders, *moved = [fcntl.fcntl(it, fcntl.F_DUPFD_CLOEXEC, max(places) + 1) for it in files]
    for it in (*files, told):
        os.close(it)
    for it, place in zip(moved, places, strict=True):
        os.dup2(it, place)
        os.close(it)
    if order["takes_terminal"]:
        take_terminal()
    os.chdir(order["cwd"])
    if order["finds_modules_there"]:
        sys.path.insert(0, order["cwd"])
    added = {name: value for name, value in os.environ.items() if name not in server}
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["command"]
    for name, value in added.items():  # what imports leave behind
        if not name.startswith("UCX_"):
            os.environ.setdefault(name, value)
    failpoints.arm()
    is_unbuffered = "PYTHONUNBUFFERED" in os.environ
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = io.TextIOWrapper(
        os.fdopen(1, "wb", 0 if is_unbuffered else -1, closefd=False),
        line_buffering=os.isatty(1),
        write_through=is_unbuffered,
    )
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    if sys.argv[0] in (CLI, BENCH):  # start services
        _fork_with(ForkServer(server, socket.socket(fileno=orders)))
    else:
        os.close(orders)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is for those that are started
    before = dict(os.environ)
    UcxSettings().apply_to(os.environ)
    services = [name for name in TAKEN if name != BENCH]
    for name in (*(f"{name}.__main__" for name in services), *IMPORTED_LATE):
        with contextlib.suppress(ImportError):  # not everybody has everything
            importlib.import_module(name)
    with contextlib.suppress(ImportError):
        importlib.import_module("services.cli.app").load_commands()
    for name in services:
        sys.modules.pop(f"{name}.__main__", None)  # each runs its own
    gc.collect()
    got = _serve(socket.socket(fileno=int(sys.argv[1])))
    if got is not None:
        _become(*got, before)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
