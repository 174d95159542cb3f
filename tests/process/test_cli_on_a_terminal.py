"""``pdmesh chat`` and ``pdmesh top`` as a person has them: on a real terminal, with a real mesh."""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.local import LocalMesh, local_mesh, plan_services, wait_for_pair
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from tests.support.command import LIMIT_S, run_pdmesh
from tests.support.house import ROOT
from tests.support.scripted_mesh import ScriptedMesh, http_gateway, saying
from tests.support.service_process import free_port
from tests.support.terminal import Terminal, on_a_terminal

pytestmark = [pytest.mark.process, pytest.mark.ucx]

STORY = "The code of the red door is 4821."
PROMPT = r">$"
"""An empty line to type in, the last of the screen."""

QUESTION = "What is the code of the red door?"


@contextlib.asynccontextmanager
async def a_mesh(
    tmp_path: Path, *, http_port: int = 0, **settings: object
) -> AsyncIterator[LocalMesh]:
    """The bundled model, one worker each; settings: of both workers."""
    worker = {"device": "cpu", "num_blocks": 256, "threads": 1, **settings}
    services = plan_services(
        GatewayConfig(http_port=http_port, grpc_port=0, mesh_port=0, drain_s=0.0),
        [PrefillConfig(**worker)],  # type: ignore[arg-type]
        [DecodeConfig(**worker)],  # type: ignore[arg-type]
    )
    async with local_mesh(services, log=tmp_path / "log", drain_s=0) as mesh:
        await wait_for_pair(mesh.http_url, LIMIT_S)
        yield mesh


async def leave(chat: Terminal, keys: str) -> None:
    """It ends well, and the terminal is as it was."""
    chat.type(keys)
    assert await chat.ended() == 0
    assert chat.is_echoing()
    assert "Traceback" not in chat.shown


async def test_a_conversation_is_remembered_until_it_is_reset(tmp_path: Path) -> None:
    """The second turn's answer stands in the first one; /reset takes it away; /receipt adds up."""
    state = tmp_path / "state"
    async with (
        a_mesh(tmp_path) as mesh,
        on_a_terminal(
            *("chat", "--url", mesh.http_url, "--temperature", "0", "--max-tokens", "24"),
            XDG_STATE_HOME=str(state),
        ) as chat,
    ):
        await chat.shows("demo at http(?s:.*)All else is nonsense")
        await chat.shows(PROMPT)
        chat.type(f"{STORY}\\\r{QUESTION}\r")
        await chat.shows(
            rf"> The code.*\n· What is .*\nThe code of the red door is 4821\.\n{PROMPT}"
        )
        chat.type("/receipt\r")
        await chat.shows(rf"= first token(?s:.*)KV transfer(?s:.*)\n{PROMPT}")
        chat.type(f"{QUESTION}\r")
        await chat.shows(rf"> What is .*\nThe code of the red door is 4821\.\n{PROMPT}")
        chat.type("/reset\r")
        await chat.shows(rf"forgotten\n{PROMPT}")
        chat.type(f"{QUESTION}\r")
        await chat.shows(rf"forgotten\n> What is .*\n.+\n{PROMPT}")
        assert "4821" not in chat.shown.partition("forgotten")[2]
        chat.type("/system Be brief.\r")
        await chat.shows("the system prompt is set")
        await leave(chat, "\x04")
    history = state / "pdmesh" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert QUESTION in history.read_text()


async def test_ctrl_c_stops_the_answer_then_clears_the_line_then_leaves(tmp_path: Path) -> None:
    """An answer of minutes ends at once, and the conversation goes on."""
    async with (
        a_mesh(tmp_path, engine="fake", fake_step_s=0.2) as mesh,
        on_a_terminal(
            "chat", "--no-history", "--url", mesh.http_url, "--max-tokens", "1000"
        ) as chat,
    ):
        await chat.shows(PROMPT)
        chat.type("hello\r")
        await chat.shows(r"> hello\n.*\S")
        chat.type("\x03")
        await chat.shows(rf"stopped\n{PROMPT}")
        chat.type("half a thou")
        await chat.shows("> half a thou$")
        chat.type("\x03")
        await chat.shows(rf"stopped\n{PROMPT}", without="half a thou")
        chat.type("/help\r")
        await chat.shows(rf"/receipt +where the time(.|\n)*\n{PROMPT}")
        await leave(chat, "\x03")


async def test_a_model_that_thinks_is_seen_to() -> None:
    """A sign of life before the first token, the thinking as it comes, then the answer; Ctrl-C
    stops each of them, and what ended in its midst says why."""
    gate = asyncio.Semaphore(0)
    mesh = ScriptedMesh(saying("<think>hm, hm</think>four", per_batch=100, gate=gate))
    async with (
        http_gateway(mesh, reasoning_parser="think") as url,
        on_a_terminal("chat", "--no-history", "--url", url) as chat,
    ):
        await chat.shows(PROMPT)
        chat.type("2 + 2?\r")
        await chat.shows(r"> 2 \+ 2\?\n. waiting$")
        gate.release()
        await chat.shows(rf"> 2 \+ 2\?\nhm, hm\n\nfour\n{PROMPT}")
        mesh.script = saying("<think>hm, hm", per_batch=100, gate=gate)
        chat.type("And 3?\r")
        await chat.shows("waiting$")
        chat.type("\x03")
        await chat.shows(rf"> And 3\?\nstopped\n{PROMPT}")
        assert chat.shows_cursor
        await leave(chat, "\x04")
        async with on_a_terminal("generate", "hi", "--max-tokens", "9", "--url", url) as once:
            await once.shows("waiting$")
            gate.release()
            assert await once.ended() == 0
            assert "hm,\nthe answer ended while the model was thinking" in once.shown
            assert once.shows_cursor


async def test_a_refusal_is_one_line_and_the_conversation_goes_on(tmp_path: Path) -> None:
    """From a pipe, too, where the exit code tells."""
    async with a_mesh(tmp_path, engine="fake") as mesh:
        async with on_a_terminal(
            "chat", "--no-history", "--url", mesh.http_url, "--max-tokens", "-4"
        ) as chat:
            await chat.shows(PROMPT)
            chat.type("hi\r")
            await chat.shows(rf"> hi\nerror: max_tokens.*\n{PROMPT}")
            chat.type("/nonsense\r")
            await chat.shows("there is no command /nonsense")
            await leave(chat, "/quit\r")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli", "chat", "--url", mesh.http_url),
            *("--max-tokens", "4"),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        words = "word " * 3000
        out, err = await process.communicate(f"hello\n{words}\n\nagain\n".encode())
        assert process.returncode == 1
        assert len(out.decode().splitlines()) >= 2
        assert err.decode().startswith("error: ")
        assert "(/reset begins anew)" in err.decode()
        assert err.decode().count("\n") == 1


async def test_top_shows_the_mesh_and_survives_its_gateway(tmp_path: Path) -> None:
    """Workers, blocks and transfers; a gateway that dies is waited for; q leaves."""
    async with a_mesh(tmp_path) as mesh:
        url = mesh.http_url
        assert await run_pdmesh("generate", STORY, "--url", url)
        once = await run_pdmesh("top", "--once", "--url", url)
        assert "● ready" in once
        assert once.count("usable") == 2
        assert "0 of 256" in once
        assert "sysv" in once
        view = json.loads(await run_pdmesh("top", "--json", "--url", url))
        assert view["window"]["requests"] == 1
        async with on_a_terminal("top", "--interval", "0.2", "--url", url) as top:
            await top.shows("● ready(?s:.*)decode .*usable(?s:.*)sysv")
            assert not top.is_echoing()
            mesh.gateway.end(at_once=True)
            await top.shows("nothing answers at (?s:.*)What is below was before that")
            await top.shows("● ready(?s:.*)decode .*usable", without="nothing answers")
            await leave(top, "q")
        async with on_a_terminal("top", "--url", url) as top:
            await top.shows("● ready")
            await leave(top, "\x03")


async def test_top_waits_for_a_gateway_that_is_not_there_yet(tmp_path: Path) -> None:
    """It says so and goes on asking until there is one."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with on_a_terminal("top", "--interval", "0.1", "--url", url) as top:
        await top.shows(f"nothing answers at {url} (?s:.*)Trying again")
        top.type("\x1b[B")  # an arrow, as of a wheel that is turned
        async with a_mesh(tmp_path, http_port=port, engine="fake"):
            await top.shows("● ready", without="nothing answers")
            await leave(top, "\x1b")


async def test_models_and_doctor_know_a_running_gateway(tmp_path: Path) -> None:
    """What is served, who works, and over which lane."""
    async with a_mesh(tmp_path) as mesh:
        url = mesh.http_url
        assert "demo" in await run_pdmesh("models", "--url", url)
        assert (
            json.loads(await run_pdmesh("models", "--json", "--url", url))["data"][0]["id"]
            == "demo"
        )
        await run_pdmesh("generate", STORY, "--url", url)
        found = json.loads(await run_pdmesh("doctor", "--json", "--gateway", url))
    assert found["ok"] is True
    (name,) = (name for name in found["sections"] if url in name)
    texts = {one["name"]: one["text"] for one in found["sections"][name]}
    assert texts["ready"].startswith("serves demo")
    assert "lane sysv" in texts["pair"]
