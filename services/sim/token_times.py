"""When a client has its tokens, a million answers at a time."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple, overload


class StepEnds(NamedTuple):
    """Equal steps [start, stop) of a worker, of which ``ends`` has all that it ever took."""

    ends: array[float]
    start: int
    stop: int

    @property
    def num(self) -> int:
        return self.stop - self.start


class TokenTimes(Sequence[float]):
    """Ascending times. Those of equal steps, with how much later each comes, are not copied: they
    stand with their worker."""

    __slots__ = ("_num", "_parts", "_since")

    def __init__(self) -> None:
        self._parts: list[float | tuple[StepEnds, float]] = []
        self._num = 0
        self._since = 0.0

    def append(self, at: float) -> None:
        self._parts.append(at)
        self._num += 1

    def extend(self, steps: StepEnds, later_s: float) -> None:
        """A token of each of these steps, so much later than its end."""
        if steps.num:
            self._parts.append((steps, later_s))
            self._num += steps.num

    def count_from(self, since: float) -> TokenTimes:
        """Let all times be counted from this one."""
        self._since = since
        return self

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[float]:
        since = self._since
        for part in self._parts:
            if isinstance(part, tuple):
                (ends, start, stop), later_s = part
                for at in ends[start:stop]:
                    yield at + later_s - since
            else:
                yield part - since

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[float, ...]: ...
    def __getitem__(self, index: int | slice) -> float | tuple[float, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = index + self._num if index < 0 else index
        if not 0 <= place < self._num:
            raise IndexError(index)
        # Asked of every answer that is over: without a walk through all that it has.
        if place == self._num - 1:
            last = self._parts[-1]
            if isinstance(last, tuple):
                steps, later_s = last
                return steps.ends[steps.stop - 1] + later_s - self._since
            return last - self._since
        return next(islice(self, place, None))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)  # type: ignore[reportUnknownArgumentType]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenTimes({list(self)})"
