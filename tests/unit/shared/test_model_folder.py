"""The torch-free reader of model folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared import model_folder
from shared.errors import ModelError
from shared.model_folder import CONFIG_FILES, ModelFolder, SpecialTokens, resolve_model
from tests.support.fake_hub import FakeHub

CONFIG = {"max_position_embeddings": 512, "vocab_size": 99, "eos_token_id": 2}


def a_folder(path: Path, **files: Any) -> ModelFolder:
    """Write a folder; ``tokenizer_config={...}`` becomes tokenizer_config.json."""
    path.mkdir(parents=True, exist_ok=True)
    for name, value in {"config": CONFIG, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return ModelFolder(path)


def test_facts(tmp_path: Path) -> None:
    """Sizes, end-of-sequence ids of both files, defaults and special tokens."""
    folder = a_folder(
        tmp_path,
        generation_config={
            "eos_token_id": [2, 7],
            "temperature": 0.6,
            "top_k": 20,
            "top_p": None,
            "do_sample": True,
        },
        tokenizer_config={"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
        special_tokens_map={"eos_token": "ignored", "pad_token": "<pad>"},
        tokenizer={},
    )
    assert folder.max_model_len == 512
    assert folder.vocab_size == 99
    assert folder.eos_token_ids == {2, 7}
    assert folder.generation_defaults == {"temperature": 0.6, "top_k": 20}
    assert folder.special_tokens == SpecialTokens(bos="<s>", eos="</s>", pad="<pad>")
    assert folder.tokenizer_path == tmp_path / "tokenizer.json"


def test_bare_folder(tmp_path: Path) -> None:
    """Only config.json: no defaults, no template, and a remedy for the missing tokenizer."""
    folder = a_folder(tmp_path)
    assert folder.eos_token_ids == {2}
    assert folder.generation_defaults == {}
    assert folder.chat_template is None
    assert folder.special_tokens == SpecialTokens()
    with pytest.raises(ModelError, match="save_pretrained"):
        _ = folder.tokenizer_path


def test_chat_template(tmp_path: Path) -> None:
    """The file wins over tokenizer_config.json; of several templates the default is taken."""
    folder = a_folder(tmp_path / "a", tokenizer_config={"chat_template": "one"})
    assert folder.chat_template == "one"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]
    folder = a_folder(tmp_path / "b", tokenizer_config={"chat_template": named})
    assert folder.chat_template == "two"
    (tmp_path / "b" / "chat_template.jinja").write_text("three é", encoding="utf-8")
    assert ModelFolder(tmp_path / "b").chat_template == "three é"
    (tmp_path / "b" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="UTF-8"):
        _ = ModelFolder(tmp_path / "b").chat_template
    folder = a_folder(tmp_path / "c", tokenizer_config={"chat_template": 3})
    with pytest.raises(ModelError, match="chat_template"):
        _ = folder.chat_template


@pytest.mark.parametrize(
    ("files", "attribute", "word"),
    [
        ({"config": {"vocab_size": 0}}, "vocab_size", "vocab_size"),
        ({"config": {}}, "max_model_len", "max_position_embeddings"),
        ({"config": {"eos_token_id": -1}}, "eos_token_ids", "eos_token_id"),
        ({"config": {"eos_token_id": [True]}}, "eos_token_ids", "eos_token_id"),
        ({"generation_config": {"top_p": "x"}}, "generation_defaults", "top_p"),
        ({"generation_config": [1]}, "generation_defaults", "generation_config.json"),
    ],
)
def test_wrong_values(tmp_path: Path, files: dict[str, Any], attribute: str, word: str) -> None:
    """A value of the wrong kind is a ModelError that names file or key."""
    folder = a_folder(tmp_path, **files)
    with pytest.raises(ModelError, match=word):
        getattr(folder, attribute)


def test_file_names(tmp_path: Path) -> None:
    """Only plain names are looked up, and links may not leave the folder."""
    folder = a_folder(tmp_path / "m")
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "m" / "link.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "m" / "inner.json").symlink_to("config.json")
    assert folder.file("absent.json") is None
    assert folder.json("inner.json") == CONFIG
    for name in ("../secret.json", "/etc/passwd", "", "..", "a\\b", "a\0b", "link.json"):
        with pytest.raises(ModelError):
            folder.file(name)


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JSON file or template beyond its limit is not read."""
    folder = a_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * 100)
    monkeypatch.setattr(model_folder, "MAX_JSON_BYTES", 10)
    monkeypatch.setattr(model_folder, "MAX_TEMPLATE_BYTES", 10)
    with pytest.raises(ModelError, match="larger"):
        _ = folder.config
    with pytest.raises(ModelError, match="larger"):
        _ = folder.chat_template


def test_resolve_paths(tmp_path: Path) -> None:
    """A folder is itself; a file, a wrong path and a wrong name each say what is wrong."""
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "file"))
    with pytest.raises(ModelError, match="no model folder"):
        resolve_model(str(tmp_path / "absent"))


def test_hub_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name without huggingface_hub says which extra to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pdmesh\[hub\]"):
        resolve_model("org/absent")


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name becomes its snapshot, without pickles; offline it says what to do."""
    hub = FakeHub(tmp_path, monkeypatch)
    assert resolve_model("org/name-1.5B") == tmp_path
    assert hub.asked == [("org/name-1.5B", ["*.json", "*.jinja", "*.safetensors"])]
    resolve_model("org/name-1.5B", CONFIG_FILES)
    assert hub.asked[1:] == [("org/name-1.5B", ["config.json"])]
    hub.answer = OSError("no route\nmore")
    with pytest.raises(ModelError, match=r"no route\).*hf download org/name"):
        resolve_model("org/name")


def test_a_snapshot_has_the_name_of_the_hub(tmp_path: Path) -> None:
    """A commit names its folder in the cache, and says nothing to who asks what is served."""
    assert a_folder(tmp_path / "my--model").name == "my--model"
    snapshot = tmp_path / "models--org--name-1.5B" / "snapshots" / "0a1b2c"
    assert a_folder(snapshot).name == "org/name-1.5B"


def test_reads_without_torch() -> None:
    """Importing it loads neither torch nor numpy: the gateway has neither."""
    code = (
        "import sys, shared.model_folder;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
