"""What a workload asks, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

BLOCK_TOKENS: Final = 512
"""Of Mooncake's traces: what one id of ``hash_ids`` stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. due_s: when to send it, after the start of the run.

    block_ids: names of the prompt's leading blocks; equal ids are equal tokens, so that a prefix
    cache sees the reuse of the trace. What they do not cover is the request's own.
    """

    num_input: int
    num_output: int
    due_s: float = 0.0
    block_ids: tuple[int, ...] = ()
