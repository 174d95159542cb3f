"""Mooncake's trace files, in the order in which they stand: blocks matter, times hardly."""

from __future__ import annotations

from pathlib import Path

import msgspec

from services.planner.rows import DataError, first_of, read_lines
from services.sim.baselines.mooncake import PrefixRequest


def read_public(folder: Path, name: str) -> list[PrefixRequest]:
    """Return a public FAST'25 trace: conversation or synthetic. Raises DataError."""
    names = f"mooncake_fast25_{name}_trace.jsonl", f"{name}_trace.jsonl"
    return read_mooncake(first_of(folder, *names))


def read_mooncake(path: Path) -> list[PrefixRequest]:
    """Return a trace.

    Raises DataError: a damaged line, one without ids, or one before its predecessor.
    """
    lines: list[PrefixRequest] = []
    for number, line in read_lines(path, msgspec.json.Decoder(PrefixRequest)):
        if not line.blocks:
            raise DataError(f"{path}:{number}: no hash_ids: a cache cannot be replayed without")
        if lines and line.at_ms < lines[-1].at_ms:
            raise DataError(f"{path}:{number}: arrives before the line above: sort by timestamp")
        lines.append(line)
    if not lines:
        raise DataError(f"{path} holds no request")
    return lines
