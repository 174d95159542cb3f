"""Small line charts as SVG text, for a page that must work without a network and without more
packages. Pure; colours are the page's (classes ``s0``...``s3``, ``limit``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 460
HEIGHT: Final = 270
LEFT: Final = 58
RIGHT: Final = 14
TOP: Final = 42
BOTTOM: Final = 40

Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or dots. names: what the pointer reads at each dot."""

    name: str
    points: Sequence[Point]
    is_dots: bool = False
    has_marks: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: label, range (None = that of the data), format of its ticks, and a limit to be
    drawn across the chart."""

    label: str
    text: Format
    low: float | None = None
    high: float | None = None
    is_log: bool = False
    limit: float | None = None
    limit_name: str = "SLO"


def chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Return one ``<svg>``; '' if there is nothing to draw."""
    points = [point for one in series for point in one.points]
    if not points:
        return ""
    across = _Scale(x, [p[0] for p in points], LEFT, WIDTH - RIGHT)
    up = _Scale(y, [p[1] for p in points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="15">{escape(title)}</text>',
        *_legend(series),
        *_grid(across, up, x, y),
    ]
    for number, one in enumerate(series):
        places = [(across(px), up(py)) for px, py in one.points]
        if not one.is_dots:
            line = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(f'<polyline class="s{number}" points="{line}"/>')
        if one.is_dots or one.has_marks:
            radius = 2 if one.is_dots else 3.2
            for (px, py), (vx, vy) in zip(places, one.points, strict=True):
                told = escape(f"{one.name}: {x.text(vx)}, {y.text(vy)}")
                parts.append(
                    f'<circle class="s{number}" cx="{px:.1f}" cy="{py:.1f}" r="{radius}">'
                    f"<title>{told}</title></circle>"
                )
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, *, is_log: bool = False) -> list[float]:
    """Return about five round values within a range."""
    if is_log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        steps = (1, 2, 5) if len(decades) <= 3 else (1,)
        found = [step * 10.0**power for power in decades for step in steps]
    else:
        rough = (high - low) / 5 or 1.0
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * size for size in (1, 2, 5, 10) if unit * size >= rough * 0.999)
        first = math.ceil(low / step - 1e-9)
        found = [round((first + number) * step, 12) for number in range(12)]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


class _Scale:
    """From values to pixels; a logarithmic one begins above zero."""

    def __init__(self, axis: Axis, values: Iterable[float], start: float, end: float) -> None:
        known = list(values) + ([axis.limit] if axis.limit is not None else [])
        self._is_log = axis.is_log and max(known) > 0
        low, high = axis.low, axis.high
        if self._is_log:
            known = [value for value in known if value > 0]
        low = min(known) if low is None else low
        high = max(known) if high is None else high
        if high <= low:
            high = low * 1.5 if low > 0 else low + 1.0
        if not self._is_log and axis.high is None:
            high += (high - low) * 0.05
        self.low, self.high = low, high
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self._is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self._start + (value - low) / (high - low) * (self._end - self._start)

    @property
    def ticks(self) -> list[float]:
        return ticks(self.low, self.high, is_log=self._is_log)


def _legend(series: Sequence[Series]) -> Iterable[str]:
    at = float(LEFT)
    for number, one in enumerate(series if len(series) > 1 else ()):
        yield f'<rect class="s{number}" x="{at:.0f}" y="24" width="10" height="3"/>'
        yield f'<text x="{at + 14:.0f}" y="29">{escape(one.name)}</text>'
        at += 24 + 6.4 * len(one.name)


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> Iterable[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in up.ticks:
        at = up(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="y" x="{LEFT - 6}" y="{at + 3.5:.1f}">{escape(y.text(value))}</text>'
    last = -math.inf
    for value in across.ticks:
        at = across(value)
        text = x.text(value)
        if at - last < 6.5 * len(text) + 6:
            continue  # it would touch the one before
        last = at
        yield f'<line class="grid" y1="{TOP}" y2="{bottom}" x1="{at:.1f}" x2="{at:.1f}"/>'
        yield f'<text class="x" x="{at:.1f}" y="{bottom + 15}">{escape(text)}</text>'
    middle = (LEFT + right) / 2
    yield f'<text class="x" x="{middle}" y="{HEIGHT - 6}">{escape(x.label)}</text>'
    if x.limit is not None:
        at = across(x.limit)
        yield f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<text class="limit" x="{at - 4:.1f}" y="{TOP + 9}">{x.limit_name}</text>'
    if y.limit is not None:
        at = up(y.limit)
        yield f'<line class="limit" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="limit" x="{right}" y="{at - 4:.1f}">{y.limit_name}</text>'
