"""What the pages on adding an engine, a model family and a routing policy tell to write, works as
written."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from services.gateway.core.routing import routing  # noqa: E402
from services.gateway.core.worker import Role  # noqa: E402
from shared.config import DecodeConfig  # noqa: E402
from shared.engine.models import registry  # noqa: E402
from shared.engine.torch_engine import TorchEngine  # noqa: E402
from shared.ids import Incarnation  # noqa: E402
from shared.model_folder import DEMO_FOLDER  # noqa: E402
from tests.support import checkpoints  # noqa: E402
from tests.support.engine_driver import Driver, greedy  # noqa: E402
from tests.support.house import ROOT  # noqa: E402
from tests.support.pages import blocks_of  # noqa: E402
from tests.support.routing import a_mesh  # noqa: E402

DOCS = ROOT / "docs"


def code_of(page: str, beginning: str) -> str:
    """The one block of a page that begins so."""
    (code,) = [b.code for b in blocks_of(DOCS / page) if b.code.startswith(beginning)]
    return code


def test_the_policy_of_the_page_passes_the_test_of_the_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The class as printed, under its name, judged by the test as printed."""
    page = "add-a-routing-policy.md"
    written: dict[str, Any] = dict(vars(routing))
    exec(code_of(page, "class TwoChoices"), written)
    monkeypatch.setitem(routing.POLICIES, "p2c", written["TwoChoices"])
    names: dict[str, Any] = {
        **vars(routing),
        "a_mesh": a_mesh,
        "Counter": Counter,
        "Role": Role,
        "Incarnation": Incarnation,
        "replace": replace,
    }
    exec(code_of(page, "def test_p2c"), names)
    names["test_p2c_takes_the_less_loaded_of_two"]()
    names["POLICIES"] = {"p2c": routing.LeastLoaded}
    with pytest.raises(AssertionError):
        names["test_p2c_takes_the_less_loaded_of_two"]()


def test_the_engine_of_the_page_passes_the_test_of_the_page() -> None:
    """As printed; and an engine that loses what it is sent does not pass."""
    page = "add-an-engine.md"
    written: dict[str, Any] = {}
    exec(code_of(page, '"""The next token is the sum'), written)
    engine, other, deaf = [
        written["load"](DEMO_FOLDER, DecodeConfig(num_blocks=60)) for _ in range(3)
    ]
    names: dict[str, Any] = {"Driver": Driver, "greedy": greedy}
    exec(code_of(page, "def test_it_is_one"), names)
    names["test_it_is_one_function"](engine, other)
    deaf.scatter = lambda *_: None
    with pytest.raises(AssertionError):
        names["test_it_is_one_function"](engine, deaf)


def test_the_family_of_the_page_answers_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader as printed, with the shapes as printed."""
    page = "add-a-model-family.md"
    written: dict[str, Any] = {"__name__": "seed_oss"}
    exec(code_of(page, '"""Seed-OSS'), written)
    monkeypatch.setitem(registry.FAMILIES, "SeedOssForCausalLM", written["read_config"])
    line = code_of(page, '    "seed_oss"')
    classes = eval("{" + line + "}", {"transformers": transformers})
    monkeypatch.setitem(checkpoints._CLASSES, "seed_oss", classes["seed_oss"])
    lines = code_of(page, '    "seed-oss-own')
    shapes = eval("{" + lines + "}", vars(checkpoints))
    assert len(shapes) == 2
    for name, shape in shapes.items():
        monkeypatch.setitem(checkpoints.SHAPES, name, shape)
        folder = checkpoints.make_checkpoint("seed_oss", name, tmp_path / name)
        prompt = [(7 * i) % shape.vocab for i in range(40)]
        want = checkpoints.reference_generate(folder, [prompt], 8)
        engine = TorchEngine.load(folder, num_blocks=20)
        assert [Driver(engine).run_alone(prompt, greedy(8), chunk=19).output] == want
