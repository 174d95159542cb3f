"""Triton's compiler takes our kernels for real devices, which needs none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.house import ROOT

pytest.importorskip("triton")

pytestmark = pytest.mark.torch

MAX_SHARED_BYTES = 99 << 10
"""What every GPU since Ampere gives one program."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "num_kernels"),
    [(80, 18), (90, 9), pytest.param(120, 9, marks=pytest.mark.nightly)],
)
def test_kernels_compile_for(capability: int, num_kernels: int) -> None:
    """To machine code, with tiles that fit into shared memory and 16-bit products on matrix units.
    What multiplies on none is compiled for the oldest device alone."""
    # A process of its own: here triton only interprets.
    environ = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.triton_compile", str(capability)]
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = json.loads(done.stdout)
    assert len(compiled) == num_kernels
    for name, kernel in compiled.items():
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES, name
        if ("attend" in name or "product" in name) and "float32" not in name:
            assert kernel["uses_matrix_units"], name
