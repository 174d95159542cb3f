"""Processes that cannot start, or may not join: one line that says why, one exit code, and a mesh
that is there already goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.model_folder import DEMO_FOLDER
from shared.runtime.service import EXIT_BAD_CONFIG, EXIT_FAILED
from tests.support.process_mesh import (
    ROLES,
    a_prompt,
    fake_ids,
    process_mesh,
)
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx]


@contextlib.asynccontextmanager
async def a_port_in_use() -> AsyncIterator[int]:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def require_refused(process: ServiceProcess, code: int, *words: str) -> None:
    """It ended with this code and one line that says why, for people."""
    assert await process.ended() == code, process.log
    (line,) = [line for line in process.log if '"level":"error"' in line]
    error = json.loads(line)
    assert all(word in error["error"] for word in words), error
    assert not any("Traceback" in line or "exception" in line for line in process.log)


@pytest.mark.parametrize(
    ("role", "settings", "code", "words"),
    [
        ("gateway", {"model": "/no/such/folder"}, EXIT_FAILED, "no model folder"),
        ("prefill", {"model": "/no/such/folder"}, EXIT_FAILED, "no model folder"),
        ("gateway", {"model": "{empty}"}, EXIT_FAILED, "config.json"),
        ("decode", {"model": "{empty}"}, EXIT_FAILED, "config.json"),
        ("gateway", {"model": "{damaged}"}, EXIT_FAILED, "is not a tokenizer"),
        ("prefill", {"model": "{damaged}"}, EXIT_FAILED, "is not a tokenizer"),
        ("decode", {"model": "{damaged}", "engine": "torch"}, EXIT_FAILED, "is not a tokenizer"),
        ("gateway", {"max_running": "many"}, EXIT_BAD_CONFIG, "PDMESH_MAX_RUNNING"),
        ("gateway", {"api_keys": "/no/such/file"}, EXIT_BAD_CONFIG, "/no/such/file"),
        ("decode", {"gateway": "nowhere:x"}, EXIT_BAD_CONFIG, "gateway"),
        ("prefill", {"transfer_mode": "fast"}, EXIT_BAD_CONFIG, "--transfer-mode"),
        ("gateway", {"http_port": "{port}"}, EXIT_FAILED, "in use"),
        ("gateway", {"grpc_port": "{port}"}, EXIT_FAILED, "in use"),
        ("gateway", {"mesh_port": "{port}"}, EXIT_FAILED, "in use"),
        ("prefill", {"port": "{port}"}, EXIT_FAILED, "in use"),
        ("decode", {"metrics_port": "{port}"}, EXIT_FAILED, "in use"),
        ("prefill", {"engine": "torch", "device": "cuda:99"}, EXIT_FAILED, "torch sees"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
async def test_what_keeps_a_process_from_starting_is_one_line_and_an_exit_code(
    tmp_path: Path, role: str, settings: dict[str, str], code: int, words: str
) -> None:
    """No traceback for what the operator can mend."""
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    empty.mkdir()
    shutil.copytree(DEMO_FOLDER, damaged)
    (damaged / "tokenizer.json").write_bytes((DEMO_FOLDER / "tokenizer.json").read_bytes()[:5000])
    async with process_mesh() as mesh, a_port_in_use() as port:
        mesh.gateway_names.append("127.0.0.1:9")
        with mesh.explained():
            known = {"http_port": 0, "grpc_port": 0, "mesh_port": 0} if role == "gateway" else {}
            given = {
                k: v.format(empty=empty, damaged=damaged, port=port) for k, v in settings.items()
            }
            process = await mesh.start(role, **{**known, **given})
            await require_refused(process, code, words)


async def test_a_worker_of_another_model_is_refused_and_the_mesh_goes_on() -> None:
    """It hears what is served here and what it should be started with, and ends."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            workers = [await mesh.start(role) for role in ROLES]
            await mesh.paired(gateway, 1)
            for role in ROLES:
                stranger = await mesh.start(role, max_model_len=512)
                words = ("max_model_len", "512", "2048", "set [mesh] max_model_len = 2048")
                await require_refused(stranger, EXIT_FAILED, *words)
            await mesh.ready(*workers)
            ids, _ = await mesh.ask_grpc(gateway, a_prompt(100), 9)
            assert ids == fake_ids(a_prompt(100), 9)
            await mesh.home([gateway], workers)


@pytest.mark.torch
async def test_a_worker_with_another_dtype_or_model_is_refused(tmp_path: Path) -> None:
    """A pair that cannot exchange KV never comes to be."""
    pytest.importorskip("torch")
    from tests.support.checkpoints import make_checkpoint

    async with process_mesh("torch") as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            workers = [
                await mesh.start("prefill", dtype="float32"),
                await mesh.start("decode", dtype="bfloat16"),
            ]

            async def is_one_left() -> bool:
                return sum(worker.is_alive for worker in workers) == 1

            await mesh.until(is_one_left)
            (late,) = [worker for worker in workers if not worker.is_alive]
            await require_refused(
                late, EXIT_FAILED, "float32", "bfloat16", "--dtype", "set [mesh] dtype = '"
            )
            await mesh.usable(gateway, 1)
            folder = make_checkpoint("llama", "llama-gqa2", tmp_path / "tiny")
            tiny = await mesh.start("prefill", model=folder)
            await require_refused(
                tiny, EXIT_FAILED, "model: this prefill worker has 'tiny' with 199 tokens",
                "the gateway has the tokenizer of 'demo'", "set [mesh] model",
            )  # fmt: skip
