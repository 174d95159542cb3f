"""The models that benchmarks make: what a peer is given of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.engine.model import VOCAB, add_tokenizer
from shared.model_folder import DEMO_FOLDER


class Written:
    """Keeps what a writer of GGUF is told."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.told.__setitem__(name, value)


def test_a_tokenizer_is_told_with_every_id_that_the_model_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its own tokens where they are, the rest as nobody's; without one there is none."""
    kinds = SimpleNamespace(NORMAL=1, CONTROL=3, UNUSED=5)
    monkeypatch.setitem(sys.modules, "gguf", SimpleNamespace(TokenType=kinds))
    path = DEMO_FOLDER / "tokenizer.json"
    written = Written()
    add_tokenizer(written, path)
    tokens, types = written.told["add_token_list"], written.told["add_token_types"]
    assert len(tokens) == len(types) == len(set(tokens)) == VOCAB
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    assert all(tokens[idx] == token for token, idx in vocabulary.items())
    assert (tokens[1], types[1]) == ("<|end|>", kinds.CONTROL)
    assert (types[300], types[-1]) == (kinds.NORMAL, kinds.UNUSED)
    assert "h e" in written.told["add_token_merges"]

    bare = Written()
    add_tokenizer(bare, tmp_path / "tokenizer.json")
    assert bare.told == {"add_tokenizer_model": "no_vocab"}
