"""What happened to each request, and to the client itself: the raw material of every figure.

Times are readings of one stopwatch (``time.perf_counter``). Holds and counts; judges nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from services.cli.bench.workload import Ask, Workload
from shared.telemetry.definitions import RequestOutcome


class Ending(Enum):
    """How a request ended. All but COMPLETE count as missed, UNFINISHED not at all."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """429 or 503 before the first token."""

    FAILED = "failed"
    """Any other error before the first token, or an answer without one."""

    CUT = "cut"
    """The answer broke off."""

    TIMEOUT = "timeout"
    """It did not end within the limit."""

    UNREACHABLE = "unreachable"
    """No connection."""

    CLIENT = "client"
    """We could not: no file descriptor or port left. Voids the run."""

    UNFINISHED = "unfinished"
    """The run was interrupted."""


MISSED = tuple(end for end in Ending if end not in (Ending.COMPLETE, Ending.UNFINISHED))
BROKEN = (Ending.FAILED, Ending.CUT, Ending.UNREACHABLE)
"""What no load excuses."""


@dataclass(slots=True, eq=False)
class Record:
    """One request. due_at: when it should have left; sent_at: when it did.

    times, counts: when each message with tokens came, and how many it held. num_output: tokens in
    all. is_counted: whether the server said the counts message by message; else they are one each,
    or spread evenly over the messages so that they add up to the total that it said at the end.
    """

    ask: Ask
    index: int
    due_at: float
    url: str = ""
    sent_at: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    counts: list[int] = field(default_factory=list[int])
    num_output: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    is_counted: bool = False
    end: Ending = Ending.UNFINISHED
    error: str = ""
    ended_at: float = 0.0

    @property
    def lag_s(self) -> float:
        return self.sent_at - self.due_at

    def add(self, at: float, num_tokens: int) -> None:
        """Note tokens that came at ``at``; what came in one read is one message."""
        if self.times and self.times[-1] == at:
            self.counts[-1] += num_tokens
        else:
            self.times.append(at)
            self.counts.append(num_tokens)
        self.num_output += num_tokens

    def correct(self, total: int) -> None:
        """Take the server's own count of all tokens: spread them over the messages, as evenly as
        can be, the first message first."""
        num_messages = len(self.times)
        if total == self.num_output or not num_messages:
            return
        steps = [-(-total * done // num_messages) for done in range(num_messages + 1)]
        self.counts = [after - before for before, after in pairwise(steps)]
        self.num_output = total

    def fail(self, end: Ending, error: str) -> None:
        self.end = end
        self.error = " ".join(error.split())[:300]

    def outcome(self) -> RequestOutcome:
        """Return it in the terms of the definitions: it arrived when it was due."""
        times: list[float] = []
        for at, count in zip(self.times, self.counts, strict=True):
            times += [at] * count
        return RequestOutcome(self.due_at, times, self.end is Ending.COMPLETE)


@dataclass(slots=True)
class Run:
    """One run. Times: readings of the stopwatch.

    loop_lags: how late the client's event loop was, a hundred times a second. cpu_s: CPU time of
    the client's process between the two times.
    """

    workload: Workload
    rate: float | None = None
    prompt_seed: int = 0
    records: list[Record] = field(default_factory=list[Record])
    started_at: float = 0.0
    ended_at: float = 0.0
    cpu_s: float = 0.0
    loop_lags: list[float] = field(default_factory=list[float])
    num_ended: int = 0
    is_interrupted: bool = False
