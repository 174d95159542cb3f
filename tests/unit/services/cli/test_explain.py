"""``pdmesh explain`` on files: what is no record is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.cli.app import run

NAMED: dict[str, Any] = {"request_id": "0" * 32, "ended": True}


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        "{}",
        "[1]",
        json.dumps({**NAMED, "decisions": [1], "receipt": {}}),
        json.dumps({**NAMED, "decisions": [{"attempt": 0}], "receipt": {}}),
        json.dumps({**NAMED, "decisions": [], "receipt": {}}),
    ],
)
def test_what_is_no_record_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever part of it is missing or another."""
    kept = tmp_path / "why.json"
    kept.write_text(content)
    for more in ([], ["--replay"], ["--json"]):
        assert run(["explain", str(kept), *more]) == 2
        assert "is not what `pdmesh explain" in capsys.readouterr().err


@pytest.mark.parametrize("why", ["1.5 s over its limit", ""])
def test_a_refusal_is_told_in_its_own_words(
    why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record of an older gateway has its kind alone."""
    kept = tmp_path / "why.json"
    receipt = {"queue_s": 0.002, "errors": ["would_be_late"]}
    told = {**NAMED, "decisions": [], "receipt": receipt} | ({"error": why} if why else {})
    kept.write_text(json.dumps(told))
    assert run(["explain", str(kept)]) == 0
    said = capsys.readouterr().out
    assert f"never sent to workers, 2.0 ms in the queue: {why or 'would_be_late'}" in said


def test_a_path_is_no_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No gateway is asked for it, but for one name, which may be any request's."""
    assert run(["explain", "a" * 300, "--url", "http://127.0.0.1:9"]) == 1
    assert "nothing answers" in capsys.readouterr().err
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "lost.json", "no such file")):
        assert run(["explain", str(path)]) == 2
        assert why in capsys.readouterr().err
