"""A gateway, a prefill and a decode worker in one process, and nothing else is for tests: TCP on
loopback, UCX, compute threads, engines with weights.

Where ``whole_mesh.py`` has virtual time and no weights, this has real time and real numbers. At the
end of every mesh each pool must be exactly full and no request may be left anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from services.decode.role import decode_launch
from services.gateway.app import Gateway
from services.gateway.text.text_model import TextModel
from services.prefill.role import prefill_launch
from shared.address import Address
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig
from shared.engine.base import Engine
from shared.engine.worker import BegunStep, OnLayersDone, StepDone, ThreadCompute
from shared.rpc.network import Network
from shared.rpc.tcp import TcpNetwork
from shared.runtime.groups import plain_errors
from shared.runtime.platform import real_platform
from shared.step import RowResult, StepRow, ToCome
from shared.transport.base import TransportFactory
from shared.transport.ucxx import open_ucx
from shared.worker.worker import MeshWorker
from tests.support.grpc_client import Answer, ask
from tests.support.worker_mesh import assert_nothing_held

STARTED_WITHIN_S = 60.0
HAPPENS_WITHIN_S = 60.0
STOPPED_WITHIN_S = 60.0

Run = Callable[[Callable[..., None], asyncio.Event], Coroutine[Any, Any, None]]


class GatedCompute(ThreadCompute):
    """The compute runner of production behind a gate, so that a test can line requests up.

    gate: no step begins before it is set.
    """

    def __init__(self, engine: Engine, gate: asyncio.Event) -> None:
        super().__init__(engine)
        self._gate = gate

    def begin(
        self,
        rows: Sequence[StepRow],
        to_come: ToCome = (),
        on_layers_done: OnLayersDone | None = None,
    ) -> BegunStep:
        begin = super().begin
        if self._gate.is_set():
            return begin(rows, to_come, on_layers_done)
        return _GatedStep(self._gate, lambda: begin(rows, to_come, on_layers_done))


class _GatedStep:
    """Begins when the gate opens; whoever waits for it waits for both."""

    def __init__(self, gate: asyncio.Event, begin: Callable[[], BegunStep]) -> None:
        self.seconds = 0.0
        self.done = StepDone()
        self._gate = gate
        self._begin = begin

    async def results(self) -> list[RowResult]:
        await self._gate.wait()
        begun = self._begin()
        results = await begun.results()
        self.seconds, self.done = begun.seconds, begun.done
        return results

    def withdraw(self) -> bool:
        return False


@dataclass
class RealMesh:
    """Made by ``real_mesh``. prefill: None = decode is colocated. prefill_gate: while it is clear,
    prefill begins no step."""

    network: Network
    address: Address
    gateway: Gateway
    prefill: Any
    decode: MeshWorker
    prefill_gate: asyncio.Event

    async def ask(self, prompt: Sequence[int] | str, max_tokens: int = 16, **params: Any) -> Answer:
        """Ask for one greedy answer, as a client does.

        Raises MeshError: the call failed.
        """
        answer = await ask(self.network, self.address, prompt, max_tokens, **params)
        if answer.error is not None:
            raise answer.error
        return answer

    async def ask_all(
        self,
        prompts: Sequence[Sequence[int]] | Sequence[str],
        max_tokens: int = 16,
        *,
        at_once: int = 1 << 10,
        **params: Any,
    ) -> list[Answer]:
        """Ask for the answers to many prompts, ``at_once`` at a time; in the prompts' order."""
        places = asyncio.Semaphore(at_once)

        async def ask_in_turn(prompt: Sequence[int] | str) -> Answer:
            async with places:
                return await self.ask(prompt, max_tokens, **params)

        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(ask_in_turn(prompt)) for prompt in prompts]
        return [task.result() for task in asking]

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition on the workers' load holds; they report every change of it."""
        members: Any = self.gateway.members
        reported = asyncio.Event()
        update = members.update

        def updated(*report: Any) -> None:
            update(*report)
            reported.set()

        members.update = updated
        try:
            async with asyncio.timeout(HAPPENS_WITHIN_S):
                while not condition():
                    await reported.wait()
                    reported.clear()
        finally:
            members.update = update

    def assert_nothing_left(self) -> None:
        """Every block of both workers is available, and the gateway holds no request."""
        for worker in filter(None, (self.prefill, self.decode)):
            assert_nothing_held(worker)
        assert self.gateway.mesh is not None
        counts = self.gateway.mesh.statistics
        assert (counts.num_running, counts.num_waiting) == (0, 0)


@contextlib.asynccontextmanager
async def _running(run: Run) -> AsyncGenerator[tuple[Any, ...]]:
    """Run a service for the length of the block; gives what it called ``ready`` with.

    At the end it drains; after an error in the block it is cancelled.
    """
    stop = asyncio.Event()
    is_ready: asyncio.Future[tuple[Any, ...]] = asyncio.get_running_loop().create_future()
    with plain_errors():
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(run(lambda *said: is_ready.set_result(said), stop))
            async with asyncio.timeout(STARTED_WITHIN_S):
                await is_ready
            yield is_ready.result()
            stop.set()
            async with asyncio.timeout(STOPPED_WITHIN_S):
                await asyncio.wait([task])


@contextlib.asynccontextmanager
async def real_mesh(
    prefill_engine: Engine | None,
    decode_engine: Engine,
    text: TextModel,
    *,
    gateway: dict[str, Any] | None = None,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
) -> AsyncGenerator[RealMesh]:
    """Run a mesh for the length of the block; entering waits until the pair takes work.

    prefill_engine: None = there is no prefill worker, and decode is colocated.
    Engines and text stay the caller's to close. At the end all services drain, and nothing may be
    left of any request.
    """
    network = TcpNetwork()
    gate = asyncio.Event()
    gate.set()
    new_transport = cast("TransportFactory", open_ucx)
    of_prefill = replace(
        real_platform(),
        new_transport=new_transport,
        compute=lambda engine: GatedCompute(engine, gate),
    )
    of_decode = replace(real_platform(), new_transport=new_transport, compute=ThreadCompute)
    front = Gateway(
        GatewayConfig(http_port=0, grpc_port=0, mesh_port=0, **(gateway or {})),
        real_platform(),
        text,
        {},
    )
    async with _running(front.run) as (_, address, mesh_address, *_):
        common: dict[str, Any] = {"gateway": str(mesh_address), "staging_mib": 16}
        of_role: dict[str, Any] = {"colocated": prefill_engine is None, **(decode or {})}
        decode_config = DecodeConfig(**common, **of_role)
        prefill_worker = None
        if prefill_engine is not None:
            config = PrefillConfig(**common, **(prefill or {}))
            prefill_worker = MeshWorker(config, prefill_launch(config), of_prefill, prefill_engine)
        mesh = RealMesh(
            network,
            address,
            front,
            prefill_worker,
            MeshWorker(decode_config, decode_launch(decode_config), of_decode, decode_engine),
            gate,
        )
        async with contextlib.AsyncExitStack() as stack:
            if mesh.prefill is not None:
                await stack.enter_async_context(_running(mesh.prefill.run))
            await stack.enter_async_context(_running(mesh.decode.run))
            assert front.members is not None
            members = front.members
            async with asyncio.timeout(HAPPENS_WITHIN_S):
                while not members.table.sides.num_pairs:
                    await members.usability.next.wait()
            yield mesh
    mesh.assert_nothing_left()
