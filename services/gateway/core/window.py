"""What happened in the last minute: the numbers of a live view, kept in a ring of seconds.

Each second has one bucket of counts and histograms, so that forgetting is exact and costs nothing.
Memory is bounded whatever comes: ``SECONDS`` buckets, in each at most three times ``NUM_BINS``
counters, ``MAX_PAIRS`` pairs with twice that, and ``MAX_READERS`` workers with two. Pure: ``now``
is an argument, in seconds of a clock that never goes back. Knows no worker and no request, only
what it is told of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from shared.predict.transfer import KvLink

SECONDS = 60
"""How far back the window looks: the running second and the 59 before it."""

MAX_PAIRS = 64
"""Pairs of workers whose transfers are told apart in one second; what is beyond goes uncounted but
for ``Summary.num_unlisted_transfers``."""

MAX_READERS = 1024
"""Workers whose prompts are told apart in one second; what is beyond goes uncounted."""

_BIN_WIDTH = 1.04
_LEAST = 1e-6
NUM_BINS = 600
"""Histogram bins: from 1e-6 up to 1.6e4, each 4 % wider than the one before."""

_LOG_WIDTH = math.log(_BIN_WIDTH)
_MOST = _LEAST * _BIN_WIDTH ** (NUM_BINS - 0.5)


class Histogram:
    """How often which value came, to within 2 %. Values beyond the bins count in the outermost."""

    __slots__ = ("_bins", "count")

    def __init__(self) -> None:
        self.count = 0
        self._bins: dict[int, int] = {}

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, ``times`` over."""
        number = int(math.log(min(value, _MOST) / _LEAST) / _LOG_WIDTH) if value > _LEAST else 0
        self._bins[number] = self._bins.get(number, 0) + times
        self.count += times

    def merge(self, other: Histogram) -> None:
        """Count all that the other has counted."""
        bins = self._bins
        for number, times in other._bins.items():
            bins[number] = bins.get(number, 0) + times
        self.count += other.count

    def percentile(self, percent: float) -> float:
        """Return the value that this share of all values does not exceed (nearest rank), to within
        2 %; 0 if there is none."""
        rank = max(1, math.ceil(self.count * percent / 100))
        for number in sorted(self._bins):
            rank -= self._bins[number]
            if rank <= 0:
                # The middle of its bin; in the first is all that is less, too.
                return _LEAST * _BIN_WIDTH ** (number + 0.5) if number else _LEAST
        return 0.0


@dataclass(slots=True)
class Transfers:
    """What one pair moved. exposed_s: how long decode still waited after token 1 was known."""

    count: int = 0
    num_bytes: int = 0
    gb_per_s: Histogram = field(default_factory=Histogram)
    exposed_s: Histogram = field(default_factory=Histogram)


class ReadPrompts(NamedTuple):
    """Tokens of the prompts of one worker, of these how many its prefix cache had, and of these how
    many another worker had sent for that prompt, and how many came from memory and disk below the
    pool."""

    num_tokens: int = 0
    num_cached: int = 0
    num_fetched: int = 0
    num_dram: int = 0
    num_ssd: int = 0

    def plus(self, more: ReadPrompts) -> ReadPrompts:
        """Return the tokens of both."""
        return ReadPrompts(*map(add, self, more))


@dataclass(slots=True, kw_only=True)
class _Counts:
    """What came in some time."""

    num_ended: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_unlisted_transfers: int = 0
    ttft_s: Histogram = field(default_factory=Histogram)
    itl_s: Histogram = field(default_factory=Histogram)
    transfers: dict[KvLink, Transfers] = field(default_factory=lambda: {})
    prompts: dict[int, ReadPrompts] = field(default_factory=lambda: {})


@dataclass(slots=True, kw_only=True)
class _Second(_Counts):
    """One bucket. number: the second it is of; another one's means that it is stale."""

    number: int = -1


@dataclass(slots=True, kw_only=True)
class Summary(_Counts):
    """The window at one moment.

    covered_s: how much time the counts are of: less than ``SECONDS`` in the running second, and
    soon after the start. output_tokens_each_s: the complete seconds, oldest first.
    """

    covered_s: float
    output_tokens_each_s: list[int] = field(default_factory=lambda: [])


class LastMinute:
    """The last minute of one gateway, since ``started_at``."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._ring = [_Second() for _ in range(SECONDS)]

    def first_token(self, now: float, ttft_s: float, num_prompt_tokens: int) -> None:
        """An answer's first token came; its prompt counts as read."""
        second = self._second(now)
        second.ttft_s.add(ttft_s)
        second.num_prompt_tokens += num_prompt_tokens
        second.num_output_tokens += 1

    def later_tokens(self, now: float, num_tokens: int, gap_s: float) -> None:
        """Later tokens came together, ``gap_s`` after the one before: so many equal gaps."""
        second = self._second(now)
        second.num_output_tokens += num_tokens
        second.itl_s.add(gap_s / num_tokens, num_tokens)

    def ended(self, now: float, *, has_failed: bool) -> None:
        """An answer is over; one that its client left has not failed."""
        second = self._second(now)
        second.num_ended += 1
        second.num_failed += has_failed

    def read(self, now: float, worker: int, prompt: ReadPrompts) -> None:
        """An answer is over whose prompt this worker had."""
        prompts = self._second(now).prompts
        if worker in prompts or len(prompts) < MAX_READERS:
            prompts[worker] = prompts.get(worker, ReadPrompts()).plus(prompt)

    def transferred(
        self, now: float, pair: KvLink, *, num_bytes: int, transfer_s: float, exposed_s: float
    ) -> None:
        """All KV of a prompt has arrived."""
        second = self._second(now)
        transfers = second.transfers.get(pair)
        if transfers is None:
            if len(second.transfers) >= MAX_PAIRS:
                second.num_unlisted_transfers += 1
                return
            transfers = second.transfers[pair] = Transfers()
        transfers.count += 1
        transfers.num_bytes += num_bytes
        if transfer_s > 0:
            transfers.gb_per_s.add(num_bytes / transfer_s / 1e9)
        transfers.exposed_s.add(exposed_s)

    def summary(self, now: float) -> Summary:
        """Add up what is not older than the window."""
        newest = int(now)
        summary = Summary(
            covered_s=min(now - self._started_at, SECONDS - 1 + now % 1),
            output_tokens_each_s=[0] * (SECONDS - 1),
        )
        # Oldest first, so that pairs come in the order in which they were first seen.
        live = (second for second in self._ring if newest - SECONDS < second.number <= newest)
        for second in sorted(live, key=lambda second: second.number):
            summary.num_ended += second.num_ended
            summary.num_failed += second.num_failed
            summary.num_output_tokens += second.num_output_tokens
            summary.num_prompt_tokens += second.num_prompt_tokens
            summary.num_unlisted_transfers += second.num_unlisted_transfers
            summary.ttft_s.merge(second.ttft_s)
            summary.itl_s.merge(second.itl_s)
            if second.number < newest:
                age = newest - second.number
                summary.output_tokens_each_s[SECONDS - 1 - age] = second.num_output_tokens
            for pair, transfers in second.transfers.items():
                total = summary.transfers.setdefault(pair, Transfers())
                total.count += transfers.count
                total.num_bytes += transfers.num_bytes
                total.gb_per_s.merge(transfers.gb_per_s)
                total.exposed_s.merge(transfers.exposed_s)
            for worker, read in second.prompts.items():
                summary.prompts[worker] = summary.prompts.get(worker, ReadPrompts()).plus(read)
        return summary

    def _second(self, now: float) -> _Second:
        number = int(now)
        second = self._ring[number % SECONDS]
        if second.number != number:
            second = self._ring[number % SECONDS] = _Second(number=number)
        return second
