"""Fixtures of folders whose tests compute with random checkpoints: a conftest.py imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import SHAPES, make_checkpoint

FolderOf = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny: a team of threads only costs time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Return the shared, read-only folder of a shape, with config.json in the form of transformers
    4 or 5; other options as for ``make_checkpoint``."""
    made: dict[tuple[object, ...], Path] = {}

    def folder(shape: str, form: int = 5, **options: object) -> Path:
        key = (shape, form, *sorted(options.items()))
        if key not in made:
            path = tmp_path_factory.mktemp(f"{shape}-{form}")
            made[key] = make_checkpoint(SHAPES[shape].family, shape, path, form=form, **options)
        return made[key]

    return folder
