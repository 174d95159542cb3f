"""Public traces of requests, as published:

Mooncake  {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
          milliseconds from the start; one id for every started block of 512 prompt tokens,
          equal ids mean an equal block and an equal prefix
Azure     TIMESTAMP,ContextTokens,GeneratedTokens
          2023-11-16 18:15:46.6805900,374,44
"""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import msgspec

from services.planner.rows import DataError, first_of, read_lines, read_rows, read_text
from services.sim.asks import Ask

MOST_TOKENS: Final = 10_000_000
"""Of one length; beyond it a file is broken, not long."""

_NumTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class _MooncakeRow(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
    input_length: _NumTokens
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    hash_ids: tuple[int, ...] = ()

    def ask(self) -> Ask:
        return Ask(
            num_input=self.input_length,
            num_output=self.output_length,
            due_s=self.timestamp / 1000,
            block_ids=self.hash_ids,
        )


class _AzureLengths(msgspec.Struct, kw_only=True):
    num_input: _NumTokens = msgspec.field(name="ContextTokens")
    num_output: _NumTokens = msgspec.field(name="GeneratedTokens")


class _AzureRow(_AzureLengths):
    at: str = msgspec.field(name="TIMESTAMP")

    def ask(self) -> Ask:
        # Of the seven decimals that Azure writes, six are read.
        moment = datetime.datetime.fromisoformat(self.at)
        due_s = (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
        return Ask(num_input=self.num_input, num_output=self.num_output, due_s=due_s)


def read_asks(
    path: Path, *, must_be_ordered: bool = False, must_name_blocks: bool = False
) -> list[Ask]:
    """Return a trace by arrival, the first at 0: Mooncake's if its first character is a brace, else
    Azure's. must_be_ordered: a request that arrives before the one above it is an error, too;
    must_name_blocks: and one without hash_ids.

    Raises DataError.
    """
    text, neither = read_text(path), "neither Mooncake's JSONL nor Azure's CSV: "
    if not text.strip():
        raise DataError(f"{path} is empty")
    if text[:64].lstrip().startswith("{"):
        rows = read_lines(path, _MooncakeRow, text)
    else:
        rows = read_rows(path, _AzureRow, neither, text)
    asks: list[Ask] = []
    for number, row in rows:
        try:
            asks.append(row.ask())
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}") from None
        if must_name_blocks and not asks[-1].block_ids:
            raise DataError(f"{path}:{number}: no hash_ids: a cache cannot be replayed without")
        if must_be_ordered and len(asks) > 1 and asks[-1].due_s < asks[-2].due_s:
            raise DataError(
                f"{path}:{number}: arrives {asks[-2].due_s - asks[-1].due_s:g} s before the line "
                "above: is this one trace, whole and in order? Sort it by time"
            )
    if not asks:
        raise DataError(f"{path} holds no request")
    asks.sort(key=lambda ask: ask.due_s)
    first = asks[0].due_s
    return [replace(ask, due_s=ask.due_s - first) for ask in asks]


def read_blocks(path: Path) -> list[Ask]:
    """Return a trace of Mooncake's, whose every request names its blocks. Raises DataError."""
    return read_asks(path, must_be_ordered=True, must_name_blocks=True)


def read_mooncake(folder: Path, name: str) -> list[Ask]:
    """Return a public FAST'25 trace: conversation or synthetic. Raises DataError."""
    names = f"mooncake_fast25_{name}_trace.jsonl", f"{name}_trace.jsonl"
    return read_blocks(first_of(folder, *names))


def read_azure(folder: Path, workload: str) -> list[tuple[int, int]]:
    """Return prompt and output lengths of Azure's trace of 2023: code or conv. Raises DataError."""
    path = first_of(folder, f"AzureLLMInferenceTrace_{workload}_2023.csv")
    lengths = [(it.num_input, it.num_output) for _, it in read_rows(path, _AzureLengths)]
    if not lengths:
        raise DataError(f"{path} holds no request")
    return lengths
