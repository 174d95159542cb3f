"""Which worker has the KV of which prefix: what all workers' journals told, in one table.

A granule's entry is a number that stands for a *holding*: the workers that have it, each with the
tiers where it lies. In real traffic most granules lie in one place, and those of one prompt lie in
the same ones, so holdings are few. A worker that leaves is taken out of the holdings, and its
entries go when the table is swept.

The index proves itself: after each report that is whole, count and digest of what it really has of
that worker are compared with the worker's own (``shared/kv/journal.py``); if they differ the worker
is asked once for a snapshot. A wrong hit costs time, never a token: the worker compares the whole
hash.

*Expected* granules are those that a decision will make its worker compute: they count at once,
beside the table, until the report that has them is due. When they are predicted to be computed they
can be sent, too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from services.gateway.core.index.holdings import Column, Holdings
from services.gateway.core.index.key_table import Keys, KeyTable, Moves, Numbers
from services.gateway.core.index.prefixes import Indexed
from shared.errors import RemoteProtocolError
from shared.kv.journal import KvChanges, Tier

_TIERS = tuple(Tier)  # an enum is walked through in Python
NUM_TIERS = len(_TIERS)

Bits: TypeAlias = NDArray[np.uint64]

SWEPT_ROWS = 1 << 12
"""Looked through at each report while entries of workers that left are in the table."""

HOLDING_BYTES = 200
"""What a holding takes beside its bits: entries of a dict and of a list."""

MOST_SNAPSHOTS = 3
"""In a row that do not prove equal: then the worker itself is wrong, and a fourth would be, too."""

ROOM = 1.25
"""Times what a worker has, until one that was left out is asked again."""

EXPECTED_S = 2.0
"""How long after its predicted end a prompt's granules are expected to be told."""

EXPECTED_PROMPTS, EXPECTED_GRANULES = 1 << 12, 1 << 17
"""Decisions whose granules are expected at once, and these granules; of more the oldest are
forgotten."""


class _NoRoom(Exception):
    """What a worker tells would take more memory than there is."""


class _Known:
    """What the index has of one worker."""

    def __init__(self) -> None:
        self.counts = [0] * NUM_TIERS
        self.digests = [0] * NUM_TIERS
        self.state = Indexed.SILENT
        self.has_begun = False
        self.num_unproved = 0
        """Snapshots since it was last known."""


class _Expected(NamedTuple):
    """One decision's granules from the first that its worker did not have."""

    place: int
    first: int
    keys: Keys
    due: float


class PrefixIndex:
    """Of all workers, by their places: small numbers that the peer table gives.

    max_bytes: what it may grow to; a worker is left out rather than more taken.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._table = KeyTable(max_bytes)
        self._known: dict[int, _Known] = {}
        # Of each tier and holding a bit a place. Holding 0 is nobody's, and so is the last bit: it
        # stands for all places beyond it.
        self._bits: Bits = np.zeros((NUM_TIERS, 16, 1), np.uint64)
        self._below: set[int] = set()  # those with somebody in a tier below the pool
        self._references = [1]
        self._number_of = {self._row(0): 0}
        self._free: list[int] = []
        self._dead: set[int] = set()  # nobody's, but still in the table
        self._expected: dict[int, _Expected] = {}
        self._expecting: deque[_Expected] = deque()
        self.num_resyncs = 0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def num_bytes(self) -> int:
        """Memory of the table and of the holdings."""
        return self._num_bytes(0, 0)

    def _num_bytes(self, num_keys: float, num_holdings: int) -> int:
        """Memory, or what it will be with so many keys and holdings more."""
        num = len(self._references) + max(0, num_holdings - len(self._free))
        rows = self._bits.shape[1]
        bits = self._bits.nbytes // rows * max(rows, num)
        return self._table.num_bytes(num_keys) + bits + HOLDING_BYTES * num

    def _has_room_for(self, num_keys: float) -> bool:
        """Whether they fit wherever they lie: each holding may become two by them."""
        return self._has_room(num_keys, min(int(num_keys), len(self._references)))

    def _has_room(self, num_keys: float, num_holdings: int) -> bool:
        """Memory is never given back, but what was taken before is free to be used again."""
        most = max(self._max_bytes, self.num_bytes)
        return num_keys <= self._table.room and self._num_bytes(num_keys, num_holdings) <= most

    def state(self, place: int) -> Indexed:
        """Return how far a worker is known."""
        known = self._known.get(place)
        return Indexed.SILENT if known is None else known.state

    def num_granules(self, place: int) -> int:
        """Return how many entries name a worker, over all tiers."""
        known = self._known.get(place)
        return 0 if known is None else sum(known.counts)

    # --- what workers tell -----------------------------------------------------------------------

    def asked(self, place: int) -> None:
        """This worker was asked for a snapshot, and what it tells before that counts no more."""
        self.drop(place)
        self._known[place] = _Known()
        if (lacking := (place + 1) // 64 + 1 - self._bits.shape[2]) > 0:
            self._bits = np.pad(self._bits, ((0, 0), (0, 0), (0, lacking)))
            self._number_of = {self._row(number): number for number in self._number_of.values()}

    def drop(self, place: int) -> None:
        """A worker has left: nothing names it any more."""
        if self._known.pop(place, None) is None:
            return
        word, bit = _bit_of(place)
        has_it = np.bitwise_or.reduce(self._bits[:, :, word] & bit, axis=0)
        for number in np.flatnonzero(has_it).tolist():
            self._unnamed(number)
            self._bits[:, number, word] &= ~bit
            if self._bits[:, number].any():
                self._number_of.setdefault(self._row(number), number)
            else:
                # Its entries still have this number: it is free when the sweep has found them all.
                self._dead.add(number)
        for expected in self._expecting:
            if expected.place == place:
                self._forget(expected)

    def apply(self, place: int, changes: KvChanges) -> bool:
        """Take a worker's report; returns whether it has to be asked for a snapshot, once.

        Raises RemoteProtocolError: it names a granule 0, which none is called.
        """
        known = self._known.get(place)
        if known is None:
            return False
        self._sweep()
        if known.state is Indexed.LEFT_OUT and self._has_room_for(
            ROOM * sum(it.num_keys for it in changes.tiers)
        ):
            self.asked(place)
            return True
        if known.state in (Indexed.LEFT_OUT, Indexed.UNPROVED):
            return False
        if changes.is_snapshot:
            if known.has_begun:  # it could not keep up, and begins anew by itself
                self.asked(place)
                known = self._known[place]
            known.has_begun, known.state = True, Indexed.LEARNING
        if not known.has_begun:
            return False
        for tier, change in zip(_TIERS, changes.tiers, strict=True):
            for keys, adds in ((change.stored, True), (change.removed, False)):
                if not len(keys):
                    continue
                while self._dead and not self._has_room_for(adds * len(keys)):
                    self._sweep()  # before one is left out for what another has left behind
                try:
                    self._change(known, tier, place, keys, adds=adds)
                except _NoRoom:
                    self._give_up(place, Indexed.LEFT_OUT)
                    return False
        if not changes.is_whole:
            return False
        if [(it.num_keys, it.digest) for it in changes.tiers] == [
            *zip(known.counts, known.digests, strict=True)
        ]:
            known.state, known.num_unproved = Indexed.KNOWN, 0
            return False
        self.num_resyncs += 1
        if known.num_unproved >= MOST_SNAPSHOTS:
            self._give_up(place, Indexed.UNPROVED)
            return False
        self.asked(place)
        self._known[place].num_unproved = known.num_unproved + 1
        return True

    def _change(
        self, known: _Known, tier: Tier, place: int, keys: Sequence[int], *, adds: bool
    ) -> None:
        """Change who holds these keys; of each tier what was true before stays uncounted.

        Raises _NoRoom: there is none, and nothing has changed."""
        different = dict.fromkeys(keys)
        if 0 in different:  # in the table it would be every free slot
            raise RemoteProtocolError("no granule is called 0", param="kv")
        word, bit = _bit_of(place)

        def after(before: list[int]) -> Moves:
            found = Counter(before)
            num_keys = found[0] if adds else 0
            if not self._has_room(num_keys, len(found)) and not self._has_room(
                num_keys, self._num_new([*found], tier, place, adds=adds)
            ):
                raise _NoRoom
            return {
                number: number
                if bool(self._bits[tier, number, word] & bit) is adds
                else self._moved(number, tier, place, times)
                for number, times in found.items()
            }

        num_flipped, digest = self._table.change([*different], after)
        known.counts[tier] += num_flipped if adds else -num_flipped
        known.digests[tier] ^= digest

    def _num_new(self, numbers: Sequence[int], tier: Tier, place: int, *, adds: bool) -> int:
        """Return how many holdings there must be more for these to be changed so."""
        word, bit = _bit_of(place)
        changing = [it for it in numbers if bool(self._bits[tier, it, word] & bit) is not adds]
        names = (_name_of(self._flipped(number, tier, place)) for number in changing)
        return sum(name not in self._number_of for name in names)

    def _flipped(self, number: int, tier: Tier, place: int) -> Bits:
        """Return a holding's bits, but for whether this place is in it."""
        word, bit = _bit_of(place)
        bits = self._bits[:, number].copy()
        bits[tier, word] ^= bit
        return bits

    def _moved(self, number: int, tier: Tier, place: int, times: int) -> int:
        """Return the holding into which so many entries of another one move: see ``_flipped``."""
        bits = self._flipped(number, tier, place)
        new = self._number_of.get(row := _name_of(bits))
        if new is None:
            new = self._free.pop() if self._free else len(self._references)
            if new == len(self._references):
                self._references.append(0)
            if new == self._bits.shape[1]:
                room = (self._max_bytes - self.num_bytes) // (self._bits.nbytes // new)
                more = np.zeros_like(self._bits[:, : max(1, min(new // 4, room))])
                self._bits = np.concatenate([self._bits, more], axis=1)
            self._bits[:, new], self._number_of[row] = bits, new
            (self._below.add if bits[Tier.HBM + 1 :].any() else self._below.discard)(new)
        self._references[new] += times
        self._unreferenced(number, times)
        return new

    def _unreferenced(self, number: int, times: int) -> None:
        self._references[number] -= times
        if number and not self._references[number]:
            self._unnamed(number)
            self._bits[:, number] = 0  # or a worker that leaves would be taken out of it
            self._dead.discard(number)
            self._free.append(number)

    def _unnamed(self, number: int) -> None:
        """Forget that this is the holding's number: after a worker has left, two may be equal."""
        if self._number_of.get(row := self._row(number)) == number:
            del self._number_of[row]

    def _row(self, number: int) -> bytes:
        return _name_of(self._bits[:, number])

    def _give_up(self, place: int, state: Indexed) -> None:
        self.drop(place)
        known = self._known[place] = _Known()
        known.state, known.has_begun = state, True

    def _sweep(self) -> None:
        if not self._dead:
            return
        is_dead = np.zeros(len(self._references), bool)
        is_dead[list(self._dead)] = True
        gone: Numbers = self._table.sweep(is_dead, SWEPT_ROWS)
        for number, times in zip(*np.unique(gone, return_counts=True), strict=True):
            self._unreferenced(int(number), int(times))

    # --- what decisions ask ----------------------------------------------------------------------

    def match(self, keys: Keys, granule_tokens: int, now: float) -> Holdings:
        """Return what each worker has of a prompt's beginning, or is expected to have: by place.

        keys: of the prompt's granules in order, of workers that tell of such granules.
        """
        numbers = self._table.find_prefix(keys)
        is_end = np.ones(len(numbers) + 1, bool)
        np.not_equal(numbers[1:], numbers[:-1], out=is_end[1:-1])
        ends = is_end.nonzero()[0]
        found = self._follow(numbers.take(ends[:-1]), granule_tokens * ends.astype(np.float64))
        if self._expected:
            self._expect_more(keys, found, ends.tolist(), granule_tokens, now)
        return found

    def _follow(self, runs: Numbers, ends: Column) -> Holdings:
        """Follow the holdings of a prompt from one change to the next; whoever is not in one ends
        before it. ends: of the runs of equal ones in tokens, 0 before them all."""
        in_hbm = self._bits[Tier.HBM].take(runs, axis=0)
        in_pool = np.bitwise_and.accumulate(in_hbm, axis=0)
        if not self._below or self._below.isdisjoint(runs.tolist()):
            tokens = ends.take(_num_runs(in_pool))
            return Holdings(tokens, tokens)
        in_dram, on_ssd = (self._bits[tier].take(runs, axis=0) for tier in (Tier.DRAM, Tier.SSD))
        has = np.bitwise_and.accumulate(in_hbm | in_dram | on_ssd, axis=0)
        below, lengths = has & ~in_hbm, np.diff(ends)
        return Holdings(
            ends.take(_num_runs(has)),
            ends.take(_num_runs(in_pool)),
            (lengths @ _unpacked(below & in_dram), lengths @ _unpacked(below & ~in_dram)),
        )

    def _expect_more(
        self,
        keys: Keys,
        found: Holdings,
        ends: Sequence[int],
        granule_tokens: int,
        now: float,
    ) -> None:
        """Add what is expected behind what was found, which ends at one of ``ends``."""
        while self._expecting and (
            self._expecting[0].due + EXPECTED_S < now
            or len(self._expecting) > EXPECTED_PROMPTS
            or len(self._expected) > EXPECTED_GRANULES
        ):
            self._forget(self._expecting.popleft())
        # The 0 stands behind the last granule: none is called so, and nothing is found there.
        expected, column = self._expected.get, [*keys.tolist(), 0]
        at_ends = [expected(column[end]) for end in ends]
        for place in {it.place for it in at_ends if it is not None}:
            granule = found.num_tokens(place) // granule_tokens
            while (
                (promise := expected(column[granule])) is not None
                and promise.place == place
                and promise.due + EXPECTED_S >= now
            ):
                granule += _num_equal(keys[granule:], promise.keys[granule - promise.first :])
                found.expect(place, granule * granule_tokens, is_there=promise.due <= now)

    def expect(self, place: int, keys: Keys, num_found: int, due: float) -> None:
        """A decision sends a prompt to a worker that has its first so many granules: it will have
        the others when they are ``due``, and its reports will say so soon after."""
        if num_found >= len(keys) or place not in self._known:
            return
        promise = _Expected(place, num_found, keys[num_found:], due)
        self._expecting.append(promise)
        self._expected.update(dict.fromkeys(promise.keys.tolist(), promise))

    def holders(self, key: int) -> list[int]:
        """Return the places of the workers that told of a granule, in whatever tier."""
        number = self._table.find(np.array([key], np.uint64))
        (bits,) = _unpacked(np.bitwise_or.reduce(self._bits[:, number], axis=0))
        return bits.nonzero()[0].tolist()

    def _forget(self, promise: _Expected) -> None:
        for key in promise.keys.tolist():
            # A later decision may expect the same granule, of this worker or another.
            if self._expected.get(key) is promise:
                del self._expected[key]


def _name_of(bits: Bits) -> bytes:
    """Return a holding's name, which is shorter than its bits are with a thousand workers."""
    return blake2b(bits.tobytes(), digest_size=16).digest()


def _bit_of(place: int) -> tuple[int, np.uint64]:
    """Return the word of a place, and its bit there."""
    return place // 64, np.uint64(1 << place % 64)


def _num_equal(some: Keys, others: Keys) -> int:
    """Return how many leading keys are the same: at least one, the key that was looked up."""
    num = min(len(some), len(others))
    differ = some[:num] != others[:num]
    return max(1, int(differ.argmax()) if differ.any() else num)


def _unpacked(bits: Bits) -> NDArray[np.uint8]:
    """Return a column for each place instead of a bit."""
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")


def _num_runs(bits: Bits) -> NDArray[Any]:
    """Return of each place in how many of these rows it is."""
    return np.add.reduce(_unpacked(bits), axis=0, dtype=np.uint8 if len(bits) < 256 else np.uint32)


def column_of(hashes: list[bytes]) -> Keys:
    """Return the keys of a prompt's granules, whose hashes these are."""
    # The first 8 of a hash's 32 bytes; 0 is no granule's name.
    return np.maximum(np.frombuffer(b"".join(hashes), "<u8")[::4], 1)
