"""Random checkpoints and what transformers answers from them, made once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from services.gateway.text.text_model import TextModel
from tests.exactness.reference import Reference
from tests.support.checkpoint_folders import FolderOf, folder_of, one_thread
from tests.support.tiny_tokenizer import tiny_text_model

__all__ = ["folder_of", "one_thread"]


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
