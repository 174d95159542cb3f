"""Which slot of a tier below the pool holds the KV of which prefix, and what is on its way there.

Pure: whoever copies says when a copy has begun and ended. A slot is free, being written (STORING),
findable (THERE), or findable and being read (LOADING); only a findable one that nobody reads gives
way to another. Blocks are copied *behind* their use: one that becomes idle in the pool is queued,
and evicting it only forgets it. So no eviction ever waits for a copy, and what was not copied in
time is lost, and counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from shared.errors import InvariantViolated, LocalProtocolError
from shared.kv.events import BlockStored, KvEvent

OnPresence = Callable[[bytes, int, bool], None]
"""Told of a key, the tokens of its prefix, and whether it can be found from now on, or no more."""


class CachePolicy(StrEnum):
    """Which findable slot gives way: the one used longest ago; the one used least often; of those
    used equally often the one whose prefix is longest (Mooncake's LengthAware). Ties: oldest."""

    LRU = "lru"
    LFU = "lfu"
    LENGTH_AWARE = "length-aware"


class SlotState(StrEnum):
    """What is done with a slot that somebody has."""

    STORING = "storing"
    THERE = "there"
    LOADING = "loading"


@dataclass(slots=True)
class _TierSlot:
    slot: int
    end: int
    rank: tuple[int, int, int] = (0, 0, 0)
    uses: int = 0
    num_readers: int = 0
    is_stored: bool = False
    is_bad: bool = False

    @property
    def state(self) -> SlotState:
        if not self.is_stored:
            return SlotState.STORING
        return SlotState.LOADING if self.num_readers else SlotState.THERE


class SlotTier:
    """The slots of one tier. on_presence: see ``OnPresence``; returns at once."""

    def __init__(
        self,
        num_slots: int,
        policy: CachePolicy = CachePolicy.LRU,
        on_presence: OnPresence = lambda key, end, is_there: None,
    ) -> None:
        if num_slots < 1:
            raise LocalProtocolError("a tier needs at least one slot")
        self.num_slots = num_slots
        self._policy = policy
        self._on_presence = on_presence
        self._entries: dict[bytes, _TierSlot] = {}
        self._free = list(reversed(range(num_slots)))
        self._order: list[tuple[tuple[int, int, int], bytes]] = []  # a heap; old ranks are skipped
        self._clock = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def state(self, key: bytes) -> SlotState | None:
        """Return what is done with a key's slot; None: it has none."""
        entry = self._entries.get(key)
        return None if entry is None else entry.state

    # --- writing ---------------------------------------------------------------------------------

    def begin_store(self, key: bytes, end: int) -> int | None:
        """Return the slot that the KV of a prefix of ``end`` tokens is to be written to, or None:
        it has one already (which counts as a use), or every slot is being read or written."""
        entry = self._entries.get(key)
        if entry is not None:
            self._use(key, entry)
            return None
        slot = self._free.pop() if self._free else self._evict()
        if slot is None:
            return None
        self._entries[key] = _TierSlot(slot, end)
        return slot

    def end_store(self, key: bytes, *, is_written: bool) -> None:
        """The copy is over; if it was not written, the slot is free."""
        entry = self._entries[key]
        if entry.is_stored:
            raise LocalProtocolError("this prefix was stored before")
        if not is_written:
            self._free.append(self._entries.pop(key).slot)
            return
        entry.is_stored = True
        self._use(key, entry)
        self._on_presence(key, entry.end, True)

    def restore(self, kept: Iterable[tuple[int, bytes, int]]) -> None:
        """Free slots have KV from before, each of the prefix of this key and so many tokens; those
        used longest ago come first. Of two with one key the last counts."""
        slots = {key: (slot, end) for slot, key, end in kept}
        taken = {slot for slot, _ in slots.values()}
        self._free = [slot for slot in self._free if slot not in taken]
        for key, (slot, end) in slots.items():
            self._entries[key] = _TierSlot(slot, end)
            self.end_store(key, is_written=True)

    # --- reading ---------------------------------------------------------------------------------

    def num_found(self, keys: Sequence[bytes], start: int = 0) -> int:
        """Return how many of the chain's keys, from number ``start`` on, can be read. Changes
        nothing."""
        for idx in range(start, len(keys)):
            entry = self._entries.get(keys[idx])
            if entry is None or not entry.is_stored or entry.is_bad:
                return idx - start
        return len(keys) - start

    def begin_load(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of keys that were found; they stay until ``end_load`` of the same."""
        if self.num_found(keys) < len(keys):
            raise LocalProtocolError("only what is found can be loaded")
        for key in keys:
            self._entries[key].num_readers += 1
        return [self._entries[key].slot for key in keys]

    def end_load(self, keys: Sequence[bytes], *, bad: Sequence[bytes] = ()) -> None:
        """The copies are over. bad: keys whose bytes are not those that were written: they go as
        soon as nobody reads them. No use: that is counted when the block becomes idle in the pool,
        as that of a block which was there already."""
        for key in keys:
            entry = self._entries[key]
            if not entry.num_readers:
                raise LocalProtocolError("nobody reads this prefix")
            entry.num_readers -= 1
            if key in bad and not entry.is_bad:
                entry.is_bad = True
                self._on_presence(key, entry.end, False)
            if entry.is_bad and not entry.num_readers:
                self._free.append(self._entries.pop(key).slot)

    # --- who gives way ---------------------------------------------------------------------------

    def _use(self, key: bytes, entry: _TierSlot) -> None:
        self._clock += 1
        entry.uses += 1
        uses = 0 if self._policy is CachePolicy.LRU else entry.uses
        length = entry.end if self._policy is CachePolicy.LENGTH_AWARE else 0
        entry.rank = (uses, -length, self._clock)
        heapq.heappush(self._order, (entry.rank, key))
        if len(self._order) > 4 * self.num_slots + 64:
            # Each use leaves an old rank behind: now and then the heap is made anew.
            self._order = [(it.rank, name) for name, it in self._entries.items()]
            heapq.heapify(self._order)

    def _evict(self) -> int | None:
        passed: list[tuple[tuple[int, int, int], bytes]] = []
        slot: int | None = None
        while self._order and slot is None:
            rank, key = item = heapq.heappop(self._order)
            entry = self._entries.get(key)
            if entry is None or entry.rank != rank:
                continue
            if entry.state is not SlotState.THERE:
                passed.append(item)
                continue
            del self._entries[key]
            self._on_presence(key, entry.end, False)
            slot = entry.slot
        for item in passed:
            heapq.heappush(self._order, item)
        return slot

    # --- looking at it ---------------------------------------------------------------------------

    @property
    def num_moving(self) -> int:
        """Slots that are being written or read."""
        return sum(it.state is not SlotState.THERE for it in self._entries.values())

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every slot is free or somebody's, once."""
        slots = sorted([*self._free, *(it.slot for it in self._entries.values())])
        if slots != list(range(self.num_slots)):
            raise InvariantViolated(f"of {self.num_slots} slots of a tier {len(slots)} are counted")
        ranked = set(self._order)
        if any(it.is_stored and (it.rank, key) not in ranked for key, it in self._entries.items()):
            raise InvariantViolated("a prefix of a tier would never give way")


class WriteBehind:
    """Blocks of the pool that are to be copied down: a ``KvListener`` of it.

    A block is queued when it becomes idle, and forgotten when it is evicted before its turn: so the
    pool bounds the queue, however slow the copies are.
    """

    def __init__(self) -> None:
        self._cached: dict[int, BlockStored] = {}
        self._keys: set[bytes] = set()
        self._queued: set[int] = set()
        self._order: list[tuple[int, int]] = []  # a heap of ends and blocks; old ones are skipped
        self.num_lost = 0

    def __len__(self) -> int:
        return len(self._queued)

    def __call__(self, event: KvEvent) -> None:
        """Take what the pool tells."""
        if isinstance(event, BlockStored):
            self._cached[event.block] = event
            self._keys.add(event.key)
        else:
            del self._cached[event.block]
            self._keys.remove(event.key)
            if event.block in self._queued:
                self._queued.remove(event.block)
                self.num_lost += 1

    def idle(self, block: int) -> None:
        """Nobody holds this cached block any more."""
        event = self._cached.get(block)
        if event is None or block in self._queued:
            return
        self._queued.add(block)
        heapq.heappush(self._order, (event.end, block))
        if len(self._order) > 2 * len(self._queued) + 64:
            self._order = [(self._cached[it].end, it) for it in self._queued]
            heapq.heapify(self._order)

    def forget(self, blocks: Iterable[int]) -> None:
        """These came from the tier: they need not go there."""
        self._queued.difference_update(blocks)

    def take(self, tier: SlotTier, most: int) -> list[tuple[BlockStored, int]]:
        """Take so many blocks off the queue, and return those that are not in the tier yet, each
        with the slot that it is to be written to; parents before what continues them.

        A block whose parent is in neither place is dropped: nobody could find it.
        """
        batch: list[tuple[BlockStored, int]] = []
        while self._order and most:
            end, block = heapq.heappop(self._order)
            if block not in self._queued or self._cached[block].end != end:
                continue
            most -= 1
            event = self._cached[block]
            self._queued.remove(block)
            if event.parent and event.parent not in self._keys and event.parent not in tier:
                self.num_lost += 1
                continue
            slot = tier.begin_store(event.key, event.end)
            if slot is not None:
                batch.append((event, slot))
        return batch
