"""Every worker killed and stopped in every phase, over real processes, TCP and UCX: with a spare
the client notices a pause at most; without one it gets one typed error in time; nothing stays held.

A failpoint in the victim decides the instant. The phases of a request are those of its prefill:
before the first frame, amid the push, before the commit, and then decoding. The cases of a phase
run at the same time, each on a mesh of its own, since they mostly wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from services.gateway.text.text_model import TextModel
from shared.model_folder import ModelFolder, resolve_model
from tests.support.process_mesh import (
    HAPPENS_WITHIN_S,
    Answer,
    ProcessMesh,
    a_prompt,
    fake_ids,
    process_mesh,
)
from tests.support.service_process import ServiceProcess, free_port

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

LIMIT_S = 4.0
"""From the fault to the client's typed error, whatever the fault."""

PAUSE_S = 2.0
"""From the fault to the client's next token where there is a spare."""

NUM_TOKENS = 16
STEP_S = 0.01
PREFILL = {"token_budget": 64, "fake_step_s": STEP_S, "transfer_mode": "layerwise"}
DECODE = {"fake_step_s": STEP_S}
SETTINGS = {"prefill": PREFILL, "decode": DECODE}
OTHER = {"prefill": "decode", "decode": "prefill"}

FAILPOINTS = {
    "before_first_frame": {"prefill": "before_first_frame", "decode": "before_grant"},
    "mid_push": {"prefill": "mid_push:5", "decode": "mid_push:3"},
    "before_commit": {"prefill": "before_commit", "decode": "before_join"},
    "mid_decode": {"prefill": "", "decode": "mid_decode:5"},
}
"""Prefill has done its part when decode runs: there the test itself hits it."""

SAMPLING: dict[str, dict[str, Any]] = {
    "kill": {"temperature": 0.0},
    "stop": {"temperature": 0.9, "top_p": 0.95, "seed": 20},
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ENDLESS_TOKENS = 1500
"""An answer that does not end within any limit here."""

DECODING = 4
"""A client that has so many tokens is served by decode alone."""


@dataclass
class Bench:
    """A mesh on which workers of one role are victims. spare: another of that role, or None."""

    mesh: ProcessMesh
    role: str
    gateway: ServiceProcess
    survivor: ServiceProcess
    spare: ServiceProcess | None
    spare_id: str = ""
    num_prompts: int = 0
    at_start: dict[str, dict[str, float]] = field(default_factory=dict)

    def new_prompt(self) -> list[int]:
        """A prompt that no worker has seen, so that no cache shortens what happens to it."""
        self.num_prompts += 1
        return a_prompt(600 + self.num_prompts, start=self.num_prompts)

    @property
    def unharmed(self) -> list[ServiceProcess]:
        return [self.survivor] if self.spare is None else [self.survivor, self.spare]

    async def ask(self, prompt: list[int], **options: Any) -> Answer:
        return await self.mesh.ask(self.gateway, prompt, NUM_TOKENS, **options)

    async def add(self, failpoints: str = "") -> ServiceProcess:
        """Start one more worker of the role. The next request goes to it: it is idle, and new."""
        worker = await self.mesh.add(self.role, failpoints=failpoints, **SETTINGS[self.role])
        await self.mesh.paired(self.gateway, len(self.unharmed))
        return worker

    async def clear(self) -> None:
        """End victims that are left; after a case that failed there are some."""
        for process in self.mesh.processes:
            if process.is_alive and process not in (self.gateway, *self.unharmed):
                await process.kill()

    async def home(self, *more: ServiceProcess, limit_s: float = HAPPENS_WITHIN_S) -> None:
        await self.mesh.home([self.gateway], [*self.unharmed, *more], limit_s=limit_s)

    async def held(self) -> dict[str, dict[str, float]]:
        """What must not grow: tasks, and endpoints of the transport."""
        return {
            process.name: {
                name: value
                for name, value in (await self.mesh.gauges(process)).items()
                if name in ("asyncio_tasks", "endpoints")
            }
            for process in (self.gateway, *self.unharmed)
        }

    async def require_nothing_left(self) -> None:
        """A prefill worker goes on calling a decode worker that is gone for some seconds."""

        async def is_as_at_start() -> bool:
            return await self.held() == self.at_start

        with self.mesh.explained():
            try:
                await self.mesh.until(is_as_at_start)
            except TimeoutError:
                raise AssertionError(f"{self.at_start} became {await self.held()}") from None


async def a_bench(mesh: ProcessMesh, role: str, *, has_spare: bool) -> Bench:
    gateway = await mesh.start_gateway(policy="least_loaded")
    roles = [OTHER[role], role] if has_spare else [OTHER[role]]
    workers = [await mesh.start(kind, **SETTINGS[kind]) for kind in roles]
    await mesh.ready(*workers)
    bench = Bench(mesh, role, gateway, workers[0], workers[1] if has_spare else None)
    await mesh.paired(gateway, int(has_spare))
    if has_spare:
        answer = await bench.ask(bench.new_prompt())
        answer.require_whole(NUM_TOKENS)
        bench.spare_id = answer.receipt[role]
    await bench.home()
    await bench.mesh.usable(gateway, len(workers))
    bench.at_start = await bench.held()
    return bench


Benches = dict[tuple[str, bool], Bench]
NameOf = Callable[[int], str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def benches() -> AsyncIterator[Benches]:
    """A bench for each kind of victim, with and without a spare of that kind.

    At the end nothing may be left of all the victims.
    """
    async with contextlib.AsyncExitStack() as stack:
        keys = [(role, has_spare) for role in OTHER for has_spare in (False, True)]
        meshes = [await stack.enter_async_context(process_mesh()) for _ in keys]
        async with asyncio.TaskGroup() as tasks:
            starting = [
                tasks.create_task(a_bench(mesh, role, has_spare=has_spare))
                for mesh, (role, has_spare) in zip(meshes, keys, strict=True)
            ]
        started = [task.result() for task in starting]
        yield dict(zip(keys, started, strict=True))
        async with asyncio.TaskGroup() as tasks:
            for bench in started:
                tasks.create_task(bench.require_nothing_left())


@pytest.fixture(scope="module")
def name_of() -> NameOf:
    """The name of a token, as the answers' logprobs give it."""
    text = TextModel.load(ModelFolder(resolve_model("demo")))
    return lambda token_id: text.piece(token_id).completion_name


@dataclass
class Case:
    """One victim, hit at one instant (loop time), and what its client got."""

    bench: Bench
    phase: str
    action: str
    victim: ServiceProcess
    prompt: list[int]
    answer: Answer
    hit_at: float

    @property
    def costs_nothing(self) -> bool:
        """Whether the victim had done its part."""
        return (self.bench.role, self.phase) == ("prefill", "mid_decode")

    @property
    def longest_pause_s(self) -> float:
        """From the hit, or a token, to the next token."""
        times = [self.hit_at, *(at for at in self.answer.arrived_at if at > self.hit_at)]
        return max(after - before for before, after in pairwise(times))

    def truth(self, name_of: NameOf) -> list[str]:
        """The tokens that the client must get, if it gets them all."""
        ids = fake_ids(self.prompt, NUM_TOKENS, **SAMPLING[self.action])
        return [name_of(token_id) for token_id in ids]


async def a_case(bench: Bench, phase: str, action: str) -> Case:
    """Start a victim, send it a request, see it hit, and read the answer to its end."""
    point = FAILPOINTS[phase][bench.role]
    victim = await bench.add(f"{bench.role}.{point}={action}" if point else "")
    prompt = bench.new_prompt()
    is_decoding = asyncio.Event()

    def watch(answer: Answer) -> None:
        if len(answer.tokens) >= DECODING:
            is_decoding.set()

    async with asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(bench.ask(prompt, on_token=watch, **SAMPLING[action]))
        if point:
            hit_at = await victim.acted(f"{bench.role}.{point.partition(':')[0]}")
        else:
            await is_decoding.wait()
            hit_at = asyncio.get_running_loop().time()
            victim.send(SIGNALS[action])
        if bench.spare is not None:
            # Whoever has nothing to do with the victim notices nothing.
            other = bench.new_prompt()
            ids, receipt = await bench.mesh.ask_grpc(bench.gateway, other, NUM_TOKENS)
            assert ids == fake_ids(other, NUM_TOKENS)
            assert receipt["attempts"] == 1
    return Case(bench, phase, action, victim, prompt, asked.result(), hit_at)


@pytest.mark.parametrize("phase", FAILPOINTS)
@pytest.mark.parametrize("action", SIGNALS)
async def test_a_fault_costs_a_pause_or_without_a_spare_one_typed_error(
    benches: Benches, name_of: NameOf, action: str, phase: str
) -> None:
    """A prefill and a decode worker, each with a spare and without, hit in the same phase."""

    async def run(bench: Bench) -> None:
        with bench.mesh.explained():
            try:
                case = await a_case(bench, phase, action)
                if bench.spare is not None:
                    await require_pause_at_most(case, name_of)
                else:
                    await require_one_typed_error(case, name_of)
            finally:
                await bench.clear()

    async with asyncio.TaskGroup() as tasks:
        for bench in benches.values():
            tasks.create_task(run(bench))


async def require_pause_at_most(case: Case, name_of: NameOf) -> None:
    """Text and tokens equal the unfaulted run; every block comes home; a worker that was stopped
    serves again when it goes on, and what it still had to say harms nobody."""
    bench, answer = case.bench, case.answer
    answer.require_whole(NUM_TOKENS)
    assert answer.tokens == case.truth(name_of)
    assert answer.receipt["attempts"] == (1 if case.costs_nothing else 2)
    assert len(answer.receipt["errors"]) == answer.receipt["attempts"] - 1
    assert case.longest_pause_s < PAUSE_S
    await bench.mesh.paired(bench.gateway, 1)
    await bench.home()
    unfaulted = await bench.ask(case.prompt, cache_salt="again", **SAMPLING[case.action])
    assert (unfaulted.text, unfaulted.tokens) == (answer.text, answer.tokens)
    assert unfaulted.receipt["attempts"] == 1
    if case.action == "kill":
        assert await case.victim.ended() == -signal.SIGKILL
        return
    case.victim.send(signal.SIGCONT)
    await bench.mesh.paired(bench.gateway, 2)
    await require_served(bench, case.victim, name_of)


async def require_one_typed_error(case: Case, name_of: NameOf) -> None:
    """What came before the error is right; every block comes home; the gateway serves again as
    soon as a worker joins, or the stopped one goes on."""
    bench, answer = case.bench, case.answer
    assert answer.tokens == case.truth(name_of)[: len(answer.tokens)]
    if case.costs_nothing:
        answer.require_whole(NUM_TOKENS)
    else:
        assert answer.require_one_error()["type"] == "server_error"
        assert answer.ended_at - case.hit_at < LIMIT_S
    await bench.mesh.paired(bench.gateway, 0)
    await bench.home()
    worker = case.victim
    if case.action == "kill":
        assert await worker.ended() == -signal.SIGKILL
        worker = await bench.add()
    else:
        worker.send(signal.SIGCONT)
        await bench.mesh.paired(bench.gateway, 1)
    await require_served(bench, worker, name_of)


async def require_served(bench: Bench, worker: ServiceProcess, name_of: NameOf) -> None:
    """The worker soon takes part in an answer, which is right; then it drains and leaves."""

    async def is_served() -> bool:
        prompt = bench.new_prompt()
        answer = await bench.ask(prompt)
        answer.require_whole(NUM_TOKENS)
        assert answer.tokens == [name_of(token_id) for token_id in fake_ids(prompt, NUM_TOKENS)]
        return answer.receipt[bench.role] != bench.spare_id

    await bench.mesh.until(is_served)  # a worker that was stopped must report anew first
    await bench.home(worker)
    await worker.stop()
    await bench.mesh.paired(bench.gateway, int(bench.spare is not None))


# --- clients that hang up -----------------------------------------------------------------------


async def test_clients_that_hang_up_leave_nothing_behind(benches: Benches, name_of: NameOf) -> None:
    """Before the first token, amid the answer, many at once: all is home, transfers that were not
    opened yet included, and the next answer is right."""
    bench = benches["decode", True]

    async def leave_before_the_first_token() -> bool:
        async def is_on_its_way() -> bool:
            return asking.done() or (await bench.mesh.gauges(bench.gateway))["legs"] > 0

        bench.num_prompts += 1
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(bench.ask(a_prompt(1900, start=bench.num_prompts)))
            await bench.mesh.until(is_on_its_way)
            return asking.cancel()

    with bench.mesh.explained():
        await bench.mesh.until(leave_before_the_first_token)
        await bench.home()
        await storm_of_cancels(bench)
        async with asyncio.TaskGroup() as tasks:
            for number in range(24):
                bench.num_prompts += 1
                prompt = a_prompt(60, start=bench.num_prompts)
                leaving = bench.mesh.ask(
                    bench.gateway, prompt, ENDLESS_TOKENS, leave_after=1 + number % 8
                )
                tasks.create_task(leaving)
        await bench.home(limit_s=LIMIT_S)
        prompt = bench.new_prompt()
        answer = await bench.ask(prompt)
        answer.require_whole(NUM_TOKENS)
        assert answer.tokens == [name_of(token_id) for token_id in fake_ids(prompt, NUM_TOKENS)]


async def storm_of_cancels(bench: Bench) -> None:
    """Clients that lose their patience at once, some between the reservation's end and prefill's
    open. All must be home before prefill would give up an open that nobody answers (5 s)."""
    source = random.Random(20)

    async def ask_in_a_hurry() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(source.uniform(0.0, 0.12)):
                await bench.ask(bench.new_prompt())

    for _ in range(5):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(60):
                tasks.create_task(ask_in_a_hurry())
        await bench.home(limit_s=PAUSE_S)


# --- gateways -----------------------------------------------------------------------------------


async def test_a_gateway_that_stops_or_dies_takes_nothing_with_it(name_of: NameOf) -> None:
    """Its requests' blocks come home while the other gateway serves on. When it goes on, its own
    client gets the whole answer; a killed one is joined again when it comes back."""
    async with process_mesh() as mesh:
        with mesh.explained():
            ports = {"http_port": free_port(), "mesh_port": free_port()}
            victim, other = await mesh.start_gateway(**ports), await mesh.start_gateway()
            gateways = [victim, other]
            workers = [await mesh.start(role, **SETTINGS[role]) for role in OTHER]
            await mesh.ready(*workers)
            for gateway in gateways:
                await mesh.paired(gateway, 1)

            async def ask(gateway: ServiceProcess, start: int, num_tokens: int = 100) -> Answer:
                """Ask, and set ``has_begun`` when the answer comes in."""
                return await mesh.ask(
                    gateway, a_prompt(300, start), num_tokens, on_token=lambda _: has_begun.set()
                )

            def require_right(answer: Answer, start: int) -> None:
                truth = fake_ids(a_prompt(300, start), len(answer.tokens))
                assert answer.tokens == [name_of(token_id) for token_id in truth]
                answer.require_whole(len(answer.tokens))

            has_begun = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                # Too long for the workers to be done before they give the gateway up.
                asked = tasks.create_task(ask(victim, 1, num_tokens=500))
                await has_begun.wait()
                victim.send(signal.SIGSTOP)
                async with asyncio.timeout(LIMIT_S + 0.5):
                    require_right(await ask(other, 2), 2)
                    await mesh.home([other], workers)
                victim.send(signal.SIGCONT)
            require_right(asked.result(), 1)
            asked.result().require_whole(500)
            assert asked.result().receipt["attempts"] == 2
            for gateway in gateways:
                await mesh.paired(gateway, 1)
            await mesh.home(gateways, workers)

            has_begun = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(require_cut_off(ask(victim, 3, num_tokens=ENDLESS_TOKENS)))
                kept = tasks.create_task(ask(other, 4))
                await has_begun.wait()
                await victim.kill()
            require_right(kept.result(), 4)
            await mesh.home([other], workers, limit_s=LIMIT_S)
            require_right(await ask(other, 5), 5)

            again = await mesh.start_gateway(**ports)
            await mesh.paired(again, 1)
            require_right(await ask(again, 6), 6)
            await mesh.home([other, again], workers)


async def require_cut_off(asking: Awaitable[Answer]) -> None:
    """A gateway that dies can say nothing any more: its client's connection breaks."""
    with pytest.raises((aiohttp.ClientError, ConnectionError)):
        await asking


# --- weights ------------------------------------------------------------------------------------

RECALL = (
    "The code of the red door is 4821. The cat sleeps in the garden. The code of the blue box is "
    "1111. The code of the old tower is 7350. What is the code of the red door?"
)


@pytest.mark.torch
async def test_the_bundled_model_says_the_same_when_its_workers_are_killed() -> None:
    """Greedy and with a seed: prefill amid the push, decode amid the answer; then, without a spare,
    one typed error."""
    pytest.importorskip("torch")
    settings = {"prefill": {"token_budget": 32}, "decode": {}}
    questions: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 11},
    ]
    async with process_mesh("torch") as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            prefill, decode = [await mesh.start(role, **settings[role]) for role in OTHER]
            await mesh.ready(prefill, decode)
            await mesh.paired(gateway, 1)

            async def ask(question: dict[str, Any]) -> Answer:
                return await mesh.ask(gateway, RECALL, NUM_TOKENS, **question)

            unfaulted = [await ask(question) for question in questions]
            for answer in unfaulted:
                answer.require_whole(NUM_TOKENS)

            points = {"prefill": "prefill.mid_push=kill", "decode": "decode.mid_decode:5=kill"}
            victims = [
                await mesh.start(role, failpoints=points[role], **settings[role]) for role in OTHER
            ]
            await mesh.ready(*victims)
            await mesh.paired(gateway, 4)
            num_attempts = 0
            while any(victim.is_alive for victim in victims):
                for number, question in enumerate(questions):
                    question = {**question, "cache_salt": f"{num_attempts}-{number}"}
                    answer = await ask(question)
                    answer.require_whole(NUM_TOKENS)
                    assert answer.text == unfaulted[number].text
                    assert answer.tokens == unfaulted[number].tokens
                    num_attempts += answer.receipt["attempts"] - 1
            assert [await victim.ended() for victim in victims] == [-signal.SIGKILL] * 2
            assert num_attempts >= 1
            await mesh.paired(gateway, 1)
            await mesh.home([gateway], [prefill, decode])

            has_begun = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(
                    mesh.ask(gateway, RECALL, 400, on_token=lambda _: has_begun.set())
                )
                await has_begun.wait()
                await decode.kill()
                killed_at = asyncio.get_running_loop().time()
            assert asked.result().require_one_error()["type"] == "server_error"
            assert asked.result().ended_at - killed_at < LIMIT_S
            await mesh.home([gateway], [prefill])
