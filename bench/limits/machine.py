"""What a machine's cores allow: prefill and decode apart and together, without anything else.

    python -m bench.limits.machine [--load azure-conv | mooncake]

Prompts of several lengths and steps of several rows are timed on one thread and on as many as there
are cores, nothing else running. Then requests of one of bench/disaggregation's loads, arriving at
random, are simulated: no gateway, no hand-over, no noise, prefix caches that keep all, and cores
that disturb each other in nothing. Prints the highest rate at which 90 % keep the tight limits of
bench/disaggregation, for each way to serve; writes nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from bench.disaggregation.run import (
    LEAST_TTFT,
    LOADS,
    NUM_CORES,
    SCALE,
    SLOS,
    VOCAB,
    make_model,
)
from bench.ends import our_engine
from bench.limits.bound import best_rate, prompts_of, seconds_of
from services.cli.bench.workload import Fit, Load, Workload, plan

ROWS = (1, 2, 3, 4, 6, 8)
CONTEXTS = {"azure-conv": 300, "mooncake": 1300}
"""Tokens of each row, about those of the load's requests."""

NUM_REQUESTS = 2000
TARGETS = (1.2, 1.5, 2.0, 3.0)
"""Of a colocated worker's step, in times a step of one row; the best one counts."""


class Request(NamedTuple):
    """When it arrives, in seconds; tokens of its prompt and of its answer. num_cached: tokens at
    the prompt's begin whose KV is there."""

    arrives_at: float
    num_prompt: int
    num_answer: int
    num_cached: int = 0


class Answer(NamedTuple):
    """TTFT, and the mean of the gaps behind the first token, both in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds alone, by (tokens, seconds) of prompts and (rows, seconds) of decode steps."""

    prompts: Sequence[tuple[int, float]]
    steps: Sequence[tuple[int, float]]

    def prompt_s(self, request: Request) -> float:
        """Return what a prompt takes: the whole of it, less what the cached part would."""
        whole_s = seconds_of(request.num_prompt, self.prompts)
        return whole_s - (seconds_of(request.num_cached, self.prompts) if request.num_cached else 0)

    def step_s(self, num_rows: int) -> float:
        return seconds_of(num_rows, self.steps)


@dataclass(slots=True)
class Decoding:
    """Answers between their first token and their last."""

    rows: list[tuple[Request, float, int]] = field(default_factory=list[tuple[Request, float, int]])
    """Each with the time of its first token and the tokens to come."""

    answers: list[Answer] = field(default_factory=list[Answer])

    def join(self, request: Request, now: float) -> None:
        """Take one whose first token is there."""
        if request.num_answer > 1:
            self.rows.append((request, now, request.num_answer - 1))
        else:
            self.answers.append(Answer(now - request.arrives_at, 0.0))

    def step(self, now: float) -> None:
        """Give each a token."""
        rows, self.rows = self.rows, []
        for request, first_at, left in rows:
            if left > 1:
                self.rows.append((request, first_at, left - 1))
            else:
                gap_s = (now - first_at) / (request.num_answer - 1)
                self.answers.append(Answer(first_at - request.arrives_at, gap_s))


class Prompts:
    """Prompts one after the other, in order of arrival."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._to_come = deque(requests)
        self._done = 0.0

    @property
    def next_at(self) -> float:
        """When the first of them is there, or was; never, if there is none."""
        return self._to_come[0].arrives_at if self._to_come else math.inf

    def compute(self, costs: Costs, begin: float, end: float) -> tuple[Request | None, float]:
        """Spend the time until end, or until a prompt is done: return it and the time then."""
        begin = max(begin, self.next_at)
        if begin >= end:
            return None, end
        whole_s = costs.prompt_s(self._to_come[0])
        done_at = begin + (1.0 - self._done) * whole_s
        if done_at > end:
            self._done += (end - begin) / whole_s
            return None, end
        self._done = 0.0
        return self._to_come.popleft(), done_at


def start(prompts: Prompts, decoding: Decoding, costs: Costs, now: float) -> float:
    """Compute the next prompt while nobody decodes; return when it is done."""
    done, now = prompts.compute(costs, now, math.inf)
    assert done is not None
    decoding.join(done, now)
    return now


def apart(requests: Sequence[Request], *, rested: Costs, beside: Costs) -> list[Answer]:
    """A prefill and a decode worker. Decode always has a core.

    rested: of a prompt while nobody decodes, and of a step that no prompt waits beside. beside: of
    both otherwise.
    """
    prompts, decoding, now = Prompts(requests), Decoding(), 0.0
    while decoding.rows or prompts.next_at < math.inf:
        if not decoding.rows:
            now = start(prompts, decoding, rested, now)
            continue
        costs = rested if prompts.next_at > now else beside
        end = now + costs.step_s(len(decoding.rows))
        joining: list[tuple[Request, float]] = []
        while now < end:
            done, now = prompts.compute(beside, now, end)
            if done is not None:
                joining.append((done, now))
        decoding.step(end)
        for request, at in joining:
            decoding.join(request, at)
        now = end
    return decoding.answers


def together(requests: Sequence[Request], *, costs: Costs, target_s: float) -> list[Answer]:
    """One worker that does both: a step has all answers and as much of a prompt as keeps target_s,
    at least a tenth of a step; a prompt that delays nobody is computed as a whole."""
    prompts, decoding, now = Prompts(requests), Decoding(), 0.0
    while decoding.rows or prompts.next_at < math.inf:
        if not decoding.rows:
            now = start(prompts, decoding, costs, now)
            continue
        step_s, done = costs.step_s(len(decoding.rows)), None
        end = now + step_s
        if prompts.next_at <= now:
            done, end = prompts.compute(costs, end, max(now + target_s, end + 0.1 * step_s))
        decoding.step(end)
        if done is not None:
            decoding.join(done, end)
        now = end
    return decoding.answers


def in_turn(
    requests: Sequence[Request], *, num_workers: int, costs: Costs, target_s: float
) -> list[Answer]:
    """So many workers that do both, which get requests in turn."""
    shares = [requests[number::num_workers] for number in range(num_workers)]
    each = [together(share, costs=costs, target_s=target_s) for share in shares]
    return [answer for answers in each for answer in answers]


Serve = Callable[[Sequence[Request]], list[Answer]]


def rate_of(serve: Serve, requests_at: Callable[[float], list[Request]], limits: Answer) -> float:
    """Return the highest rate at which a way to serve keeps both limits."""

    def kept_at(rate: float) -> list[bool]:
        return [
            one.ttft_s <= limits.ttft_s and one.tpot_s <= limits.tpot_s
            for one in serve(requests_at(rate))
        ]

    return best_rate(kept_at)


def requests_of(workload: Workload) -> list[Request]:
    """Return what is simulated of a workload: a leading block that an earlier prompt had is
    cached, all but a prompt's last token."""
    seen: set[int] = set()
    requests: list[Request] = []
    for ask in workload.asks:
        num_seen = sum(1 for _ in takewhile(seen.__contains__, ask.block_ids))
        cached = min(num_seen * workload.block_tokens, ask.num_input - 1)
        requests.append(Request(ask.due_s, ask.num_input, ask.num_output, cached))
        seen.update(ask.block_ids)
    return requests


def timed(folder: Path, threads: int, repetitions: int, context: int) -> Costs:
    """Time prompts and steps of this folder's model. context: tokens of a step's rows."""
    with our_engine(folder, threads, VOCAB) as engine:
        prompts = prompts_of(engine, repetitions)
        steps: list[tuple[int, float]] = []
        for rows in ROWS:
            engine.ask("fill", rows=rows, context=context)
            told = engine.ask("decode", steps=10 * repetitions)
            steps.append((rows, statistics.median(told["seconds"])))
    print(
        f"{threads} threads: prompts "
        + ", ".join(f"{size}: {took * 1e3:.0f} ms" for size, took in prompts)
        + "; steps "
        + ", ".join(f"{rows}: {took * 1e3:.1f} ms" for rows, took in steps)
    )
    return Costs(prompts, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--load", choices=list(CONTEXTS), default="azure-conv")
    parser.add_argument("--repetitions", type=int, default=5, help="of each length")
    asked = parser.parse_args()
    source, context = LOADS[asked.load], CONTEXTS[asked.load]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        one, all_cores = (
            timed(folder, each, asked.repetitions, context) for each in (1, NUM_CORES)
        )

    @cache
    def requests_at(rate: float) -> list[Request]:
        load = Load(rate=rate, num_requests=NUM_REQUESTS, arrivals="poisson")
        return requests_of(plan(source, load, Fit(scale=SCALE, max_input=1400, max_output=200)))

    ttft, tpot = SLOS["tight"]
    alone = [all_cores.prompt_s(request) for request in requests_at(1.0)]
    step_s = min(one.step_s(1), all_cores.step_s(1))
    limits = Answer(max(ttft * statistics.median(alone), LEAST_TTFT * max(alone)), tpot * step_s)
    requests = requests_at(1.0)
    num_cached = sum(request.num_cached for request in requests)
    share = num_cached / sum(request.num_prompt for request in requests)
    print(f"{share:.0%} of all prompt tokens are cached")
    print(
        f"{asked.load}, TTFT {limits.ttft_s:.3f} s, TPOT {limits.tpot_s * 1e3:.1f} ms, requests/s:"
    )
    targets = [share * step_s for share in TARGETS]
    ways: dict[str, list[Serve]] = {
        "apart, one thread each": [partial(apart, rested=one, beside=one)],
        "apart, each on all cores while the other rests": [
            partial(apart, rested=all_cores, beside=one)
        ],
        "together, a worker a core": [
            partial(in_turn, num_workers=NUM_CORES, costs=one, target_s=target)
            for target in targets
        ],
        "together, one worker on all cores": [
            partial(together, costs=all_cores, target_s=target) for target in targets
        ],
    }
    for way, choices in ways.items():
        print(f"{way:50}{max(rate_of(each, requests_at, limits) for each in choices):8.2f}")


if __name__ == "__main__":
    main()
