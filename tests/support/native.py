"""Whether this machine has the native kernels."""

from __future__ import annotations

import pytest


def needs_native(numbers: str = "bfloat16", instructions: str = "") -> None:
    """Skip the running test where the kernels cannot be had. instructions: '' = the quickest."""
    import torch

    from shared.engine.native import build, library

    try:
        library.load(getattr(torch, numbers), instructions)
    except build.Unavailable as error:
        pytest.skip(f"no native kernels: {error}")
