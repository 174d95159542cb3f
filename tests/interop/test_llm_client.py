"""The `llm` command line against `pdmesh up`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.demo_truth import MODEL, recall_prompts
from tests.support.foreign_client import Ended, run_client

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

RUNS_WITHIN_S = 120.0


class Llm:
    """The command, with a folder of its own."""

    def __init__(self, client: Path, url: str, folder: Path) -> None:
        self._client = client
        self._folder = folder
        models = [
            {"model_id": "mesh", "model_name": MODEL, "api_base": url + "/v1"},
            {"model_id": "other", "model_name": "no-such-model", "api_base": url + "/v1"},
        ]
        (folder / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

    async def run(self, *arguments: str) -> Ended:
        """Run it once."""
        settings = {"LLM_USER_PATH": str(self._folder), "OPENAI_API_KEY": "none"}
        return await run_client(
            *(self._client / "llm", *arguments),
            cwd=self._folder,
            within_s=RUNS_WITHIN_S,
            environment=settings,
        )


@pytest.fixture
def llm(client_bin: Callable[[str], Path], running_mesh: tuple[str, str], tmp_path: Path) -> Llm:
    """The command, pointed at the running mesh."""
    return Llm(client_bin("llm"), running_mesh[0], tmp_path)


GREEDY = ("-o", "temperature", "0")


async def test_llm_streams_and_answers_whole(llm: Llm) -> None:
    """Both ways give the right code, and the log counts tokens."""
    (prompt,) = recall_prompts(1)
    question = prompt.messages[0]["content"]
    for how in ((), ("--no-stream",)):
        ended = await llm.run("-m", "mesh", *how, *GREEDY, question)
        assert ended == (0, prompt.expected_reply + "\n")
    logged = json.loads((await llm.run("logs", "--json", "-n", "2")).words)
    counts = {(entry["input_tokens"], entry["output_tokens"]) for entry in logged}
    assert len(counts) == 1
    assert min(counts.pop()) > 4


async def test_llm_continues_a_conversation(llm: Llm) -> None:
    """A code from an earlier turn is remembered."""
    stated = "The code of the red door is 4821. The cat sleeps. What is the code of the red door?"
    answer = "The code of the red door is 4821.\n"
    assert await llm.run("-m", "mesh", *GREEDY, stated) == (0, answer)
    assert await llm.run("-c", *GREEDY, "What is the code of the red door?") == (0, answer)


async def test_llm_says_what_is_wrong(llm: Llm) -> None:
    """Our message arrives on the terminal, with an exit code."""
    missing = await llm.run("-m", "other", "Hello!")
    assert missing.code == 1
    assert "no model of this name is served here" in missing.words
    long = await llm.run("-m", "mesh", "-o", "max_tokens", "1000000", "Hello!")
    assert long.code == 1
    assert "maximum context length is 2048 tokens" in long.words
