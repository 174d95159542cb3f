"""The charts of a report, drawn by matplotlib as SVG that stands inside the page: of every run how
latencies spread and how the run went, and of several runs how they depend on the rate."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Final

from services.cli.bench.records import Run
from services.cli.bench.view import time_text
from services.cli.flags import CannotRun
from shared.telemetry.definitions import RequestOutcome, Slo, percentiles

MOST_DOTS: Final = 2000
NUM_BINS: Final = 60
_STEPS: Final = [step / 2 for step in range(201)]
"""Percentiles of a curve."""


def require_matplotlib() -> None:
    """Raise CannotRun, naming the extra, if nothing here can draw."""
    if find_spec("matplotlib") is None:
        raise CannotRun("--output draws with matplotlib: pip install 'pdmesh[bench]'")


def plot_rates(report: Mapping[str, Any]) -> str:
    """Return the charts over the rate as one ``<svg>``; '' for fewer than two runs."""
    runs = [run for run in report["runs"] if run["rate"] and math.isfinite(run["rate"])]
    runs.sort(key=lambda run: run["rate"])
    if len(runs) < 2:
        return ""
    figure, plots = _figure(5)
    _over_rate(plots[0], "attained", runs, "attainment")
    plots[0].set(ylim=(0, 1.03), title="Requests that attain the SLO")
    plots[0].axhline(report["flags"]["attainment"], color="C3", linestyle="--")
    limits = {"ttft_s": report["slo"]["ttft_s"], "tpot_s": report["slo"]["tpot_s"], "itl_s": None}
    for plot, (key, limit) in zip(plots[1:], limits.items(), strict=False):
        for name in ("p50", "p90", "p99"):
            _over_rate(plot, name, runs, key, name)
        plot.set(title=f"{key[:-2].upper()} over the rate")
        _time_axis(plot, "y", limit)
        plot.legend()
    _over_rate(plots[4], "tokens/s", runs, "output_tokens_per_s")
    plots[4].set(title="Answer tokens per second", ylim=(0, None))
    return _svg(figure)


def plot_run(run: Run, slo: Slo) -> str:
    """Return the charts of one run as one ``<svg>``."""
    outcomes = [record.outcome(is_closed_loop=run.limit is not None) for record in run.records]
    served = [outcome for outcome in outcomes if outcome.is_complete]
    tpot = [outcome.tpot_by(slo.tpot_rule) for outcome in served if len(outcome.token_times) > 1]
    figure, plots = _figure(5)
    _spread(plots[0], "TTFT", [outcome.ttft_s or 0.0 for outcome in served], slo.ttft_s)
    _spread(plots[1], "TPOT", tpot, slo.tpot_s)
    _spread(plots[2], "ITL (gap between messages)", [g for o in served for g in o.itl_s], None)
    _timeline(plots[3], run, outcomes, slo)
    _flow(plots[4], run)
    return _svg(figure)


def _over_rate(plot: Any, name: str, runs: Sequence[Any], key: str, quantile: str = "") -> None:
    points = [(run["rate"], run[key][quantile] if quantile else run[key])
              for run in runs if run[key] is not None]  # fmt: skip
    plot.plot([rate for rate, _ in points], [y for _, y in points], marker="o", label=name)
    plot.set(xlabel="requests/s", xlim=(0, None))


def _spread(plot: Any, name: str, values: Sequence[float], limit: float | None) -> None:
    """Which share of the values is at most so large."""
    if values:
        plot.plot([max(v, 1e-6) for v in percentiles(values, _STEPS)], [s / 100 for s in _STEPS])
    plot.set(title=name, ylabel="share of values up to", ylim=(0, 1.03))
    _time_axis(plot, "x", limit)


def _timeline(plot: Any, run: Run, outcomes: Sequence[RequestOutcome], slo: Slo) -> None:
    """TTFT of each request where it arrived; what was missed lies on the upper edge."""
    step = max(1, len(outcomes) // MOST_DOTS)
    ttfts = [outcome.ttft_s for outcome in outcomes if outcome.is_complete]
    top = max((ttft for ttft in ttfts if ttft), default=slo.ttft_s)
    dots: dict[str, list[tuple[float, float]]] = {}
    for record, outcome in list(zip(run.records, outcomes, strict=True))[::step]:
        ttft_s = outcome.ttft_s if outcome.is_complete else None
        word = "within the SLO" if outcome.meets(slo) else "slower"
        at = record.due_at - run.started_at
        kind, height = ("no answer", max(top, slo.ttft_s)) if ttft_s is None else (word, ttft_s)
        dots.setdefault(kind, []).append((at, max(height, 1e-6)))
    for kind, points in dots.items():
        plot.plot([at for at, _ in points], [y for _, y in points], ".", label=kind)
    plot.set(title="TTFT by time of arrival", xlabel="seconds into the run")
    _time_axis(plot, "y", slo.ttft_s)
    plot.legend()


def _flow(plot: Any, run: Run) -> None:
    """Tokens per second over time, and requests in flight."""
    width_s = max(run.ended_at - run.started_at, 1e-6) / NUM_BINS
    tokens = [0.0] * NUM_BINS
    for record in run.records:
        for at, count in zip(record.times, record.counts, strict=True):
            place = int((at - run.started_at) / width_s)
            tokens[min(max(place, 0), NUM_BINS - 1)] += count / width_s
    middles = [(place + 0.5) * width_s for place in range(NUM_BINS)]
    lives = [(record.due_at - run.started_at, record.ended_at - run.started_at)
             for record in run.records]  # fmt: skip
    flights = [sum(due <= at and not 0 <= end <= at for due, end in lives) for at in middles]
    plot.plot(middles, tokens, label="tokens/s")
    plot.set(title="Load over the run", xlabel="seconds into the run", ylim=(0, None))
    other = plot.twinx()
    other.plot(middles, flights, color="C1", label="in flight")
    other.set(ylim=(0, None))
    plot.legend(handles=[*plot.lines, *other.lines])


def _figure(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    rows = -(-count // 3)
    figure: Any = Figure(figsize=(12, 3.2 * rows), layout="constrained")
    plots = list(figure.subplots(rows, 3).flat)
    for unused in plots[count:]:
        unused.remove()
    for plot in plots[:count]:
        plot.grid(visible=True, alpha=0.4)
    return figure, plots[:count]


def _time_axis(plot: Any, name: str, limit: float | None) -> None:
    """Make an axis logarithmic, with units; draw the limit of the SLO across."""
    from matplotlib.ticker import LogLocator

    axis = getattr(plot, f"{name}axis")
    plot.set(**{f"{name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(_tick_text)
    axis.set_minor_formatter("")
    if limit is not None:
        draw = plot.axvline if name == "x" else plot.axhline
        draw(limit, color="C3", linestyle="--", label="SLO")


def _tick_text(seconds: float, _: int) -> str:
    return time_text(seconds)


def _svg(figure: Any) -> str:
    matplotlib: Any = importlib.import_module("matplotlib")
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text: small, selectable
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
