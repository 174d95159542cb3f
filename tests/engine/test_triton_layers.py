"""Triton's layer operations are those of plain torch."""

from __future__ import annotations

import pytest
import torch

from shared.engine.models.layers import LayerOps
from tests.support.interpreted import DEVICE, needs_triton

needs_triton()

from shared.engine.gpu.triton_layers import TritonOps, ops_for  # noqa: E402

pytestmark = pytest.mark.torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [16, 80, 1030]


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (2 * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def close(got: torch.Tensor, want: torch.Tensor, *, scale: float = 0.0) -> None:
    """Equal but for the roundings on the way, of which the interpreter cuts bfloat16's off instead
    of rounding to nearest. scale: of terms that may cancel."""
    assert got.dtype == want.dtype
    unit = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[want.dtype]
    torch.testing.assert_close(got, want, rtol=2.5 * unit, atol=2.5 * unit * scale + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(dtype: torch.dtype, width: int) -> None:
    """Of whole rows, of some rows, and of the heads in a part of each row."""
    weight = noise(dtype, width)
    rows = noise(dtype, 5, width)
    for x in (rows, rows[2:4], noise(dtype, 3, 7, width)[:, 2:6]):
        close(TritonOps().rms_norm(x, weight, 1e-5), LayerOps().rms_norm(x, weight, 1e-5))
    tiny = rows * 1e-4  # epsilon counts
    close(TritonOps().rms_norm(tiny, weight, 1e-5), LayerOps().rms_norm(tiny, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_of_sums(dtype: torch.dtype, width: int) -> None:
    """The sum is rounded before its norm is taken, and is there to be added to."""
    x, added, weight = noise(dtype, 5, width), noise(dtype, 5, width) * 3, noise(dtype, width)
    want_total, want = LayerOps().add_norm(x, added, weight, 1e-5)
    total, normed = TritonOps().add_norm(x, added, weight, 1e-5)
    close(total, want_total, scale=float(added.abs().max()))
    close(normed, want, scale=float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 24), (33, 80), (6, 128)])
def test_rotations(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """Of some of the heads in each row; both halves turn."""
    x = noise(dtype, 3, heads + 2, head_dim)[:, 1 : heads + 1]
    angles = torch.rand(3, 1, head_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    angles = torch.cat((angles, angles), -1).to(DEVICE)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    scale = float(x.abs().max())
    close(TritonOps().rotate(x, cos, sin), LayerOps().rotate(x, cos, sin), scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_gates(dtype: torch.dtype, width: int) -> None:
    """Large arguments included: the exponential overflows, the result does not."""
    gate_up = noise(dtype, 3, 2 * width)
    gate_up[0, :2] = torch.tensor([-300.0, 300.0])
    close(TritonOps().gate(gate_up), LayerOps().gate(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "num_out", "has_bias"), [(64, 64, False), (150, 90, True)])
def test_exact_products(dtype: torch.dtype, width: int, num_out: int, has_bias: bool) -> None:
    """They are those of plain torch, and a row has the same bits alone, among a few and among
    many, at any place."""
    x, weight = noise(dtype, 130, width), noise(dtype, num_out, width)
    bias = noise(dtype, num_out) if has_bias else None
    ops = ops_for(is_exact=True)
    all_rows = ops.linear(x, weight, bias)
    close(all_rows, LayerOps().linear(x, weight, bias), scale=4 * width**0.5)
    for start, stop in ((0, 1), (77, 78), (3, 67), (64, 128), (129, 130)):
        assert torch.equal(ops.linear(x[start:stop], weight, bias), all_rows[start:stop])


def test_other_products_are_the_librarys() -> None:
    """Bit for bit."""
    x, weight = noise(torch.float32, 5, 80), noise(torch.float32, 16, 80)
    ops = ops_for(is_exact=False)
    assert torch.equal(ops.linear(x, weight, None), LayerOps().linear(x, weight, None))
