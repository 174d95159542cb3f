"""What a run says: percentiles, throughput, attainment, how late the client was, and whether the
run counts at all. Pure; every definition is that of ``shared/telemetry/definitions.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from services.cli.bench.records import MISSED, Ending, Run
from shared.telemetry.definitions import Slo, attainment, percentile, percentiles

QUANTILES: Final = (50, 90, 95, 99, 100)
NAMES: Final = ("p50", "p90", "p95", "p99", "max")

LAG_FLOOR_S: Final = 0.010
LAG_SHARE: Final = 0.05
"""A client may be late by 10 ms, or by 5 % of the median TTFT if that is more: so much of every
figure may be its own."""

MOST_LATE_SHARE: Final = 0.01
"""Of the requests, and of the time, in which it may be later: what a 99th percentile does not see.
One late request is forgiven in runs of less than a hundred, too."""

BUSIEST: Final = 0.9
"""Share of one core beyond which the client's process counts as saturated."""


def summarize(run: Run, slo: Slo) -> dict[str, Any]:
    """Return everything that a report says of a run; JSON's types only.

    Latencies are of complete requests; attainment is of all but those that an interruption left
    unfinished.
    """
    judged = [record for record in run.records if record.end is not Ending.UNFINISHED]
    outcomes = [record.outcome() for record in judged]
    served = [outcome for outcome in outcomes if outcome.is_complete]
    refused = [record for record in run.records if record.end is Ending.REFUSED]
    counts = Counter(record.end for record in run.records)
    ttft = [outcome.token_times[0] - outcome.arrived_at for outcome in served]
    share = attainment(outcomes, slo) if outcomes else None
    client = _client(run, ttft)
    # Throughput is over the time from the first arrival to the last token.
    last = max((record.times[-1] for record in run.records if record.times), default=0.0)
    span_s = last - min(record.due_at for record in run.records) if last else 0.0
    sums = {
        "input_tokens": sum(it.num_prompt or it.ask.num_input for it in run.records if it.times),
        "output_tokens": sum(one.num_output for one in run.records),
        "requests": len(served),
        "attained": (share or 0.0) * len(outcomes),
    }
    arrivals_s = run.records[-1].due_at - run.started_at
    return {
        "rate": run.rate,
        "num_submitted": len(run.records),
        "submitted_per_s": len(run.records) / arrivals_s if arrivals_s > 0 else 0.0,
        "ends": {end.value: counts[end] for end in Ending if counts[end]},
        "num_missed": sum(counts[end] for end in MISSED),
        "errors": dict(Counter(r.error for r in run.records if r.error).most_common(5)),
        "is_interrupted": run.is_interrupted,
        "span_s": span_s,
        "ttft_s": spread(ttft),
        "tpot_s": spread([o.tpot_s for o in served if len(o.token_times) > 1]),
        "itl_s": spread([gap for outcome in served for gap in outcome.itl_s]),
        "e2e_s": spread([o.token_times[-1] - o.arrived_at for o in served]),
        "refusal_s": spread([record.ended_at - record.sent_at for record in refused]),
        "input_tokens": sums["input_tokens"],
        "cached_tokens": sum(record.num_cached for record in run.records),
        "output_tokens": sums["output_tokens"],
        **{f"{name}_per_s": total / span_s if span_s else 0.0 for name, total in sums.items()},
        "attainment": share,
        "num_short": sum(
            r.end is Ending.COMPLETE and r.num_output < r.ask.num_output for r in judged
        ),
        "client": client,
        "workload": {
            "name": run.workload.name,
            "arrivals": run.workload.arrivals,
            "num_planned": len(run.workload.asks),
            "num_cut": run.workload.num_cut,
            "num_skipped": run.workload.num_skipped,
            "prompt_seed": run.prompt_seed,
        },
        "void": void_reasons(run, client),
    }


def void_reasons(run: Run, client: dict[str, Any]) -> list[str]:
    """Return why a run says more of the client than of the server; nothing = it counts."""
    bound = f"{client['bound_s'] * 1e3:.3g} ms"
    num_late = client["num_late"]
    num_own = sum(record.end is Ending.CLIENT for record in run.records)
    reasons: list[str] = []
    if num_late > max(1, MOST_LATE_SHARE * len(run.records)):
        reasons.append(f"{num_late} of {len(run.records)} requests left late, by more than {bound}")
    if client["late_share"] > MOST_LATE_SHARE:
        share = f"{client['late_share']:.1%} of the time"
        reasons.append(f"answers were read late: by more than {bound} {share}")
    if client["cpu_share"] > BUSIEST:
        reasons.append(f"the client used {client['cpu_share']:.0%} of a core")
    if num_own:
        reasons.append(f"{num_own} requests could not leave this machine")
    return reasons


def spread(values: Collection[float]) -> dict[str, float] | None:
    """Return percentiles, mean and count; None for no values."""
    if not values:
        return None
    found = dict(zip(NAMES, percentiles(values, QUANTILES), strict=True))
    return {**found, "mean": sum(values) / len(values), "count": len(values)}


def _client(run: Run, ttft: Sequence[float]) -> dict[str, Any]:
    """How the client did. late_share: of the time, in which a message that came was read later than
    the bound: what of each delay of the loop is beyond it, over the run."""
    wall_s = run.ended_at - run.started_at
    bound_s = max(LAG_FLOOR_S, LAG_SHARE * percentile(ttft, 50) if ttft else 0.0)
    late_s = sum(lag_s - bound_s for lag_s in run.loop_lags if lag_s > bound_s)
    return {
        "bound_s": bound_s,
        "num_late": sum(record.lag_s > bound_s for record in run.records if record.sent_at),
        "late_share": late_s / wall_s if wall_s > 0 else 0.0,
        "dispatch_lag_s": spread([record.lag_s for record in run.records if record.sent_at]),
        "loop_lag_s": spread(run.loop_lags),
        "cpu_s": run.cpu_s,
        "wall_s": wall_s,
        "cpu_share": run.cpu_s / wall_s if wall_s > 0 else 0.0,
    }
