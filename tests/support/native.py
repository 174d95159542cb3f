"""Whether this machine has the native kernels, and a compiler for tests of how they are made."""

from __future__ import annotations

from pathlib import Path

import pytest


def needs_native(numbers: str = "bfloat16", instructions: str = "") -> None:
    """Skip the running test where the kernels cannot be had. instructions: '' = the quickest."""
    import torch

    from shared.engine.native import build, library

    try:
        library.load(getattr(torch, numbers), instructions)
    except build.Unavailable as error:
        pytest.skip(f"no native kernels: {error}")


def quick_compiler(folder: Path) -> str:
    """Write a compiler that works and does not optimize, which would take most of its time; returns
    its path."""
    path = folder / "quick-g++"
    path.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    path.chmod(0o755)
    return str(path)
