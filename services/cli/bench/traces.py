"""Public trace files as workloads: Mooncake's JSONL and Azure's CSV.

Every line is checked; the first that is wrong is named by file and line. Formats, as published:

    Mooncake  {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
              milliseconds from the start; one id for every started block of 512 prompt tokens,
              equal ids mean an equal block and an equal prefix
    Azure     TIMESTAMP,ContextTokens,GeneratedTokens
              2023-11-16 18:15:46.6805900,374,44
"""

from __future__ import annotations

import csv
import datetime
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from services.cli.bench.workload import Ask
from shared.errors import InvalidRequest

TraceFormat = Literal["auto", "mooncake", "azure"]

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOST_TOKENS: Final = 10_000_000
"""Of one length; beyond it a file is broken, not long."""


class TraceError(InvalidRequest):
    """A trace file cannot be used; the message says file, line and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file, by arrival; the first arrives at 0."""

    name: str
    rows: tuple[Ask, ...]
    has_times: bool = True

    def asks(self, rng: random.Random) -> Iterator[Ask]:
        """See Source; nothing is drawn."""
        return iter(self.rows)


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, form: TraceFormat = "auto") -> Trace:
    """Return a trace. 'auto': JSONL if the first character is a brace.

    Raises TraceError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise TraceError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not text") from None
    if form == "auto":
        form = "mooncake" if "".join(lines[:1]).lstrip().startswith("{") else "azure"
    read = _read_mooncake if form == "mooncake" else _read_azure
    rows = list(read(path, lines))
    if not rows:
        raise TraceError(f"{path} holds no request")
    rows.sort(key=lambda ask: ask.due_s)
    first = rows[0].due_s
    return Trace(path.name, tuple(replace(ask, due_s=ask.due_s - first) for ask in rows))


def _read_mooncake(path: Path, lines: Sequence[str]) -> Iterator[Ask]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{path}:{number}: {error}") from None
        yield _ask(
            path, number, row.timestamp / 1000, row.input_length, row.output_length, row.hash_ids
        )


def _read_azure(path: Path, lines: Sequence[str]) -> Iterator[Ask]:
    table = csv.reader(lines)
    head = tuple(name.strip() for name in next(table, ()))
    missing = [name for name in AZURE_COLUMNS if name not in head]
    if missing:
        wanted = ",".join(AZURE_COLUMNS)
        raise TraceError(
            f"{path}:1: neither Mooncake's JSONL nor Azure's columns {wanted} "
            f"(missing: {', '.join(missing)})"
        )
    places = [head.index(name) for name in AZURE_COLUMNS]
    for number, fields in enumerate(table, 2):
        if not fields:
            continue
        if len(fields) != len(head):
            raise TraceError(f"{path}:{number}: {len(fields)} columns, not {len(head)}")
        at, num_input, num_output = (fields[place].strip() for place in places)
        try:
            # Azure writes seven decimals, Python reads six.
            whole, _, fraction = at.partition(".")
            moment = datetime.datetime.fromisoformat(f"{whole}.{(fraction or '0')[:6]:0<6}")
            seconds = moment.replace(tzinfo=datetime.UTC).timestamp()
        except ValueError:
            raise TraceError(f"{path}:{number}: {at!r} is not a time") from None
        try:
            counts = int(num_input), int(num_output)
        except ValueError:
            raise TraceError(
                f"{path}:{number}: token counts must be whole numbers, not "
                f"{num_input!r} and {num_output!r}"
            ) from None
        yield _ask(path, number, seconds, *counts)


def _ask(
    path: Path,
    number: int,
    at_s: float,
    num_input: int,
    num_output: int,
    block_ids: Sequence[int] = (),
) -> Ask:
    if not (0 < num_input <= MOST_TOKENS and 0 < num_output <= MOST_TOKENS):
        raise TraceError(
            f"{path}:{number}: a request needs 1..{MOST_TOKENS:,} tokens of prompt and of answer, "
            f"not {num_input} and {num_output}"
        )
    if not 0 <= at_s < 1e12:
        raise TraceError(f"{path}:{number}: a time of {at_s:g} s")
    return Ask(num_input=num_input, num_output=num_output, due_s=at_s, block_ids=tuple(block_ids))
