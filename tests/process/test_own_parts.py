"""A routing policy and an engine from outside this package, in a mesh of real processes and in the
simulator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tokenizers import Tokenizer

from shared.model_folder import DEMO_FOLDER, ModelFolder
from tests.support.house import ROOT
from tests.support.pages import blocks_of

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.torch]

POLICY = """
from services.gateway.core.routing.sides import RoutingPolicy

class Last(RoutingPolicy):
    def choose(self, request, sides, scores, random):
        prefill = len(sides.prefills) - 1
        return prefill, sides.partners_of(prefill)[-1]

class Broken(RoutingPolicy):
    def choose(self, request, sides, scores, random):
        raise ValueError("no idea")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of policies, and the engine of docs/add-an-engine.md."""
    (tmp_path / "own_policies.py").write_text(POLICY)
    beginning = '"""The next token is the sum'
    (engine,) = [
        block.code
        for block in blocks_of(ROOT / "docs" / "add-an-engine.md")
        if block.code.startswith(beginning)
    ]
    (tmp_path / "sum_engine.py").write_text(engine)
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """``pdmesh`` as a person in that folder starts it."""
    ours = {name: text for name, text in os.environ.items() if not name.startswith("PDMESH_")}
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", *arguments],
        cwd=folder,
        env={**ours, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def completion(url: str, prompt: list[int]) -> tuple[str, str]:
    """The answer's text, and the request's id."""
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    asked = Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urlopen(asked, timeout=60) as response:
        told = json.load(response)
        return told["choices"][0]["text"], response.headers["x-request-id"]


def test_a_mesh_of_ones_own_engine_and_policy(folder: Path) -> None:
    """Answers are the engine's over two processes, decisions the policy's, and made again from
    their record."""
    mesh = start(
        folder,
        *("up", "--policy", "own_policies:Last", "--engine", "sum_engine:load", "--port", "0"),
        *("--prefill", "2", "--decode", "2"),
    )
    try:
        assert mesh.stdout is not None
        line = next(line for line in mesh.stdout if line.startswith("ready: "))
        url = line.split()[1].rstrip("/")
        size = ModelFolder(DEMO_FOLDER).vocab_size
        want, so_far = [], [3, 5, 9]
        for _ in range(4):
            want.append(sum(so_far) % size)
            so_far.append(want[-1])
        text, request_id = completion(url, [3, 5, 9])
        assert text == Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")).decode(want)
        asked = ("explain", request_id, "--url", url, "--replay")
        unnamed = start(folder, *asked)
        _, wrong = unnamed.communicate(timeout=60)
        assert unnamed.returncode == 2
        assert "--policy names one of your own" in wrong
        explain = start(folder, *asked, "--policy", "own_policies:Last")
        said, wrong = explain.communicate(timeout=60)
        assert (explain.returncode, wrong) == (0, "")
        assert "policy own_policies:Last" in said
        assert "the same pair, from the same scores" in said
    finally:
        mesh.send_signal(signal.SIGINT)
        mesh.communicate(timeout=60)
    assert mesh.returncode == 130  # the end that Ctrl-C asks for


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--policy", "own_policies:Absent"], "has no attribute 'Absent'"),
        (["--policy", "no_such_module:A"], "No module named 'no_such_module'"),
        (["--policy", "sum_engine:SumEngine"], "no services.gateway.core.routing.sides."),
        (["--policy", "own"], "package.module:Class"),
        (["--engine", "sum_engine:absent"], "has no attribute 'absent'"),
        (["--engine", "own"], "package.module:load"),
    ],
)
def test_what_is_no_policy_or_engine_starts_nothing(
    folder: Path, arguments: list[str], why: str
) -> None:
    """One line that says why, before any process is there."""
    run = start(folder, "up", *arguments, "--port", "0")
    said, wrong = run.communicate(timeout=60)
    assert (run.returncode, said) == (2, "")
    assert len(wrong.splitlines()) == 1
    assert why in wrong


def test_a_policy_of_ones_own_is_simulated(folder: Path) -> None:
    """By ``plan simulate``, as the mesh's own are; one that fails ends it with its error."""
    asked = ("--num-requests", "20", "--rate", "2", "--json")
    good = start(folder, "plan", "simulate", "2P+2D", "--policy", "own_policies:Last", *asked)
    said, _ = good.communicate(timeout=120)
    assert good.returncode == 0
    assert json.loads(said)["policy"] == "own_policies:Last"
    bad = start(folder, "plan", "simulate", "2P+2D", "--policy", "own_policies:Broken", *asked)
    _, wrong = bad.communicate(timeout=120)
    assert bad.returncode == 1
    assert "no idea" in wrong
