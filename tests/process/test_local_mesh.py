"""``pdmesh up`` and ``pdmesh demo`` with real processes: they serve, they restart what crashes, and
whatever ends them leaves nothing behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.local import (
    LocalMesh,
    Phase,
    Service,
    StartFailed,
    local_mesh,
    plan_services,
    wait_for_pair,
)
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from shared.errors import WorkerLost
from shared.runtime.child import child_process
from tests.support.command import LIMIT_S, has_ended, pdmesh

pytestmark = [pytest.mark.process, pytest.mark.ucx]

SMALL = ("--port", "0", "--num-blocks", "256", "--device", "cpu", "--threads", "1")
FAKE = (*SMALL, "--engine", "fake")

RECALL = (
    "The code of the red door is 4821. The cat sleeps in the garden. The code of the blue box is "
    "1111. The code of the old tower is 7350. What is the code of the red door?"
)


async def chat(url: str, **fields: Any) -> Any:
    """One chat completion that must succeed."""
    body = {"messages": [{"role": "user", "content": RECALL}], "max_tokens": 24, **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/chat/completions", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer


@pytest.mark.usefixtures("starts_are_executed")
@pytest.mark.quick
async def test_up_serves_a_request_and_ctrl_c_leaves_nothing() -> None:
    """Two workers of each role; 130 is Ctrl-C's exit code."""
    async with pdmesh("up", "--prefill", "2", "--decode", "2", *FAKE) as up:
        url = await up.url()
        answer = await chat(url, temperature=0)
        assert answer["usage"]["completion_tokens"] > 1
        assert len(up.children) == 5
        up.process.send_signal(signal.SIGINT)
        assert await up.ended() == 130
    assert "Traceback" not in up.err


@pytest.mark.usefixtures("starts_are_executed")
async def test_generate_streams_a_right_answer_and_its_receipt() -> None:
    """The bundled model finds the code in KV that was moved; SIGTERM ends a mesh with 0."""
    async with pdmesh("up", "--prefill", "1", *SMALL) as up:
        url = await up.url()
        async with pdmesh("generate", RECALL, "--url", url, "--temperature", "0") as asked:
            assert await asked.ended() == 0
        assert "4821" in asked.out
        assert "KV transfer" in asked.err
        up.process.terminate()
        assert await up.ended() == 0


@pytest.mark.parametrize(("asked", "num_workers"), [((), 1), (("--colocated", "2"), 2)])
async def test_up_with_colocated_workers_has_no_others(
    asked: tuple[str, ...], num_workers: int
) -> None:
    """With real weights the answer is the same, and nothing was transferred for it. One such worker
    is what a CPU has if nothing is asked for, and up says why."""
    async with pdmesh("up", *asked, *SMALL) as up:
        url = await up.url()
        assert ("shape: one worker for prompts and answers" in up.out) == (not asked)
        answer = await chat(url, temperature=0, include_receipt=True)
        assert "4821" in answer["choices"][0]["message"]["content"]
        assert (answer["receipt"]["mode"], answer["receipt"]["transfer_bytes"]) == ("colocated", 0)
        assert len(up.children) == 1 + num_workers
        async with pdmesh("top", "--once", "--url", url) as top:
            assert await top.ended() == 0
        assert "colocated" in top.out
        assert "prefill " not in top.out.partition("KV transfers")[0]
        up.process.terminate()
        assert await up.ended() == 0


async def test_nothing_outlives_a_killed_up() -> None:
    """kill -9 runs no code of ours: the children notice the cord."""
    async with pdmesh("up", *FAKE) as up:
        await up.url()
        up.process.kill()
        assert await up.ended() == -signal.SIGKILL
        assert len(up.children) == 3


@pytest.mark.usefixtures("starts_are_executed")
async def test_nothing_outlives_an_up_killed_at_the_start() -> None:
    """The children are loading and do not look at the cord yet."""
    async with pdmesh("up", *FAKE) as up:
        await up.said("decode-0 +starting")
        up.process.kill()
        assert await up.ended() == -signal.SIGKILL
        assert len(up.children) == 3


@pytest.mark.parametrize("phase", ["gateway +starting", "prefill-0 +starting"])
async def test_ctrl_c_at_the_start_leaves_nothing(phase: str) -> None:
    """In every phase: 130, no traceback, nobody left."""
    async with pdmesh("up", *FAKE) as up:
        await up.said(phase)
        up.process.send_signal(signal.SIGINT)
        assert await up.ended() == 130
    assert "Traceback" not in up.err


async def test_a_second_ctrl_c_does_not_wait_for_what_is_in_hand() -> None:
    """The first one lets an answer of minutes go on, the second one ends it."""
    async with (
        pdmesh("up", *FAKE, PDMESH_FAKE_STEP_S="1") as up,
        pdmesh("generate", "hi", "--max-tokens", "500", "--url", await up.url()) as asked,
    ):
        await asked.said(r"\S")
        up.process.send_signal(signal.SIGINT)
        await up.said("gateway +stopping")
        assert up.process.returncode is None
        up.process.send_signal(signal.SIGINT)
        assert await up.ended() == 130
        assert await asked.ended() == 1
        assert asked.err == "pdmesh: the answer broke off: the gateway has gone\n"


async def test_what_crashes_is_restarted_and_serves_again() -> None:
    """A worker, then the gateway, which comes back on its port so that workers find it."""
    async with pdmesh("up", *FAKE) as up:
        url = await up.url()
        for name in ("decode-0", "gateway"):
            pid = (await up.said(rf"{name} +ready +pid (\d+)"))[1]
            os.kill(int(pid), signal.SIGKILL)
            await up.said(rf"{name} +crashed +ended by SIGKILL")
            await up.said(rf"{name} +ready .*, 1 restart")
            await wait_for_pair(url, LIMIT_S)
            assert (await chat(url))["choices"]
        up.process.terminate()
        assert await up.ended() == 0


async def test_the_log_file_takes_what_the_services_say(tmp_path: Path) -> None:
    """stderr stays free for errors."""
    log = tmp_path / "mesh.log"
    async with pdmesh("up", *FAKE, "--log", str(log)) as up:
        await up.url()
        up.process.terminate()
        assert await up.ended() == 0
    assert up.err == ""
    text = log.read_text()
    assert all(f'"service":"{name}"' in text for name in ("gateway", "prefill", "decode"))


async def test_demo_answers_right_and_leaves_nothing(tmp_path: Path) -> None:
    """Offline, on free ports, also with a mesh on the usual ones; its temporary log goes, too.
    None of its processes uses what the next Python lacks: that would be a warning."""
    offline = {"TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    async with pdmesh("demo", **offline, PYTHONWARNINGS="error::DeprecationWarning") as demo:
        assert await demo.ended() == 0
    assert "The code of the old library is 1986." in demo.out
    assert "= first token" in demo.out
    assert "pdmesh up" in demo.out
    assert demo.err == ""
    assert len(demo.children) == 3
    assert list(tmp_path.iterdir()) == []


async def test_ctrl_c_ends_the_demo() -> None:
    """While its processes start."""
    async with pdmesh("demo") as demo:
        await demo.said("decode-0 +starting")
        demo.process.send_signal(signal.SIGINT)
        assert await demo.ended() == 130
    assert "Traceback" not in demo.err


# --- the mesh itself -------------------------------------------------------------------------


def a_plan(**settings: Any) -> list[Service]:
    """One worker of each role with the fake engine."""
    return plan_services(
        GatewayConfig(http_port=0, grpc_port=0, mesh_port=0),
        [PrefillConfig(engine="fake", **settings)],
        [DecodeConfig(engine="fake")],
    )


def is_reaped(services: list[Service]) -> bool:
    """Whether every process was started and is gone, even from the process table."""
    return all(s.pid and not Path(f"/proc/{s.pid}").exists() for s in services if s.process)


async def test_a_block_of_a_mesh_reaps_all_processes(tmp_path: Path) -> None:
    """Inside it answers; afterwards there is not even a zombie."""
    services = a_plan()
    seen: list[tuple[str, Phase]] = []
    parts: dict[str, None] = {}

    def changed(mesh: LocalMesh) -> None:
        parts.update(dict.fromkeys(s.part for s in mesh.services))
        seen.extend((s.name, s.phase) for s in mesh.services if (s.name, s.phase) not in seen)

    async with local_mesh(services, log=tmp_path / "log", on_change=changed) as mesh:
        assert all(service.phase is Phase.READY for service in mesh.services)
        await wait_for_pair(mesh.http_url, LIMIT_S)
        assert (await chat(mesh.http_url))["choices"]
    assert is_reaped(services)
    assert set(parts) == {"", "loading the tokenizer", "opening UCX"}  # the fake engine has no more
    for service in services:
        assert [phase.value for name, phase in seen if name == service.name] == [
            "waiting",
            "starting",
            "ready",
            "stopping",
            "stopped",
        ]


async def test_a_failure_to_start_is_the_childs_own_last_word(tmp_path: Path) -> None:
    """It ends all others at once, and nothing is restarted."""
    services = a_plan()
    services[1].env["PDMESH_BLOCK_SIZE"] = "5000"
    with pytest.raises(StartFailed, match="prefill-0 could not start: --block-size must be"):
        async with local_mesh(services, log=tmp_path / "log"):
            pytest.fail("it must not be entered")
    assert is_reaped(services)
    assert [service.num_restarts for service in services] == [0, 0, 0]


async def test_a_child_without_a_last_word_is_told_by_its_exit_code(tmp_path: Path) -> None:
    """An import error comes before the cord."""
    services = a_plan()
    services[2].module = "services.no_such_module"
    with pytest.raises(StartFailed, match="decode-0 could not start: ended with exit code 1"):
        async with local_mesh(services, log=tmp_path / "log"):
            pytest.fail("it must not be entered")
    assert is_reaped(services)
    assert "no_such_module" in (tmp_path / "log").read_text()


async def test_an_error_in_the_block_stops_the_mesh_and_comes_out_plain(tmp_path: Path) -> None:
    """No group round it; without ``restart`` a crash stays a crash."""
    services = a_plan()
    worker = services[2]

    async def lose_a_worker() -> None:
        async with local_mesh(services, log=tmp_path / "log", restart=False) as mesh:
            os.kill(worker.pid, signal.SIGKILL)
            await has_ended(worker.pid)
            await wait_for_pair(mesh.http_url, 0.5)

    with pytest.raises(WorkerLost, match=r"no pair .* within 0\.5 s: .*decode"):
        await lose_a_worker()
    assert worker.exit_code == -signal.SIGKILL
    assert is_reaped(services)


async def test_a_machine_that_has_no_room_for_a_process_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of process ids, or of memory, at a restart: the mesh lives on, and so does what it
    has in hand."""
    services = a_plan()
    worker = services[2]
    refused: list[str] = []

    def child(module: str, env: dict[str, str], output: int) -> Any:
        if worker.num_restarts == 1 and not refused:
            refused.append(module)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return child_process(module, env, output)

    monkeypatch.setattr("services.local.child_process", child)
    async with local_mesh(services, log=tmp_path / "log") as mesh:
        os.kill(worker.pid, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            while worker.num_restarts < 2 or worker.phase is not Phase.READY:
                await asyncio.sleep(0.05)
        await wait_for_pair(mesh.http_url, LIMIT_S)
        assert (await chat(mesh.http_url))["choices"]
    assert refused == ["services.decode"]
