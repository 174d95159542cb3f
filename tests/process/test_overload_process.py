"""Tenants, limits and refusals with real processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.front.auth import hash_key
from shared import wire
from shared.address import Address
from shared.errors import InvalidRequest, WouldBeLate
from shared.rpc.methods import GENERATE
from shared.rpc.tcp import TcpNetwork
from shared.runtime.service import EXIT_BAD_CONFIG
from tests.support.calls import open_call
from tests.support.process_mesh import ProcessMesh, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx]

TENANTS = """
[tenants.bob]
max_priority = 4

[tenants.hasty]
tpot_ms = 1
"""


async def a_mesh(
    mesh: ProcessMesh, tmp_path: Path, *, num_blocks: int = 1024, **settings: Any
) -> ServiceProcess:
    """A gateway with three keys and one pair of workers, each of whose steps takes 20 ms."""
    keys, tenants = tmp_path / "keys", tmp_path / "tenants.toml"
    keys.write_text("\n".join(hash_key(name, name) for name in ("alice", "bob", "hasty")))
    tenants.write_text(TENANTS)
    gateway = await mesh.start_gateway(api_keys=keys, tenants=tenants, **settings)
    for role in ("prefill", "decode"):
        await mesh.add(role, fake_step_s=0.02, num_blocks=num_blocks)
    async with aiohttp.ClientSession() as session:

        async def is_ready() -> bool:
            async with session.get(_url(gateway, "/ready")) as answer:
                return answer.status == 200

        await mesh.until(is_ready)
    return gateway


def _url(gateway: ServiceProcess, path: str) -> str:
    return f"http://127.0.0.1:{gateway.facts['http_port']}{path}"


async def ask(
    gateway: ServiceProcess, key: str, headers: dict[str, str] | None = None, **body: Any
) -> tuple[int, Any, Any]:
    """Return status, headers and body."""
    own = {"Authorization": f"Bearer {key}", **(headers or {})}
    wanted = {"prompt": [5] * 20, "max_tokens": 8, "ignore_eos": True, **body}
    async with (
        aiohttp.ClientSession(headers=own) as session,
        session.post(_url(gateway, "/v1/completions"), json=wanted) as answer,
    ):
        return answer.status, answer.headers, await answer.json()


async def test_of_several_answers_none_is_refused_for_want_of_room(tmp_path: Path) -> None:
    """Decode holds two of the five, and an answer takes longer than a request may wait: the others
    wait, since the client reads the first already."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await a_mesh(mesh, tmp_path, num_blocks=32, max_wait_s=0.5)
            body = {"prompt": [*range(5, 205)], "max_tokens": 50, "n": 5, "seed": 3}
            status, _, told = await ask(gateway, "alice", temperature=1.0, **body)
            assert status == 200, told
            texts = [choice["text"] for choice in told["choices"]]
            assert len(set(texts)) == 5
            assert told["usage"]["completion_tokens"] == 250


@pytest.mark.parametrize(
    ("settings", "num_tokens"), [({}, 1500), ({"max_running": 2, "max_wait_s": 60.0}, 20)]
)
async def test_a_flood_of_one_tenant_holds_up_neither_others_nor_what_is_urgent(
    tmp_path: Path, settings: dict[str, Any], num_tokens: int
) -> None:
    """Forty requests of one, then two of another and two of its own that are urgent: by arrival
    those would be the last to be answered. By default few of the long prompts are with the worker,
    and nobody is refused for a wait of several times --max-wait-s; or two places are set."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await a_mesh(mesh, tmp_path, **{"max_wait_s": 0.2, **settings})
            done: list[str] = []
            one_is_done = asyncio.Event()
            begins = itertools.count(5)  # no two prompts have one beginning

            async def one(key: str, **body: Any) -> None:
                prompt = [next(begins)] * num_tokens
                status, _, told = await ask(gateway, key, prompt=prompt, **body)
                assert status == 200, told
                done.append(f"{key} {body}" if body else key)
                one_is_done.set()

            async with asyncio.TaskGroup() as tasks:
                for _ in range(40):
                    tasks.create_task(one("alice"))
                await one_is_done.wait()
                for _ in range(2):
                    tasks.create_task(one("bob"))
                    tasks.create_task(one("alice", priority=7))
            assert len(done) == 44
            assert [place for place, key in enumerate(done) if key != "alice"][-1] < 25


async def test_several_answers_wait_for_each_other_and_are_never_refused(tmp_path: Path) -> None:
    """Four run one after the other for longer than may be waited; beside them one request at a
    time has a turn, and what finds the queue full is refused. The drain waits for all of them."""
    async with process_mesh() as mesh:
        with mesh.explained():
            limits = {"max_running": 1, "max_waiting": 1, "max_wait_s": 2.5}
            gateway = await a_mesh(mesh, tmp_path, **limits)
            async with asyncio.TaskGroup() as tasks:
                reads = tasks.create_task(read(gateway, "alice", max_tokens=50, n=4))
                await asyncio.sleep(0.5)
                turn = tasks.create_task(ask(gateway, "alice"))
                await asyncio.sleep(0.1)
                status, _, body = await ask(gateway, "alice")
                assert (status, body["error"]["code"]) == (503, "queue_full")
            assert turn.result()[0] == 200
            assert reads.result() == dict.fromkeys(range(4), 50)
            async with asyncio.TaskGroup() as tasks:
                batch = {"prompt": [[5, 6]] * 70, "max_tokens": 2}
                asked = tasks.create_task(ask(gateway, "bob", **batch))
                await asyncio.sleep(0.5)
                tasks.create_task(gateway.stop())
            status, _, body = asked.result()
            assert (status, len(body["choices"])) == (200, 70)


async def read(gateway: ServiceProcess, key: str, **body: Any) -> dict[int, int]:
    """Read a stream to its end. Returns how many tokens each answer has."""
    wanted = {"prompt": [5] * 20, "ignore_eos": True, "stream": True, "logprobs": 0, **body}
    counts: dict[int, int] = {}
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session,
        session.post(_url(gateway, "/v1/completions"), json=wanted) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    told = (choice["logprobs"] or {}).get("tokens", ())
                    counts[choice["index"]] = counts.get(choice["index"], 0) + len(told)
    return counts


async def test_what_would_be_late_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    """By both doors, by its own limit or its tenant's; who names none is served. The refusal says
    which limit and by how much, is counted, and comes at once."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await a_mesh(mesh, tmp_path, overload="early")
            for _ in range(9):  # nothing is known before eight steps: nobody is refused
                status, _, _ = await ask(gateway, "alice", max_tokens=9)
                assert status == 200

            async def is_refused() -> bool:
                status, _, body = await ask(gateway, "alice", tpot_ms=1, ttft_ms=1)
                return status == 429 and body["error"]["code"] == "slo_both"

            await mesh.until(is_refused)  # as soon as a report has come
            assert (await ask(gateway, "alice", tpot_ms=1))[2]["error"]["code"] == "slo_tbt"
            start = time.perf_counter()
            status, headers, body = await ask(gateway, "alice", ttft_ms=1)
            took_s = time.perf_counter() - start
            assert (status, body["error"]["type"]) == (429, "rate_limit_error")
            assert body["error"]["code"] == "slo_ttft"
            assert (
                "over its limit, which even an idle worker cannot keep" in body["error"]["message"]
            )
            assert "Retry-After" not in headers
            assert took_s < 0.25  # with a connection of its own, on a busy machine
            status, _, body = await ask(gateway, "alice", {"X-TTFT-Ms": "1", "X-TPOT-Ms": "1"})
            assert (status, body["error"]["code"]) == (429, "slo_both")
            assert (await ask(gateway, "hasty"))[2]["error"]["code"] == "slo_tbt"
            assert (await ask(gateway, "hasty", tpot_ms=60_000))[0] == 200
            assert (await ask(gateway, "alice"))[0] == 200
            with pytest.raises(WouldBeLate, match="over its limit"):
                await generate(gateway, "alice", ttft_ms=1.0)
            with pytest.raises(InvalidRequest, match="may ask for 0 to 4, not for 5"):
                await generate(gateway, "bob", priority=5)
            await generate(gateway, "alice", priority=5)

            for field, value in (
                *(("ttft_ms", value) for value in (0, -1, 1_000_000, "soon")),
                *(("tpot_ms", value) for value in (0, -5, 1_000_000)),
                *(("priority", value) for value in (-1, 8, 1_000_000, 1.5)),
            ):
                status, _, body = await ask(gateway, "alice", **{field: value})
                assert (status, body["error"]["param"]) == (400, field), value
            for header in ("X-Priority", "X-TTFT-Ms"):
                assert (await ask(gateway, "alice", {header: "none"}))[0] == 400
                assert (await ask(gateway, "alice", {header: "-3"}))[0] == 400
            status, _, body = await ask(gateway, "bob", priority=5)
            assert (status, body["error"]["code"]) == (400, "priority_too_high")

            headers = {"Authorization": "Bearer alice"}
            async with aiohttp.ClientSession(headers=headers) as session:
                async with session.get(_url(gateway, "/cluster")) as answer:
                    refusals = (await answer.json())["gateway"]["refusals"]
                async with session.get(_url(gateway, "/metrics")) as answer:
                    metrics = await answer.text()
            assert refusals["slo_ttft"] == 2
            assert refusals["slo_both"] >= 2
            assert refusals["slo_tbt"] >= 2
            name = 'pdmesh_gateway_answers_refused_total{reason="slo_ttft"} 2.0'
            assert name in metrics.splitlines()


async def generate(gateway: ServiceProcess, key: str, **terms: Any) -> None:
    """Ask over gRPC and read to the end. Raises MeshError."""
    address = Address("127.0.0.1", gateway.facts["grpc_port"])
    metadata = {"authorization": f"Bearer {key}"}
    request = wire.GenerateRequest(text="a", params=wire.GenerateParams(max_tokens=2), **terms)
    async with (
        TcpNetwork().channel(address) as channel,
        open_call(channel, GENERATE, metadata=metadata) as stream,
    ):
        await stream.send(request, end=True)
        async for _ in stream:
            pass


async def test_terms_that_cannot_be_keep_a_gateway_from_starting(tmp_path: Path) -> None:
    """One line that says where and what."""
    keys, tenants = tmp_path / "keys", tmp_path / "tenants.toml"
    keys.write_text(hash_key("alice", "k"))
    tenants.write_text("[tenants.stranger]\nweight = 2")
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start("gateway", api_keys=keys, tenants=tenants)
            assert await gateway.ended() == EXIT_BAD_CONFIG
            (error,) = [json.loads(line) for line in gateway.log if '"level":"error"' in line]
            assert f"{tenants}: [tenants.stranger]: no API key has this name" in error["error"]
