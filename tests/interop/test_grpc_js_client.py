"""Another language: Node's @grpc/grpc-js against `pdmesh up`, with nothing but our .proto files."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.support.client_environments import PINS
from tests.support.demo_truth import MODEL, client_task, recall_prompts
from tests.support.foreign_client import run_client_well
from tests.support.house import ROOT

pytestmark = [
    *(pytest.mark.process, pytest.mark.timeout(900)),
    pytest.mark.skipif(
        shutil.which("node") is None or shutil.which("npm") is None,
        reason="node and npm are not installed",
    ),
]

RUNS_WITHIN_S = 120.0
CEASES_WITHIN_S = 30.0


async def test_grpc_js(
    node_modules: Callable[[str], Path], running_mesh: tuple[str, str], tmp_path: Path
) -> None:
    """Streams, counts, the receipt in the trailers, statuses with typed errors; a deadline and a
    cancel end the generation."""
    modules = node_modules("node")
    prompts = recall_prompts(6)
    url, address = running_mesh
    task = tmp_path / "task.json"
    task.write_text(json.dumps(client_task(url, prompts)))
    words = await run_client_well(
        *(shutil.which("node") or "", PINS / "node/client.js", address, ROOT / "proto", task),
        cwd=tmp_path,
        within_s=RUNS_WITHIN_S,
        environment={"NODE_PATH": str(modules)},
    )
    got = json.loads(words.splitlines()[-1])
    truth = [prompt.expected_reply for prompt in prompts]

    assert got["models"] == [[MODEL, 2048]]
    first = got["first"]
    assert (first["status"], first["finish"], first["text"]) == (
        "OK",
        "FINISH_REASON_STOP",
        truth[0],
    )
    # Tokens that come while a client sleeps are one message: a short answer may be one.
    streams = [got[name]["messages"] for name in ("first", "from_text", "from_ids", "late")]
    assert max(streams) > 1, "it streams"
    assert first["usage"]["completion_tokens"] == len(first["ids"])
    receipt = first["receipt"]
    assert receipt["output_tokens"] == len(first["ids"])
    assert receipt["prompt_tokens"] == first["usage"]["prompt_tokens"]
    assert 0 < receipt["ttft_s"] <= receipt["e2e_s"]
    assert receipt["attempts"] == 1
    assert got["all"] == truth

    assert got["from_text"]["text"].startswith(f" {prompts[0].answer}.")
    assert got["from_ids"]["ids"] == got["from_text"]["ids"]
    assert got["from_text"]["usage"]["prompt_tokens"] == got["num_ids"]

    refusals = {
        "wrong_model": ("NOT_FOUND", "not_found", "model"),
        "wrong_value": ("INVALID_ARGUMENT", "invalid_request", "temperature"),
        "nothing": ("INVALID_ARGUMENT", "invalid_request", "text"),
    }
    for name, due in refusals.items():
        error = got[name]["error"]
        assert (got[name]["status"], error["type"], error["param"]) == due
        assert error["message"] == got[name]["details"]

    assert got["late"]["status"] == "DEADLINE_EXCEEDED"
    assert got["left"]["status"] == "CANCELLED"
    for name in ("late", "left"):
        assert len(got[name]["ids"]) < 1900
        assert got[name]["finish"] == ""
    async with asyncio.timeout(CEASES_WITHIN_S), aiohttp.ClientSession() as session:
        while await _num_running(session, url):
            await asyncio.sleep(0.05)  # the mesh has no event for it


async def _num_running(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url + "/cluster") as response:
        return (await response.json())["gateway"]["running"]
