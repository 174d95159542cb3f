"""The arithmetic of a decoder layer, one Triton kernel an operation; products are the library's,
unless they must be exact.

In plain torch a norm is eight kernels and a rotation six, each of which reads and writes everything
once more, and takes a few microseconds however few rows there are. These round where ``layers.py``
rounds. Imports triton: whoever chose triton imports this.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from shared.engine.attention.triton_kernels import IS_INTERPRETED
from shared.engine.models.layers import LayerOps

_TILE = 1024
"""Items of a program that works item by item."""

_PRODUCT_TILE = 64
"""Rows and columns of a tile of an exact product, whatever the number of rows."""


def ops_for(*, is_exact: bool) -> LayerOps:
    """Return a layer's operations; is_exact: a row has the same bits among any others."""
    return ExactTritonOps() if is_exact else TritonOps()


class TritonOps(LayerOps):
    """See ``layers.LayerOps``. The last dimension of every argument is contiguous.

    Every kernel works on one token alone, so only products depend on how many there are.
    """

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        width = x.shape[-1]
        # [num_tokens, heads, width]: a norm of heads gets them as a part of each token's row.
        heads = x.shape[1] if x.dim() == 3 else 1
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernel: Any = _rms_norm
        kernel[(x.shape[0], heads)](
            *(out, x, x, x, weight, eps, x.stride(0)),
            WIDTH=width,
            FILLED=_power_of_two(width),
            ADDS=False,
        )
        return out

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, width = x.shape
        out, total = torch.empty((2, num_tokens, width), dtype=x.dtype, device=x.device)
        kernel: Any = _rms_norm
        kernel[(num_tokens, 1)](
            *(out, total, x, added, weight, eps, width),
            WIDTH=width,
            FILLED=_power_of_two(width),
            ADDS=True,
        )
        return total, out

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
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
        num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
        kernel: Any = _gate
        kernel[(num_tokens, -(-width // _TILE))](out, gate_up, WIDTH=width, TILE=_TILE)
        return out


class ExactTritonOps(TritonOps):
    """Products of one shape of tile, each walking all of its columns in order, so that a row's sums
    do not know how many rows there are (He et al. 2025, "Defeating Nondeterminism in LLM
    Inference"). Libraries take another shape, or cut the columns, for another number of rows.
    """

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        x = x.contiguous()
        num_tokens, width = x.shape
        num_out = weight.shape[0]
        out = torch.empty((num_tokens, num_out), dtype=x.dtype, device=x.device)
        kernel: Any = _product
        kernel[(-(-num_tokens // _PRODUCT_TILE), -(-num_out // _PRODUCT_TILE))](
            out,
            x,
            weight,
            weight if bias is None else bias,
            num_tokens,
            WIDTH=width,
            NUM_OUT=num_out,
            TILE=_PRODUCT_TILE,
            DEPTH=128 // x.element_size(),
            HAS_BIAS=bias is not None,
            WIDENS=IS_INTERPRETED,
            num_warps=4,
            num_stages=3,
        )
        return out


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


# A number of rows is 1, or divisible by 16, in one step and not in the next: it must not choose
# another kernel.
@triton.jit(do_not_specialize=["num_rows"])
def _product(
    out, x, weight, bias, num_rows,
    WIDTH: tl.constexpr, NUM_OUT: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_row = row < num_rows
    is_column = column < NUM_OUT
    total = tl.zeros((TILE, TILE), tl.float32)
    for begin in range(0, WIDTH, DEPTH):
        at = begin + tl.arange(0, DEPTH)
        is_at = at < WIDTH
        left = tl.load(
            x + row[:, None] * WIDTH + at[None, :], mask=is_row[:, None] & is_at[None, :], other=0.0
        )
        right = tl.load(
            weight + column[None, :] * WIDTH + at[:, None],
            mask=is_column[None, :] & is_at[:, None],
            other=0.0,
        )
        if WIDENS:  # see attention/triton_kernels.py
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * NUM_OUT + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm(
    out, total, x, added, weight, eps, stride,
    WIDTH: tl.constexpr, FILLED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    place = tl.arange(0, FILLED)
    mask = place < WIDTH
    at = token * stride + head * WIDTH + place
    dtype = out.dtype.element_ty
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        wide += tl.load(added + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(total + at, wide.to(dtype), mask=mask)
        # As in plain torch: the norm is of the sum as it is kept.
        wide = wide.to(dtype).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
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
