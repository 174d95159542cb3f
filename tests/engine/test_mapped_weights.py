"""Weights stay where they are mapped: what is used as it stands is not copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.engine.torch_engine import TorchEngine
from shared.model_folder import DEMO_FOLDER

pytestmark = pytest.mark.torch


def _mappings(name: str) -> list[range]:
    """Return the address ranges of this process at which a file of this name is mapped."""
    ranges: list[range] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(name):
            start, _, stop = line.split()[0].partition("-")
            ranges.append(range(int(start, 16), int(stop, 16)))
    return ranges


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_a_weight_that_is_used_as_it_stands_is_the_file_itself() -> None:
    """Two workers that serve one folder share its pages."""
    engine = TorchEngine.load(DEMO_FOLDER, dtype="bfloat16", num_blocks=8, kernels="torch")
    try:
        mapped = _mappings("model.safetensors")
        shared = [
            weight
            for weight in engine.forward.weights
            if any(weight.data_ptr() in addresses for addresses in mapped)
        ]
        # The embedding, and of each layer the output and the down projection.
        assert len(shared) > 2 * engine.layout.num_layers
    finally:
        engine.close()
