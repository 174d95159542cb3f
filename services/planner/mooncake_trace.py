"""Mooncake's trace files, in the order in which they stand: blocks matter, times hardly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from services.planner.rows import DataError, read_text

BLOCK_TOKENS: Final = 512

_Count = Annotated[int, msgspec.Meta(ge=0, le=10_000_000)]


class TraceLine(msgspec.Struct, frozen=True):
    """One request. hash_ids: one for every started block of 512 prompt tokens."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
    input_length: _Count
    output_length: _Count
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MooncakeTrace:
    """num_odd: lines that have another number of ids than their length says."""

    lines: tuple[TraceLine, ...]
    num_odd: int


def read_mooncake(path: Path) -> MooncakeTrace:
    """Return a trace.

    Raises DataError: a damaged line, one without ids, or one before its predecessor.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    num_odd = 0
    for number, text in enumerate(read_text(path).splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise DataError(f"{path}:{number}: {error}") from None
        if not line.hash_ids:
            raise DataError(f"{path}:{number}: no hash_ids: a cache cannot be replayed without")
        if lines and line.timestamp < lines[-1].timestamp:
            raise DataError(f"{path}:{number}: arrives before the line above: sort by timestamp")
        num_odd += len(line.hash_ids) != -(-line.input_length // BLOCK_TOKENS)
        lines.append(line)
    if not lines:
        raise DataError(f"{path} holds no request")
    return MooncakeTrace(tuple(lines), num_odd)
