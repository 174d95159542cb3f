"""Documents name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("bench/*/*.md"))
)
_IN_CODE = re.compile(r"`((?:services|shared|tests|tools|proto|docs|bench)/[\w./-]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_path_that_a_document_names_exists(document: Path) -> None:
    """A renamed module must be renamed in the documents, too."""
    text = (ROOT / document).read_text()
    named = [ROOT / path for path in _IN_CODE.findall(text)]
    linked = [(ROOT / document).parent / path for path in _LINK.findall(text)]
    missing = [str(path) for path in named + linked if not path.exists()]
    assert not missing
