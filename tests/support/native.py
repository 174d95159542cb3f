"""Whether this machine has the native kernels."""

from __future__ import annotations

import pytest


def needs_native(numbers: str = "bfloat16", instructions: str = "") -> None:
    """Skip the running test where the kernels cannot be had. instructions: '' = the quickest."""
    from shared.engine.native import build

    try:
        build.library(numbers, instructions or build.best_instructions(numbers))
    except build.Unavailable as error:
        pytest.skip(f"no native kernels: {error}")
