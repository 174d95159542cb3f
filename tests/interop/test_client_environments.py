"""The environments of other people's clients: made once, made again for new pins, and a failure
that says what is wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import client_environments
from tests.support.client_environments import NoClient, node_client, python_client

pytestmark = pytest.mark.process


@pytest.fixture
def pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of pins, with a cache of its own."""
    folder = tmp_path / "pins"
    folder.mkdir()
    monkeypatch.setattr(client_environments, "PINS", folder)
    monkeypatch.setattr(client_environments, "CACHE", tmp_path / "cache")
    return folder


def test_an_environment_is_made_once_for_its_pins(pins: Path) -> None:
    """The second use finds it, new pins make it afresh, and both are told."""
    (pins / "one.txt").write_text("# nothing\n")
    said: list[str] = []
    folder = python_client("one", said.append)
    assert (folder / "python").exists()
    assert len(said) == 1
    left = folder / "left-behind"
    left.touch()
    assert python_client("one", said.append) == folder
    assert len(said) == 1
    assert left.exists()
    (pins / "one.txt").write_text("# nothing either\n")
    assert python_client("one", said.append) == folder
    assert len(said) == 2
    assert not left.exists()


def test_a_failure_shows_what_pip_said_and_is_not_remembered(pins: Path) -> None:
    """An environment that failed half-way is no environment."""
    (pins / "two.txt").write_text("./no-such-wheel-1.0-py3-none-any.whl\n")
    for _ in range(2):
        with pytest.raises(NoClient, match="no-such-wheel"):
            python_client("two", lambda _: None)


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_node_packages_are_those_of_the_lock_file(pins: Path) -> None:
    """npm refuses a package.json that the lock does not know."""
    (pins / "three").mkdir()
    (pins / "three/package.json").write_text('{"dependencies": {"no-such-package": "1.0.0"}}')
    lock = '{"name": "three", "lockfileVersion": 3, "packages": {"": {}}}'
    (pins / "three/package-lock.json").write_text(lock)
    with pytest.raises(NoClient, match="npm ci"):
        node_client("three", lambda _: None)


def test_every_client_is_pinned() -> None:
    """Each direct requirement has one version."""
    for name in client_environments.names():
        lines = (client_environments.PINS / f"{name}.txt").read_text().splitlines()
        wanted = [line for line in lines if line and not line.startswith("#")]
        assert wanted
        assert all("==" in line for line in wanted), name
