"""Which charts a report has: of every run how latencies spread and how the run went, and of several
runs how they depend on the rate. Draws with ``svg.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from services.cli.bench.records import Record, Run
from services.cli.bench.svg import Axis, Point, Series, chart
from services.cli.bench.view import time_text
from shared.telemetry.definitions import Slo, percentiles

MOST_DOTS: Final = 2000
NUM_BINS: Final = 60
_STEPS: Final = [step / 2 for step in range(201)]
"""Percentiles of a curve."""


def plots_of(report: Mapping[str, Any]) -> list[str]:
    """Return the charts over the rate; none for fewer than two runs."""
    runs = [run for run in report["runs"] if run["rate"] and math.isfinite(run["rate"])]
    runs.sort(key=lambda run: run["rate"])
    if len(runs) < 2:
        return []
    slo, target = report["slo"], report["flags"]["attainment"]
    rate = Axis("requests/s", _number, low=0.0)
    attained = [(run["rate"], run["attainment"]) for run in runs if run["attainment"] is not None]
    charts = [
        chart(
            "Requests that attain the SLO",
            [Series("attained", attained, has_marks=True)],
            rate,
            Axis("", _percent, low=0.0, high=1.0, limit=target, limit_name="target"),
        )
    ]
    for key, title, limit in (
        ("ttft_s", "TTFT", slo["ttft_s"]),
        ("tpot_s", "TPOT", slo["tpot_s"]),
        ("itl_s", "ITL (gap between messages)", None),
    ):
        lines = [
            Series(name, [(r["rate"], r[key][name]) for r in runs if r[key]], has_marks=True)
            for name in ("p50", "p90", "p99")
        ]
        up = Axis("", time_text, is_log=True, limit=limit)
        charts.append(chart(f"{title} over the rate", lines, rate, up))
    speed = [(run["rate"], run["output_tokens_per_s"]) for run in runs]
    charts.append(
        chart(
            "Answer tokens per second",
            [Series("tokens/s", speed, has_marks=True)],
            rate,
            Axis("", _number, low=0.0),
        )
    )
    return [one for one in charts if one]


def run_plots_of(run: Run, slo: Slo) -> list[str]:
    """Return the charts of one run."""
    outcomes = [record.outcome(is_closed_loop=run.limit is not None) for record in run.records]
    served = [outcome for outcome in outcomes if outcome.is_complete]
    ttft = [outcome.token_times[0] - outcome.arrived_at for outcome in served]
    tpot = [outcome.tpot_by(slo.tpot_rule) for outcome in served if len(outcome.token_times) > 1]
    gaps = [gap for outcome in served for gap in outcome.itl_s]
    charts = [
        _curve("TTFT", ttft, slo.ttft_s),
        _curve("TPOT", tpot, slo.tpot_s),
        _curve("ITL (gap between messages)", gaps, None),
        _timeline(run, slo),
        _flow(run),
    ]
    return [one for one in charts if one]


def _curve(name: str, values: Sequence[float], limit: float | None) -> str:
    """Which share of the values is at most so large."""
    if not values:
        return ""
    found = percentiles(values, _STEPS)
    points = [(value, step / 100) for value, step in zip(found, _STEPS, strict=True)]
    across = Axis("", time_text, is_log=True, limit=limit)
    share = Axis("", _percent, low=0.0, high=1.0)
    return chart(f"{name}: share of values up to", [Series(name, points)], across, share)


def _timeline(run: Run, slo: Slo) -> str:
    """TTFT of each request where it arrived; what was missed lies on the upper edge."""
    step = max(1, len(run.records) // MOST_DOTS)
    good: list[Point] = []
    slow: list[Point] = []
    missed: list[float] = []
    for record in run.records[::step]:
        at = record.due_at - run.started_at
        outcome = record.outcome(is_closed_loop=run.limit is not None)
        ttft_s = outcome.ttft_s
        if ttft_s is None or not outcome.is_complete:
            missed.append(at)
        else:
            (good if outcome.meets(slo) else slow).append((at, max(ttft_s, 1e-6)))
    highest = max((ttft for _, ttft in good + slow), default=slo.ttft_s)
    lost = [(at, max(highest, slo.ttft_s)) for at in missed]
    series = [
        Series("within the SLO", good, is_dots=True),
        Series("slower", slow, is_dots=True),
        Series("without an answer", lost, is_dots=True),
    ]
    return chart(
        "TTFT by time of arrival",
        series,
        Axis("seconds into the run", _number, low=0.0),
        Axis("", time_text, is_log=True, limit=slo.ttft_s),
    )


def _flow(run: Run) -> str:
    """Requests in flight over time, and tokens per second."""
    span_s = run.ended_at - run.started_at
    if span_s <= 0:
        return ""
    width_s = span_s / NUM_BINS
    tokens = [0.0] * NUM_BINS
    for record in run.records:
        for at, count in zip(record.times, record.counts, strict=True):
            place = int((at - run.started_at) / width_s)
            tokens[min(max(place, 0), NUM_BINS - 1)] += count / width_s
    middles = [(place + 0.5) * width_s for place in range(NUM_BINS)]
    flights = [float(_in_flight(run.records, run.started_at + at)) for at in middles]
    most_tokens, most_flights = max(tokens) or 1.0, max(flights) or 1.0
    return chart(
        "Load over the run, each line by its own maximum",
        [
            Series(
                f"tokens/s (most {_number(most_tokens)})",
                [(at, value / most_tokens) for at, value in zip(middles, tokens, strict=True)],
            ),
            Series(
                f"in flight (most {_number(most_flights)})",
                [(at, value / most_flights) for at, value in zip(middles, flights, strict=True)],
            ),
        ],
        Axis("seconds into the run", _number, low=0.0),
        Axis("", _percent, low=0.0, high=1.0),
    )


def _in_flight(records: Sequence[Record], at: float) -> int:
    return sum(record.due_at <= at < (record.ended_at or math.inf) for record in records)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{value:.0%}"
