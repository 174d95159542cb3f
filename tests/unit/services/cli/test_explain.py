"""``pdmesh explain`` on files: what is no record is refused in one line; and who is asked."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.cli.app import run
from services.cli.client import GatewayRefused
from services.cli.explain import explain

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


class OnePort:
    """Gateway processes at one port: a connection finds any of them. One knows the request."""

    def __init__(self, num_processes: int, *, knows: bool = True) -> None:
        self.access = self
        self.num_connections = 0
        self._num_processes = num_processes
        self._knows = knows
        self._rng = random.Random(num_processes)

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[int]:
        self.num_connections += 1
        yield self._rng.randrange(self._num_processes)

    async def call(self, process: int, path: str) -> dict[str, Any]:
        if path == "/cluster":
            return {"gateway": {"incarnation": f"{process:016x}"}}
        if process or not self._knows:
            raise GatewayRefused("this gateway remembers no request", code="no_request")
        return {**NAMED, "decisions": [], "receipt": {"queue_s": 0.0, "errors": []}}


@pytest.mark.parametrize("num_processes", [1, 2, 8, 64])
def test_each_process_of_a_port_is_asked(num_processes: int) -> None:
    """As many connections as it takes to meet one of the most that there may be, nearly always."""
    gateway: Any = OnePort(num_processes)
    for _ in range(100):
        assert explain("0" * 32, gateway=gateway) == 0


def test_a_gateway_alone_is_not_asked_for_long() -> None:
    """It forgot the request, and says so."""
    gateway: Any = OnePort(1, knows=False)
    with pytest.raises(GatewayRefused, match="remembers no request"):
        explain("0" * 32, gateway=gateway)
    assert gateway.num_connections == 16
