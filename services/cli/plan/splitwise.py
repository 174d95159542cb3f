"""``pdmesh plan paper splitwise``: power, the performance model, and how many machines it takes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

from services.cli.bench.search import RateSearch
from services.cli.plan.view import Kept, progress, require_ranges, say_how_long, show_tables
from services.cli.sources import JsonFlag
from services.planner.core.paper_table import PaperRow, PaperTable
from services.planner.core.provisioning import (
    A100,
    DESIGNS,
    H100,
    Provisioned,
    broken_limits,
    iso_power,
    provision,
    within,
)
from services.planner.splitwise_data import drawn, machine_times, read_perf_model
from services.planner.traces import read_azure
from services.sim.baselines.splitwise import (
    BLOOM_176B,
    LINK_BANDWIDTH,
    LLAMA2_70B,
    LLAMA2_70B_AS_CODED,
    TRAP_BANDWIDTH,
    SplitwiseSim,
    cluster,
)
from services.sim.baselines.splitwise_times import MeasuredRun, prediction_error
from shared.errors import InvalidRequest
from shared.runtime.service import EXIT_OK

_OVERLAP: Final = 10
"""Their model of layer-wise transfers that are 90 % hidden: ten times the bandwidth."""
_SPLITS: Final = 5
_STEP: Final = 1.02
"""Rates that differ by less are the same."""
_LOWEST: Final = 1.0
_THEIRS: Final = {
    ("HH", "code", "bloom-176b", "power 70"): "35P + 5T",
    ("AA", "code", "bloom-176b", "power 70"): "55P + 15T",
    ("HH", "conv", "bloom-176b", "power 70"): "25P + 15T",
}
"""Their clusters of most throughput at the power of 40 DGX-H100."""

Transfer = Literal["layer-wise", "serialized", "as-coded"]


def splitwise(
    *,
    data: Path | None = None,
    model: Literal["bloom-176b", "llama2-70b"] = "bloom-176b",
    workload: Literal["code", "conv"] = "code",
    design: Literal["AA", "HH", "HA", "HHcap"] = "HH",
    rate: float = 70.0,
    duration: float = 120.0,
    transfer: Transfer = "layer-wise",
    most_prompt: int = 39,
    most_token: int = 69,
    seed: int = 0,
    budget: float | None = None,
    budget_of: Literal["cost", "power"] = "power",
    as_json: JsonFlag = False,
) -> int:
    """Splitwise (ISCA'24): equal power, its performance model, machines for a rate under nine SLOs.

    With --data: how well the performance model predicts runs that it has not seen, and by
    simulation of its router and machines the fewest prompt machines for each number of token
    machines, or the most requests a second for a --budget. Ctrl-C shows what has been found.

    Parameters
    ----------
    data
        Folder with splitwise_sim_perf_model.csv (or perf_model.csv) and the Azure 2023 traces,
        AzureLLMInferenceTrace_code_2023.csv and AzureLLMInferenceTrace_conv_2023.csv.
    model
        bloom-176b or llama2-70b, on servers of 8 GPUs.
    workload
        Whose lengths: code or conv.
    design
        Prompt and token machines: A is DGX-A100, H DGX-H100, Hcap H100 at half of its GPUs' power.
    rate
        Requests a second, by Poisson.
    duration
        Seconds of arrivals.
    transfer
        layer-wise: 200 Gb/s of which 90 % is hidden; serialized: 200 Gb/s; as-coded: their 200
        GiB/s, and KV of Llama2-70B as if it had no grouped heads.
    most_prompt
        Most prompt machines tried.
    most_token
        Most token machines tried.
    seed
        Of lengths and arrivals.
    budget
        Find the cluster that serves the highest rate for so much, in DGX-A100: of cost, or power.
    budget_of
        What --budget is of.
    """
    require_ranges(
        ("--rate", 0 < rate < 1e6, "above 0"),
        ("--duration", 0 < duration < 1e6, "above 0"),
        ("--most-prompt", 1 <= most_prompt <= 1000, "1..1000"),
        ("--most-token", 1 <= most_token <= 1000, "1..1000"),
    )
    clusters: list[Provisioned] = []
    if budget is not None:
        require_ranges(("--budget", 0 < budget < 1e9, "above 0"))
        clusters = within(DESIGNS[design], budget, budget_of, most_prompt, most_token)
        is_enough = f"enough for a prompt and a token machine of {design}"
        require_ranges(("--budget", bool(clusters), is_enough))
        if data is None:
            raise InvalidRequest("--budget needs --data: how long machines take")
    tables = [_power()]
    if data is None:
        show_tables(tables, as_json=as_json)
        return EXIT_OK
    runs, lengths = read_perf_model(data), read_azure(data, workload)
    tables.append(_errors(runs))
    if not as_json:
        show_tables(tables)
        tables = []
    prompt_type, token_type = DESIGNS[design]
    alone = machine_times(runs, model, A100.hardware)
    times = [machine_times(runs, model, kind.hardware) for kind in (prompt_type, token_type)]
    served = LLAMA2_70B if transfer != "as-coded" else LLAMA2_70B_AS_CODED
    served = BLOOM_176B if model == "bloom-176b" else served
    bandwidth = {
        "layer-wise": LINK_BANDWIDTH * _OVERLAP,
        "serialized": LINK_BANDWIDTH,
        "as-coded": TRAP_BANDWIDTH,
    }[transfer]
    reasons: dict[tuple[int, int], list[str]] = {}

    def broken(num_prompt: int, num_token: int, at: float) -> list[str]:
        requests = drawn(lengths, at, duration, seed)
        if not requests:
            raise InvalidRequest("no request arrives: give a higher --rate or a longer --duration")
        machines = cluster(num_prompt, num_token, times[0], times[1], served)
        SplitwiseSim(machines, bandwidth=bandwidth).run(requests)
        return broken_limits(requests, alone)

    def is_fine(num_prompt: int, num_token: int) -> bool:
        if (num_prompt, num_token) not in reasons:
            reasons[num_prompt, num_token] = broken(num_prompt, num_token, rate)
            on_progress(len(reasons))
        return not reasons[num_prompt, num_token]

    kept = Kept()
    if budget is not None:
        goal = f"{budget_of} {budget:g}"
        rising: list[tuple[Provisioned, float]] = []
        with kept, progress(f"{model}, {workload}, {design}, {goal}", len(clusters)) as one_more:
            rising.extend(_rising(clusters, rate, broken, one_more))
        title = f"Splitwise: {design}, {model}, {workload}, most requests/s for {goal}"
        theirs = _THEIRS.get((design, workload, model, goal), "")
        show_tables([*tables, _most(title, rising, theirs)], as_json=as_json)
        return kept.exit_code(is_good=bool(rising))
    found: list[Provisioned] = []
    with kept, progress(f"{model}, {workload}, {design}", most_prompt + most_token) as on_progress:
        began = time.perf_counter()
        is_fine(most_prompt, most_token)
        run_s = time.perf_counter() - began
        say_how_long(most_prompt + most_token, run_s, "--duration, --most-prompt shorten it")
        found.extend(provision((prompt_type, token_type), most_prompt, most_token, is_fine))
    title = f"Splitwise: {design}, {model}, {workload}, {rate:g} requests/s, {transfer} transfers"
    is_theirs = (design, model, workload, rate) == ("HH", "bloom-176b", "code", 70)
    frontier = _frontier(title, found, "27P + 3T" if is_theirs else "")
    if missed := reasons.get((most_prompt, most_token)):
        limits = "; ".join(missed[:3])
        words = f"{most_prompt}P + {most_token}T do not keep the limits: {limits}"
        frontier = PaperTable(title, (), [words])
    show_tables([*tables, frontier], as_json=as_json)
    return kept.exit_code(is_good=bool(found))


def _power() -> PaperTable:
    return PaperTable(
        "Splitwise: machines of equal power",
        [
            PaperRow("DGX-A100 for 40 DGX-H100", "70", iso_power(40, H100, A100), 0),
            PaperRow("KV of a token, Llama2-70B, kB", "", LLAMA2_70B.kv_token / 1e3, 2),
            PaperRow(
                "the same in their code, kB", f"{LLAMA2_70B_AS_CODED.kv_token / 1e3:.2f}",
                LLAMA2_70B.kv_token / 1e3, 2, why="TRAP: hidden size for grouped heads, 8x",
            ),
            PaperRow(
                "bandwidth in their code, GB/s", f"{TRAP_BANDWIDTH / 1e9:.1f}",
                LINK_BANDWIDTH / 1e9, 1, why="TRAP: 200 Gb/s becomes 200 GiB/s",
            ),
        ],
    )  # fmt: skip


def _errors(runs: list[MeasuredRun]) -> PaperTable:
    groups: dict[tuple[str, str, int], list[MeasuredRun]] = {}
    for run in runs:
        groups.setdefault((run.model, run.hardware, run.tp), []).append(run)
    rows: list[PaperRow] = []
    for (model, hardware, tp), group in groups.items():
        errors: list[float] = []
        for seed in range(_SPLITS):
            mixed = random.Random(seed).sample(group, len(group))
            cut = len(mixed) * 4 // 5
            errors.append(100 * prediction_error(mixed[:cut], mixed[cut:]))
        rows.append(PaperRow(f"{model}, {hardware}, tp{tp}", "", sum(errors) / _SPLITS, 2, "%"))
    mean = sum(row.ours for row in rows) / len(rows)
    rows.append(PaperRow("all of them", "< 3 %", mean, 2, "%"))
    return PaperTable(
        f"Splitwise: MAPE of the performance model, mean of {_SPLITS} 80:20 splits", rows
    )


def _rising(
    clusters: list[Provisioned],
    first: float,
    broken: Callable[[int, int, float], list[str]],
    one_more: Callable[[], None],
) -> Iterator[tuple[Provisioned, float]]:
    """Yield each cluster that keeps the limits at a higher rate than those before it, and which."""
    best = 0.0
    for one in clusters:
        # What does not beat the best is one simulation.
        search = RateSearch(best * _STEP or first, 1.0, _STEP - 1, lowest=max(best, _LOWEST))
        while (rate := search.next_rate()) is not None:
            search.add(rate, float(not broken(one.num_prompt, one.num_token, rate)))
        one_more()
        if search.best > best:
            best = search.best
            yield one, best


def _most(title: str, rising: list[tuple[Provisioned, float]], theirs: str) -> PaperTable:
    rows = [
        PaperRow(
            f"{one.num_prompt}P + {one.num_token}T, requests/s",
            theirs if (one, rate) == rising[-1] else "",
            rate,
            1,
            why=f"cost {one.cost:.2f}, power {one.power:.2f}",
        )
        for one, rate in rising
    ]
    return PaperTable(
        title,
        rows,
        [
            "clusters that keep all nine SLOs at a higher rate than those with fewer token "
            "machines: the last serves most"
            if rows
            else f"no cluster keeps the limits at {_LOWEST:g} requests/s or more"
        ],
    )


def _frontier(title: str, found: list[Provisioned], theirs: str) -> PaperTable:
    least = min((round(one.cost, 2) for one in found), default=0.0)
    rows = [
        PaperRow(
            f"{one.num_prompt}P + {one.num_token}T, cost in DGX-A100",
            theirs if one.num_token == 3 else "",
            one.cost,
            2,
            why=f"power {one.power:.2f}"
            + ("; as cheap as any" if round(one.cost, 2) == least else "")
            + (
                "; theirs keeps the limits, too"
                if one.num_token == 3 and theirs and one.num_prompt <= 27
                else ""
            ),
        )
        for one in found
    ]
    return PaperTable(
        title,
        rows,
        [
            "clusters that keep all nine SLOs, and from which no machine can be taken; "
            "their curves, lengths drawn from the Azure trace instead of their own 2-minute traces"
        ],
    )
