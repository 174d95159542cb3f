"""Workers that may be either as real processes: homes change under load and no answer notices it;
``pdmesh role`` and ``pdmesh up --workers`` as a user types them.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from services.gateway.front.auth import hash_key
from services.gateway.text.text_model import TextModel
from shared.model_folder import ModelFolder, resolve_model
from tests.support.command import pdmesh
from tests.support.process_mesh import Answer, ProcessMesh, a_prompt, fake_ids, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx]

EITHER: dict[str, Any] = {"movable": True, "token_budget": 64, "fake_step_s": 0.005}
OTHER = {"prompt": "token", "token": "prompt"}
SERVED = {"prompt": "prefill", "token": "decode"}

NUM_MOVES = 100
NUM_CLIENTS = 6
NUM_TOKENS = 16

KEY = "a-key-of-the-operator"


@pytest_asyncio.fixture
async def mesh() -> AsyncIterator[ProcessMesh]:
    """No process yet."""
    async with process_mesh() as mesh:
        with mesh.explained():
            yield mesh


class Pools:
    """A mesh of workers that may be either, and what an operator sees and does over HTTP."""

    def __init__(self, mesh: ProcessMesh, gateway: ServiceProcess, key: str = "") -> None:
        self.mesh = mesh
        self.gateway = gateway
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = f"http://127.0.0.1:{gateway.facts['http_port']}"
        self.workers: list[ServiceProcess] = []

    async def workers_now(self) -> list[dict[str, Any]]:
        """The workers of /cluster."""
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.get(f"{self.url}/cluster") as response,
        ):
            assert response.status == 200
            return (await response.json())["workers"]

    async def move(self, incarnation: str, home: str) -> tuple[int, dict[str, Any]]:
        """Order a home; the status and the body of the answer."""
        url = f"{self.url}/cluster/workers/{incarnation}/role"
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.post(url, json={"role": home}) as response,
        ):
            return response.status, await response.json()

    async def add(self, *roles: str) -> None:
        """Start workers that may be either, and wait until each has its standing partners: all who
        are at home on the other side."""
        started = [await self.mesh.start(role, **EITHER) for role in roles]
        await self.mesh.ready(*started)
        self.workers += started

        async def are_partners() -> bool:
            seen = await self.workers_now()
            either = [worker for worker in seen if worker["moves"]]
            return len(seen) == len(self.workers) and all(
                worker["state"] == "usable"
                and {it["incarnation"] for it in either if it["home"] != worker["home"]}
                <= {*worker["paired"]}
                for worker in either
            )

        await self.mesh.until(are_partners)

    async def homes(self) -> list[str]:
        """What each is while nothing is asked of it."""
        return [worker["home"] for worker in await self.workers_now()]

    async def all_home(self) -> None:
        """Wait until no worker holds foreign work, and nothing at all is held."""

        async def is_nobody_mixed() -> bool:
            return all(it["pool"] == it["home"] for it in await self.workers_now())

        await self.mesh.until(is_nobody_mixed)
        await self.mesh.home([self.gateway], self.workers)


async def a_pool(mesh: ProcessMesh, *roles: str) -> Pools:
    """A gateway and workers that may be either."""
    pools = Pools(mesh, await mesh.start_gateway(policy="splitwise"))
    await pools.add(*roles)
    return pools


async def test_a_hundred_moves_under_load_cost_no_answer(mesh: ProcessMesh) -> None:
    """Clients that ask all the time while two workers of each home change it a hundred times: no
    answer is wrong, fails or is tried twice, each worker has done both, and all are home after."""
    pools = await a_pool(mesh, "prefill", "prefill", "decode", "decode")
    text = TextModel.load(ModelFolder(resolve_model("demo")))
    answers: list[Answer] = []
    has_moved = asyncio.Event()

    async def ask_all_the_time(client: int) -> None:
        number = 0
        while not has_moved.is_set():
            number += 1
            prompt = a_prompt(40 + (97 * number + 31 * client) % 500, start=1000 * client + number)
            answer = await mesh.ask(pools.gateway, prompt, NUM_TOKENS)
            answer.require_whole(NUM_TOKENS)
            wanted = fake_ids(prompt, NUM_TOKENS)
            assert answer.tokens == [text.piece(i).completion_name for i in wanted]
            answers.append(answer)

    async with asyncio.TaskGroup() as tasks:
        for client in range(NUM_CLIENTS):
            tasks.create_task(ask_all_the_time(client))
        await move_about(pools, answers)
        has_moved.set()
    assert len(answers) >= NUM_MOVES
    assert {answer.receipt["attempts"] for answer in answers} == {1}
    everybody = {worker["incarnation"] for worker in await pools.workers_now()}
    for role in SERVED.values():
        assert {answer.receipt[role] for answer in answers} == everybody
    await pools.all_home()
    assert set(await pools.homes()) == {"prompt", "token"}


async def move_about(pools: Pools, answers: list[Answer]) -> None:
    """Move somebody whenever an answer has come; the last of a role is refused, all others go."""
    chance = random.Random(4)
    num_moves = num_refused = 0
    while num_moves < NUM_MOVES:
        num_answers = len(answers)
        workers = await pools.workers_now()
        chosen = chance.choice(workers)
        is_last = [worker["home"] for worker in workers].count(chosen["home"]) == 1
        status, body = await pools.move(chosen["incarnation"], OTHER[chosen["home"]])
        if is_last:
            assert (status, body["error"]["code"]) == (400, "last_of_role")
            num_refused += 1
        else:
            assert (status, body["home"]) == (200, OTHER[chosen["home"]])
            num_moves += 1

        async def has_answered(before: int = num_answers) -> bool:
            return len(answers) > before

        await pools.mesh.until(has_answered)
    assert num_refused


# --- pdmesh role ----------------------------------------------------------------------------------


async def said_of_role(pools: Pools, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Type ``pdmesh role``; its exit code, and what it printed on each of the two ways."""
    async with pdmesh("role", *arguments, "--url", pools.url, **variables) as role:
        code = await role.ended()
    return code, role.out, role.err


async def test_a_worker_is_named_by_address_or_the_beginning_of_its_incarnation(
    mesh: ProcessMesh,
) -> None:
    """One line says where it is now; the mesh answers before and after."""
    pools = await a_pool(mesh, "prefill", "prefill", "decode")
    first, second, third = await pools.workers_now()
    assert [worker["home"] for worker in (first, second, third)] == ["prompt", "prompt", "token"]
    code, out, err = await said_of_role(pools, first["address"], "token")
    assert (code, err) == (0, "")
    assert out == f"{first['incarnation']} ({first['address']}): home token, now token\n"
    code, out, err = await said_of_role(pools, third["incarnation"][:10], "prompt")
    assert (code, err) == (0, "")
    assert out == f"{third['incarnation']} ({third['address']}): home prompt, now prompt\n"
    homes = {worker["incarnation"]: worker["home"] for worker in await pools.workers_now()}
    assert homes == {
        first["incarnation"]: "token",
        second["incarnation"]: "prompt",
        third["incarnation"]: "prompt",
    }
    prompt = a_prompt(200)
    ids, receipt = await mesh.ask_grpc(pools.gateway, prompt, NUM_TOKENS)
    assert ids == fake_ids(prompt, NUM_TOKENS)
    assert receipt["decode"] == first["incarnation"]
    await pools.all_home()


async def test_what_cannot_be_moved_is_refused_in_one_line(mesh: ProcessMesh) -> None:
    """An unknown worker, the last of its role, one that serves one role for good, an unknown home:
    the line names the remedy, and nobody has moved."""
    pools = await a_pool(mesh, "prefill", "decode")
    fixed = await mesh.add("prefill")
    pools.workers.append(fixed)
    await mesh.usable(pools.gateway, 3)
    before = await pools.workers_now()
    (token,) = (worker for worker in before if worker["home"] == "token")
    (one_role,) = (worker for worker in before if not worker["moves"])
    refusals = {
        ("00ff00ff00ff00ff", "token"): "no worker '00ff00ff00ff00ff' is in the mesh: `pdmesh top`",
        ("not-a-worker", "token"): "no worker 'not-a-worker' is in the mesh: `pdmesh top` lists",
        (token["address"], "prompt"): "is the last one for tokens: start another one",
        (one_role["incarnation"], "token"): "serves prefill alone: start one that serves both",
    }
    for arguments, remedy in refusals.items():
        code, out, err = await said_of_role(pools, *arguments)
        assert (code, out) == (1, ""), err
        assert err.startswith("pdmesh: ")
        assert err.count("\n") == 1
        assert remedy in err
    code, out, err = await said_of_role(pools, token["address"], "both")
    assert (code, out) == (2, "")
    assert "both" in err
    assert "pdmesh role --help" in err
    assert "Traceback" not in err
    after = await pools.workers_now()
    assert [worker["home"] for worker in after] == [worker["home"] for worker in before]


async def test_without_the_right_key_nobody_moves(mesh: ProcessMesh, tmp_path: Path) -> None:
    """No key, a wrong one and one without the right are told apart from one that has it, which
    moves the worker."""
    keys = tmp_path / "keys"
    keys.write_text(f"{hash_key('ops', KEY, may='roles')}\n{hash_key('app', 'key-of-an-app')}\n")
    pools = Pools(mesh, await mesh.start_gateway(policy="splitwise", api_keys=keys), KEY)
    await pools.add("prefill", "prefill", "decode")
    chosen, *_ = await pools.workers_now()
    for variables in ({}, {"PDMESH_API_KEY": "another"}):
        code, out, err = await said_of_role(pools, chosen["address"], "token", **variables)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "give it with --api-key or PDMESH_API_KEY" in err
    asks_only = {"PDMESH_API_KEY": "key-of-an-app"}
    code, out, err = await said_of_role(pools, chosen["address"], "token", **asks_only)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "'app' may ask, but has no right to change roles" in err
    stranger = Pools(mesh, pools.gateway, "another")
    status, body = await stranger.move(chosen["incarnation"], "token")
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    code, out, err = await said_of_role(pools, chosen["address"], "token", PDMESH_API_KEY=KEY)
    assert (code, err) == (0, "")
    assert "home token" in out


# --- pdmesh up --workers --------------------------------------------------------------------------


async def test_up_starts_workers_that_may_be_either_and_ctrl_c_ends_them() -> None:
    """Of three one is at home with prompts; `top` shows all pools, and nobody is left after."""
    fake = ("--port", "0", "--num-blocks", "256", "--device", "cpu", "--engine", "fake")
    async with pdmesh("up", "--workers", "3", *fake) as up:
        url = await up.url()
        body = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                assert (await response.json())["usage"]["completion_tokens"] >= 1
            workers: list[dict[str, Any]] = []
            while len(workers) < 3:  # the first two answer while the third still joins
                async with session.get(f"{url}/cluster") as response:
                    workers = (await response.json())["workers"]
        assert sorted(worker["home"] for worker in workers) == ["prompt", "token", "token"]
        assert all(worker["moves"] for worker in workers)
        async with pdmesh("top", "--once", "--url", url) as top:
            assert await top.ended() == 0
        shown = [line.split()[:2] for line in top.out.splitlines()]
        # One that the answer was borrowed from may not be home yet, or be it since.
        pools = [(worker["address"], {worker["home"], "mixed"}) for worker in workers]
        assert all(any([pool, address] in shown for pool in names) for address, names in pools)
        assert len(up.children) == 4
        up.process.send_signal(signal.SIGINT)
        assert await up.ended() == 130
    assert "Traceback" not in up.err


@pytest.mark.quick
async def test_up_takes_one_answer_to_who_does_both() -> None:
    """--workers and --colocated exclude each other, before anything is started."""
    async with pdmesh("up", "--workers", "2", "--colocated", "1", "--port", "0") as up:
        assert await up.ended() == 2
    assert up.children == []
    assert up.err == (
        "pdmesh: --workers and --colocated are two answers to one question: give one\n"
    )
