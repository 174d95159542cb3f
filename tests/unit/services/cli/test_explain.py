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


def test_a_path_is_no_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No gateway is asked for it, but for one name, which may be any request's."""
    assert run(["explain", "a" * 300, "--url", "http://127.0.0.1:9"]) == 1
    assert "nothing answers" in capsys.readouterr().err
    for path, why in ((tmp_path, "is a directory"), (tmp_path / "lost.json", "no such file")):
        assert run(["explain", str(path)]) == 2
        assert why in capsys.readouterr().err
