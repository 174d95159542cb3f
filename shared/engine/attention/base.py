"""The contract between the decoder and attention over paged KV.

A backend is asked three things per step and layer, in this order: ``plan`` once per step, then for
every layer ``store`` and ``attend``. It keeps nothing between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from shared.engine.batch import StepBatch
from shared.engine.memory.paged_kv import PagedKv


class AttentionBackend(Protocol):
    """Paged attention on one kind of device.

    has_static_plans: what it does for single-token rows depends on the batch's tensors and their
    shapes alone, never on numbers that the host has seen; so a step recorded once can be replayed
    after new numbers were written into the same tensors.
    """

    has_static_plans: bool

    def plan(
        self, batch: StepBatch, windows: Iterable[int | None], dtype: torch.dtype
    ) -> dict[int | None, Any]:
        """Prepare index tensors and masks once per step; one plan per distinct window."""
        ...

    def store(
        self, kv: PagedKv, layer: int, keys: torch.Tensor, values: torch.Tensor, batch: StepBatch
    ) -> None:
        """Write ``[num_tokens, num_kv_heads, head_dim]`` keys and values of this step's tokens."""
        ...

    def attend(
        self,
        kv: PagedKv,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: Any,
    ) -> torch.Tensor:
        """Return softmax(q k / sqrt(head_dim)) v for every token over its own sequence.

        queries: ``[num_tokens, num_heads, head_dim]``; so is the result. keys, values: this step's
        tokens, already stored. Query head h reads key/value head h // group_size.
        """
        ...
