"""What the mesh must know of a model, whoever loaded it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One loaded model.

    fingerprint: 32 bytes, SHA-256 over the canonical config and the weights' identity; equal
    fingerprints mean the same function. max_model_len: prompt plus generated tokens. eos_token_ids:
    none where nobody computes: a gateway need not know them. engine: what computes that function,
    with its release: two engines round differently, so that a token may change where an answer
    moves from one to the other.
    """

    name: str
    fingerprint: bytes
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()
    dtype: str
    engine: str = "torch"
