"""litellm against `pdmesh up`: its SDK, and its proxy between an application and the mesh."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.support.client_environments import PINS
from tests.support.demo_truth import MAX_TOKENS, MODEL, client_task, recall_prompts
from tests.support.foreign_client import OFFLINE, run_client_well
from tests.support.service_process import free_port

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(2400)]

RUNS_WITHIN_S = 240.0
STARTS_WITHIN_S = 300.0
"""The proxy imports for 10 to 70 s."""

SETTINGS = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
KEY = "sk-0f6b0f5c1d2e4a7b9c8d7e6f5a4b3c2d"


async def test_the_sdk(
    client_bin: Callable[[str], Path], running_mesh: tuple[str, str], tmp_path: Path
) -> None:
    """Every way to ask gives the right code, and what is refused comes as litellm's exceptions."""
    prompts = recall_prompts(6)
    task = tmp_path / "task.json"
    task.write_text(json.dumps(client_task(running_mesh[0], prompts)))
    words = await run_client_well(
        *(client_bin("litellm") / "python", PINS / "litellm_client.py", task),
        cwd=tmp_path,
        within_s=RUNS_WITHIN_S,
        environment=SETTINGS,
    )
    got = json.loads(words.splitlines()[-1])
    truth = [prompt.expected_reply for prompt in prompts]
    assert got["first"] == got["streamed"] == truth[0]
    assert got["all"] == truth
    assert got["completion"].startswith(f" {prompts[0].answer}.")
    assert got["finish"] == "stop"
    assert got["usage"] == got["streamed_usage"]
    assert min(got["usage"].values()) > 4
    assert got["wrong_model"] == "NotFoundError"
    assert got["wrong_value"] == "BadRequestError"
    assert got["too_long"] == "ContextWindowExceededError"


@asynccontextmanager
async def proxy(client: Path, url: str, folder: Path) -> AsyncIterator[str]:
    """Run litellm's proxy in front of the mesh; gives its URL."""
    entry = {
        "model_name": "through-the-proxy",
        "litellm_params": {
            "model": "openai/" + MODEL,
            "api_base": url + "/v1",
            "api_key": "none",
        },
    }
    config = folder / "proxy.yaml"
    config.write_text(json.dumps({"model_list": [entry]}))  # JSON is YAML
    port = free_port()
    words = folder / "proxy.log"
    with words.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *map(str, (client / "litellm", "--config", config, "--host", "127.0.0.1")),
            *("--port", str(port)),
            cwd=folder,
            env={
                "PATH": f"{client}:{os.environ['PATH']}",
                "HOME": str(folder),
                "LITELLM_MASTER_KEY": KEY,
                **SETTINGS,
                **OFFLINE,
            },
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    own_url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(STARTS_WITHIN_S), aiohttp.ClientSession() as session:
            while not await _is_alive(session, own_url):
                said = words.read_text(errors="replace")[-4000:]
                assert process.returncode is None, f"the proxy did not start:\n{said}"
                await asyncio.sleep(0.2)  # it has no event to wait for
        yield own_url
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _is_alive(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url + "/health/liveliness") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_the_proxy(
    client_bin: Callable[[str], Path], running_mesh: tuple[str, str], tmp_path: Path
) -> None:
    """An application that speaks to the proxy gets the mesh's answers, streams and refusals."""
    prompts = recall_prompts(3)
    async with (
        proxy(client_bin("litellm"), running_mesh[0], tmp_path) as url,
        openai.AsyncOpenAI(base_url=url + "/v1", api_key=KEY, max_retries=0) as client,
    ):
        for prompt in prompts:
            fields = {
                "model": "through-the-proxy",
                "messages": prompt.messages,
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
            }
            whole = await client.chat.completions.create(**fields)
            assert whole.choices[0].message.content == prompt.expected_reply
            stream = await client.chat.completions.create(stream=True, **fields)
            pieces = [
                choice.delta.content or "" async for chunk in stream for choice in chunk.choices
            ]
            assert "".join(pieces) == prompt.expected_reply
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                model="through-the-proxy", messages=prompts[0].messages, max_tokens=1_000_000
            )
