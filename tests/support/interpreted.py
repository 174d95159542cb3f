"""Triton's kernels where tests run: on the GPU if there is one, else in Triton's interpreter
(`tests/conftest.py`)."""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def needs_triton() -> None:
    """Skip the importing module where the kernels cannot run."""
    pytest.importorskip("triton")
    from shared.engine.attention import triton_kernels

    if DEVICE.type == "cpu" and not triton_kernels.IS_INTERPRETED:
        pytest.skip("a GPU, but no torch that knows it", allow_module_level=True)
