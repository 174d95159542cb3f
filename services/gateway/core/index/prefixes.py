"""What this gateway asks workers of their prefixes, and what it makes of the answers.

The index is made, and numpy with it imported, when there is a choice for the first time: with one
worker for prompts nobody is asked for anything, and no prompt is hashed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from services.gateway.core.index.hot_prefixes import HotPrefix, HotPrefixes
from services.gateway.core.worker import Role, Worker
from shared.ids import Incarnation
from shared.kv.journal import KvChanges, stride_of
from shared.kv.prefix_hash import UNIT, prefix_hashes, root_hash

if TYPE_CHECKING:
    from services.gateway.core.index.holdings import Holdings
    from services.gateway.core.index.key_table import Keys
    from services.gateway.core.index.prefix_index import PrefixIndex


class Indexed(StrEnum):
    """How far the index knows a worker."""

    SILENT = "silent"  # it tells nothing, or not yet; one of an older release never will
    LEARNING = "learning"  # a snapshot is on its way
    KNOWN = "known"  # at its last report the index was equal to its pool
    LEFT_OUT = "left out"  # --index-memory-mib is full; asked again when there is room
    UNPROVED = "unproved"  # snapshot after snapshot was wrong: nothing that it tells counts


class PrefixReports(NamedTuple):
    """What workers are asked for. granule_tokens: prefixes that end at its multiples. interval_s:
    least time between two reports of changes."""

    granule_tokens: int
    interval_s: float


SIZES = (
    (64, PrefixReports(UNIT, 0.05)),
    (256, PrefixReports(2 * UNIT, 0.15)),
    (1024, PrefixReports(2 * UNIT, 0.5)),
)
"""By the most workers of prompts: it hears some 2,000 reports a second, however many tell."""


class HashedPrompt:
    """A prompt's prefixes, hashed once, however many attempts ask. column: its tokens as
    little-endian u32. salt: the tenant's."""

    __slots__ = ("column", "keys", "salt")

    def __init__(self, column: bytes, salt: bytes) -> None:
        self.column = column
        self.salt = salt
        self.keys: dict[int, Keys] = {}
        """Those of its granules, by their tokens, as far as somebody has asked."""

    def has(self, num_tokens: int) -> bool:
        """Whether it has so many tokens."""
        return len(self.column) >= 4 * num_tokens

    def hashes(self, model_key: bytes, every: int) -> list[bytes]:
        """Return the hashes of its prefixes of so many tokens, twice, three times as many..."""
        return prefix_hashes(root_hash(model_key, self.salt), self.column, every)


class Prefixes:
    """The index, and who has been asked for what. max_bytes: see ``PrefixIndex``. of_everybody: of
    workers for answers, too, whose caches others may fetch from."""

    def __init__(self, max_bytes: int, *, of_everybody: bool = False) -> None:
        self._hot = HotPrefixes()
        self._max_bytes = max_bytes
        self._of_everybody = of_everybody
        self.index: PrefixIndex | None = None
        self._asked = SIZES[0][1]
        self._workers: dict[Incarnation, Worker] = {}
        self._model_key = b""
        self.to_ask: set[Incarnation] = set()
        self._strides: dict[int, set[int]] = {}

    def known(self, worker: Worker) -> tuple[Indexed, int] | None:
        """Return how far a worker is known, and how many of its prefixes; None = nobody asks it."""
        if self.index is None or worker.incarnation not in self._workers:
            return None
        return self.index.state(worker.place), self.index.num_granules(worker.place)

    def take_ask(self, incarnation: Incarnation) -> PrefixReports | None:
        """Return what a worker is to be asked for now; None = nothing new."""
        if incarnation not in self.to_ask:
            return None
        self.to_ask.discard(incarnation)
        return self._asked

    def joined(self, worker: Worker) -> bool:
        """A worker is here, perhaps anew, or has reported that it computes prompts, too; returns
        whether anybody is to be asked."""
        if self._workers.get(worker.incarnation) is worker:
            return False
        # The entry that a rejoin has replaced, if there is one: this one tells everything anew.
        self.left(worker)
        computes_prompts = Role.PREFILL in worker.serves or worker.is_colocated
        if not (computes_prompts or self._of_everybody):
            return False
        self._workers[worker.incarnation] = worker
        self._model_key = worker.model.fingerprint + worker.layout.digest  # of all the same
        num = len(self._workers)
        if num < 2 and self.index is None:
            return False
        size = next((asked for most, asked in SIZES if num <= most), SIZES[-1][1])
        # Only ever more sparsely: those that stay are not asked again because others have left.
        everybody = self.index is None or size.interval_s > self._asked.interval_s
        if self.index is None:
            from services.gateway.core.index.prefix_index import PrefixIndex

            self.index = PrefixIndex(self._max_bytes)
        if everybody:
            self._asked = size
        for each in list(self._workers.values()) if everybody else [worker]:
            self.index.asked(each.place)
            self.to_ask.add(each.incarnation)
        self._group()
        return True

    def left(self, worker: Worker) -> None:
        """It is not here any more."""
        self.to_ask.discard(worker.incarnation)
        if self._workers.pop(worker.incarnation, None) is not None:
            self._group()
            if self.index is not None:
                self.index.drop(worker.place)

    def _group(self) -> None:
        """Sort the workers by the strides of what they tell, and by place."""
        self._strides = {}
        for worker in self._workers.values():
            self._strides.setdefault(self._stride(worker), set()).add(worker.place)

    def _stride(self, worker: Worker) -> int:
        return stride_of(self._asked.granule_tokens, worker.block_size)

    def told(self, worker: Worker, changes: KvChanges) -> bool:
        """A worker told what it has; returns whether it is to be asked again."""
        if self.index is None or worker.incarnation not in self._workers:
            return False
        is_asked = self.index.apply(worker.place, changes)
        if is_asked:
            self.to_ask.add(worker.incarnation)
        return is_asked

    # --- one prompt ------------------------------------------------------------------------------

    def found(self, prompt: HashedPrompt, now: float) -> Holdings | None:
        """Return what each worker has of a prompt. None = nobody looks: one worker is no choice,
        and of a prompt shorter than a granule no worker tells."""
        index = self.index
        if index is None or len(self._workers) < 2 or not prompt.has(min(self._strides)):
            return None
        found = {
            stride: index.match(self._keys(prompt, stride), stride, now) for stride in self._strides
        }
        if len(found) == 1:
            return found.popitem()[1]
        from services.gateway.core.index.holdings import Holdings

        # Who tells of finer granules is found by coarser ones, too, but with less: each by its own.
        return Holdings.of(
            {
                place: hit
                for stride, places in self._strides.items()
                for place, hit in found[stride].items()
                if place in places
            }
        )

    def sent(
        self, prompt: HashedPrompt, worker: Worker, num_cached: int, due: float, now: float
    ) -> None:
        """The prompt goes to this worker, which has so many tokens of it, and the rest by then."""
        if self.index is None or len(self._workers) < 2:
            return
        if prompt.has(finest := min(self._strides)):
            self._hot.asked(self._keys(prompt, finest).tolist(), finest, now)
        if worker.incarnation in self._workers and prompt.has(stride := self._stride(worker)):
            keys = self._keys(prompt, stride)
            self.index.expect(worker.place, keys, num_cached // stride, due)

    def hottest(self, most: int) -> list[tuple[HotPrefix, int]]:
        """Return the prefixes by which most tokens come again, each with the number of workers that
        have it."""
        index = self.index
        if index is None:
            return []
        return [(it, len(index.holders(it.key))) for it in self._hot.hottest(most)]

    def _keys(self, prompt: HashedPrompt, stride: int) -> Keys:
        keys = prompt.keys.get(stride)
        if keys is None:
            from services.gateway.core.index.prefix_index import column_of

            keys = prompt.keys[stride] = column_of(prompt.hashes(self._model_key, stride))
        return keys
