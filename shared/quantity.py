"""Durations and sizes as people write them: ``"30 s"``, ``"250 ms"``, ``"4 GiB"``.

What unit a setting has stands at the end of its name (``drain_s``, ``kv_gib``; a cache has bytes);
a setting whose name names none is a plain number. Knows no setting.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

_TIMES: Final = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
}
_SIZES: Final = {
    "B": Fraction(1),
    "kB": Fraction(10**3),
    "MB": Fraction(10**6),
    "GB": Fraction(10**9),
    "TB": Fraction(10**12),
    "KiB": Fraction(1 << 10),
    "MiB": Fraction(1 << 20),
    "GiB": Fraction(1 << 30),
    "TiB": Fraction(1 << 40),
}
_SUFFIXES: Final = {
    "s": ("s", _TIMES),
    "kib": ("KiB", _SIZES),
    "mib": ("MiB", _SIZES),
    "gib": ("GiB", _SIZES),
    "dram_cache": ("B", _SIZES),
    "cache_size": ("B", _SIZES),
}
_QUANTITY: Final = re.compile(r"\s*(\d{1,99}(?:\.\d{1,99})?(?:e[+-]?\d{1,2})?)\s*([A-Za-z]*)\s*")


def unit_of(name: str) -> str:
    """Return the unit in which a setting of this name counts, '' if it has none."""
    return next(
        (unit for end, (unit, _) in _SUFFIXES.items() if f"_{name}".endswith(f"_{end}")), ""
    )


def read_quantity(text: str, unit: str) -> Fraction:
    """Return a quantity, exactly, in ``unit`` (as ``unit_of`` gives it).

    Raises ValueError: no number with a unit of that kind; the message says what is wanted.
    """
    units = _TIMES if unit in _TIMES else _SIZES
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise ValueError(f"must be a number with a unit ({', '.join(units)}), not {text!r}")
    return Fraction(match[1]) * units[match[2]] / units[unit]


def write_quantity(value: float, unit: str) -> str:
    """Return the text that ``read_quantity`` reads back as ``value``."""
    return f"{int(value) if value == int(value) else value!r} {unit}"
