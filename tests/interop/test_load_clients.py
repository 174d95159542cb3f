"""The load generators aiperf and guidellm against `pdmesh up`: that they run, that they count what
was sent, and that what they were told is what any client is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from shared.model_folder import DEMO_FOLDER
from tests.support.demo_truth import MODEL
from tests.support.foreign_client import run_client_well

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(2400)]

RUNS_WITHIN_S = 300.0
NUM_REQUESTS = 24
NUM_OUTPUT = 32
NUM_CHECKED = 3
"""Answers that are asked for again by hand."""


async def ask(url: str, body: dict[str, Any]) -> str:
    """Return the greedy answer to a client's own body."""
    whole = body | {"stream": False, "stream_options": None}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/chat/completions", json=whole) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]["message"]["content"]


def tokenizer_in_a_cache(home: Path) -> str:
    """Put the tokenizer where huggingface_hub keeps what it downloaded, for clients that take no
    folder; returns its name."""
    commit = "0" * 40
    entry = home / "hub" / "models--pdmesh--demo"
    snapshot = entry / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(commit)
    for path in DEMO_FOLDER.glob("*.json"):
        shutil.copy(path, snapshot)
    return "pdmesh/demo"


async def test_aiperf(client_bin: Callable[[str], Path], exact_mesh: str, tmp_path: Path) -> None:
    """Every request is answered in full, tokens are counted as asked for, metrics are read."""
    url = exact_mesh
    home = tmp_path / "hf"
    await run_client_well(
        *(client_bin("aiperf") / "aiperf", "profile", "-m", MODEL, "--url", url),
        *("--endpoint-type", "chat", "--streaming", "--tokenizer", tokenizer_in_a_cache(home)),
        *("--concurrency", "4", "--request-count", str(NUM_REQUESTS), "--use-server-token-count"),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", str(NUM_OUTPUT)),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{NUM_OUTPUT}"),
        *("--extra-inputs", "temperature:0", "--export-level", "raw", "--random-seed", "7"),
        *("--ui", "simple", "--artifact-dir", tmp_path / "out"),
        cwd=tmp_path,
        within_s=RUNS_WITHIN_S,
        environment={"HF_HOME": str(home)},
    )
    out = tmp_path / "out"
    summary = json.loads((out / "profile_export_aiperf.json").read_text())
    assert summary["request_count"]["avg"] == NUM_REQUESTS
    assert summary["error_summary"] == []
    lengths = summary["output_sequence_length"]
    assert (lengths["min"], lengths["max"]) == (NUM_OUTPUT, NUM_OUTPUT)
    assert 60 <= summary["input_sequence_length"]["avg"] <= 75  # 64, and the template's tokens
    assert summary["time_to_first_token"]["min"] > 0
    metrics = json.loads((out / "server_metrics_export.json").read_text())
    assert metrics["summary"]["endpoints_successful"] == [url + "/metrics"]

    raw = [json.loads(line) for line in (out / "profile_export_raw.jsonl").read_text().splitlines()]
    assert len(raw) == NUM_REQUESTS
    for record in raw[:NUM_CHECKED]:
        assert await ask(url, record["payload"]) == _streamed(record["responses"])


def _streamed(responses: list[dict[str, Any]]) -> str:
    """The text of the events that aiperf kept."""
    values = [packet["value"] for response in responses for packet in response["packets"]]
    assert values.pop() == "[DONE]"
    chunks = [json.loads(value) for value in values]
    return "".join(choice["delta"]["content"] for chunk in chunks for choice in chunk["choices"])


async def test_guidellm(client_bin: Callable[[str], Path], exact_mesh: str, tmp_path: Path) -> None:
    """Every request is answered in full, with as many tokens as asked for."""
    url = exact_mesh
    backend = {
        "kind": "openai_http",
        "target": url,
        "model": MODEL,
        "extras": {"body": {"temperature": 0}},
    }
    await run_client_well(
        *(client_bin("guidellm") / "guidellm", "run"),
        *("--backend", json.dumps(backend)),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO_FOLDER}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_OUTPUT}"),
        *("--output", "kind=json,path=out.json", "--disable-progress"),
        cwd=tmp_path,
        within_s=RUNS_WITHIN_S,
    )
    (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (NUM_REQUESTS, [])
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == NUM_OUTPUT, request["output_metrics"]
    for request in requests["successful"][:NUM_CHECKED]:
        body = json.loads(request["request_args"])["body"]
        assert await ask(url, body) == request["output"]
