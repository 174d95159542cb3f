"""Triton's kernels where tests run: on the GPU if there is one, else in Triton's interpreter
(`tests/conftest.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def needs_triton() -> None:
    """Skip the importing module where the kernels cannot run."""
    pytest.importorskip("triton")
    from shared.engine.attention import triton_kernels

    if triton_kernels.IS_INTERPRETED:
        _have_products_of_their_own()
    if DEVICE.type == "cpu" and not triton_kernels.IS_INTERPRETED:
        pytest.skip("a GPU, but no torch that knows it", allow_module_level=True)


def _have_products_of_their_own() -> None:
    """The interpreter multiplies by numpy, and so by a BLAS whose sums depend on the shape of the
    rest on some processors. On a GPU a tile's product does not: add in the order of k here, too."""
    from triton.runtime import interpreter

    def matmul(one: np.ndarray, other: np.ndarray, dtype: Any = None) -> np.ndarray:
        one, other = (np.asarray(part, dtype or part.dtype) for part in (one, other))
        total = np.zeros((*one.shape[:-1], other.shape[-1]), np.result_type(one, other))
        for idx in range(one.shape[-1]):
            total += one[..., :, idx, None] * other[..., idx, None, :]
        return total

    known = {name: getattr(np, name) for name in dir(np)}
    interpreter.np = SimpleNamespace(**{**known, "matmul": matmul})
