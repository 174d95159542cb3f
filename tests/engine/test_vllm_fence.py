"""The fence between leases, over pools that are laid out as vLLM's on a CPU are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.vllm.pools import HostPools
from tests.support.loopback import LoopbackFabric
from tests.support.no_fence import take_fence_away
from tests.support.stamped_kv import StampedKv, stamps
from tests.support.tiers import few
from tests.support.transfer_ends import SLOW_WIRE, running_ends, storm
from tests.support.virtual_loop import virtual_time

pytestmark = pytest.mark.torch


class VllmKv(StampedKv):
    """Stamped words in vLLM's blocks: keys transposed, values behind them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        shape = (self.num_blocks, 1, self.block_size, 2 * self.layout.head_dim)
        pools = [torch.zeros(shape, dtype=torch.uint8) for _ in range(self.layout.num_layers)]
        self._pools = HostPools([pools], self.layout, self.block_size)

    def stamp(self, table: Sequence[int], start: int, stop: int, layer: int, request: int) -> None:
        """See StampedKv."""
        words = stamps(request, start, stop, layer, layer + 1)[..., None]
        self.scatter(
            table,
            start,
            stop,
            layer,
            layer + 1,
            np.broadcast_to(words, self._shape(start, stop, 1)).tobytes(),
        )

    def num_foreign(self, table: Sequence[int], start: int, stop: int, request: int) -> int:
        """See StampedKv."""
        num_layers = self.layout.num_layers
        found = np.zeros(self._shape(start, stop, num_layers), np.uint64)
        self.gather(table, start, stop, 0, num_layers, found)
        return int((found != stamps(request, start, stop, 0, num_layers)[..., None]).sum())

    def gather(
        self, table: Sequence[int], start: int, stop: int, first: int, last: int, out: Any
    ) -> None:
        """See Engine."""
        self._pools.gather(self._slots(table, start, stop), first, last, out)

    def scatter(
        self, table: Sequence[int], start: int, stop: int, first: int, last: int, data: Any
    ) -> None:
        """See Engine."""
        self._pools.scatter(self._slots(table, start, stop), first, last, data)

    def _shape(self, start: int, stop: int, num_layers: int) -> tuple[int, ...]:
        return num_layers, 2, stop - start, self.layout.head_dim // 8


@pytest.mark.parametrize("has_fence", [True, False])
@pytest.mark.parametrize("has_windows", few([False, True], True))
@virtual_time
async def test_late_writes_reach_nobodys_blocks_but_without_the_fence(
    has_windows: bool, has_fence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wire that writes on after a cancel: with the fence no foreign KV, without it some."""
    if not has_fence:
        take_fence_away(monkeypatch)
    options: dict[str, Any] = {"prefill_blocks": 32, "decode_blocks": 16, "num_slots": 3}
    fabric = LoopbackFabric(replace(SLOW_WIRE, has_windows=has_windows))
    async with running_ends(fabric.open, kv=VllmKv, **options) as ends:
        await storm(ends, count=150, seed=3)
        assert (ends.decode.num_foreign > 0) is not has_fence
        if has_fence:
            assert ends.decode.book.num_quarantined > 5
            ends.check_all_home()
