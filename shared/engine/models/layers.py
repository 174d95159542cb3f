"""The arithmetic of a decoder layer: products, RMS norm, rotary embedding, gated feed-forward.

Each function rounds where transformers rounds, so that bfloat16 results agree as far as the matrix
products do.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from shared.engine.models.config import Rope


class LayerOps:
    """What a decoder layer does besides attention, in plain torch, which runs everywhere;
    ``triton_layers`` has the same in fewer kernels."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return ``[num_tokens, out]`` of ``[num_tokens, in]``; weight: ``[out, in]``."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise the last dimension (Zhang and Sennrich 2019), in float32 whatever the dtype; x:
        ``[num_tokens, width]`` or ``[num_tokens, heads, width]``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x + added``, and its ``rms_norm``; all ``[num_tokens, width]``."""
        total = x + added
        return total, self.rms_norm(total, weight, eps)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Apply rotary embedding to ``[num_tokens, heads, head_dim]``; pairs are (i, i + half)."""
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of ``[num_tokens, 2 * width]``, gate first."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair of dimensions, float32 ``[head_dim / 2]``."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    wavelengths = rope.theta**exponents  # in positions per radian
    plain = 1.0 / wavelengths
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _llama3(plain, rope)
        case "yarn":
            return _yarn(plain, 1.0 / (rope.factor * wavelengths), rope, head_dim)


def _llama3(plain: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, a ramp between them."""
    wavelengths = 2 * math.pi / plain
    smooth = (rope.original_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    ramp = (1 - smooth) * plain / rope.factor + smooth * plain
    is_long = wavelengths > rope.original_len / rope.low_freq_factor
    is_short = wavelengths < rope.original_len / rope.high_freq_factor
    return torch.where(is_long, plain / rope.factor, torch.where(is_short, plain, ramp))


def _yarn(plain: torch.Tensor, stretched: torch.Tensor, rope: Rope, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al. 2023), section 3.2, "NTK-by-parts": a ramp over dimensions."""

    def dimension_of(num_rotations: float) -> float:
        ratio = rope.original_len / (num_rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return stretched * (1 - kept) + plain * kept


class RotaryEmbedding:
    """Angles of the positions of one step, shared by all layers."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._scale = rope.attention_factor

    def cos_sin(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin ``[num_tokens, 1, head_dim]``; angles are float32, always."""
        half = positions[:, None].float() * self._frequencies
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)
