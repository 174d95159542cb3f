"""Pictures of what was measured: medians with their lowest and highest, SVG and PNG side by side.

Without matplotlib (extra ``bench``) there are none, and that is said.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Spread = Mapping[str, Any]
"""What ``record.spread`` returns."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of a picture. lines: name -> points (x, spread of y); the first is drawn boldest."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, Spread]]]
    is_log: bool = True


def save(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels side by side; ``path`` gets the endings .svg and .png."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("(no plot: matplotlib is not installed)", file=sys.stderr)
        return
    size = (4.8 * len(panels), 4)
    figure, places = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    for place, panel in zip(places[0], panels, strict=True):
        for idx, (name, points) in enumerate(panel.lines.items()):
            place.errorbar(
                [x for x, _ in points],
                [y["median"] for _, y in points],
                yerr=[
                    [y["median"] - y["min"] for _, y in points],
                    [y["max"] - y["median"] for _, y in points],
                ],
                label=name, capsize=3, marker="o", linewidth=1.2 if idx else 2.5,
            )  # fmt: skip
        place.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        if panel.is_log:
            ticks = sorted({x for points in panel.lines.values() for x, _ in points})
            place.set_xscale("log")
            place.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
            place.minorticks_off()
        place.set_ylim(bottom=0)
        place.legend(fontsize=8)
    figure.tight_layout()
    for suffix in (".svg", ".png"):
        figure.savefig(path.with_suffix(suffix), dpi=120)
