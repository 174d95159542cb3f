"""Anthropic's own client and /v1/messages: what it makes of refusals; what it makes of answers is
in ``test_agent_clients.py``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.gateway.front.auth import KeyRing, hash_key
from shared.errors import WorkerLost
from tests.support.client_environments import PINS
from tests.support.foreign_client import run_client_well
from tests.support.scripted_mesh import ScriptedMesh, failing_after, http_gateway

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]


async def test_refusals_are_the_clients_own_exceptions(
    client_bin: Callable[[str], Path], tmp_path: Path
) -> None:
    """By class and status, with our place and code in the body; a broken stream raises, too."""
    keys = tmp_path / "keys"
    keys.write_text(hash_key("a", "ka"))
    asks: list[dict[str, Any]] = [
        {"key": "other"},
        {"model": "claude"},
        {"extra_body": {"temperature": 9}},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"messages": [{"role": "user", "content": "a " * 600}]},
        {"stream": True},
    ]
    task = tmp_path / "task.json"
    mesh = ScriptedMesh(failing_after("the", WorkerLost("gone")))
    async with http_gateway(mesh, KeyRing(keys)) as url:
        task.write_text(json.dumps({"url": url, "key": "ka", "asks": asks}))
        words = await run_client_well(
            *(client_bin("anthropic") / "python", PINS / "anthropic_refusals_client.py", task),
            cwd=tmp_path,
            within_s=120.0,
        )
    told = [
        (name, status, body["type"], body["error"]["type"], body["error"].get("param"))
        for name, status, body in json.loads(words.splitlines()[-1])
    ]
    wrong = ("BadRequestError", 400, "error", "invalid_request_error")
    assert told == [
        ("AuthenticationError", 401, "error", "authentication_error", "authorization"),
        ("NotFoundError", 404, "error", "not_found_error", "model"),
        (*wrong, "temperature"),
        (*wrong, "messages[0].content[0].type"),
        (*wrong, "tools[0].type"),
        (*wrong, "messages"),
        ("APIStatusError", 200, "error", "api_error", None),
    ]
