"""The contract between the engine and one way to compute a forward pass.

Two ways exist: ``torch_forward`` runs wherever torch does and is the reference; ``native`` is one
fused C++ step for bfloat16 on CPUs that multiply it in hardware. An engine has one of them for its
whole life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from shared.engine.base import OnLayer, QueuedStep
from shared.engine.sampling.guides import Masks
from shared.step import StepRow, ToCome


class Passed(NamedTuple):
    """What a pass leaves behind.

    hidden: returns ``[num_tokens, hidden_size]`` before the final norm. lasts: per row, in the
    caller's order, where its last token lies in ``hidden``, after its other ones. logits: returns
    float32 ``[num_samples, vocab_size]``, empty if no row samples; may be written over. deny:
    leaves them the tokens that grammars allow. best: returns the first most likely token of each;
    None: this way has no kernel for it. All are valid until the next pass; a step that wants no
    tensor makes none, for each costs it tens of us (bench/engine).
    """

    hidden: Callable[[], torch.Tensor]
    lasts: Sequence[int]
    logits: Callable[[], torch.Tensor]
    deny: Callable[[Masks], None]
    best: Callable[[], list[int]] | None


Choose = Callable[[torch.Tensor], torch.Tensor]
"""Queues the choice of a token id, int64 ``[num_rows]``, by logits ``[num_rows, vocab_size]``."""


class Forward(Protocol):
    """A loaded model with its KV pool: rows in, hidden states and KV out."""

    @property
    def weights(self) -> Iterable[torch.Tensor]:
        """All tensors, for tests and benchmarks that check what a worker really runs in."""
        ...

    def prepare(
        self, rows: Sequence[StepRow], to_come: ToCome
    ) -> Callable[[Choose], QueuedStep] | None:
        """Make a step ready whose rows all sample; None: it cannot be queued behind another. Who
        calls what is returned queues it; see ``base.Engine.prepare``."""
        return None

    def run(
        self, rows: Sequence[StepRow], samples: Sequence[int], on_layer: OnLayer | None
    ) -> Passed:
        """Compute all tokens of all rows and write their KV; report each layer once it is written.

        samples: the rows, by ascending index, of which logits are wanted: those of their last
        tokens.

        Raises LocalProtocolError, before anything is written: a row is empty, too long, names
        unknown tokens or blocks, or its block table is too short.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits ``[n, vocab_size]`` of hidden states ``[n, hidden_size]``, valid
        until the next call of anything here."""
        ...
