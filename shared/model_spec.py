"""What the mesh must know of a model, whoever loaded it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One loaded model.

    fingerprint: 32 bytes, SHA-256 over the canonical config and the weights' identity; equal
    fingerprints mean the same function. max_model_len: prompt plus generated tokens.
    """

    name: str
    fingerprint: bytes
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: str
