"""Whether this machine has the native kernels."""

from __future__ import annotations

import pytest


def needs_native() -> None:
    """Skip the running test where the kernels cannot be had."""
    from shared.engine.native import build

    try:
        build.library()
    except build.Unavailable as error:
        pytest.skip(f"no native kernels: {error}")
