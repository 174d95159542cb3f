"""The arithmetic of a decoder layer between its products, one Triton kernel an operation.

In plain torch a norm is eight kernels and a rotation six, each of which reads and writes everything
once more, and takes a few microseconds however few rows there are. These round where ``layers.py``
rounds. Imports triton: whoever chose triton imports this.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_TILE = 1024
"""Items of a program that works item by item."""


class TritonOps:
    """See ``layers.LayerOps``. The last dimension of every argument is contiguous."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See LayerOps."""
        width = x.shape[-1]
        # [num_tokens, heads, width]: a norm of heads gets them as a part of each token's row.
        heads = x.shape[1] if x.dim() == 3 else 1
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernel: Any = _rms_norm
        kernel[(x.shape[0], heads)](
            out, x, weight, eps, x.stride(0), WIDTH=width, FILLED=_power_of_two(width)
        )
        return out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        num_tokens, heads, head_dim = x.shape
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        half = head_dim // 2
        filled = _power_of_two(half)
        tile = max(1, min(_power_of_two(heads), _TILE // filled))
        kernel: Any = _rotate
        kernel[(num_tokens, -(-heads // tile))](
            out, x, cos, sin, x.stride(0), HEADS=heads, HALF=half, TILE_HEADS=tile, FILLED=filled
        )
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
        kernel: Any = _gate
        kernel[(num_tokens, -(-width // _TILE))](out, gate_up, WIDTH=width, TILE=_TILE)
        return out


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@triton.jit
def _rms_norm(out, x, weight, eps, stride, WIDTH: tl.constexpr, FILLED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.arange(0, FILLED)
    mask = place < WIDTH
    wide = tl.load(x + token * stride + head * WIDTH + place, mask=mask, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    dtype = out.dtype.element_ty
    scaled = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    scaled = scaled * wide.to(dtype).to(tl.float32)
    row = token * tl.num_programs(1) + head
    tl.store(out + row * WIDTH + place, scaled.to(dtype), mask=mask)


@triton.jit
def _rotate(
    out, x, cos, sin, stride,
    HEADS: tl.constexpr, HALF: tl.constexpr, TILE_HEADS: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    pair = tl.arange(0, FILLED)
    is_pair = pair < HALF
    place = head[:, None] * (2 * HALF) + pair[None, :]
    mask = (head < HEADS)[:, None] & is_pair[None, :]
    dtype = out.dtype.element_ty
    own = x + token * stride + place
    first = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(own + HALF, mask=mask, other=0.0).to(tl.float32)
    # Both halves of a head have the same angles.
    angle = token * (2 * HALF) + pair
    c = tl.load(cos + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    low = (first * c).to(dtype).to(tl.float32) - (second * s).to(dtype).to(tl.float32)
    high = (second * c).to(dtype).to(tl.float32) + (first * s).to(dtype).to(tl.float32)
    target = out + token * (2 * HALF * HEADS) + place
    tl.store(target, low.to(dtype), mask=mask)
    tl.store(target + HALF, high.to(dtype), mask=mask)


@triton.jit
def _gate(out, gate_up, WIDTH: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = place < WIDTH
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + token * (2 * WIDTH) + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + place, mask=mask, other=0.0)
    small = tl.exp(-tl.abs(gate))  # never overflows
    share = tl.where(gate < 0, small, 1.0) / (1.0 + small)
    silu = (gate * share).to(dtype).to(tl.float32)
    tl.store(out + token * WIDTH + place, (silu * up.to(tl.float32)).to(dtype), mask=mask)
