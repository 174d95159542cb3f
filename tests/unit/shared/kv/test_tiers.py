"""Who gives way in a tier, and which blocks are copied down."""

from __future__ import annotations

import pytest

from shared.errors import InvariantViolated, LocalProtocolError
from shared.kv.events import BlockRemoved, BlockStored
from shared.kv.tiers import CachePolicy, SlotState, SlotTier, WriteBehind


def put(tier: SlotTier, *keys: bytes) -> None:
    for key in keys:
        if tier.begin_store(key, int(key)) is not None:
            tier.end_store(key, is_written=True)


@pytest.mark.parametrize(
    ("policy", "gone"),
    [(CachePolicy.LRU, b"1"), (CachePolicy.LFU, b"2"), (CachePolicy.LENGTH_AWARE, b"3")],
)
def test_each_policy_gives_up_another(policy: CachePolicy, gone: bytes) -> None:
    """Used longest ago; least often, of those the oldest; least often, of those the longest."""
    tier = SlotTier(3, policy)
    put(tier, b"1", b"1", b"2", b"3")
    put(tier, b"4")
    assert [key for key in (b"1", b"2", b"3") if key not in tier] == [gone]


def test_a_slot_under_a_move_is_never_given_away() -> None:
    """While every slot is written or read, a newcomer gets none."""
    tier = SlotTier(2)
    put(tier, b"1")
    tier.begin_load([b"1"])
    assert tier.begin_store(b"2", 2) is not None
    assert (tier.state(b"1"), tier.state(b"2")) == (SlotState.LOADING, SlotState.STORING)
    assert tier.begin_store(b"3", 3) is None
    tier.end_load([b"1"])
    assert tier.begin_store(b"3", 3) == 0
    assert b"1" not in tier


def test_only_what_is_stored_can_be_read() -> None:
    """A chain is found up to its first gap, and asking for more is a mistake."""
    tier = SlotTier(4)
    put(tier, b"1", b"3")
    assert tier.num_found([b"1", b"2", b"3"]) == 1
    with pytest.raises(LocalProtocolError):
        tier.begin_load([b"1", b"2"])
    with pytest.raises(LocalProtocolError):
        tier.end_load([b"1"])
    with pytest.raises(LocalProtocolError):
        tier.end_store(b"1", is_written=True)
    with pytest.raises(LocalProtocolError):
        SlotTier(0)


def test_damage_goes_when_its_last_reader_has() -> None:
    """Bytes that are not those that were written are found by nobody, and their slot is used again
    only when nobody reads it."""
    tier = SlotTier(1)
    put(tier, b"1")
    tier.begin_load([b"1"])
    tier.begin_load([b"1"])
    tier.end_load([b"1"], bad=[b"1"])
    assert tier.num_found([b"1"]) == 0
    assert tier.begin_store(b"2", 2) is None
    tier.end_load([b"1"])
    assert tier.begin_store(b"2", 2) == 0


@pytest.mark.parametrize(
    ("slot", "num_free"), [(2, 2), (2, 1), (1, 2), (0, 0)], ids=["more", "beyond", "twice", "lost"]
)
def test_a_slot_that_is_none_is_noticed(slot: int, num_free: int) -> None:
    """Each of a tier's slots is counted once, and nothing lies beyond its room, whether another is
    missing for it or not."""
    tier = SlotTier(2)
    tier.restore([(0, b"1", 1)])
    tier.check_integrity()
    (entry,) = tier._entries.values()
    entry.slot, tier._free = slot, [0, 1][:num_free]
    with pytest.raises(InvariantViolated):
        tier.check_integrity()


def test_parents_are_copied_before_what_continues_them() -> None:
    """Blocks become idle from the last to the first; they are stored from the first to the last,
    those nobody could find not at all, and what was evicted before its turn is counted."""
    queue, tier = WriteBehind(), SlotTier(8)
    queue(BlockStored(b"a", 0, 2))
    queue(BlockStored(b"b", 1, 4, b"a"))
    queue(BlockStored(b"z", 2, 6, b"y"))
    for block in (2, 1, 0):
        queue.idle(block)
    assert [event.key for event, _ in queue.take(tier, 1)] == [b"a"]
    assert [event.key for event, _ in queue.take(tier, 8)] == [b"b"]
    assert (len(queue), queue.num_lost) == (0, 1)
    queue(BlockStored(b"c", 3, 2))
    queue.idle(3)
    queue(BlockRemoved(b"c", 3))
    assert (queue.take(tier, 8), queue.num_lost) == ([], 2)
