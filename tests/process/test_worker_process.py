"""Prefill and decode as real processes: TCP between them, UCX under them, the fake engine in them.

A fake gateway in this process drives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from shared.address import Address
from shared.engine.fake import FakeModel
from shared.errors import MeshError
from shared.ids import Incarnation
from shared.model_folder import ModelFolder, resolve_model
from shared.request import SamplingParams
from shared.rpc.tcp import TcpNetwork
from tests.support.fake_gateway import FakeGateway, fake_gateway
from tests.support.fake_reference import fake_continuation
from tests.support.tiers import few

pytestmark = [pytest.mark.process, pytest.mark.ucx]

STARTED_WITHIN_S = 120.0


@dataclass
class WorkerProcess:
    """A worker's process; its stderr is kept."""

    process: asyncio.subprocess.Process
    role: str
    log: list[str]
    log_grew: asyncio.Condition

    async def said(self, pattern: str) -> str:
        """Wait for a line of its log."""
        async with self.log_grew:
            await self.log_grew.wait_for(lambda: any(re.search(pattern, li) for li in self.log))
        return next(line for line in self.log if re.search(pattern, line))


class Processes:
    """All workers of a test; killed at its end."""

    def __init__(self, gateway: FakeGateway, port: int, tasks: asyncio.TaskGroup) -> None:
        self.gateway = gateway
        self._port = port
        self._tasks = tasks
        self.workers: list[WorkerProcess] = []

    async def start(self, role: str, **settings: str) -> WorkerProcess:
        """Start a worker; settings: ``block_size="8"`` becomes PDMESH_BLOCK_SIZE."""
        wanted = {"engine": "fake", "gateway": f"127.0.0.1:{self._port}", "log_format": "json"}
        environment = {
            f"PDMESH_{name.upper()}": value for name, value in {**wanted, **settings}.items()
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"services.{role}",
            env={**os.environ, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        worker = WorkerProcess(process, role, [], asyncio.Condition())
        self._tasks.create_task(self._read(worker))
        self.workers.append(worker)
        return worker

    async def _read(self, worker: WorkerProcess) -> None:
        assert worker.process.stderr is not None
        async for line in worker.process.stderr:
            async with worker.log_grew:
                worker.log.append(line.decode(errors="replace").rstrip())
                worker.log_grew.notify_all()

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


@contextlib.asynccontextmanager
async def processes() -> AsyncIterator[Processes]:
    network = TcpNetwork()
    async with (
        asyncio.timeout(2 * STARTED_WITHIN_S),
        asyncio.TaskGroup() as tasks,
        fake_gateway(network, Address("127.0.0.1", 0)) as gateway,
    ):
        started = Processes(gateway, gateway.port, tasks)
        try:
            yield started
        finally:
            for worker in started.workers:
                if worker.process.returncode is None:
                    worker.process.kill()
                await worker.process.wait()


def model() -> FakeModel:
    """The fake model that workers run: the bundled model's vocabulary."""
    folder = ModelFolder(resolve_model("demo"))
    return FakeModel(
        vocab_size=folder.vocab_size,
        max_model_len=folder.max_model_len,
        eos_token_ids=tuple(sorted(folder.eos_token_ids)),
    )


def a_prompt(num_tokens: int, start: int = 5) -> list[int]:
    """Token ids of the bundled vocabulary."""
    return [5 + (start + i * 37) % 900 for i in range(num_tokens)]


@pytest.mark.quick
@pytest.mark.usefixtures("hears_hangup", "starts_are_executed")
async def test_answers_through_real_processes_are_exact_and_a_drain_ends_them() -> None:
    """TCP, UCX, threads and uvloop change no token; SIGTERM ends one with 0, and SIGHUP, which UCX
    takes for itself unless told otherwise, the other."""
    async with processes() as started:
        await started.start("prefill", token_budget="256")
        await started.start("decode", block_size="32")
        prefill, decode = await started.pair()
        requests = [
            started.gateway.start(
                a_prompt(n, n), SamplingParams(max_tokens=20), prefill=prefill, decode=decode
            )
            for n in (3, 40, 700, 1500)
        ]
        for n, request in zip((3, 40, 700, 1500), requests, strict=True):
            assert await request.finished() == fake_continuation(a_prompt(n, n), 20, model=model())
        assert requests[-1].done is not None
        assert requests[-1].done.lane
        for worker, number in zip(started.workers, (signal.SIGTERM, signal.SIGHUP), strict=True):
            worker.process.send_signal(number)
        assert [await worker.process.wait() for worker in started.workers] == [0, 0]


@pytest.mark.parametrize("victim", few(["prefill", "decode"], "prefill"))
async def test_a_worker_killed_in_mid_push_costs_the_other_nothing(victim: str) -> None:
    """A failpoint kills one end; the survivor reports a typed error and serves a new partner."""
    point = {"prefill": "prefill.mid_push=kill", "decode": "decode.mid_decode:3=kill"}[victim]
    async with processes() as started:
        workers = {
            role: await started.start(
                role, **({"failpoints": point} if role == victim else {}), token_budget="128"
            )
            for role in ("prefill", "decode")
        }
        prefill, decode = await started.pair()
        request = started.gateway.start(
            a_prompt(1000), SamplingParams(max_tokens=50), prefill=prefill, decode=decode
        )
        assert await workers[victim].process.wait() == -signal.SIGKILL
        if victim == "prefill":
            with pytest.raises(MeshError):
                await request.until(lambda r: r.joined)
        await started.gateway.until(lambda: len(started.gateway.workers) == 1)
        await started.start(victim)
        prefill, decode = await started.pair()
        survivor = decode if victim == "prefill" else prefill
        prompt = a_prompt(300, 77)
        again = started.gateway.start(
            prompt, SamplingParams(max_tokens=10), prefill=prefill, decode=decode
        )
        assert await again.finished() == fake_continuation(prompt, 10, model=model())
        status = started.gateway.status
        await started.gateway.until(lambda: status[survivor].reserved_blocks == 0)
        assert status[survivor].quarantined_blocks == 0


async def test_a_stopped_prefill_worker_is_given_up_after_three_seconds() -> None:
    """SIGSTOP looks alive to TCP and to UCX: only its silence tells; decode frees everything."""
    async with processes() as started:
        await started.start("prefill", token_budget="64", failpoints="prefill.mid_push:5=stop")
        await started.start("decode")
        prefill, decode = await started.pair()
        request = started.gateway.start(
            a_prompt(1000), SamplingParams(max_tokens=5), prefill=prefill, decode=decode
        )
        with pytest.raises(MeshError):
            await request.until(lambda r: r.joined)
        status = started.gateway.status
        await started.gateway.until(
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
    async with processes() as started:
        worker = await started.start("prefill", **settings)
        assert await worker.process.wait() == code
        await worker.said(words)
        assert not any("Traceback" in line for line in worker.log)


async def test_a_port_in_use_is_one_line_and_an_exit_code() -> None:
    """The second worker on a port says so and ends."""
    async with processes() as started:
        blocker = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        async with blocker:
            port = blocker.sockets[0].getsockname()[1]
            worker = await started.start("decode", port=str(port))
            assert await worker.process.wait() == 1
            await worker.said("in use|address")
            assert not any("Traceback" in line for line in worker.log)
