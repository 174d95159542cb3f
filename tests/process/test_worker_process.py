"""Prefill and decode as real processes: TCP between them, UCX under them, the fake engine in them.

A fake gateway in this process drives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from shared.address import Address
from shared.errors import MeshError
from shared.ids import Incarnation
from shared.request import SamplingParams
from shared.rpc.tcp import TcpNetwork
from tests.support.fake_gateway import FakeGateway, FakeRequest, fake_gateway
from tests.support.process_mesh import ProcessMesh, a_prompt, fake_ids, process_mesh
from tests.support.tiers import few

pytestmark = [pytest.mark.process, pytest.mark.ucx]

LIMIT_S = 240.0


@dataclass
class DrivenWorkers:
    """Processes of workers, and the gateway that drives them."""

    mesh: ProcessMesh
    gateway: FakeGateway

    def incarnation(self, role_name: str) -> Incarnation:
        """The joined worker of a role."""
        return next(
            incarnation
            for incarnation, announce in self.gateway.workers.items()
            if announce.hello is not None and announce.hello.role.name == role_name
        )

    async def pair(self) -> tuple[Incarnation, Incarnation]:
        """Wait until one prefill and one decode worker are joined and paired."""
        await self.gateway.until(lambda: len(self.gateway.workers) >= 2)
        prefill, decode = self.incarnation("PREFILL"), self.incarnation("DECODE")
        await self.gateway.paired(prefill, decode)
        return prefill, decode

    async def ask(self, prompt: list[int], num_tokens: int) -> FakeRequest:
        """Send one request to the pair, once there is one."""
        prefill, decode = await self.pair()
        sampling = SamplingParams(max_tokens=num_tokens)
        return self.gateway.start(prompt, sampling, prefill=prefill, decode=decode)


@contextlib.asynccontextmanager
async def driven_workers() -> AsyncIterator[DrivenWorkers]:
    async with (
        asyncio.timeout(LIMIT_S),
        fake_gateway(TcpNetwork(), Address("127.0.0.1", 0)) as gateway,
        process_mesh(has_secret=False) as mesh,
    ):
        mesh.gateway_names.append(f"127.0.0.1:{gateway.port}")
        with mesh.explained():
            yield DrivenWorkers(mesh, gateway)


@pytest.mark.quick
@pytest.mark.usefixtures("hears_hangup", "starts_are_executed")
async def test_answers_through_real_processes_are_exact_and_a_drain_ends_them() -> None:
    """TCP, UCX, threads and uvloop change no token; SIGTERM ends one with 0, and SIGHUP, which UCX
    takes for itself unless told otherwise, the other."""
    async with driven_workers() as it:
        workers = [
            await it.mesh.start("prefill", token_budget=256),
            await it.mesh.start("decode", block_size=32),
        ]
        prompts = [a_prompt(n, n) for n in (3, 40, 700, 1500)]
        requests = [await it.ask(prompt, 20) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            assert await request.finished() == fake_ids(prompt, 20)
        assert requests[-1].done is not None
        assert requests[-1].done.lane
        for worker, number in zip(workers, (signal.SIGTERM, signal.SIGHUP), strict=True):
            worker.send(number)
        assert [await worker.ended() for worker in workers] == [0, 0]


@pytest.mark.parametrize("victim", few(["prefill", "decode"], "prefill"))
async def test_a_worker_killed_in_mid_push_costs_the_other_nothing(victim: str) -> None:
    """A failpoint kills one end; the survivor reports a typed error and serves a new partner."""
    point = {"prefill": "prefill.mid_push=kill", "decode": "decode.mid_decode:3=kill"}[victim]
    async with driven_workers() as it:
        workers = {
            role: await it.mesh.start(
                role, failpoints=point if role == victim else "", token_budget=128
            )
            for role in ("prefill", "decode")
        }
        request = await it.ask(a_prompt(1000), 50)
        assert await workers[victim].ended() == -signal.SIGKILL
        if victim == "prefill":
            with pytest.raises(MeshError):
                await request.until(lambda r: r.joined)
        await it.gateway.until(lambda: len(it.gateway.workers) == 1)
        await it.mesh.start(victim)
        prompt = a_prompt(300, 77)
        again = await it.ask(prompt, 10)
        assert await again.finished() == fake_ids(prompt, 10)
        survivor = again.decode if victim == "prefill" else again.prefill
        status = it.gateway.status
        await it.gateway.until(lambda: status[survivor].reserved_blocks == 0)
        assert status[survivor].quarantined_blocks == 0


async def test_a_stopped_prefill_worker_is_given_up_after_three_seconds() -> None:
    """SIGSTOP looks alive to TCP and to UCX: only its silence tells; decode frees everything."""
    async with driven_workers() as it:
        await it.mesh.start("prefill", token_budget=64, failpoints="prefill.mid_push:5=stop")
        await it.mesh.start("decode")
        request = await it.ask(a_prompt(1000), 5)
        with pytest.raises(MeshError):
            await request.until(lambda r: r.joined)
        status, decode = it.gateway.status, request.decode
        await it.gateway.until(
            lambda: status[decode].reserved_blocks + status[decode].quarantined_blocks == 0
        )


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"model": "/no/such/folder"}, 1, "no model folder"),
        ({"max_running": "many"}, 2, "PDMESH_MAX_RUNNING"),
        ({"block_size": "5000"}, 2, "block-size"),
    ],
)
async def test_what_keeps_a_worker_from_starting_is_one_line_and_an_exit_code(
    settings: dict[str, str], code: int, words: str
) -> None:
    """No traceback for what the operator can mend."""
    async with driven_workers() as it:
        worker = await it.mesh.start("prefill", **settings)
        assert await worker.ended() == code
        await worker.said(words)
        assert not any("Traceback" in line for line in worker.log)


async def test_a_port_in_use_is_one_line_and_an_exit_code() -> None:
    """The second worker on a port says so and ends."""
    async with driven_workers() as it:
        blocker = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with blocker:
            port = blocker.sockets[0].getsockname()[1]
            worker = await it.mesh.start("decode", port=port)
            assert await worker.ended() == 1
            await worker.said("in use|address")
            assert not any("Traceback" in line for line in worker.log)
