"""Pictures of what was measured: medians with their lowest and highest, SVG and PNG side by side.

A question's ``run.py`` has ``pictures_of(rows)``; ``python -m bench --draw`` draws them again from
what is recorded. Without matplotlib there are none, and that is said.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

Spread = Mapping[str, Any]
"""What ``record.spread`` returns."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of a picture. lines: name -> points (x, spread of y); the first is drawn boldest.
    is_log: of x. goal: a line across, where there is one."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, Spread]]]
    is_log: bool = True
    goal: float | None = None
    inches: ClassVar[float] = 4.8

    def draw(self, place: Any) -> None:
        for idx, (name, points) in enumerate(self.lines.items()):
            place.errorbar(
                [x for x, _ in points],
                [y["median"] for _, y in points],
                yerr=_reach([y for _, y in points]),
                label=name, capsize=3, marker="o", linewidth=1.2 if idx else 2.5,
            )  # fmt: skip
        place.set(title=self.title, xlabel=self.x, ylabel=self.y)
        if self.is_log:
            ticks = sorted({x for points in self.lines.values() for x, _ in points})
            place.set_xscale("log")
            place.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
            place.minorticks_off()


@dataclass(frozen=True, slots=True)
class Bars:
    """One plot of a picture, for what has no order. bars: name -> group -> spread of y. goal: a
    line across, where there is one."""

    title: str
    y: str
    bars: Mapping[str, Mapping[str, Spread]]
    goal: float | None = None

    @property
    def groups(self) -> list[str]:
        """What stands side by side, from left to right."""
        return list(dict.fromkeys(group for of in self.bars.values() for group in of))

    @property
    def inches(self) -> float:
        """Of its width: room for every name."""
        return max(4.0, 0.85 * len(self.groups))

    def draw(self, place: Any) -> None:
        groups = self.groups
        width = 0.8 / len(self.bars)
        for idx, (name, of) in enumerate(self.bars.items()):
            middle = (idx - (len(self.bars) - 1) / 2) * width
            place.bar(
                [groups.index(group) + middle for group in of],
                [y["median"] for y in of.values()],
                width,
                yerr=_reach(list(of.values())),
                label=name, capsize=3,
            )  # fmt: skip
        place.set_xticks(range(len(groups)), groups)
        place.set(title=self.title, ylabel=self.y)


Pictures = Mapping[str, Sequence[Panel | Bars]]
"""What distinguishes a picture's file (nothing, if there is one only) -> its plots."""


def _reach(values: Sequence[Spread]) -> list[list[float]]:
    """How far the lowest and the highest are from the median."""
    return [
        [y["median"] - y["min"] for y in values],
        [y["max"] - y["median"] for y in values],
    ]


def save(pictures: Pictures, path: Path) -> None:
    """Draw each picture's plots side by side; files are ``path`` less its ending, what
    distinguishes the picture, and .svg and .png; the same plots make the same bytes."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        mpl.rcParams["svg.hashsalt"] = "pdmesh"  # else its names are random
        import matplotlib.pyplot as plt
    except ImportError:
        print("(no pictures: matplotlib is not installed)", file=sys.stderr)
        return
    for name, panels in pictures.items():
        widths = [panel.inches for panel in panels]
        figure, places = plt.subplots(
            1, len(panels), figsize=(sum(widths), 4), width_ratios=widths, squeeze=False
        )
        for place, panel in zip(places[0], panels, strict=True):
            panel.draw(place)
            if panel.goal is not None:
                label = f"goal: {panel.goal:g}"
                place.axhline(panel.goal, color="black", linestyle=":", linewidth=1, label=label)
            place.set_ylim(bottom=0)
            place.legend(fontsize=8)
        figure.tight_layout()
        stem = f"{path.with_suffix('')}{name}"
        figure.savefig(f"{stem}.svg", metadata={"Date": None})
        figure.savefig(f"{stem}.png", dpi=120)
        plt.close(figure)
