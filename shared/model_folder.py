"""A model folder as Hugging Face lays it out, read without torch.

The gateway reads it for tokenizer, chat template and defaults, the engine for the rest. This module
never opens weights, runs no code from the folder, and follows no symlink that leaves it (see
``ModelFolder.file``).
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shared.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_JSON_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20
PIPE_WITHIN_S = 10.0

GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The keys of generation_config.json that become defaults of a request."""

DEMO_FOLDER = Path(__file__).parent / "models" / "demo"
BUNDLED = {"demo": DEMO_FOLDER, "demo-tools": DEMO_FOLDER.with_name("demo-tools")}
"""Models that come with the package, by the names that ``--model`` takes."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
CONFIG_FILES = ("config.json",)
TEXT_FILES = ("*.json", "*.jinja")
ALL_FILES = (*TEXT_FILES, "*.safetensors")
"""Of a hub name, what is downloaded: for who needs the model's shape alone, also its tokenizer and
template, or its weights, too."""


def resolve_model(name_or_path: str, files: Sequence[str] = ALL_FILES) -> Path:
    """Return the local folder of a model: a path, a bundled one (``demo``,
    ``demo-tools``), or a hub name (``org/name``).

    A hub name needs the extra ``hub``, is downloaded once (``files`` of it), and is found in the
    local cache when there is no network.
    Raises ModelError: there is no such folder, or the name can be neither downloaded nor found in
    the cache.
    """
    path = Path(os.path.expanduser(name_or_path))  # of an unknown user: as it is
    if path.is_dir():
        return path
    bundled = BUNDLED.get(name_or_path)
    if bundled is not None and bundled.is_dir():
        return bundled
    if path.exists():
        raise ModelError(f"{path} is a file: --model wants the folder that holds config.json")
    if _HUB_NAME.fullmatch(name_or_path) is None:
        raise ModelError(
            f"there is no model folder {path}, and it is no hub name (org/name) either: --model "
            "wants a folder that holds config.json, a hub name, or demo"
        )
    return _download(name_or_path, files)


def read_template(path: Path) -> str:
    """Return a chat template. Raises ModelError: no such file, too large, or not UTF-8."""
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes")
        with open(path, encoding="utf-8", opener=_soon_opened) as file:
            return file.read()
    except OSError as error:
        raise ModelError(f"chat template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8") from error


def _soon_opened(path: str, flags: int) -> int:
    """Raises TimeoutError: it is a pipe that nobody writes to."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if not poll.poll(PIPE_WITHIN_S * 1000):
        os.close(descriptor)
        raise TimeoutError(errno.ETIMEDOUT, "nobody writes to this pipe")
    os.set_blocking(descriptor, True)
    return descriptor


def _download(name: str, files: Sequence[str]) -> Path:
    try:
        import huggingface_hub as hub_module
    except ImportError:
        raise ModelError(
            f"there is no folder {name}; to load a model by hub name install the extra: "
            "pip install 'pdmesh[hub]', or give a local folder"
        ) from None
    hub: Any = hub_module
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(files)))
    # The library raises its own, requests', httpx's and the operating system's errors for the same
    # few causes; all of them mean "not available", and the text says which.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"model {name} is neither a local folder, nor in the hub cache, nor could it be "
            f"downloaded ({reason}): download it where there is a network "
            f"('hf download {name}') and give the folder as --model"
        ) from error


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Text of the special tokens that chat templates use; '' = the tokenizer has none."""

    bos: str = ""
    eos: str = ""
    pad: str = ""
    unk: str = ""


class ModelFolder:
    """The torch-free facts of one model folder; files are read when first asked for, then kept.

    Raises ModelError, from the constructor or an attribute: a file is missing, too large, malformed
    or escapes the folder; the message names file and key.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(f"model folder {self.path} does not exist")
        self._root = _allowed_root(self.path.resolve())
        if self.file("config.json") is None:
            raise ModelError(f"{self.path} holds no config.json: it is no model folder")

    @property
    def name(self) -> str:
        """The folder's; of a snapshot in a hub cache, which is named by a commit, the hub's."""
        name, is_cached = self._root.name, self._root != self.path.resolve()
        return name.removeprefix("models--").replace("--", "/") if is_cached else name

    def file(self, name: str) -> Path | None:
        """Return the path of a file of this folder, or None if there is none.

        Symlinks may point inside the folder and, in a hub cache, to the blobs beside its snapshots.
        Raises ModelError: the name is not a plain file name, or the file lies elsewhere.
        """
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ModelError(f"{self.path}: {name!r} is not a plain file name")
        path = self.path / name
        if not path.is_file():
            return None
        if not path.resolve().is_relative_to(self._root):
            raise ModelError(f"{path} is a link out of the model folder: copy the file there")
        return path

    def json(self, name: str) -> dict[str, Any] | None:
        """Parse a JSON object of this folder; None if there is no such file."""
        path = self.file(name)
        if path is None:
            return None
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
        try:
            value = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from error
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise ModelError(f"{path} does not hold a JSON object")
        return cast("dict[str, Any]", value)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json as it stands."""
        return self.json("config.json") or {}

    @cached_property
    def _generation_config(self) -> dict[str, Any]:
        return self.json("generation_config.json") or {}

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        return self.json("tokenizer_config.json") or {}

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and answer together, that the model was made for."""
        return self._positive("max_position_embeddings")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; the tokenizer may know fewer tokens."""
        return self._positive("vocab_size")

    @property
    def text_config(self) -> dict[str, Any]:
        """config.json's part about text: of models that also see or hear a part of its own."""
        part = self.config.get("text_config")
        return cast("dict[str, Any]", part) if isinstance(part, dict) else self.config

    def _positive(self, key: str) -> int:
        value = self.config.get(key, self.text_config.get(key))
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"{self.path}/config.json: {key} must be a positive integer, not {value!r}"
            )
        return value

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids: those of generation_config.json and of config.json together."""
        ids: set[int] = set()
        for name, source in (
            ("generation_config.json", self._generation_config),
            ("config.json", self.config),
        ):
            value = source.get("eos_token_id")
            for item in cast("list[Any]", value if isinstance(value, list) else [value]):
                if item is None:
                    continue
                if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                    raise ModelError(
                        f"{self.path}/{name}: eos_token_id must hold ids, not {item!r}"
                    )
                ids.add(item)
        return frozenset(ids)

    @cached_property
    def generation_defaults(self) -> Mapping[str, float]:
        """Sampling defaults of generation_config.json: some of GENERATION_DEFAULTS, or {}."""
        found: dict[str, float] = {}
        for key in GENERATION_DEFAULTS:
            value = self._generation_config.get(key)
            if value is None:
                continue
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not -math.inf < value < math.inf:
                raise ModelError(
                    f"{self.path}/generation_config.json: {key} must be a number, not {value!r}"
                )
            found[key] = value
        return found

    @property
    def tokenizer_path(self) -> Path:
        """tokenizer.json. Raises ModelError: there is none."""
        path = self.file("tokenizer.json")
        if path is None:
            raise ModelError(
                f"{self.path} holds no tokenizer.json: load the tokenizer with transformers and "
                "save it (AutoTokenizer.from_pretrained(...).save_pretrained(...)) to get one"
            )
        return path

    def read_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of tokenizer.json, which takes some 0.5 s. Raises ModelError: there
        is none, or it is damaged."""
        from tokenizers import Tokenizer  # most who ask for a model's facts need none

        path = self.tokenizer_path
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ModelError(f"{path} is not a tokenizer: {error}") from error

    @cached_property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template (the one named 'default' of several), or None."""
        path = self.file("chat_template.jinja")
        if path is not None:
            return read_template(path)
        template: Any = self._tokenizer_config.get("chat_template")
        if isinstance(template, list):
            template = _template_by_name(cast("list[Any]", template))
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{self.path}/tokenizer_config.json: chat_template is not text")
        return template

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """Special tokens of tokenizer_config.json, else of special_tokens_map.json."""
        sources = (self._tokenizer_config, self.json("special_tokens_map.json") or {})

        def text_of(key: str) -> str:
            for source in sources:
                value: Any = source.get(key)
                if isinstance(value, dict):  # an AddedToken
                    value = cast("dict[str, Any]", value).get("content")
                if isinstance(value, str):
                    return value
            return ""

        return SpecialTokens(
            bos=text_of("bos_token"),
            eos=text_of("eos_token"),
            pad=text_of("pad_token"),
            unk=text_of("unk_token"),
        )


def _template_by_name(templates: list[Any]) -> Any:
    for item in templates:
        if isinstance(item, dict):
            named = cast("dict[str, Any]", item)
            if named.get("name") == "default":
                return named.get("template")
    return None


def _allowed_root(folder: Path) -> Path:
    """Return the folder that links may point into: itself, or ``models--*`` of a hub cache.

    <cache>/models--org--name/snapshots/<commit>/config.json -> ../../blobs/<digest>
    """
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent
    return folder
