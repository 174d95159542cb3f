"""Work of clients that may never end, in a process of its own, because nothing else can be ended:
a thread hears nobody while a library computes, and its memory is everybody's.

This module is both ends: ``WorkProcess`` in the gateway, ``answer_all`` in the child, a module that
calls it, which forks for each piece of work. Between them: a line each way. ``WorkQueue`` has the
gateway's loop wait for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Generic, Literal, TypeVar

from shared.errors import Overloaded
from shared.runtime.child import our_code

GIVE_UP_S = 3.0
"""Longest wait for an outcome, so that a busy machine refuses nothing that is small."""

STARTS_WITHIN_S = 30.0
MAX_MEMORY_BYTES = 2 << 30

MAX_WAITING = 64
"""Pieces of work that may wait in a queue; more are refused."""

_SLOW, _LARGE = b"slow", b"large"
"""In place of an outcome, which is JSON."""


class Unfinished(Exception):
    """There is no outcome. why: it took more than its processor time, more than its memory, too
    long on a machine that may have been busy with something else, or its process ended."""

    def __init__(self, why: Literal["slow", "large", "late", "lost"]) -> None:
        super().__init__(why)
        self.why = why


class WorkProcess:
    """The gateway's end: starts the child with the first work and whenever it was ended.
    ``outcome`` blocks, and is for one thread; the others are for any."""

    def __init__(self, module: str, limit_s: float, *, give_up_s: float = GIVE_UP_S) -> None:
        """module: it is the child. limit_s: most processor time of one piece of work."""
        self._module = module
        self._limit_s = limit_s
        self._give_up_s = give_up_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_working = False
        self._is_given_up = False
        self._is_closed = False
        self.client: object = None
        """Whose work is next, or is worked at; set on the thread of ``outcome``."""

    def outcome(self, work: bytes) -> bytes:
        """Return what becomes of a line of work, as JSON.

        Raises Unfinished. Overloaded: no process can be started.
        """
        child = self._started()
        if child is None:
            raise Unfinished("lost")
        with self._lock:
            self._is_working, self._is_given_up = True, False
        try:
            return self._outcome(child, work)
        finally:
            with self._lock:
                self._is_working = False
            # Killed perhaps after its outcome: the next work must not be written to it.
            if self._is_given_up:
                self._end()

    def give_up(self, client: object = None) -> None:
        """End what is being worked at, if it is this client's: nobody waits for it any more. By
        now it may be the next one's."""
        with self._lock:
            if self._is_working and self.client is client and self._child is not None:
                self._is_given_up = True
                _kill(self._child)

    def _outcome(self, child: subprocess.Popen[bytes], work: bytes) -> bytes:
        assert child.stdin is not None
        assert child.stdout is not None
        line = b""
        with contextlib.suppress(OSError):
            _send(child.stdin, b"%f %s" % (self._limit_s, work))
            # One line each way: nothing is left in our own buffer, which ``poll`` does not see.
            if not _says_something(child.stdout, self._give_up_s):
                self._end()
                raise Unfinished("late")
            line = child.stdout.readline()
        if not line.endswith(b"\n"):  # half a line, or none
            self._end()
            raise Unfinished("lost")
        outcome = line[:-1]
        if outcome in (_SLOW, _LARGE):
            raise Unfinished("slow" if outcome == _SLOW else "large")
        return outcome

    def close(self) -> None:
        """End the child; nothing is worked at any more."""
        self._is_closed = True
        self._end()

    def _started(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._is_closed:
                return None
            if self._child is not None:
                return self._child
            try:
                child = self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", self._module],
                    env={**os.environ, **our_code()},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # ends with its forks, and not by the terminal's ^C
                )
            except OSError as error:  # no memory, descriptors or process ids for one more
                raise Overloaded(
                    f"no process can be started that checks it: {error.strerror}",
                    retry_after_s=1.0,
                ) from error
        assert child.stdout is not None
        # Its start does not count; but its first line, come later, would be taken for an outcome.
        if not _says_something(child.stdout, STARTS_WITHIN_S):
            self._end()
            raise Unfinished("late")
        child.stdout.readline()
        return child

    def _end(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            _kill(child)
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()


ProcessT = TypeVar("ProcessT", bound=WorkProcess)
T = TypeVar("T")


class WorkQueue(Generic[ProcessT]):
    """What is done one after the other, in a process of its own."""

    def __init__(self, process: ProcessT, what: str, *, gives_up: bool) -> None:
        """what: waits here. gives_up: work ends with the client that waits for it."""
        self._process = process
        self._what = what
        self._gives_up = gives_up
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bounded")
        self._num_waiting = 0

    async def run(self, work: Callable[[ProcessT], T]) -> T:
        """Return what it returns. Raises what it raises, and Overloaded."""
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded(f"too many {self._what} wait to be checked", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            client = object()
            running = self._thread.submit(self._work, client, work)
            try:
                return await asyncio.wrap_future(running)
            except asyncio.CancelledError:
                # One that waits yet is cancelled with its future.
                if self._gives_up:
                    self._process.give_up(client)
                raise
        finally:
            self._num_waiting -= 1

    def _work(self, client: object, work: Callable[[ProcessT], T]) -> T:
        self._process.client = client
        return work(self._process)

    def close(self) -> None:
        """End the thread and its process; work in progress fails."""
        self._process.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def answer_all(outcome: Callable[[bytes], bytes]) -> None:
    """The child's end: answer until the other one is gone. outcome: of a line of work, a line of
    JSON."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _send(sys.stdout.buffer, b"")
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            _send(sys.stdout.buffer, _forked(line, outcome))


def _forked(line: bytes, outcome: Callable[[bytes], bytes]) -> bytes:
    """Return the answer of a fork, which its own limits end at no cost to the next work."""
    read_end, write_end = os.pipe()
    fork = os.fork()
    if fork == 0:
        try:
            limit_s, _, work = line.partition(b" ")
            signal.setitimer(signal.ITIMER_PROF, float(limit_s))  # its signal ends this process
            answer = outcome(work)
            with open(write_end, "wb") as pipe:
                pipe.write(answer)
        finally:  # a MemoryError is the parent's to tell, by the empty pipe
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(fork, 0)
    # An answer that the signal cut is none.
    if os.waitstatus_to_exitcode(status) == -signal.SIGPROF:
        return _SLOW
    return answer or _LARGE


def _says_something(pipe: IO[bytes], within_s: float) -> bool:
    """Whether there is something to read in time, be it the end."""
    poll = select.poll()  # ``select.select`` knows no descriptor above 1023
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _send(pipe: IO[bytes], line: bytes) -> None:
    pipe.write(line + b"\n")
    pipe.flush()
