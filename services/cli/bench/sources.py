"""Where lengths come from: built-in shapes, drawn, and public trace files, read.

Shapes have the medians and 90th percentiles of those traces, as lognormal distributions cut at
their maxima: Azure 2023 conversation and code (CC-BY 4.0, Splitwise, ISCA 2024), Mooncake FAST'25
conversation (Apache-2.0).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.planner.traces import read_asks
from services.sim.asks import BLOCK_TOKENS, Ask

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

    def asks(self, rng: random.Random) -> Iterator[Ask]:
        return iter(self.rows)


Source = Shape | Sessions | Trace
"""Where lengths come from: ``asks`` gives its requests, of shapes and sessions without end."""


def read_trace(path: Path, *, must_be_ordered: bool = False) -> Trace:
    """Return the trace of a file, see ``read_asks``. Raises DataError."""
    return Trace(path.name, tuple(read_asks(path, must_be_ordered=must_be_ordered)))
