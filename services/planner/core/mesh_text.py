"""Meshes as people write them: ``3P+2D``, ``2P(tp2,pp2)+1D(h100)+1M``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from shared.errors import InvalidRequest

MOST_WORKERS: Final = 256
DEGREES: Final = (1, 2, 4, 8)
"""Of tensor and of pipeline parallelism."""

KNOWN: Final = (
    "P (prefill), D (decode), M (mixed); in brackets tp1, tp2, tp4, tp8, pp1, pp2, pp4, pp8 or a "
    "device"
)

_PART: Final = re.compile(r"(\d{0,9})\s*x?\s*([A-Za-z]+)(?:\(([^()]*)\))?")
_KINDS: Final = {"p": "P", "prefill": "P", "d": "D", "decode": "D", "m": "M", "mixed": "M"}
_ORDER: Final = "PDM"


class Unit(NamedTuple):
    """One worker's devices: which, how many share every layer, and in how many stages the layers
    are. device '': the plan's."""

    device: str = ""
    tp: int = 1
    pp: int = 1

    @property
    def num_devices(self) -> int:
        """Of all stages."""
        return self.tp * self.pp

    def __str__(self) -> str:
        degrees = (("tp", self.tp), ("pp", self.pp))
        words = [self.device, *(f"{name}{num}" for name, num in degrees if num > 1)]
        return f"({','.join(filter(None, words))})" if any(words) else ""


PLAIN: Final = Unit()


@dataclass(frozen=True, slots=True)
class MeshPart:
    """So many equal workers. kind: P computes prompts, D answers, M both."""

    num: int
    kind: str
    unit: Unit = PLAIN

    def __str__(self) -> str:
        return f"{self.num}{self.kind}{self.unit}"


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Workers of a mesh; parts: each kind and unit once, prefill first."""

    parts: tuple[MeshPart, ...]

    @classmethod
    def of(cls, *parts: MeshPart) -> MeshShape:
        """Return these workers, equal ones together, in the order in which they are written."""
        counts: dict[tuple[str, Unit], int] = {}
        for part in parts:
            counts[part.kind, part.unit] = counts.get((part.kind, part.unit), 0) + part.num
        found = [MeshPart(num, kind, unit) for (kind, unit), num in counts.items() if num]
        return cls(tuple(sorted(found, key=lambda it: (_ORDER.index(it.kind), it.unit))))

    @property
    def num_workers(self) -> int:
        """Of all kinds."""
        return sum(part.num for part in self.parts)

    def num_of(self, kind: str) -> int:
        """Workers of a kind."""
        return sum(part.num for part in self.parts if part.kind == kind)

    @property
    def can_serve(self) -> bool:
        """Whether there is somebody for prompts and somebody for answers."""
        return bool(self.num_of("M") or (self.num_of("P") and self.num_of("D")))

    def holds(self, other: MeshShape) -> bool:
        """Whether it has every worker of another mesh, and perhaps more."""
        mine = {(part.kind, part.unit): part.num for part in self.parts}
        return all(mine.get((it.kind, it.unit), 0) >= it.num for it in other.parts)

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


def read_mesh(text: str) -> MeshShape:
    """Return the mesh that a text describes. Raises InvalidRequest, with the known words."""
    parts: list[MeshPart] = []
    for written in text.replace(" ", "").split("+"):
        match = _PART.fullmatch(written)
        kind = _KINDS.get(match[2].lower()) if match else None
        if match is None or kind is None:
            raise InvalidRequest(
                f"{written!r} in {text!r} is no part of a mesh: write 3P+2D, with {KNOWN}"
            )
        parts.append(MeshPart(int(match[1] or 1), kind, _read_unit(match[3] or "", text)))
    shape = MeshShape.of(*parts)
    if not 1 <= shape.num_workers <= MOST_WORKERS:
        raise InvalidRequest(f"a mesh has 1..{MOST_WORKERS} workers, {text!r} {shape.num_workers}")
    if not shape.can_serve:
        raise InvalidRequest(
            f"{text!r} can serve nothing: a mesh needs P and D, or M (1P+1D is the smallest)"
        )
    return shape


def _read_unit(words: str, text: str) -> Unit:
    device, degrees = "", dict[str, int]()
    for word in filter(None, words.lower().split(",")):
        kind = word[:2]
        if kind in degrees if kind in ("tp", "pp") else device:
            raise InvalidRequest(f"({words}) in {text!r}: one tp, one pp and one device at most")
        if re.fullmatch(r"[tp]p\d{1,9}", word):
            degrees[kind] = int(word[2:])
            if degrees[kind] not in DEGREES:
                known = ", ".join(f"{kind}{degree}" for degree in DEGREES)
                raise InvalidRequest(f"{word} in {text!r}: known are {known}")
        # Degrees of experts (ep) are not simulated; none is a device's name.
        elif re.fullmatch(r"[a-z][a-z0-9.-]*", word) and not re.fullmatch(r"[tpe]p\d*", word):
            device = word
        else:
            raise InvalidRequest(f"{word!r} in {text!r} is not known: write 3P+2D, with {KNOWN}")
    return Unit(device, **degrees)
