"""Random checkpoints, made once per session and shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from shared.engine.torch_engine import TorchEngine  # noqa: E402
from tests.support.checkpoints import SHAPES, make_checkpoint  # noqa: E402

FolderOf = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> Iterator[None]:
    """The models are tiny: a team of threads only costs time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Return the shared, read-only folder of a shape; options as for ``make_checkpoint``."""
    made: dict[tuple[object, ...], Path] = {}

    def folder(shape: str, **options: object) -> Path:
        key = (shape, *sorted(options.items()))
        if key not in made:
            path = tmp_path_factory.mktemp(shape)
            made[key] = make_checkpoint(SHAPES[shape].family, shape, path, **options)
        return made[key]

    return folder


@pytest.fixture
def engine_of(folder_of: FolderOf) -> Callable[..., TorchEngine]:
    """Load a shape; options as for ``TorchEngine.load``."""

    def engine(shape: str, **options: object) -> TorchEngine:
        options.setdefault("num_blocks", 300)
        return TorchEngine.load(folder_of(shape), **options)

    return engine
