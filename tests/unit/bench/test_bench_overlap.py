"""The modelled engine of bench/overlap: when it says that a layer's KV is written."""

from __future__ import annotations

import pytest

from bench.overlap.engine import ModelledEngine


class _Logged(ModelledEngine):
    """Writes down its products instead of computing them."""

    def __init__(self, kv_share: float, log: list[str]) -> None:
        super().__init__(num_layers=2, num_tokens=16, seed=None, kv_share=kv_share)
        self.products_per_layer = 20
        self.log = log

    def _multiply(self, times: int) -> None:
        self.log.append(f"{times} products")


@pytest.mark.parametrize(
    ("kv_share", "layer"),
    [(0.15, ["3 products", "KV", "17 products"]), (1.0, ["20 products", "KV"])],
)
def test_kv_is_told_of_after_its_share_of_a_layer(kv_share: float, layer: list[str]) -> None:
    """Attention and MLP follow; at 1 nothing does."""
    log: list[str] = []
    _Logged(kv_share, log).step([], lambda _: log.append("KV"))
    assert log == layer * 2
