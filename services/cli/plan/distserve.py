"""``pdmesh plan paper distserve``: DistServe's simulator on a file of requests, its queues, its
placements."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from services.cli.plan.view import progress, require_writable, show_tables
from services.cli.sources import JsonFlag
from services.planner.core.paper_table import PaperRow, PaperTable
from services.planner.core.placement import quantile
from services.planner.core.prefill_queue import queue_tables
from services.planner.distserve_data import (
    DECIMALS,
    LATENCY_COLUMNS,
    DistServeData,
    GivenRequest,
    System,
    check_sizes,
    printed,
    read_degree,
    read_requests,
    results_text,
)
from services.sim.baselines.distserve import DistServeSim, Fidelity, Latency
from shared.errors import InvalidRequest
from shared.whole_file import write_whole


def distserve(
    *,
    requests: Path | None = None,
    model: str = "opt-13b",
    system: System = "distserve",
    prefill: str = "2,1",
    decode: str = "1,1",
    data: Path | None = None,
    out: Path | None = None,
    fidelity: Fidelity = "runs",
    as_json: JsonFlag = False,
) -> None:
    """DistServe (OSDI'24): its simulator by its rules, exact to the printed decimals.

    With --requests: what every request of the file would feel. Without: its closed forms of a
    prefill queue, theirs beside ours.

    Parameters
    ----------
    requests
        CSV with the columns req_id, arrival_s, prompt_len, output_len. If it has ttft_ms,
        decode_ms and tpot_ms as well, it is said how far ours are from them.
    model
        A model of the coefficient file, such as opt-13b or opt-66b.
    system
        distserve: prefill and decode on instances of their own; vllm: both on one.
    prefill
        Tensor and pipeline parallelism of the prefill instance, TP,PP.
    decode
        The same of the decode instance; of vllm the same degree again.
    data
        Folder with the coefficient files and the KV capacities, as DistServe publishes them:
        ref_distserve_profile_a100_80g_distserve.json (and …_vllm.json),
        ref_distserve_max_num_tokens.csv.
    out
        CSV to write: the request's columns with ttft_ms, decode_ms, tpot_ms.
    fidelity
        exact: an event for every step. runs: steps that nothing changes are added up. Same results.
    """
    if requests is None:
        if out is not None:
            raise InvalidRequest("--out needs --requests FILE.csv: there is nothing to write")
        show_tables(queue_tables(), as_json=as_json)
        return
    if data is None:
        raise InvalidRequest("--requests needs --data DIR: the folder with the coefficient files")
    if out is not None:
        require_writable("--out", out)
    prefill_degree = read_degree("--prefill", prefill)
    decode_degree = read_degree("--decode", decode)
    if system == "vllm" and prefill_degree != decode_degree:
        raise InvalidRequest(
            f"--system vllm runs both phases on one instance: give one degree twice, not "
            f"--prefill {prefill} --decode {decode}"
        )
    files = DistServeData(data, system)
    phases = files.phase(model, prefill_degree), files.phase(model, decode_degree)
    given = read_requests(requests)
    check_sizes(requests, given, phases[0])
    began = time.perf_counter()
    sim = DistServeSim(*phases, is_split=system == "distserve", fidelity=fidelity)
    with progress(f"{model} {system}", len(given)) as on_progress:
        latencies = sim.run(given, on_progress)
    took_s = time.perf_counter() - began
    if out is not None:
        write_whole(out, results_text(given, latencies).encode())
        print(f"written to {out}", file=sys.stderr)
    where = f"P({prefill_degree}) D({decode_degree})" if system == "distserve" else prefill_degree
    duration_s = given[-1].at_ms / 1000
    rate = f"{len(given) / duration_s:.2f} requests/s" if duration_s else "all at once"
    title = f"{model} {system} {where}: {len(given)} requests, {rate}"
    note = f"{fidelity}: {sim.num_steps} steps in {sim.clock.num_events} events, {took_s:.2f} s"
    show_tables([PaperTable(title, _rows(given, latencies), [note])], as_json=as_json)


def _rows(given: list[GivenRequest], latencies: list[Latency]) -> list[PaperRow]:
    """What requests feel, beside what the file says of them, if it does."""
    pairs = [
        (request.felt, printed(latency))
        for request, latency in zip(given, latencies, strict=True)
        if request.felt is not None
    ]
    rows: list[PaperRow] = []
    for name in ("ttft_ms", "tpot_ms"):
        ours = [getattr(latency, name) for latency in latencies]
        theirs = [getattr(felt, name) for felt, _ in pairs]
        for q in (50, 90, 99):  # by linear interpolation, as their scripts count
            file = f"{quantile(theirs, q / 100):.3f}" if theirs else ""
            what = f"{name[:4].upper()} p{q}"
            rows.append(PaperRow(what, file, quantile(ours, q / 100), 3, "ms"))
    if not pairs:
        return rows
    num_same = sum(theirs == ours for theirs, ours in pairs)
    rows.append(PaperRow("rows that are the same, digit by digit", f"{len(pairs)}", num_same, 0))
    for idx, (name, decimals) in enumerate(zip(LATENCY_COLUMNS, DECIMALS, strict=True)):
        most = max(abs(theirs[idx] - ours[idx]) for theirs, ours in pairs)
        rows.append(PaperRow(f"largest difference of {name}", "0", most, decimals))
    return rows
