"""vLLM's own server, and a mesh beside it: what docs/vllm.md tells those who run vLLM already."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest

from shared.model_folder import DEMO_FOLDER
from tests.process.test_bench_command import benched
from tests.support.command import pdmesh
from tests.support.house import ROOT
from tests.support.service_process import free_port
from tests.vllm.conftest import EAGER

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.process, pytest.mark.ucx),
    pytest.mark.timeout(600),
]

STARTS_WITHIN_S = 240.0
QUESTIONS = (
    "The code of the red door is 4821. What is the code of the red door?",
    "What is the capital of France?",
    "Tell me a story.",
)
MESH = ("--engine", "vllm", "--prefill", "1", "--decode", "1", "--port", "0", "--threads", "1")


@contextlib.asynccontextmanager
async def server_of_vllm(log: Path) -> AsyncGenerator[str, None]:
    """The command of the page; its address once it answers."""
    url = f"http://127.0.0.1:{free_port()}"
    command = (
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_FOLDER)),
        *("--served-model-name", "demo", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]),
        *("--enforce-eager", "--kv-cache-memory-bytes", "67108864", "--max-num-seqs", "8"),
    )
    variables = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("wb") as told:
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, *command),
            cwd=ROOT,
            env={**os.environ, **variables},
            stdout=told,
            stderr=told,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(STARTS_WITHIN_S), aiohttp.ClientSession() as client:
            while True:
                assert server.returncode is None, log.read_text()[-4000:]
                with contextlib.suppress(aiohttp.ClientError):
                    async with client.get(f"{url}/health") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.2)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # its engine is a process of its own
        await server.wait()


async def answer(client: aiohttp.ClientSession, url: str, question: str) -> str:
    body = {
        "model": "demo",
        "temperature": 0,
        "max_tokens": 40,
        "messages": [{"role": "user", "content": question}],
    }
    async with client.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["choices"][0]["message"]["content"]


async def test_a_server_of_vllm_and_a_mesh_serve_side_by_side(tmp_path: Path) -> None:
    """The same folder, on one host: greedy answers are alike, and one client shares its requests
    between them."""
    asked = (*MESH, "--num-blocks", "200", "--vllm-args", EAGER)
    async with server_of_vllm(tmp_path / "log") as theirs, pdmesh("up", *asked, limit_s=500) as up:
        ours = await up.url()
        async with aiohttp.ClientSession() as client:
            for question in QUESTIONS:
                said = await answer(client, theirs, question)
                assert said
                assert await answer(client, ours, question) == said
        lengths = ("--synthetic", "fixed", "--input-len", "40", "--output-len", "12")
        load = ("--rate", "4", "--requests", "8", "--warmup", "2", *lengths)
        _, report, _ = await benched(theirs, ours, *load)
        assert [run["ends"] for run in report["runs"]] == [{"complete": 8}]
        up.process.terminate()
        assert await up.ended() == 0
