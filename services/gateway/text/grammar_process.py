"""Grammars compiled in a process of their own, because nothing else can be ended: the library takes
0.3 ms for nearly all of them and for ever for some, a hundred characters are enough, and while it
computes a thread hears nobody.

This module is both ends: ``GrammarProcess`` in the gateway, ``main`` in the child
(``python -m services.gateway.text.grammar_process``), which forks for each grammar. Between them:
a line of JSON each way.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO

import msgspec

from shared.errors import Overloaded
from shared.grammar import library, matcher
from shared.runtime.child import our_code

MAX_COMPILE_S = 0.5
"""Most processor time of one grammar: workers compile it once more, beside their steps."""

GIVE_UP_S = 3.0
"""Longest wait for a verdict, so that a busy machine refuses nothing that is small."""

STARTS_WITHIN_S = 30.0
MAX_MEMORY_BYTES = 2 << 30


class Verdict(msgspec.Struct, frozen=True):
    """fault: what is wrong, '' = nothing. is_lasting: it would be the same again."""

    fault: str
    is_lasting: bool = True


TOO_SLOW = Verdict("it takes too long to compile: make it simpler")
NOT_IN_TIME = Verdict(TOO_SLOW.fault, is_lasting=False)
"""The machine may have been busy with something else."""

TOO_LARGE = Verdict("it takes too much memory to compile: make it simpler")


class GrammarProcess:
    """The gateway's end: starts the child with the first grammar and whenever it was ended.
    ``check`` blocks, and is for one thread; the others are for any."""

    def __init__(self, limit_s: float = MAX_COMPILE_S, *, give_up_s: float = GIVE_UP_S) -> None:
        """limit_s: most processor time of one grammar."""
        self._limit_s = limit_s
        self._give_up_s = give_up_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_checking = False
        self._is_given_up = False
        self._is_closed = False

    def check(self, grammar: str) -> Verdict:
        """Return the verdict on a grammar.

        Raises InvalidRequest: the library is not installed. Overloaded: no process can be started.
        """
        library()
        child = self._started()
        if child is None:
            return Verdict("it was not checked: the gateway ends", is_lasting=False)
        with self._lock:
            self._is_checking, self._is_given_up = True, False
        try:
            return self._verdict(child, grammar)
        finally:
            with self._lock:
                self._is_checking = False
            # Killed perhaps after its verdict: the next check must not write to it.
            if self._is_given_up:
                self._end()

    def give_up(self) -> None:
        """End what is being checked, if anything is: nobody waits for it any more."""
        with self._lock:
            if self._is_checking and self._child is not None:
                self._is_given_up = True
                _kill(self._child)

    def _verdict(self, child: subprocess.Popen[bytes], grammar: str) -> Verdict:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _send(child.stdin, msgspec.json.encode((self._limit_s, grammar)))
            # One line each way: nothing is left in our own buffer, which ``poll`` does not see.
            if not _says_something(child.stdout, self._give_up_s):
                self._end()
                return NOT_IN_TIME
            return msgspec.json.decode(child.stdout.readline(), type=Verdict)
        except (OSError, msgspec.DecodeError):  # half a line, or none
            self._end()
            why = "its client left" if self._is_given_up else "the process that checks it ended"
            return Verdict(why, is_lasting=False)

    def close(self) -> None:
        """End the child; nothing is checked any more."""
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
                    [sys.executable, "-P", "-m", __name__],
                    env={**os.environ, **our_code()},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # ends with its forks, and not by the terminal's ^C
                )
            except OSError as error:  # no memory, descriptors or process ids for one more
                raise Overloaded(
                    f"no process can be started that checks grammars: {error.strerror}",
                    retry_after_s=1.0,
                ) from error
        assert child.stdout is not None
        if _says_something(child.stdout, STARTS_WITHIN_S):
            child.stdout.readline()  # it is there: its start does not count
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


def verdict_of(grammar: str, tokenizer: object) -> Verdict:
    """Compile a grammar over the 256 bytes, and look at its first token."""
    began_at = time.process_time()
    state = matcher(tokenizer, grammar)
    if not state.is_error():
        mask = state.compute_bitmask()
        if not any(mask) or (state.is_error() and not state.is_accepting()):
            return Verdict("no text matches it")
    if state.is_error():
        return Verdict(_sentence(state.get_error()))
    # A fork's timer comes first: this is for tests, which check in place.
    if time.process_time() - began_at > MAX_COMPILE_S:
        return TOO_SLOW
    return Verdict("")


def _sentence(message: str) -> str:
    """The library's message, of a regular expression only what comes after its drawing."""
    _, _, reason = message.rpartition("error: ")
    line = (reason.strip().splitlines() or ["it is not valid"])[0]
    return "".join(char for char in line if char.isprintable())[:300]


def byte_tokenizer() -> object:
    """A tokenizer of which every token is a byte: what matches does not depend on the model's."""
    return library().LLTokenizer("byte")


def main() -> None:
    """Answer until the other end is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = byte_tokenizer()
    _send(sys.stdout.buffer, b"")
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            _send(sys.stdout.buffer, _answer(line, tokenizer))


def _answer(asked: bytes, tokenizer: object) -> bytes:
    """Return the verdict of a fork, which its own limits end at no cost to the next grammar."""
    read_end, write_end = os.pipe()
    fork = os.fork()
    if fork == 0:
        try:
            limit_s, grammar = msgspec.json.decode(asked, type=tuple[float, str])
            signal.setitimer(signal.ITIMER_PROF, limit_s)  # its signal ends this process
            os.write(write_end, msgspec.json.encode(verdict_of(grammar, tokenizer)))
        finally:  # a MemoryError is the parent's to tell, by the empty pipe
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(fork, 0)
    if answer:
        return answer
    is_slow = os.waitstatus_to_exitcode(status) == -signal.SIGPROF
    return msgspec.json.encode(TOO_SLOW if is_slow else TOO_LARGE)


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


if __name__ == "__main__":
    main()
