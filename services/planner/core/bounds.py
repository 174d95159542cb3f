"""Closed forms: what one worker can do at most, and what one request alone would feel.

A search simulates only what these do not rule out, so each is on the generous side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from services.planner.core.fetch import pipeline_makespan
from services.planner.core.mesh_text import MeshShape, Unit
from shared.predict.step_time import attended
from shared.predict.times import TimeModel
from shared.telemetry.definitions import Slo, percentile


class AskedLengths(NamedTuple):
    """Tokens of one request. cached: of the prompt's beginning, those that an earlier one had."""

    prompt: int
    output: int
    cached: int = 0

    @property
    def num_new(self) -> int:
        """Prompt tokens that must be computed in any case."""
        return self.prompt - min(self.cached, self.prompt - 1)

    @property
    def num_steps(self) -> int:
        """Decode steps: the first token is the prompt's."""
        return max(0, self.output - 1)


Lengths = Sequence[AskedLengths]

_MOST_BATCH: Final = 4096


@dataclass(frozen=True, slots=True)
class WorkerBound:
    """Requests a second that one worker can at most do the prompts of, the answers of, or both."""

    prompts: float
    answers: float
    both: float


def worker_bound(
    times: TimeModel,
    kv_tokens: int,
    lengths: Lengths,
    *,
    token_budget: int,
    max_running: int,
    pp: int = 1,
) -> WorkerBound:
    """Return the bounds of one worker with full batches that never wait. pp: stages, in each of
    which one for prompts alone has others.

    Means are over steps: a request is among those that decode for as long as its answer is. Blocks
    of a prefix are held once, however many read them.
    """
    num = len(lengths)
    prompt = sum(one.num_new for one in lengths) / num
    depth = sum(attended(one.prompt - one.num_new, one.prompt) for one in lengths) / num
    steps = sum(one.num_steps for one in lengths)
    read = sum(one.num_steps * (one.prompt + one.output / 2) for one in lengths)
    held = sum(one.num_steps * (one.num_new + one.output / 2) for one in lengths)
    context = read / steps if steps else prompt
    in_step = min(max(1.0, token_budget / prompt), num)
    # Whichever is cheaper: Splitwise's measured prompts cost least at 2048 tokens a step.
    prompt_s = min(
        times.step_s(round(count * prompt), round(count * depth), 0, 0) / count
        for count in {1.0, in_step}
    )
    most_rows = math.ceil(kv_tokens * steps / held) if steps else 1
    rows = max(1, min(max_running, most_rows, _MOST_BATCH))
    row_s = min(times.step_s(0, 0, count, round(count * context)) / count for count in {1, rows})
    answers_s = steps / num * row_s
    step_s = times.step_s(0, 0, rows, round(rows * context))
    # In a step that decodes anyway a prompt costs by what that step is longer.
    beside_s = times.step_s(round(prompt), round(depth), rows, round(rows * context)) - step_s
    both_s = min(prompt_s, max(beside_s, 0.0)) + answers_s
    return WorkerBound(pp / prompt_s, _rate(answers_s), _rate(both_s))


def _rate(seconds: float) -> float:
    return 1 / seconds if seconds > 0 else float("inf")


def mesh_bound(shape: MeshShape, bounds: Mapping[Unit, WorkerBound]) -> float:
    """Return requests a second beyond which a mesh's queues must grow for ever."""
    # A mixed worker counts on both sides in full: too much, and a bound may be that.
    prompts = sum(it.num * bounds[it.unit].prompts for it in shape.parts if it.kind in "PM")
    answers = sum(it.num * bounds[it.unit].answers for it in shape.parts if it.kind in "DM")
    if not shape.num_of("P") and not shape.num_of("D"):
        return sum(it.num * bounds[it.unit].both for it in shape.parts)
    return min(prompts, answers)


def alone(
    times: TimeModel, one: AskedLengths, token_budget: int, pp: int = 1
) -> tuple[float, float]:
    """Return TTFT and TPOT of a request that has a worker for its prompt and one for its answer to
    itself, without the way between them. pp: stages through which its chunks follow each other."""
    prompt, output = one.prompt, one.output
    chunks_s, start = list[float](), prompt - one.num_new
    while start < prompt:
        stop = min(prompt, start + token_budget)
        chunks_s.append(times.step_s(stop - start, attended(start, stop), 0, 0))
        start = stop
    ttft_s = pipeline_makespan(chunks_s, pp)
    steps = max(1, output - 1)
    first, last = prompt + 1, prompt + steps
    tpot_s = times.step_s(0, 0, 1, round((first + last) / 2))
    return ttft_s, tpot_s if output > 1 else 0.0


def least_limits(
    workers: Sequence[tuple[TimeModel, int]], lengths: Lengths, target: float, token_budget: int
) -> Slo:
    """Return the tightest limits that such a share of requests can keep on the quickest of these
    workers, each with its stages, each request alone: no number of workers gets below them."""
    felt = [[alone(times, one, token_budget, pp) for one in lengths] for times, pp in workers]
    ttft_s = min(percentile([ttft for ttft, _ in each], 100 * target) for each in felt)
    tpot_s = min(percentile([tpot for _, tpot in each], 100 * target) for each in felt)
    return Slo(ttft_s, tpot_s)


def unmeetable(slo: Slo, least: Slo, target: float) -> list[str]:
    """Return which limits nobody can meet, and what would; []: none."""
    found: list[str] = []
    for name, limit_s, least_s in (
        ("TTFT", slo.ttft_s, least.ttft_s),
        ("TPOT", slo.tpot_s, least.tpot_s),
    ):
        if limit_s < least_s:
            found.append(
                f"no mesh of these workers keeps {name} {_ms(limit_s)}: for {target:.0%} of these "
                f"requests a worker to oneself takes {_ms(least_s)} already; give --slo-"
                f"{name.lower()} {_ms(least_s * 1.5)} or more, a quicker device, a higher degree "
                "(tp), or shorter requests"
            )
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g}ms" if seconds < 10 else f"{seconds:.4g}s"
