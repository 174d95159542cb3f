"""Attainment over rate, and inter-token latency over rate, of all systems: SVG and PNG."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def draw(rows: Sequence[dict[str, Any]], stem: Path) -> None:
    """Write ``<stem>-<load>-<slo>.svg`` and ``.png``; says so and returns without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("(no plots: pip install matplotlib)", file=sys.stderr)
        return
    groups: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        if "system" in row and row["itl_s"] is not None:
            groups[row["load"], row["slo"]][row["system"]].append(row)
    for (load, slo), systems in groups.items():
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
        for name, found in systems.items():
            found = sorted(found, key=lambda row: row["rate"])
            rates = [row["rate"] for row in found]
            left.plot(rates, [row["attainment"] for row in found], "o-", label=name)
            right.plot(rates, [1e3 * row["itl_s"]["p99"] for row in found], "o-", label=name)
        left.axhline(0.9, color="gray", linestyle=":", linewidth=1)
        left.set(xlabel="requests/s", ylabel="attained", ylim=(0, 1.05), title=f"{load}, {slo} SLO")
        right.set(xlabel="requests/s", ylabel="P99 inter-token latency, ms", title="(CPU)")
        right.set_ylim(bottom=0)
        left.legend()
        for kind in ("svg", "png"):
            figure.savefig(f"{stem}-{load}-{slo}.{kind}", dpi=120)
        plt.close(figure)
