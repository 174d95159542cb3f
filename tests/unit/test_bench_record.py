"""What a recorded run says of itself."""

from __future__ import annotations

import pytest

from bench.record import environment


def test_arguments_are_told_without_the_folders_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader can ask the same again; where a model lay is nobody's affair."""
    monkeypatch.setattr("sys.argv", ["run.py", "--tbt-ms", "10", "15", "--model", "/a/b/model"])
    assert environment()["arguments"] == ["--tbt-ms", "10", "15", "--model", "model"]
