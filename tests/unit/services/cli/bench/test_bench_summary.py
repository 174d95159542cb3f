"""What a run says of itself: counts, percentiles, attainment, and when it is void."""

from __future__ import annotations

import asyncio
import csv
import io
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from services.cli.bench.command import _is_good, bench
from services.cli.bench.endpoints import Description
from services.cli.bench.flags import BenchFlags
from services.cli.bench.measurement import Measurement
from services.cli.bench.records import Ending, Record, Run
from services.cli.bench.report import build_report, write_report
from services.cli.bench.search import RateSearch
from services.cli.bench.sources import fixed
from services.cli.bench.summary import summarize
from services.cli.bench.view import notes_of, progress_of, report_view
from services.cli.bench.workload import Ask, Load, Workload
from services.cli.flags import CannotRun
from shared.errors import InvalidRequest
from shared.telemetry.definitions import Slo

SLO = Slo(ttft_s=0.5, tpot_s=0.05)


def a_record(
    index: int, end: Ending = Ending.COMPLETE, *, ttft_s: float = 0.1, **more: Any
) -> Record:
    """A request due at ``index`` s; a complete one has four tokens, 20 ms apart."""
    record = Record(Ask(num_input=10, num_output=4), index, float(index), "http://a", **more)
    record.sent_at = record.sent_at or record.due_at + 0.001
    if end in (Ending.COMPLETE, Ending.CUT):
        for token in range(4 if end is Ending.COMPLETE else 2):
            record.add(index + ttft_s + 0.02 * token, 1)
    record.ended_at = index + 1.0
    if end is Ending.COMPLETE or end is Ending.UNFINISHED:
        record.end = end
    else:
        record.fail(end, f"it was {end.value}")
    return record


def late(count: int, *, by_s: float = 0.02, ttft_s: float = 0.1) -> list[Record]:
    """Requests that left late."""
    return [a_record(n, ttft_s=ttft_s, sent_at=n + by_s) for n in range(count)]


def a_run(*records: Record, **more: Any) -> Run:
    asks = tuple(record.ask for record in records)
    run = Run(Workload(name="test", asks=asks), rate=1.0, records=list(records), **more)
    run.ended_at = run.ended_at or float(len(records) + 1)
    return run


def test_everything_missed_counts_against_the_server() -> None:
    """Refused, failed, cut, timed out, unreachable; what we interrupted is left out."""
    ends = [
        Ending.COMPLETE,
        Ending.REFUSED,
        Ending.FAILED,
        Ending.CUT,
        Ending.TIMEOUT,
        Ending.UNREACHABLE,
    ]
    run = a_run(*(a_record(n, end) for n, end in enumerate([*ends, Ending.UNFINISHED])))
    summary = summarize(run, SLO)
    assert summary["attainment"] == pytest.approx(1 / 6)
    assert summary["num_missed"] == 5
    assert summary["ends"] == {end.value: 1 for end in [*ends, Ending.UNFINISHED]}
    assert summary["num_submitted"] == 7
    assert summary["ttft_s"]["count"] == 1
    # Of who was turned away no prompt was computed.
    assert summary["input_tokens"] == sum(
        record.ask.num_input for record in run.records if record.times
    )
    assert summary["output_tokens"] == 4 + 2
    assert summary["refusal_s"]["p50"] == pytest.approx(0.999)  # from when it left


def test_latency_counts_from_when_a_request_was_due() -> None:
    """Whatever the client was late is in TTFT."""
    record = a_record(0, ttft_s=0.3, sent_at=0.2)
    assert summarize(a_run(record), SLO)["ttft_s"]["p50"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"records": late(1)}, None),
        ({"records": late(2)}, "2 of 2 requests left late, by more than 10 ms"),
        ({"records": [*late(3), *late(197, ttft_s=0.1, by_s=0.009)]}, "3 of 200 requests"),
        ({"records": [*late(2), *late(198, ttft_s=0.1, by_s=0.009)]}, None),
        # 5 % of a median TTFT of 1 s is 50 ms.
        ({"records": late(2, ttft_s=1.0)}, None),
        ({"loop_lags": [0.0] * 50 + [0.2]}, "answers were read late: by more than 10 ms"),
        ({"loop_lags": [0.0] * 50 + [0.02]}, None),  # 10 ms of 2 s
        ({"cpu_s": 1.9}, "the client used 95% of a core"),
        ({"records": [a_record(0), a_record(1, Ending.CLIENT)]}, "1 requests could not leave"),
    ],
)
def test_a_run_in_which_the_client_fell_behind_is_void(
    changes: dict[str, Any], words: str | None
) -> None:
    """By late requests, a late loop, a busy core or a full machine; each is said."""
    records = changes.pop("records", [a_record(0)])
    reasons = summarize(a_run(*records, ended_at=2.0, **changes), SLO)["void"]
    assert len(reasons) == (words is not None)
    assert not words or words in reasons[0]


def a_measurement(*runs: Run) -> Measurement:
    found = Measurement(["http://a"], fixed(10, 4), BenchFlags())
    found.runs = list(runs)
    return found


def test_the_files_of_a_report(tmp_path: Path) -> None:
    """JSON as built, a line of CSV for each request, plots with the runs' rates."""
    lost = a_record(1, Ending.REFUSED)
    first, second = a_run(a_record(0), lost), a_run(a_record(0), a_record(1, ttft_s=0.9))
    second.rate = 2.0
    measurement = a_measurement(first, second)
    measurement.descriptions = [Description(url="http://a", api="completions", model="<m>")]
    measurement.search = RateSearch(tried=[(1.0, 0.95), (2.0, 0.5)])
    report = build_report(measurement)
    write_report(report, measurement.runs, tmp_path)
    assert orjson.loads((tmp_path / "report.json").read_bytes()) == orjson.loads(
        orjson.dumps(report)
    )
    rows = list(csv.DictReader((tmp_path / "requests.csv").read_text().splitlines()))
    assert [*rows[0]][:5] == ["run", "rate", "index", "url", "end"]
    assert [(row["run"], row["end"], row["meets_slo"]) for row in rows] == [
        ("0", "complete", "1"),
        ("0", "refused", "0"),
        ("1", "complete", "1"),
        ("1", "complete", "0"),
    ]
    assert float(rows[0]["ttft_s"]) == pytest.approx(0.1)
    assert float(rows[0]["tpot_s"]) == pytest.approx(0.02)
    assert (rows[1]["ttft_s"], rows[1]["output"]) == ("", "0")
    plots = (tmp_path / "report.svg").read_text()
    for words in ("TTFT by time of arrival", "TPOT: share", "0: 1/s", "1: 2/s"):
        assert words in plots


def test_without_matplotlib_a_report_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    monkeypatch.setattr("services.cli.bench.report.find_spec", lambda name: None)
    with pytest.raises(CannotRun, match=r"pdmesh\[bench\]"):
        bench(output=Path("report"))


def test_a_folder_that_is_not_ours_to_write_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of measuring must not be lost."""
    monkeypatch.setattr("services.cli.bench.report.os.access", lambda *_: False)
    with pytest.raises(CannotRun, match="permission denied"):
        bench(output=tmp_path)


def test_a_report_of_nothing_but_failures_can_be_shown(tmp_path: Path) -> None:
    """No latencies, no plots of them, no crash; an endless rate is null in JSON."""
    run = a_run(a_record(0, Ending.UNREACHABLE))
    run.rate = math.inf
    measurement = a_measurement(run)
    measurement.descriptions = [Description(url="http://a", api="chat", model="m")]
    report = build_report(measurement)
    write_report(report, measurement.runs, tmp_path)
    report_view(report)
    assert orjson.loads((tmp_path / "report.json").read_bytes())["runs"][0]["rate"] is None
    assert "1 x it was unreachable" in notes_of(report)


@pytest.mark.parametrize("is_watched", [False, True])
async def test_what_ends_a_run_is_told_alike_where_somebody_looks(is_watched: bool) -> None:
    """On a terminal, too, an error is itself, and no group of errors."""
    console = Console(file=io.StringIO(), force_terminal=is_watched)
    with pytest.raises(InvalidRequest, match="too many"):
        async with progress_of(a_run(), console, "1/s"):
            raise InvalidRequest("too many")


async def test_a_narrow_terminal_shows_one_line_of_progress() -> None:
    """What does not fit is cut: a second line would stay, twice a second another one. None is left
    for what follows to be mixed with."""
    console = Console(file=(shown := io.StringIO()), force_terminal=True, width=40)
    async with progress_of(a_run(), console, "the trace's own rate"):
        await asyncio.sleep(0)
    assert shown.getvalue().startswith("the trace's own rate: 0/0 done, 0 in fl")
    assert shown.getvalue().endswith("\r\x1b[2K")
    assert "\n" not in shown.getvalue()


def test_what_left_at_once_has_no_rate() -> None:
    """Where a rate of 0 would stand."""
    run = a_run(*(a_record(0) for _ in range(3)))
    run.rate = math.inf
    measurement = a_measurement(run)
    measurement.descriptions = [Description(url="http://a", api="chat", model="m")]
    console = Console(file=(shown := io.StringIO()), width=140)
    console.print(report_view(build_report(measurement)))
    assert "3 complete, all sent at once, over 0.16 s" in shown.getvalue()


def test_a_report_is_kept_also_if_nobody_reads_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pdmesh bench --output report | head -1` has measured for minutes."""

    async def measured(self: Measurement) -> None:
        self.runs.append(a_run(a_record(0)))
        self.descriptions.append(Description(url="http://a", api="chat", model="m"))

    def leave(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(Measurement, "go", measured)
    monkeypatch.setattr(Console, "print", leave)
    with pytest.raises(BrokenPipeError):
        bench(output=tmp_path)
    assert (tmp_path / "report.json").exists()


def test_a_void_run_is_told_with_what_to_do() -> None:
    """Once, however many are void; a run that counts says nothing of it."""
    good, busy, busier = (a_run(a_record(0), ended_at=2.0, cpu_s=s) for s in (0.0, 2.0, 2.1))
    notes = notes_of(build_report(a_measurement(good, busy, busier)))
    assert sum("VOID, the client used" in note for note in notes) == 2
    assert sum("--scale-lengths" in note for note in notes) == 1
    assert notes_of(build_report(a_measurement(good))) == []


class Scripted(Measurement):
    """A measurement whose runs are void by a script; those that count attain up to 4/s."""

    async def _run(self, load: Load) -> Run:
        is_void = bool(self.voids) and self.voids.pop(0)
        assert load.rate is not None
        run = a_run(a_record(0, ttft_s=0.1 if load.rate <= 4 else 0.9))
        run.rate, run.cpu_s = load.rate, 10.0 if is_void else 0.0
        self.runs.append(run)
        return run


@pytest.mark.parametrize(
    ("voids", "rates", "best", "is_conclusive"),
    [
        ([], [2, 4, 8, 6, 5, 4.5, 4.25], 4, True),
        ([False, True, True], [2, 4, 4, 4, 8, 6, 5, 4.5, 4.25], 4, True),
        ([False, True, True, True], [2, 4, 4, 4], 2, False),
    ],
)
async def test_a_search_repeats_what_is_void_and_then_gives_up(
    voids: list[bool], rates: list[float], best: float, is_conclusive: bool
) -> None:
    """A hiccup of the machine costs a run, not the answer; what cannot be sent is not judged."""
    found = Scripted(["http://a"], fixed(10, 4), BenchFlags(goodput=True))
    found.voids = list(voids)
    await found._find_goodput(2.0)
    assert [run.rate for run in found.runs] == rates
    found.descriptions = [Description(url="http://a", api="chat", model="m")]
    report = build_report(found)
    assert (report["goodput"]["rate"], report["goodput"]["is_conclusive"]) == (best, is_conclusive)
    assert _is_good(report) == is_conclusive
