"""Where lengths come from: built-in shapes, drawn, and public trace files, read.

Shapes have the medians and 90th percentiles of those traces, as lognormal distributions cut at
their maxima: Azure 2023 conversation and code (CC-BY 4.0, Splitwise, ISCA 2024), Mooncake FAST'25
conversation (Apache-2.0). Trace formats, as published:

    Mooncake  {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
              milliseconds from the start; one id for every started block of 512 prompt tokens,
              equal ids mean an equal block and an equal prefix
    Azure     TIMESTAMP,ContextTokens,GeneratedTokens
              2023-11-16 18:15:46.6805900,374,44
"""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import msgspec

from services.cli.bench.workload import BLOCK_TOKENS, Ask
from services.planner.rows import DataError, read_lines, read_rows, read_text

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOST_TOKENS: Final = 10_000_000
"""Of one length; beyond it a file is broken, not long."""

_Z90: Final = 1.2816
"""90th percentile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal distribution of token counts, by its median and 90th percentile."""

    p50: int
    p90: int
    largest: int

    def draw(self, rng: random.Random) -> int:
        sigma = math.log(self.p90 / self.p50) / _Z90
        value = rng.lognormvariate(math.log(self.p50), sigma)
        return min(self.largest, max(1, round(value)))


@dataclass(frozen=True, slots=True)
class Shape:
    """Independent requests."""

    name: str
    input: Lengths
    output: Lengths
    has_times: bool = False

    def asks(self, rng: random.Random) -> Iterator[Ask]:
        while True:
            num_input = self.input.draw(rng)
            yield Ask(num_input=num_input, num_output=self.output.draw(rng))


def fixed(num_input: int, num_output: int) -> Shape:
    prompt, answer = (Lengths(num, num, num) for num in (num_input, num_output))
    return Shape(f"fixed {num_input}+{num_output}", prompt, answer)


@dataclass(frozen=True, slots=True)
class Sessions:
    """Requests that share long prefixes: conversations whose next turn begins with all that was
    said before, after one system prompt that everybody has.

    new_share: requests that open a conversation. A turn continues one of the ``num_open`` latest,
    the later the likelier, so that reuse has the near end that caches live from.
    """

    name: str
    input: Lengths
    output: Lengths
    new_share: float
    num_open: int = 64
    has_times: bool = False

    def asks(self, rng: random.Random) -> Iterator[Ask]:
        sessions: list[tuple[int, ...]] = []
        next_id = 1  # 0 is everybody's
        while True:
            num_input = self.input.draw(rng)
            num_blocks = math.ceil(num_input / BLOCK_TOKENS)
            prefix: tuple[int, ...] = (0,)
            if sessions and rng.random() >= self.new_share:
                back = min(len(sessions) - 1, int(rng.expovariate(4 / self.num_open)))
                # It comes back below as the latest, with this turn.
                prefix = sessions.pop(-1 - back)
            num_new = max(0, num_blocks - len(prefix))
            block_ids = (*prefix[:num_blocks], *range(next_id, next_id + num_new))
            next_id += num_new
            sessions = [*sessions[-self.num_open + 1 :], block_ids]
            yield Ask(num_input=num_input, num_output=self.output.draw(rng), block_ids=block_ids)


SHAPES: Final = {
    "chat": Shape("chat", Lengths(1020, 2734, 14050), Lengths(129, 424, 1000)),
    "code": Shape("code", Lengths(1469, 5188, 7437), Lengths(13, 55, 1899)),
    "mooncake": Sessions(
        "mooncake", Lengths(6909, 27367, 126195), Lengths(350, 597, 2000), new_share=0.25
    ),
}
"""By the name that ``--synthetic`` takes; 'fixed' is made from its lengths."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of a file, by arrival; the first arrives at 0."""

    name: str
    rows: tuple[Ask, ...]
    has_times: bool = True

    def asks(self, rng: random.Random) -> Iterator[Ask]:
        return iter(self.rows)


_NumTokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class _MooncakeRow(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, lt=1e15)]
    input_length: _NumTokens
    output_length: _NumTokens
    hash_ids: tuple[int, ...] = ()

    def ask(self) -> Ask:
        due_s = self.timestamp / 1000
        return Ask(
            num_input=self.input_length,
            num_output=self.output_length,
            due_s=due_s,
            block_ids=self.hash_ids,
        )


class _AzureRow(msgspec.Struct):
    at: str = msgspec.field(name="TIMESTAMP")
    num_input: _NumTokens = msgspec.field(name="ContextTokens")
    num_output: _NumTokens = msgspec.field(name="GeneratedTokens")

    def ask(self) -> Ask:
        # Of the seven decimals that Azure writes, six are read.
        moment = datetime.datetime.fromisoformat(self.at.strip())
        due_s = (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
        return Ask(num_input=self.num_input, num_output=self.num_output, due_s=due_s)


def read_trace(path: Path, *, must_be_ordered: bool = False) -> Trace:
    """Return a trace: Mooncake's if its first character is a brace, else Azure's. must_be_ordered:
    a request that arrives before the one above it is an error, too.

    Raises DataError.
    """
    text, neither = read_text(path), "neither Mooncake's JSONL nor Azure's CSV: "
    if text[:64].lstrip().startswith("{"):
        lines = read_lines(path, _MOONCAKE, text)
    else:
        lines = read_rows(path, AZURE_COLUMNS, neither, text)
    rows: list[Ask] = []
    for number, line in lines:
        try:
            row = msgspec.convert(line, _AzureRow, strict=False) if isinstance(line, dict) else line
            rows.append(row.ask())
        except ValueError as error:  # msgspec's is one, too
            raise DataError(f"{path}:{number}: {error}") from None
        if must_be_ordered and len(rows) > 1 and rows[-1].due_s < rows[-2].due_s:
            raise DataError(
                f"{path}:{number}: arrives {rows[-2].due_s - rows[-1].due_s:g} s before the line "
                "above: is this one trace, whole and in order? Sort it by time"
            )
    if not rows:
        raise DataError(f"{path} holds no request")
    rows.sort(key=lambda ask: ask.due_s)
    first = rows[0].due_s
    return Trace(path.name, tuple(replace(ask, due_s=ask.due_s - first) for ask in rows))


_MOONCAKE: Final = msgspec.json.Decoder(_MooncakeRow)
