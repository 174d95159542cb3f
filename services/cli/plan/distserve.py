"""``pdmesh plan paper distserve``: DistServe's simulator on a file of requests, and its queues;
``distserve-placement``: its algorithms 1 and 2 for the lengths of one."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Final

from services.cli.bench.view import limits_text
from services.cli.plan.view import (
    Kept,
    progress,
    require_ranges,
    require_writable,
    say_how_long,
    show_tables,
    write_output,
)
from services.cli.quantities import TpotFlag, TtftFlag
from services.cli.sources import JsonFlag
from services.planner.core.bounds import unmeetable
from services.planner.core.paper_table import PaperRow, PaperTable
from services.planner.core.placement import (
    MOST_RATE,
    Affinity,
    LatencyGoal,
    Placed,
    Replicas,
    Success,
    quantile,
)
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
from services.planner.distserve_place import Demand, Placer
from services.sim.baselines.distserve import DistServeSim, Fidelity, Latency
from shared.errors import InvalidRequest
from shared.telemetry.definitions import Slo


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
        if out is not None or data is not None:
            raise InvalidRequest(
                "--data and --out need --requests FILE.csv: there is nothing to run"
            )
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
        write_output("--out", out, results_text(given, latencies).encode())
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


_SHOWN: Final = 8
_RATES: Final = 5
"""Tried of each placement: bisections of 0 to 5 until 0.25."""
_TRIAL_REQUESTS: Final = 60


def distserve_placement(
    *,
    requests: Path,
    data: Path,
    model: str = "opt-13b",
    affinity: Affinity = "low",
    nodes: int = 1,
    gpus: int = 4,
    slo_ttft: TtftFlag = 0.2,
    slo_tpot: TpotFlag = 0.1,
    target: float = 0.9,
    success: Success = "each",
    rate: float = 10.0,
    num_requests: int = 300,
    seed: int = 0,
    as_json: JsonFlag = False,
) -> int:
    """DistServe's placement (OSDI'24, algorithms 1 and 2) for the lengths of a file of requests.

    Tries every placement that the GPUs and the model's shape allow, and finds by bisection the
    highest rate a GPU that attains, as their code does. Ctrl-C shows what has been found.

    Parameters
    ----------
    requests
        CSV with the columns req_id, arrival_s, prompt_len, output_len; lengths are drawn from it.
    data
        Folder with the coefficient files and the KV capacities, as of distserve.
    model
        opt-13b or opt-66b.
    affinity
        low: KV stays within a node (algorithm 2). high: it may cross (both phases together, as in
        their code, and each by itself, algorithm 1).
    nodes
        How many nodes.
    gpus
        GPUs of one node.
    target
        Share of requests that must keep the limits.
    success
        each: the percentile of either is below its limit, as in their code; joint: so many keep
        both, as in the paper.
    rate
        Requests a second of all replicas together, for which they are counted.
    num_requests
        Requests of one simulation.
    seed
        Of lengths and arrivals.
    """
    require_ranges(
        ("--nodes", 1 <= nodes <= 64, "1..64"),
        ("--gpus", 1 <= gpus <= 64, "1..64"),
        ("--target", 0 < target <= 1, "above 0 and at most 1"),
        ("--rate", 0 < rate < 1e9, "above 0"),
        ("--num-requests", 2 <= num_requests <= 1_000_000, "2..1000000"),
    )
    slo = Slo(slo_ttft, slo_tpot)
    goal = LatencyGoal(slo.ttft_s * 1000, slo.tpot_s * 1000, target)
    lengths = [(one.prompt_len, one.output_len) for one in read_requests(requests)]
    files = DistServeData(data, "distserve")
    placer = Placer(files, model, Demand.drawn(lengths, num_requests, seed), goal, success)
    candidates = placer.candidates(nodes, gpus, affinity)
    if not candidates:
        raise InvalidRequest(
            f"no placement of {model} fits {nodes} x {gpus} GPUs: prefill and decode need memory "
            f"for the model each; known degrees: "
            f"{', '.join(f'{d.tp},{d.pp}' for d in files.degrees(model))}"
        )
    few = min(num_requests, _TRIAL_REQUESTS)
    # Of few requests, so that how long the search may take is known at once.
    trial = Placer(files, model, Demand.drawn(lengths, few, seed), goal, success)
    began = time.perf_counter()
    trial.alone(candidates[:1])
    trial_s = (time.perf_counter() - began) * num_requests / few
    say_how_long(len(candidates) * _RATES, trial_s, "--num-requests, --nodes, --gpus shorten it")
    found: list[Placed] = []
    apart: tuple[Replicas, ...] | None = None
    kept = Kept()
    with kept:
        with progress(f"{len(candidates)} placements", len(candidates)) as on_progress:
            for placed in placer.together(candidates):
                found.append(placed)
                on_progress(len(found))
        if affinity == "high":
            apart = placer.apart(nodes * gpus, rate)
    ranked = sorted(found, key=lambda one: one.rank, reverse=True)
    attains = bool(ranked and ranked[0].rate_per_gpu)
    notes = [
        f"algorithm 1, {name} by itself: {one.num} x {one.degree}, {one.rate:.2f} requests/s each"
        for name, one in zip(("prefill", "decode"), apart or (), strict=False)
    ]
    if kept.is_whole and not attains:
        with kept:
            notes += unmeetable(slo, placer.alone(candidates), target)
        if kept.is_whole and not notes:
            notes.append(f"nothing attains, not at {MOST_RATE / 2**_RATES:.2g} requests/s a GPU")
    title = (
        f"{model}, {nodes} x {gpus} GPUs, {affinity} affinity, {limits_text(slo)}, "
        f"{target:.0%}, success {success}: {len(found)} of {len(candidates)} placements"
    )
    rows = [_row(it, rate) for it in (ranked if as_json else ranked[:_SHOWN])]
    show_tables([PaperTable(title, rows, notes)], as_json=as_json)
    return kept.exit_code(is_good=attains)


def _row(one: Placed, rate: float) -> PaperRow:
    num, per_gpu = one.placement.num_devices, one.rate_per_gpu
    why = f"{num} GPUs"
    if per_gpu:
        why += f", {math.ceil(rate / (per_gpu * num))} replicas for {rate:g}/s"
    return PaperRow(str(one.placement), "", per_gpu, 4, "requests/s a GPU", why)
