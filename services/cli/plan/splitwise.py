"""``pdmesh plan paper splitwise``: power, the performance model, and how many machines it takes."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Final, Literal

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
)
from services.planner.splitwise_data import (
    drawn,
    machine_times,
    read_azure,
    read_perf_model,
)
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
    as_json: JsonFlag = False,
) -> int:
    """Splitwise (ISCA'24): equal power, its performance model, machines for a rate under nine SLOs.

    With --data: how well the performance model predicts runs that it has not seen, and by
    simulation of its router and machines the fewest prompt machines for each number of token
    machines. Ctrl-C shows what has been found.

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
    """
    require_ranges(
        ("--rate", 0 < rate < 1e6, "above 0"),
        ("--duration", 0 < duration < 1e6, "above 0"),
        ("--most-prompt", 1 <= most_prompt <= 1000, "1..1000"),
        ("--most-token", 1 <= most_token <= 1000, "1..1000"),
    )
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

    def is_fine(num_prompt: int, num_token: int) -> bool:
        if (num_prompt, num_token) in reasons:
            return not reasons[num_prompt, num_token]
        requests = drawn(lengths, rate, duration, seed)
        if not requests:
            raise InvalidRequest("no request arrives: give a higher --rate or a longer --duration")
        machines = cluster(num_prompt, num_token, times[0], times[1], served)
        SplitwiseSim(machines, bandwidth=bandwidth).run(requests)
        reasons[num_prompt, num_token] = broken_limits(requests, alone)
        on_progress(len(reasons))
        return not reasons[num_prompt, num_token]

    found: list[Provisioned] = []
    kept = Kept()
    with kept, progress(f"{model}, {workload}, {design}", most_prompt + most_token) as on_progress:
        began = time.perf_counter()
        is_fine(most_prompt, most_token)
        run_s = time.perf_counter() - began
        say_how_long(most_prompt + most_token, run_s, "--duration, --most-prompt shorten it")
        found.extend(provision((prompt_type, token_type), most_prompt, most_token, is_fine))
    title = f"Splitwise: {design}, {model}, {workload}, {rate:g} requests/s, {transfer} transfers"
    is_theirs = (design, model, workload, rate) == ("HH", "bloom-176b", "code", 70)
    frontier = _frontier(title, found, "27P + 3T" if is_theirs else "")
    if broken := reasons.get((most_prompt, most_token)):
        limits = "; ".join(broken[:3])
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
