"""Does the autoscaler keep the limits with few workers, over a day and through a jump of the load?

    python -m bench.autoscaler.run [--quick] [--parts oracle day step]

Modelled: the cores of gateway and workers under a virtual clock, and the very ``decide`` of the
gateway; a step's time is a model. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from bench.autoscaler.scaled import Change, ScaledMesh
from bench.plots import Panel, Pictures
from bench.record import Record, arguments, spread
from services.gateway.core.scaling.need import Limits
from services.gateway.core.scaling.scaling import Kind, Rules
from services.sim.engine import TimedEngine
from services.sim.mesh import CoreAnswer
from services.sim.open_loop import simulated_model
from services.sim.worker import WorkerSize
from shared.predict.times import AffineTimes
from shared.telemetry.definitions import RequestOutcome, Slo

HOUR_S: Final = 3600.0
BLOCK_S: Final = 600.0
"""How long the oracle keeps a number of workers, at least: as the autoscaler."""

STARTUP_S: Final = 120.0
MOST_WORKERS: Final = 12
"""Of a kind, that the oracle has."""

TIMES = AffineTimes(
    base_s=0.025, prompt_token_s=3.5e-4, decode_row_s=1e-3, context_token_s=2e-7
)  # fmt: skip
"""Round numbers of Llama2-70B on two A100s (a prompt of 8,192 tokens takes 3 s, from the public
measurements of splitwise-sim)."""
LIMITS = Limits(ttft_s=30.0, tpot_s=0.1, target=0.95)
"""Mooncake's (arXiv 2407.00079, section 8)."""

RULES = Rules(LIMITS)

PROMPTS, ANSWERS = (6909, 27367, 32768), (13, 55, 200)
"""p50, p90 and the longest, in tokens: prompts of Mooncake's conversations, answers of Azure's code
trace, both cut."""

BLOCK_TOKENS = 512
SIZE = WorkerSize(num_blocks=96_000 // BLOCK_TOKENS, block_size=BLOCK_TOKENS, max_running=64)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated. startup_s: from a worker's order to its join."""

    times: AffineTimes = TIMES
    size: WorkerSize = SIZE
    rules: Rules = RULES
    startup_s: float = STARTUP_S


PEAK_RATE, STEP_RATE, STEP_FACTOR = 1.2, 0.3, 3.0
DAY = (
    (0, 0.45), (2, 0.32), (4, 0.25), (6, 0.3), (8, 0.6), (10, 0.92), (12, 0.88), (13, 0.85),
    (15, 1.0), (17, 0.9), (19, 0.75), (21, 0.65), (24, 0.45),
)  # fmt: skip
"""A working day: hours and shares of the peak, straight lines between them."""

_Z90 = 1.2816


def day_rate(at_s: float) -> float:
    """Return the requests a second at a time of the day."""
    hour = (at_s / HOUR_S) % 24
    for (before, low), (after, high) in itertools.pairwise(DAY):
        if hour <= after:
            return PEAK_RATE * (low + (high - low) * (hour - before) / (after - before))
    raise AssertionError(hour)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. number: of its run; no two prompts begin alike."""

    at_s: float
    num_prompt: int
    num_output: int


def requests(
    rate: Callable[[float], float], peak: float, seconds: float, seed: int
) -> Iterator[Ask]:
    """Draw arrivals by a Poisson process whose rate changes (thinning), and lengths by lognormals
    through p50 and p90."""
    draw, at_s = random.Random(seed), 0.0
    while True:
        at_s += draw.expovariate(peak)
        if at_s >= seconds:
            return
        if draw.random() < rate(at_s) / peak:
            yield Ask(at_s, _length(draw, *PROMPTS), _length(draw, *ANSWERS))


def _length(draw: random.Random, half: int, ninety: int, most: int) -> int:
    return min(most, max(2, round(half * math.exp(draw.gauss(0, math.log(ninety / half) / _Z90)))))


class Felt(NamedTuple):
    """One request's time of arrival and whether it kept both limits."""

    at_s: float
    kept: bool


class ScaledRun(NamedTuple):
    """What came of one run. felt: by time of arrival. device_s: seconds of devices paid for."""

    felt: list[Felt]
    changes: list[Change]
    device_s: float
    mesh: ScaledMesh


def simulate(
    asks: Iterator[Ask],
    seconds: float,
    num_prefill: int,
    num_decode: int,
    *,
    acts: bool = True,
    setting: Setting = Setting(),
) -> ScaledRun:
    """Run one load. acts: whether an autoscaler looks at it; else it stays as it begins."""
    spec, layout = simulated_model("Llama2-70B's shape", 1.0, 1 << 16)
    limits = setting.rules.limits
    mesh = ScaledMesh(
        spec,
        layout,
        TimedEngine(setting.times),
        setting.size,
        rules=setting.rules,
        startup_s=setting.startup_s,
        acts=acts,
    )
    for kind, num in ((Kind.PREFILL, num_prefill), (Kind.DECODE, num_decode)):
        for _ in range(num):
            mesh.begin(kind)
    mesh.settle()
    began_s = mesh.clock.now
    felt: list[Felt] = []
    slo = Slo(limits.ttft_s, limits.tpot_s)
    num_asked = 0
    count_ended = mesh.on_end

    def ended(answer: CoreAnswer) -> None:
        count_ended(answer)
        is_whole = answer.error is None
        outcome = RequestOutcome(answer.asked_at, answer.token_times, is_whole)
        felt.append(Felt(answer.asked_at - began_s, outcome.meets(slo)))

    mesh.on_end = ended

    def next_one() -> None:
        ask = next(asks, None)
        if ask is None:
            return

        def come() -> None:
            nonlocal num_asked
            num_asked += 1
            prompt = (num_asked,) * ask.num_prompt
            mesh.ask(prompt, max_tokens=ask.num_output, ignore_eos=True, temperature=0)
            next_one()

        mesh.clock.at(began_s + ask.at_s, come)

    next_one()
    if acts:
        mesh.watch()

    def is_over() -> bool:
        return mesh.clock.now - began_s >= seconds and len(felt) == num_asked

    mesh.run(is_over, seconds + HOUR_S)
    mesh.check()
    return ScaledRun(
        sorted(felt),
        [it._replace(at_s=it.at_s - began_s) for it in mesh.changes],
        mesh.device_s(began_s + seconds),
        mesh,
    )


def attained(felt: Sequence[Felt]) -> float:
    """Return the share that kept both limits."""
    return sum(it.kept for it in felt) / len(felt) if felt else 1.0


# --- the oracle -----------------------------------------------------------------------------------


def attains(num_prefill: int, num_decode: int, rate: float, seconds: float) -> bool:
    """Whether so many workers, from the beginning and for ever, keep the limits at an even rate."""
    asks = requests(lambda _: rate, rate, seconds, seed=11)
    run = simulate(asks, seconds, num_prefill, num_decode, acts=False)
    return attained(run.felt) >= LIMITS.target


def most_rates(seconds: float) -> dict[str, list[float]]:
    """Return, for 1, 2, ... workers of either kind, the highest rate that they attain while the
    other kind is ample; up to the peak."""
    found: dict[str, list[float]] = {"prefill": [], "decode": []}
    for kind, rates in found.items():
        for num in range(1, MOST_WORKERS + 1):
            shape = (num, 8) if kind == "prefill" else (MOST_WORKERS + 4, num)
            if rates and rates[-1] >= PEAK_RATE:
                break
            low, high = rates[-1] if rates else 0.0, PEAK_RATE
            if not attains(*shape, high, seconds):
                while high - low > 0.03 * PEAK_RATE:
                    middle = (low + high) / 2
                    if attains(*shape, middle, seconds):
                        low = middle
                    else:
                        high = middle
                high = low
            rates.append(high)
    return found


def least(rates: Sequence[float], rate: float) -> int:
    """Return how many workers a rate takes."""
    return next((num for num, most in enumerate(rates, 1) if rate <= most), len(rates))


def oracle_device_s(
    rates: dict[str, list[float]], rate: Callable[[float], float], seconds: float
) -> float:
    """Return the device seconds of who knows the load in advance, pays for every start-up, and
    changes its numbers every ``BLOCK_S``."""
    total, before = 0.0, {"prefill": 0, "decode": 0}
    for idx in range(math.ceil(seconds / BLOCK_S)):
        middle = rate((idx + 0.5) * BLOCK_S)
        for kind, most in rates.items():
            num = least(most, middle)
            total += num * BLOCK_S
            if idx:
                total += max(0, num - before[kind]) * STARTUP_S
            before[kind] = num
    return total


# --- what is asked --------------------------------------------------------------------------------


def flaps(changes: Sequence[Change]) -> int:
    """Return how many pairs of a rise and a fall of one number, in either order, lie within ten
    minutes."""
    count = 0
    for kind in Kind:
        own = [it for it in changes if it.kind is kind]
        for one, other in itertools.pairwise(own):
            goes_back = (one.after > one.before) is not (other.after > other.before)
            count += goes_back and other.at_s - one.at_s < BLOCK_S
    return count


def recovered_s(felt: Sequence[Felt], step_at_s: float) -> float:
    """Return how long after the step the limits are kept again: from then on the target is reached
    in the next five minutes, and in all that follow; inf = never."""
    after_s = 0.0
    while step_at_s + after_s < felt[-1].at_s:
        rest = [it for it in felt if it.at_s >= step_at_s + after_s]
        first = [it for it in rest if it.at_s < step_at_s + after_s + BLOCK_S / 2]
        if min(attained(first), attained(rest)) >= LIMITS.target:
            return after_s
        after_s += 5.0
    return math.inf


def row_of(part: str, run: ScaledRun, seconds: float) -> dict[str, Any]:
    bins: list[dict[str, float]] = []
    for idx in range(int(seconds // BLOCK_S)):
        own = [it for it in run.felt if idx * BLOCK_S <= it.at_s < (idx + 1) * BLOCK_S]
        bins.append(
            {
                "at_s": idx * BLOCK_S,
                "rate": round(len(own) / BLOCK_S, 4),
                "attained": round(attained(own), 4),
            }
        )
    return {
        "part": part,
        "seconds": seconds,
        "requests": len(run.felt),
        "attained": attained(run.felt),
        "device_hours": run.device_s / HOUR_S,
        "flaps": flaps(run.changes),
        "changes": [
            [round(it.at_s), it.kind.value, it.before, it.after, it.reason] for it in run.changes
        ],
        "orders": [[round(at_s), str(order)] for at_s, order in run.mesh.orders],
        "bins": bins,
    }


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """The day: the load, and the workers that were wanted."""
    day = next((row for row in rows if row["part"] == "day"), None)
    if day is None:
        return {}
    lines: dict[str, list[tuple[float, Any]]] = {}
    for kind in ("prefill", "decode"):
        own = [it for it in day["changes"] if it[1] == kind]
        points = [(0.0, spread([own[0][2] if own else 1]))]
        for at_s, _, before, after, _ in own:
            points += [(at_s / HOUR_S, spread([before])), (at_s / HOUR_S, spread([after]))]
        lines[kind] = points
    rates = [(it["at_s"] / HOUR_S, spread([it["rate"]])) for it in day["bins"]]
    kept = [(it["at_s"] / HOUR_S, spread([it["attained"]])) for it in day["bins"]]
    return {
        "": [
            Panel("A day (modelled)", "hour", "requests/s", {"asked": rates}, False),
            Panel("", "hour", "workers wanted", lines, False),
            Panel("", "hour", "attained", {"of 10 min": kept}, False, LIMITS.target),
        ]
    }


def main() -> None:
    parser = arguments(__doc__, "a step alone, prints only")
    parser.add_argument("--parts", nargs="+", choices=("step", "day"), default=("step", "day"))
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    about = {"limits": LIMITS._asdict(), "startup_s": STARTUP_S, "times": TIMES.source}
    record = Record.of(__file__, asked, modelled=True, **about)
    if "step" in asked.parts:
        before_s, seconds = HOUR_S / 2, 1.5 * HOUR_S

        def stepping(at_s: float) -> float:
            return STEP_RATE * (1.0 if at_s < before_s else STEP_FACTOR)

        asks = requests(stepping, STEP_RATE * STEP_FACTOR, seconds, asked.seed)
        run = simulate(asks, seconds, 3, 1)
        took_s = recovered_s(run.felt, before_s)
        record.add({**row_of("step", run, seconds), "recovered_s": took_s})
        report(record.rows[-1])
        print(f"step: recovered after {took_s:.0f} s", flush=True)
        record.goal(19, "step x 3: recovered within start-up + 60 s", took_s, "<=", STARTUP_S + 60)
        record.goal(19, "step x 3: attained", attained(run.felt), ">=", 0.95)
        record.goal(19, "step x 3: rises and falls in 10 min", flaps(run.changes), "<=", 0)
    if "day" in asked.parts and not asked.quick:
        seconds = 24 * HOUR_S
        with ProcessPoolExecutor(1) as processes:
            known = processes.submit(most_rates, HOUR_S / 2)
            asks = requests(day_rate, PEAK_RATE, seconds, asked.seed)
            run = simulate(asks, seconds, 4, 2)
            record.add(row_of("day", run, seconds))
            report(record.rows[-1])
            rates = known.result()
        oracle_s = oracle_device_s(rates, day_rate, seconds)
        record.add({"part": "oracle", "rates": rates, "device_hours": oracle_s / HOUR_S})
        print(f"oracle: {oracle_s / HOUR_S:.1f} device hours; {rates}", flush=True)
        record.goal(19, "a day: attained", attained(run.felt), ">=", 0.95)
        record.goal(19, "a day: rises and falls in 10 min", flaps(run.changes), "<=", 0)
        record.goal(19, "a day: device hours / oracle's", run.device_s / oracle_s, "<=", 1.15)
    record.finish(pictures_of)


def report(row: dict[str, Any]) -> None:
    print(
        f"{row['part']}: {row['requests']} requests, attained {row['attained']:.4f}, "
        f"{row['device_hours']:.1f} device hours, {len(row['changes'])} changes",
        flush=True,
    )
    for at_s, kind, before, after, reason in row["changes"]:
        print(f"  {at_s / HOUR_S:6.2f} h  {kind:8} {before} -> {after}  {reason}", flush=True)


if __name__ == "__main__":
    main()
