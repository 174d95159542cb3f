"""Random checkpoints, made once per session and shape, and engines that compute with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from shared.engine.torch_engine import TorchEngine
from tests.support.checkpoint_folders import FolderOf, folder_of, one_thread

__all__ = ["folder_of", "one_thread"]


@pytest.fixture
def engine_of(folder_of: FolderOf) -> Callable[..., TorchEngine]:
    """Load a shape; options as for ``TorchEngine.load``."""

    def engine(shape: str, **options: object) -> TorchEngine:
        options.setdefault("num_blocks", 300)
        return TorchEngine.load(folder_of(shape), **options)

    return engine
