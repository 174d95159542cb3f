"""What the index finds of a prompt: where it lies, and what is only expected."""

from __future__ import annotations

from functools import reduce
from operator import xor

import numpy as np
import pytest

from services.gateway.core.index.fetches import Hit
from services.gateway.core.index.key_table import Keys
from services.gateway.core.index.prefix_index import EXPECTED_GRANULES, PrefixIndex
from services.gateway.core.index.prefixes import Indexed
from shared.errors import RemoteProtocolError
from shared.kv.journal import KvChanges, TierChanges

KEYS = np.arange(1, 9, dtype=np.uint64)
"""Of a prompt of eight granules."""


def tell(index: PrefixIndex, place: int, *tiers: Keys) -> None:
    """A worker tells what lies in each tier."""
    index.asked(place)
    changes = [
        TierChanges(keys.tolist(), [], len(keys), reduce(xor, keys.tolist(), 0)) for keys in tiers
    ]
    changes += [TierChanges([], [], 0, 0)] * (3 - len(changes))
    assert not index.apply(place, KvChanges(True, True, tuple(changes)))


def tell_all(index: PrefixIndex, place: int, keys: Keys) -> None:
    """The same in reports of a hundred, as a worker that computes."""
    index.asked(place)
    for first in range(0, len(keys), 100):
        told, some = keys[: first + 100].tolist(), keys[first : first + 100].tolist()
        change = TierChanges(some, [], len(told), reduce(xor, told, 0))
        index.apply(place, KvChanges(not first, True, (change, *[TierChanges([], [], 0, 0)] * 2)))


def test_a_worker_that_never_proves_equal_is_asked_no_more_until_it_joins_anew() -> None:
    """Snapshot after snapshot would cost both sides for ever; what it told counts for nothing."""
    index = PrefixIndex(1 << 16)
    index.asked(0)
    nothing = (TierChanges([], [], 0, 0),) * 2
    snapshot = KvChanges(True, True, (TierChanges([5], [], 1, 6), *nothing))
    asked = [index.apply(0, snapshot) for _ in range(8)]
    assert (asked, index.state(0)) == ([True] * 3 + [False] * 5, Indexed.UNPROVED)
    assert (index.num_granules(0), index.num_resyncs) == (0, 4)
    tell(index, 0, KEYS)
    assert index.state(0) is Indexed.KNOWN


def test_one_that_proves_equal_between_is_asked_as_often_as_it_differs() -> None:
    """A difference now and then is what snapshots are for."""
    index = PrefixIndex(1 << 16)
    nothing = (TierChanges([], [], 0, 0),) * 2
    for _ in range(8):
        index.asked(0)
        for digest, differs in ((6, True), (5, False)):
            snapshot = KvChanges(True, True, (TierChanges([5], [], 1, digest), *nothing))
            assert index.apply(0, snapshot) is differs
    assert index.state(0) is Indexed.KNOWN


def test_a_worker_that_was_left_out_is_asked_again_when_there_is_room() -> None:
    """Its reports say how much it has; they are all that comes of it meanwhile."""
    index, keys = PrefixIndex(1 << 16), np.arange(1, 1801, dtype=np.uint64)
    tell_all(index, 0, keys)
    tell_all(index, 1, keys + np.uint64(5000))
    assert (index.state(0), index.state(1)) == (Indexed.KNOWN, Indexed.LEFT_OUT)
    own = (keys + np.uint64(5000)).tolist()
    nothing = (TierChanges([], [], 0, 0),) * 2
    report = KvChanges(False, True, (TierChanges([], [], len(own), reduce(xor, own)), *nothing))
    assert not index.apply(1, report)
    index.drop(0)
    index.asked(2)
    index.apply(2, KvChanges(True, True, (TierChanges([], [], 0, 0), *nothing)))  # and sweeps
    assert index.apply(1, report)
    tell_all(index, 1, keys + np.uint64(5000))
    assert index.state(1) is Indexed.KNOWN


def test_nobody_is_left_out_for_what_another_left_behind() -> None:
    """What is left over from a worker that was left out makes room for the others; else all of them
    would follow, and with nobody left to sweep it would stand there for ever."""
    index = PrefixIndex(1 << 16)
    keys = np.arange(1, 6001, dtype=np.uint64)
    tell_all(index, 0, keys[:1800])
    tell_all(index, 1, keys[3000:4800])
    tell_all(index, 0, keys[:6000])
    assert (index.state(0), index.state(1)) == (Indexed.LEFT_OUT, Indexed.LEFT_OUT)
    tell_all(index, 2, keys[:2500])
    assert (index.state(2), index.num_granules(2)) == (Indexed.KNOWN, 2500)


def test_each_tier_is_counted_and_what_can_be_sent_is_what_leads_in_the_pool() -> None:
    """A block in two tiers counts in the faster; one that lacks ends the prefix."""
    index = PrefixIndex(1 << 16)
    tell(index, 0, KEYS[:5])
    tell(index, 1, KEYS[:2], KEYS[:6], KEYS[4:])
    tell(index, 2, KEYS[[0, 1, 2, 4, 5]])
    tell(index, 5, KEYS[1:])
    tell(index, 7, KEYS[3:], KEYS[:3])
    assert index.match(KEYS, 10, 0.0) == {
        0: Hit(50, 50),
        1: Hit(80, 20, 40, 20),
        2: Hit(30, 30),
        7: Hit(80, 0, 30, 0),
    }


def test_what_is_expected_counts_but_is_not_in_the_pool() -> None:
    """From when it is predicted to be computed it can be sent, until its time is over; behind what
    the worker has, and of nobody else."""
    index = PrefixIndex(1 << 16)
    tell(index, 0, KEYS[:3])
    tell(index, 1, KEYS[:0])
    index.expect(0, KEYS, 3, due=3.0)
    assert index.match(KEYS, 10, 1.0) == {0: Hit(80, 30)}
    assert index.match(KEYS[:6], 10, 3.0) == {0: Hit(60, 60)}
    assert index.match(KEYS, 10, 5.0) == {0: Hit(80, 80)}
    assert index.match(KEYS, 10, 5.1) == {0: Hit(30, 30)}
    index.expect(1, KEYS[:2], 0, due=7.0)
    assert index.match(KEYS, 10, 6.0) == {0: Hit(30, 30), 1: Hit(20, 0)}


def test_long_prompts_that_are_expected_take_no_more_memory_than_short_ones() -> None:
    """The oldest promises go, however long the queue is."""
    index = PrefixIndex(1 << 16)
    tell(index, 0, KEYS[:0])
    prompt = KEYS
    for number in range(300):
        prompt = np.arange(1000 * number + 1, 1000 * number + 1001, dtype=np.uint64)
        index.match(prompt, 10, 0.0)
        index.expect(0, prompt, 0, due=3600.0)
    assert index.match(prompt, 10, 0.0) == {0: Hit(10_000, 0)}
    assert len(index._expected) <= EXPECTED_GRANULES


@pytest.mark.parametrize("in_one_report", [True, False])
def test_memory_is_bounded_however_prefixes_are_spread(in_one_report: bool) -> None:
    """Where every granule lies with other workers than the next, what stands for these is most of
    the memory: whoever would make it more, by one report, too, is left out."""
    index = PrefixIndex(1 << 18)
    numbers = np.random.default_rng(1)
    keys = numbers.integers(1, 1 << 63, 4000, dtype=np.uint64)
    for place in range(32):
        told = keys[numbers.random(len(keys)) < 0.5]
        if in_one_report:
            tell(index, place, told)
        else:
            tell_all(index, place, told)
        assert index.num_bytes <= 1 << 18
    states = [index.state(place) for place in range(32)]
    assert Indexed.KNOWN in states
    assert Indexed.LEFT_OUT in states
    known = states.index(Indexed.KNOWN)
    removed = keys[numbers.random(len(keys)) < 0.5].tolist()
    index.apply(known, KvChanges(False, False, (TierChanges([], removed, 0, 0),) * 3))
    assert index.num_bytes <= 1 << 18


def test_one_that_was_left_out_for_its_spread_prefixes_is_not_asked_at_each_report() -> None:
    """Its snapshot would not fit the next time either, however few its granules are."""
    index = PrefixIndex(1 << 18)
    numbers = np.random.default_rng(1)
    keys = numbers.integers(1, 1 << 63, 4000, dtype=np.uint64)
    places = range(16)
    for place in places:
        tell(index, place, keys[numbers.random(len(keys)) < 0.5])
    out = next(place for place in places if index.state(place) is Indexed.LEFT_OUT)
    report = KvChanges(
        False, True, (TierChanges([], [], 2000, 1), *[TierChanges([], [], 0, 0)] * 2)
    )
    assert [index.apply(out, report) for _ in range(8)] == [False] * 8


def test_in_a_full_index_workers_may_let_go_of_what_they_have() -> None:
    """That makes room: nobody is left out for it."""
    index = PrefixIndex(1 << 16)
    keys = np.random.default_rng(1).integers(1, 1 << 63, 3000, dtype=np.uint64)
    num = max(num for num in range(2000, 3000, 5) if _fits(PrefixIndex(1 << 16), keys[:num]))
    tell(index, 0, keys[:num])
    gone, left = keys[:10].tolist(), keys[10:num].tolist()
    change = TierChanges([], gone, len(left), reduce(xor, left))
    index.apply(0, KvChanges(False, True, (change, *[TierChanges([], [], 0, 0)] * 2)))
    assert (index.state(0), index.num_granules(0)) == (Indexed.KNOWN, num - 10)


def _fits(index: PrefixIndex, keys: Keys) -> bool:
    tell(index, 0, keys)
    return index.state(0) is Indexed.KNOWN


@pytest.mark.parametrize("tells", ["stored", "removed"])
def test_a_forged_granule_changes_nothing(tells: str) -> None:
    """0 is no key but a free slot: who names it is refused, and the others' prefixes stay."""
    index = PrefixIndex(1 << 16)
    tell(index, 1, KEYS)
    index.asked(0)
    change = TierChanges([], [], 0, 0)._replace(**{tells: [0, 5]})
    with pytest.raises(RemoteProtocolError):
        index.apply(0, KvChanges(True, True, (change,) * 3))
    assert (len(index), index.num_granules(0), index.num_granules(1)) == (8, 0, 8)
    assert index.match(KEYS, 10, 0.0) == {1: Hit(80, 80)}
