"""langchain-openai against `pdmesh up`: invoke, stream, batch, async, chains, exceptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.client_environments import PINS
from tests.support.demo_truth import client_task, recall_prompts
from tests.support.foreign_client import run_client_well

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

RUNS_WITHIN_S = 240.0


async def test_langchain(
    client_bin: Callable[[str], Path], running_mesh: tuple[str, str], tmp_path: Path
) -> None:
    """Every way to ask gives the right code, usage counts both sides, and what is refused comes as
    the exception that langchain has for it."""
    prompts = recall_prompts(6)
    task = tmp_path / "task.json"
    task.write_text(json.dumps(client_task(running_mesh[0], prompts)))
    words = await run_client_well(
        *(client_bin("langchain") / "python", PINS / "langchain_client.py", task),
        cwd=tmp_path,
        within_s=RUNS_WITHIN_S,
    )
    got = json.loads(words.splitlines()[-1])
    truth = [prompt.expected_reply for prompt in prompts]
    assert got["first"] == got["streamed"] == got["chain"] == truth[0]
    assert got["batch"] == got["abatch"] == truth
    assert got["completion"].startswith(f" {prompts[0].answer}.")
    assert got["finish"] == "stop"
    counts = ("input_tokens", "output_tokens", "total_tokens")
    assert [got["usage"][name] for name in counts] == [
        got["streamed_usage"][name] for name in counts
    ]
    assert got["num_logprobs"] == got["usage"]["output_tokens"] > 4
    assert got["streamed_usage"]["input_token_details"]["cache_read"] > 0, "the prompt was known"

    assert (got["wrong_model"]["status"], got["wrong_model"]["code"]) == (404, "model_not_found")
    assert "NotFound" in got["wrong_model"]["name"]
    assert (got["wrong_value"]["status"], got["wrong_value"]["code"]) == (400, "invalid_request")
    # A model that is full is an exception of its own, which agents shorten their history for.
    assert got["too_long"]["name"] == "OpenAIContextOverflowError"
    # What would change the answer and is not served is refused by the field that langchain sent.
    assert got["tools"]["param"] == "tools"
    assert got["structured"] in ({"a": "yes"}, {"a": "no"})
