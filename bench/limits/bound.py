"""What queueing alone allows: the rate at which prompts keep a limit of TTFT, with nothing but
their computation in the way.

    python -m bench.limits.bound

Prompts of several lengths are timed on one thread of this machine, nothing else running. Then
requests of Azure's conversations, arriving at random, wait for one server (a prefill worker), or
for the first of two that is free (two colocated ones, if answers cost nothing). Prints the highest
rate at which 90 % have their first token within so many times the median prompt's time; writes
nothing.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count, pairwise
from pathlib import Path

from bench.disaggregation.run import LOADS, SCALE, TARGET, VOCAB, make_model
from bench.ends import EngineEnd, our_engine
from bench.limits.run import TTFT_LIMITS
from services.cli.bench.workload import Fit, Load, plan

LOAD = "azure-conv"
"""Its prompts share nothing, so each is computed as a whole."""

LENGTHS = (16, 64, 256, 512, 1024, 1400)
NUM_REQUESTS = 4000
STEP = 0.125
"""Requests/s between two rates that are tried."""

SHARED_STEP = 2048
"""Tokens of a step, where all prompts that wait share one."""

Prompt = tuple[float, float, int]
"""When it arrives, seconds that it takes alone, its length."""

Queue = Callable[[Sequence[Prompt]], list[float]]
"""Seconds until each has its first token."""


def prompts_of(engine: EngineEnd, repetitions: int) -> list[tuple[int, float]]:
    """Return lengths of prompts, and the seconds that each takes."""
    return [
        (length, statistics.median(told["seconds"]))
        for length in LENGTHS
        for told in [engine.ask("prefill", tokens=length, times=repetitions)]
    ]


def seconds_of(length: int, timed: Sequence[tuple[int, float]]) -> float:
    """Between two lengths that were timed, a line; beyond them, in proportion."""
    for (shorter, low), (longer, high) in pairwise(timed):
        if length <= longer:
            share = max(0.0, (length - shorter) / (longer - shorter))
            return low + share * (high - low)
    longest, seconds = timed[-1]
    return seconds * length / longest


def in_order(num_servers: int) -> Queue:
    """First come, first served, by the first server that is free."""

    def wait(prompts: Sequence[Prompt]) -> list[float]:
        free_at = [0.0] * num_servers
        waits: list[float] = []
        for arrives_at, seconds, _ in prompts:
            done_at = max(arrives_at, heapq.heappop(free_at)) + seconds
            heapq.heappush(free_at, done_at)
            waits.append(done_at - arrives_at)
        return waits

    return wait


def shortest_first(prompts: Sequence[Prompt]) -> list[float]:
    """One server; of those that wait it takes the shortest, and interrupts none."""
    waits: list[float] = []
    waiting: list[tuple[float, float]] = []
    now, at = 0.0, 0
    while at < len(prompts) or waiting:
        if not waiting:
            now = max(now, prompts[at][0])
        while at < len(prompts) and prompts[at][0] <= now:
            arrives_at, seconds, _ = prompts[at]
            heapq.heappush(waiting, (seconds, arrives_at))
            at += 1
        seconds, arrives_at = heapq.heappop(waiting)
        now += seconds
        waits.append(now - arrives_at)
    return waits


def all_together(prompts: Sequence[Prompt]) -> list[float]:
    """One server; all that wait share a step, as many as fit, and end with it."""
    waits: list[float] = []
    now, at = 0.0, 0
    while at < len(prompts):
        now, first, size = max(now, prompts[at][0]), at, 0
        while at < len(prompts) and prompts[at][0] <= now:
            size += prompts[at][2]
            if size > SHARED_STEP and at > first:
                break
            at += 1
        now += sum(seconds for _, seconds, _ in prompts[first:at])
        waits += [now - arrives_at for arrives_at, _, _ in prompts[first:at]]
    return waits


QUEUES: dict[str, Queue] = {
    "one server, in order of arrival": in_order(1),
    "one server, all that wait in one step": all_together,
    "one server, the shortest first": shortest_first,
    "two servers, in order of arrival": in_order(2),
}


def best_rate(kept_at: Callable[[float], Sequence[bool]]) -> float:
    """Return the last rate before the first that misses the target. kept_at: who of its requests
    keeps the limits."""
    for number in count(1):
        kept = kept_at(number * STEP)
        if sum(kept) < TARGET * len(kept):
            return (number - 1) * STEP
    raise AssertionError


def rate_of(queue: Queue, prompts_at: Callable[[float], Sequence[Prompt]], limit_s: float) -> float:
    """Return the highest rate at which a queue keeps a limit of TTFT."""
    return best_rate(lambda rate: [wait <= limit_s for wait in queue(prompts_at(rate))])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repetitions", type=int, default=5, help="of each length")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name))
        with our_engine(Path(name), 1, VOCAB) as engine:
            timed = prompts_of(engine, asked.repetitions)
    print("prompts, alone: " + ", ".join(f"{size}: {took * 1e3:.0f} ms" for size, took in timed))

    @cache
    def prompts_at(rate: float) -> list[Prompt]:
        load = Load(rate=rate, num_requests=NUM_REQUESTS, arrivals="poisson")
        asks = plan(LOADS[LOAD], load, Fit(scale=SCALE, max_input=1400, max_output=200)).asks
        return [(ask.due_s, seconds_of(ask.num_input, timed), ask.num_input) for ask in asks]

    median_s = statistics.median(seconds for _, seconds, _ in prompts_at(1.0))
    print(f"the median prompt: {median_s * 1e3:.0f} ms; {LOAD}, requests/s within a limit of")
    print(f"{'':40}" + "".join(f"{f'{limit} x':>8}" for limit in TTFT_LIMITS))
    for name, queue in QUEUES.items():
        rates = [rate_of(queue, prompts_at, limit * median_s) for limit in TTFT_LIMITS]
        print(f"{name:40}" + "".join(f"{rate:8.2f}" for rate in rates))


if __name__ == "__main__":
    main()
