"""Random checkpoints and what transformers answers from them, made once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from services.gateway.text.text_model import TextModel  # noqa: E402
from tests.exactness.reference import Reference  # noqa: E402
from tests.support.checkpoints import SHAPES, make_checkpoint  # noqa: E402
from tests.support.tiny_tokenizer import tiny_text_model  # noqa: E402

FolderOf = Callable[[str, int], Path]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Prefill, decode and the reference share the machine, and the models are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Return the read-only folder of a shape, with config.json in the form of transformers 4 or
    5."""
    made: dict[tuple[str, int], Path] = {}

    def folder(shape: str, form: int) -> Path:
        if (shape, form) not in made:
            path = tmp_path_factory.mktemp(f"{shape}-{form}")
            made[shape, form] = make_checkpoint(SHAPES[shape].family, shape, path, form=form)
        return made[shape, form]

    return folder


@pytest.fixture(scope="session")
def reference_of(folder_of: FolderOf) -> Callable[[str], Reference]:
    """Return what transformers says from a shape's weights."""
    made: dict[str, Reference] = {}

    def reference(shape: str) -> Reference:
        if shape not in made:
            made[shape] = Reference(folder_of(shape, 5))
        return made[shape]

    return reference


@pytest.fixture(scope="session")
def tiny_text() -> Iterator[TextModel]:
    """A tokenizer, for random models have none; nobody looks at the text."""
    text = tiny_text_model()
    yield text
    text.close()
