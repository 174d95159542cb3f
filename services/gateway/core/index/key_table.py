"""A map from 64-bit keys to small numbers in 20 bytes a key: numpy arrays, many keys at a time.

Keys are hashes already. Each has two rows where it may stand, of eight slots, and goes into the
emptier one (two choices; Azar et al. 1994), so that rows fill evenly; the very few that find both
full stand in a dict, where those of a small change are gathered first: numpy takes as long for one
key as for a hundred. The table grows by splitting some rows in two (linear hashing, Litwin 1980):
no moment at which everything is copied, and never more memory than was reserved at the start, of
which the system gives only what is touched. A removed key leaves nothing behind.

Numbers are above 0; 0 is "not here".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Keys: TypeAlias = NDArray[np.uint64]
Numbers: TypeAlias = NDArray[np.int32]
Places: TypeAlias = NDArray[Any]
Moves: TypeAlias = Mapping[int, int]
"""Of each number the one that comes after it."""

SLOTS = 8
"""Of a row: one cache line of keys."""

ROW_BYTES = SLOTS * (8 + 4)

LOAD = 0.6
"""Share of slots taken; two choices would allow 0.9, but rows split one after the other."""

FIRST_ROWS = 64

MOST_CROWDED = 64
"""Keys that the dict may have, and one more for each 512 of the table; beyond that all are put
anew."""

FEW, MOST_GATHERED = 64, 1024
"""Keys of one change that are gathered in the dict, and how many of them, of a table that is not
small."""


class KeyTable:
    """Of at most ``max_bytes``; what does not fit is refused, see ``room``."""

    def __init__(self, max_bytes: int) -> None:
        most = max(FIRST_ROWS, max_bytes // ROW_BYTES)
        self._keys = np.zeros((most, SLOTS), np.uint64)
        self._numbers = np.zeros((most, SLOTS), np.int32)
        self._flat_keys = self._keys.reshape(-1)
        self._flat_numbers = self._numbers.reshape(-1)
        self._num_rows: int = FIRST_ROWS
        self._base: int = FIRST_ROWS  # a power of two; rows below num_rows - base are split
        self._crowded: dict[int, int] = {}
        self._most_gathered = min(MOST_GATHERED, most // 64)
        self._count = 0
        self._swept = 0

    def __len__(self) -> int:
        return self._count

    def num_bytes(self, more: float = 0) -> int:
        """Memory in use, or that will be with so many keys more; a key in the dict costs about
        120."""
        count = self._count + int(more)
        num_rows = max(self._num_rows, min(_rows_for(count), len(self._keys)))
        return num_rows * ROW_BYTES + 120 * max(len(self._crowded), self._most_crowded(count))

    @property
    def room(self) -> int:
        """How many more keys are taken."""
        return int(len(self._keys) * SLOTS * LOAD) - self._count

    def _rows_of(self, keys: Keys) -> Places:
        """Return the two rows of each key: by its lower half, and by its upper half."""
        rows = keys.view(np.uint32).reshape(-1, 2) & np.uint32(2 * self._base - 1)
        # A row that is not there yet: its keys stand in the one that will be split for it.
        rows -= (rows >= self._num_rows) * np.uint32(self._base)
        return rows

    def _found(self, keys: Keys) -> tuple[Places, Places]:
        """Return the places in ``keys`` of those that stand in a row, and their slots, counted
        through all rows."""
        rows = self._rows_of(keys)
        equal = self._keys.take(rows, axis=0) == keys[:, None, None]
        equal[rows[:, 0] == rows[:, 1], 1] = False  # one row twice: the key is found once
        at = np.flatnonzero(equal)
        return at // (2 * SLOTS), rows.reshape(-1).take(at // SLOTS) * SLOTS + at % SLOTS

    def find(self, keys: Keys) -> Numbers:
        """Return the number of each key."""
        return self._with_crowded(keys, self._find_in_rows(keys))

    def _find_in_rows(self, keys: Keys) -> Numbers:
        rows = self._rows_of(keys)
        found: Keys = self._keys.take(rows, axis=0).reshape(-1, 2 * SLOTS)
        equal: NDArray[np.bool_] = found == keys[:, None]
        # Of each key's sixteen slots the one where it stands, or the first.
        slots: Places = np.arange(0, equal.size, 2 * SLOTS) + equal.argmax(1)
        numbers: Numbers = self._numbers.take(rows, axis=0).reshape(-1).take(slots)
        numbers *= equal.reshape(-1).take(slots)
        return numbers

    def _with_crowded(self, keys: Keys, numbers: Numbers) -> Numbers:
        for place in (numbers == 0).nonzero()[0].tolist() if self._crowded else ():
            numbers[place] = self._crowded.get(int(keys[place]), 0)
        return numbers

    def find_prefix(self, keys: Keys) -> Numbers:
        """Return the numbers of the keys before the first one that is not here."""
        numbers = self._find_in_rows(keys)
        for place in (numbers == 0).nonzero()[0].tolist():
            number = self._crowded.get(int(keys[place]))
            if number is None:
                return numbers[:place]
            numbers[place] = number
        return numbers

    def put(self, keys: Keys, numbers: Numbers) -> None:
        """Set the numbers of different keys; 0 takes a key out. There must be room."""
        self._put(keys, numbers, *self._found(keys))

    def change(self, keys: Sequence[int], after: Callable[[list[int]], Moves]) -> tuple[int, int]:
        """Give different keys the numbers that come ``after`` those that they have; 0 is none.
        There must be room. Returns how many have another number now, and their exclusive or."""
        if len(keys) <= FEW:
            return self._change_few(keys, after)
        column = np.array(keys, np.uint64)
        places, slots = self._found(column)
        before = np.zeros(len(column), np.int32)
        before[places] = self._flat_numbers.take(slots)
        numbers = self._with_crowded(column, before).copy()  # which has filled in ``before``
        for number, new in after(before.tolist()).items():
            numbers[before == number] = new
        self._put(column, numbers, places, slots)
        changed = column[numbers != before]
        return len(changed), int(np.bitwise_xor.reduce(changed))

    def _change_few(
        self, keys: Sequence[int], after: Callable[[list[int]], Moves]
    ) -> tuple[int, int]:
        slots = [self._slot_of(key) for key in keys]
        before = [
            self._crowded.get(key, 0) if slot is None else self._flat_numbers.item(slot)
            for key, slot in zip(keys, slots, strict=True)
        ]
        moves, num_changed, digest = after(before), 0, 0
        for key, slot, number in zip(keys, slots, before, strict=True):
            if (new := moves[number]) == number:
                continue
            num_changed, digest = num_changed + 1, digest ^ key
            self._count += (new > 0) - (number > 0)
            if slot is not None:
                self._flat_numbers[slot] = new
                self._flat_keys[slot] = key if new else 0
            elif new:
                self._crowded[key] = new
            else:
                del self._crowded[key]
        self._uncrowd()
        return num_changed, digest

    def _slot_of(self, key: int) -> int | None:
        """Return the slot of a key, counted through all rows; None = it stands in none."""
        for half in (key, key >> 32) if key not in self._crowded else ():
            row = half & (2 * self._base - 1)
            row -= self._base * (row >= self._num_rows)
            if key in (slots := self._keys[row].tolist()):
                return row * SLOTS + slots.index(key)
        return None

    def _put(self, keys: Keys, numbers: Numbers, places: Places, slots: Places) -> None:
        found = numbers[places]
        self._flat_numbers[slots] = found
        gone = slots[found == 0]
        self._flat_keys[gone] = 0
        self._count -= len(gone)
        added = numbers != 0
        added[places] = False
        # Out of the dict even if it stays in the table: put anew, it may find room in a row by now.
        if self._crowded:
            is_crowded = np.ones(len(keys), bool)
            is_crowded[places] = False
            for key in keys[is_crowded].tolist():
                if self._crowded.pop(key, 0):
                    self._count -= 1
        if added.any():
            self._count += int(added.sum())
            self._add(keys[added], numbers[added])
        self._uncrowd()

    def _most_crowded(self, count: int) -> int:
        return self._most_gathered + MOST_CROWDED + count // 512

    def _uncrowd(self) -> None:
        if len(self._crowded) > self._most_crowded(self._count):
            crowded, self._crowded = self._crowded, {}
            self._add(
                np.array(list(crowded), np.uint64), np.array(list(crowded.values()), np.int32)
            )

    def _add(self, keys: Keys, numbers: Numbers) -> None:
        self._grow()
        rows = self._rows_of(keys).astype(np.int64)
        taken = (self._keys.take(rows, axis=0) != 0).sum(2)
        swapped = taken[:, 1] < taken[:, 0]
        rows[swapped] = rows[swapped, ::-1]
        left = self._place(rows[:, 0], keys, numbers)
        if len(left):
            left = left[self._place(rows[left, 1], keys[left], numbers[left])]
            self._crowded.update(zip(keys[left].tolist(), numbers[left].tolist(), strict=True))

    def _place(self, rows: Places, keys: Keys, numbers: Numbers) -> Places:
        """Put each key into a free slot of its row; return the places of those that found none."""
        order = rows.argsort(kind="stable")
        rows = rows[order]
        is_first = np.empty(len(rows), bool)
        is_first[0] = True
        np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        ranks = np.arange(len(rows)) - starts[is_first.cumsum() - 1]  # 0, 1, 2 within each row
        num_free = (self._keys[rows] == 0).cumsum(1)
        fits = num_free[:, -1] > ranks
        slots = rows * SLOTS + (num_free > ranks[:, None]).argmax(1)
        slots, placed = slots[fits], order[fits]
        self._flat_keys[slots] = keys[placed]
        self._flat_numbers[slots] = numbers[placed]
        return order[~fits]

    def _grow(self) -> None:
        wanted = min(_rows_for(self._count), len(self._keys))
        while self._num_rows < wanted:
            first = self._num_rows - self._base
            num = min(wanted - self._num_rows, self._base - first)
            self._split(slice(first, first + num), slice(self._num_rows, self._num_rows + num))
            self._num_rows += num
            if self._num_rows == 2 * self._base:
                self._base *= 2

    def _split(self, old: slice, new: slice) -> None:
        """Give each of the new rows what belongs there, of the old row that had it until now."""
        keys, numbers = self._keys[old], self._numbers[old]
        low = np.uint64(self._base - 1)
        # By which half of its hash a key is here; if by both, either may move it, since both are
        # looked up.
        is_first = (keys & low) == np.arange(old.start, old.stop, dtype=np.uint64)[:, None]
        hashes = np.where(is_first, keys, keys >> np.uint64(32))
        moved = (hashes & np.uint64(self._base)) != 0
        self._keys[new], self._numbers[new] = keys * moved, numbers * moved
        keys[moved] = 0
        numbers[moved] = 0

    def sweep(self, is_dead: NDArray[np.bool_], num_rows: int) -> Numbers:
        """Take out keys whose number is dead, in the next so many rows; return their numbers."""
        if self._swept >= self._num_rows:
            self._swept = 0
        rows = slice(self._swept, min(self._swept + num_rows, self._num_rows))
        self._swept = rows.stop
        numbers = self._numbers[rows]
        dead = is_dead[numbers]
        found = numbers[dead]
        self._keys[rows][dead] = 0
        numbers[dead] = 0
        crowded = [key for key, number in self._crowded.items() if is_dead[number]]
        gone = [self._crowded.pop(key) for key in crowded]
        self._count -= len(found) + len(gone)
        return np.concatenate([found, np.array(gone, np.int32)])


def _rows_for(num_keys: int) -> int:
    return int(num_keys / (SLOTS * LOAD)) + 1
