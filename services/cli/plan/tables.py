"""The papers of which `pdmesh plan paper` has nothing but tables."""

from __future__ import annotations

from pathlib import Path

from services.cli.plan.view import progress, show_tables
from services.cli.sources import JsonFlag
from services.planner.core.founding import founding_tables
from services.planner.core.partition import pope_tables
from services.planner.founding_data import data_tables
from services.planner.paper_runs import muxserve_tables, orca_tables, sarathi_tables


def pope(*, as_json: JsonFlag = False) -> None:
    """Pope et al. (MLSys'23): longest contexts, use of the peak, layouts of PaLM 540B."""
    show_tables(pope_tables(), as_json=as_json)


def founding(
    *,
    data: Path | None = None,
    as_json: JsonFlag = False,
) -> None:
    """The figures of pdmesh's founding documents, recomputed, and which of them are wrong.

    Parameters
    ----------
    data
        Folder with the Azure 2023 and Mooncake FAST'25 traces and splitwise_sim_perf_model.csv:
        also what comes from public data.
    """
    show_tables([*founding_tables(), *(data_tables(data) if data else ())], as_json=as_json)


def muxserve(*, as_json: JsonFlag = False) -> None:
    """MuxServe (ICML'24): its greedy placement beside every other one, on four GPUs; ADBS."""
    num_draws = 300
    with progress("placements", num_draws) as on_progress:
        tables = muxserve_tables(num_draws, on_progress)
    show_tables(tables, as_json=as_json)


def orca(*, as_json: JsonFlag = False) -> None:
    """Orca (OSDI'22): iteration-level scheduling, first come first served."""
    show_tables(orca_tables(), as_json=as_json)


def sarathi(*, as_json: JsonFlag = False) -> None:
    """Sarathi-Serve (OSDI'24): stall-free batches, what chunks cost, capacity under limits."""
    show_tables(sarathi_tables(), as_json=as_json)
