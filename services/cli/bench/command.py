"""``pdmesh bench``: load a server, measure what its clients feel, report it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from services.cli.bench.flags import BenchFlags, UrlsFlag
from services.cli.bench.records import BROKEN
from services.cli.client import DEFAULT_URL, NO_ACCESS, Access, require_url
from services.cli.interrupts import run_interruptible
from services.cli.sources import OUTPUT, JsonFlag
from services.cli.words import plain_console, print_json
from shared.errors import MeshError
from shared.runtime.service import EXIT_FAILED, EXIT_OK


def bench(
    url: UrlsFlag = (DEFAULT_URL,),
    *,
    flags: BenchFlags = BenchFlags(),  # noqa: B008
    access: Access = NO_ACCESS,
    output: Annotated[
        Path | None, Parameter(group=OUTPUT, show_env_var=False, show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Load a server as its users would, and measure what they would feel.

    Requests leave at times planned beforehand, whatever comes back (an open loop), and latencies
    count from those times. The client measures its own lateness: a run in which it fell behind is
    void, says so, and makes the exit code 1, as requests do that fail or break off.
    docs/benchmarking.md says what each figure means.

    Parameters
    ----------
    output
        Folder for report.svg (plots), report.json and requests.csv (one line a request).
    """
    for one in url:
        require_url(one)
    flags.check()
    source = flags.source()
    # aiohttp is a third of a second that other commands need not wait for.
    import uvloop

    from services.cli.bench.measurement import Measurement
    from services.cli.bench.report import build_report, require_folder, write_report
    from services.cli.bench.view import report_view

    if output is not None:
        require_folder(output)
    measurement = Measurement(url or (DEFAULT_URL,), source, flags, access)
    failure: MeshError | None = None
    try:
        code = run_interruptible(measurement.go, new_loop=uvloop.new_event_loop)
    except MeshError as error:
        code, failure = EXIT_FAILED, error
    if not any(run.records for run in measurement.runs):
        if failure is not None:
            raise failure
        return code
    report = build_report(measurement)
    try:
        if output is not None:  # first: whoever reads us may have left
            write_report(report, measurement.runs, output)
    finally:
        if as_json:
            print_json(report)
        else:
            plain_console(140).print(report_view(report))
    if output is not None:
        print(f"written to {output}: report.svg, report.json, requests.csv", file=sys.stderr)
    if failure is not None:  # of a run that could not begin: those before it are told
        raise failure
    return code or (EXIT_OK if _is_good(report) else EXIT_FAILED)


def _is_good(report: dict[str, Any]) -> bool:
    """Whether every run counts and was answered, and no request of it broken; of a search, whether
    it came to its end. To be refused, or to wait too long, is what a high rate measures."""
    if report["goodput"] is not None:
        return bool(report["goodput"]["is_conclusive"])
    return all(
        run["ends"].get("complete")
        and not run["void"]
        and not any(end.value in run["ends"] for end in BROKEN)
        for run in report["runs"]
    )
