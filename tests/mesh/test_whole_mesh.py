"""The three services together under virtual time: every answer exact, whatever happens to workers.

Each test is one deterministic run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import structlog

from services.gateway.workers import peers
from shared import log, wire
from shared.address import Address
from shared.config import MESH_PORT, DecodeConfig, GatewayConfig, PrefillConfig
from shared.engine.fake import FakeModel, FakeTiming
from shared.errors import (
    DeadlinePassed,
    IncompatiblePeer,
    InvalidRequest,
    InvariantViolated,
    MeshError,
    Overloaded,
    ShuttingDown,
    WorkerLost,
)
from shared.liveness import DEAD_AFTER_S, IDLE
from shared.messages.columns import pack_u32
from shared.profile.machine import MachineProfile
from shared.request import SamplingParams
from shared.rpc.methods import REGISTRY_JOIN
from shared.rpc.stream import open_stream
from tests.support.grpc_client import Answer
from tests.support.loopback import LoopbackSettings
from tests.support.memory_network import MemoryNetwork, MemoryTransport
from tests.support.tiny_tokenizer import tiny_tokenizer
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import a_prompt, expected

SLOW = FakeTiming(base_s=0.02, prefill_token_s=0.001)
"""Steps long enough for a test to fall between them."""


@virtual_time
async def test_one_prompt_crosses_three_services() -> None:
    """The client reads what one undisturbed engine gives, with usage and a receipt that adds up."""
    async with whole_mesh() as mesh:
        prompt = a_prompt(70)
        answer = await mesh.ask(prompt, 12)
        assert answer.error is None
        assert answer.token_ids == expected(prompt, 12)
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (70, 12)
        receipt = answer.receipt
        phases = ("queue_s", "route_s", "retry_s", "prefill_queue_s", "prefill_s", "handover_s")
        assert sum(receipt[name] for name in phases) == pytest.approx(receipt["ttft_s"], abs=2e-6)
        assert receipt["transfer_bytes"] > 0
        assert receipt["attempts"] == 1


@pytest.mark.parametrize(
    ("settings", "expected_s"),
    [({}, [0.22, 0.44, 0.66, 0.88]), ({"batch_tokens": 2048}, [0.22, 0.84, 0.84, 0.84])],
)
@virtual_time
async def test_a_prompt_does_not_wait_for_those_behind_it(
    settings: dict[str, Any], expected_s: list[float]
) -> None:
    """A device that is busy with one computes them one after the other, 20 ms and 1 ms a token;
    as one batch those that wait would have their first tokens when the last one has."""
    prefill = {"profile": MachineProfile(saturating_tokens=32), **settings}
    async with whole_mesh(prefill=prefill, timing=SLOW, num_blocks=200) as mesh:
        prompts = [a_prompt(200, seed=seed) for seed in range(4)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(prompt, 5)) for prompt in prompts]
        answers = [task.result() for task in asked]
        assert [answer.token_ids for answer in answers] == [expected(p, 5) for p in prompts]
        waited_s = sorted(answer.receipt["ttft_s"] for answer in answers)
        assert waited_s == pytest.approx(expected_s, abs=0.01)
        seen = mesh.gateways[0].members.table.get(mesh.prefills[0].incarnation)
        assert seen.status.batch_tokens == settings.get("batch_tokens", 32)
        assert seen.status.max_running == 256


@virtual_time
async def test_token_one_reaches_the_client_while_kv_still_travels() -> None:
    """With a slow link the first token comes at once and the second waits for the KV."""
    async with whole_mesh(timing=SLOW) as mesh:
        mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e4)
        prompt = a_prompt(200)
        answer = await mesh.ask(prompt, 4)
        assert answer.token_ids == expected(prompt, 4)
        gap_1, gap_2 = (answer.arrived_at[i + 1] - answer.arrived_at[i] for i in (0, 1))
        assert gap_1 > 5 * gap_2


@virtual_time
async def test_many_clients_over_two_pairs_are_all_exact() -> None:
    """Forty mixed requests on 2 x 2 workers: each answer is its own, and all workers took part."""
    async with whole_mesh(num_prefill=2, num_decode=2, num_blocks=96) as mesh:
        prompts = [a_prompt(1 + 13 * i % 300, seed=i) for i in range(40)]
        answers = await _ask_all(mesh, prompts, 9)
        assert [a.token_ids for a in answers] == [expected(p, 9) for p in prompts]
        assert len({a.receipt["prefill"] for a in answers}) == 2
        assert len({a.receipt["decode"] for a in answers}) == 2


@virtual_time
async def test_a_repeated_prompt_is_told_as_cached() -> None:
    """The second time usage reports the cached prefix, and fewer bytes move."""
    async with whole_mesh() as mesh:
        prompt = a_prompt(100)
        first, second = await mesh.ask(prompt, 4), await mesh.ask(prompt, 4)
        assert first.token_ids == second.token_ids == expected(prompt, 4)
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens == 96
        assert second.receipt["transfer_bytes"] < first.receipt["transfer_bytes"] / 4


@pytest.mark.slow
@virtual_time
async def test_a_burst_that_a_gateway_takes_is_refused_by_no_worker() -> None:
    """Who is beyond ``--max-running`` waits in the gateway; one worker of each role takes all who
    are within, by their defaults."""
    assert GatewayConfig().max_running <= PrefillConfig().max_jobs
    assert GatewayConfig().max_running <= DecodeConfig().max_requests
    async with whole_mesh(num_blocks=4096) as mesh:
        prompts = [a_prompt(20, seed=i) for i in range(300)]
        answers = await _ask_all(mesh, prompts, 3)
        assert [a.token_ids for a in answers] == [expected(p, 3) for p in prompts]


PHASES = ("before_first_token", "after_first_token", "mid_decode")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual_time
async def test_a_killed_worker_costs_a_pause_when_there_is_a_spare(role: str, phase: str) -> None:
    """The client's tokens equal the undisturbed run; nothing is sent twice or lost."""
    async with whole_mesh(num_prefill=2, num_decode=2, timing=SLOW) as mesh:
        prompt = a_prompt(150)
        task_of = {"before_first_token": 0, "after_first_token": 1, "mid_decode": 4}
        trigger = asyncio.Event()

        def watch(answer: Answer) -> None:
            if len(answer.token_ids) >= task_of[phase]:
                trigger.set()

        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(prompt, 12, on_token=watch))
            await asyncio.sleep(0.03)
            victim = _busy(mesh, role)
            if phase != "before_first_token":
                await trigger.wait()
            await mesh.kill(victim)
        answer = asked.result()
        assert answer.error is None
        assert answer.token_ids == expected(prompt, 12)
        costs_nothing = role == "prefill" and phase == "mid_decode"
        assert answer.receipt["attempts"] == (1 if costs_nothing else 2)


@virtual_time
async def test_masks_hold_when_another_worker_goes_on() -> None:
    """Three tokens are allowed and a sequence of them is bad: the whole answer is the undisturbed
    one, wherever it is cut."""
    tokenizer = tiny_tokenizer()
    allowed = pack_u32(tokenizer.encode("qxz").ids)
    free = SamplingParams(max_tokens=12, allowed_token_ids=allowed, bad_words=((1, 1),))
    prompt = a_prompt(150)
    first, second, third, *_ = expected(prompt, 12, free)
    word = (first, second, third)
    due = expected(prompt, 12, replace(free, bad_words=(word,)))
    assert due[:2] == [first, second]
    assert due[2] != third
    for cut in range(1, 6):
        async with whole_mesh(num_prefill=2, num_decode=2, timing=SLOW) as mesh:
            reached = asyncio.Event()

            def watch(answer: Answer, cut: int = cut, reached: asyncio.Event = reached) -> None:
                if len(answer.token_ids) >= cut:
                    reached.set()

            masks = {"allowed_token_ids": allowed, "bad_words": [tokenizer.decode(word)]}
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(mesh.ask(prompt, 12, on_token=watch, **masks))
                await reached.wait()
                await mesh.kill(_busy(mesh, "decode"))
        answer = asked.result()
        assert answer.error is None
        assert answer.token_ids == due


@pytest.mark.parametrize("phase", PHASES[:2])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual_time
async def test_a_killed_worker_without_a_spare_is_one_typed_error_within_four_seconds(
    role: str, phase: str
) -> None:
    """One WorkerLost, in bounded time, and nothing stays held."""
    async with whole_mesh(timing=SLOW) as mesh:
        mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e5)
        loop = asyncio.get_running_loop()
        first_token = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(
                mesh.ask(a_prompt(150), 12, on_token=lambda _: first_token.set())
            )
            if phase == "before_first_token":
                await asyncio.sleep(0.03)
            else:
                await first_token.wait()
            await mesh.kill(_busy(mesh, role))
            killed_at = loop.time()
        answer = asked.result()
        assert isinstance(answer.error, WorkerLost), answer
        assert loop.time() - killed_at <= 4.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual_time
async def test_a_silent_worker_is_replaced_after_its_heartbeats_stop(role: str) -> None:
    """A worker that hangs (its host neither answers nor resets) is dead in three seconds."""
    async with whole_mesh(num_prefill=2, num_decode=2, timing=SLOW) as mesh:
        loop = asyncio.get_running_loop()
        prompt = a_prompt(150)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(prompt, 12))
            await asyncio.sleep(0.03)
            hung = _busy(mesh, role)
            for other in ("gateway-0", *(w.host for w in mesh.workers if w is not hung)):
                mesh.network.fabric.partition(hung.host, other)
            mesh.fabric.kill(hung.transport_address)
            hung_at = loop.time()
        answer = asked.result()
        assert answer.error is None
        assert answer.token_ids == expected(prompt, 12)
        assert answer.receipt["attempts"] == 2
        assert loop.time() - hung_at < DEAD_AFTER_S + 2.0
        await mesh.kill(hung)


@virtual_time
async def test_a_host_that_stood_still_takes_nobodys_silence_for_a_loss() -> None:
    """All of the mesh was stopped and goes on (a virtual machine, a container): no attempt ends."""
    async with whole_mesh(timing=SLOW) as mesh:
        loop: Any = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(a_prompt(20), 100))
            await asyncio.sleep(0.5)
            loop._jumping.now += 30.0  # time passes, nothing runs
        answer = asked.result()
        assert answer.error is None
        assert answer.token_ids == expected(a_prompt(20), 100)
        assert answer.receipt["attempts"] == 1


@virtual_time
async def test_a_silent_worker_is_a_member_for_six_seconds() -> None:
    """Its session tells sooner that it is not usable; then its place is another's."""
    async with whole_mesh(num_decode=2) as mesh:
        loop = asyncio.get_running_loop()
        hung, table = mesh.decodes[0], mesh.gateways[0].members.table
        mesh.network.fabric.partition(hung.host, "gateway-0")
        hung_at = loop.time()
        await mesh.until(lambda: table.get(hung.incarnation) is None)
        assert IDLE.dead_after_s - 2.0 <= loop.time() - hung_at <= IDLE.dead_after_s + 0.1
        await mesh.kill(hung)


@virtual_time
async def test_a_pair_that_broke_is_not_tried_again() -> None:
    """Only prefill sees that the decode worker's transport died: the retry goes to the other decode
    worker, though that one is busier."""
    async with whole_mesh(num_decode=2, timing=SLOW) as mesh:
        mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e5)
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(mesh.ask(a_prompt(300), 60))
            await mesh.until(lambda: any(w.pool.num_held for w in mesh.decodes))
            idle = next(w for w in mesh.decodes if not w.pool.num_held)
            second = tasks.create_task(mesh.ask(a_prompt(150, seed=2), 12))
            await mesh.until(lambda: idle.pool.num_held)
            mesh.fabric.kill(idle.transport_address)
        assert first.result().token_ids == expected(a_prompt(300), 60)
        assert second.result().token_ids == expected(a_prompt(150, seed=2), 12)
        assert second.result().receipt["attempts"] == 2
        await mesh.kill(idle)


@virtual_time
async def test_a_broken_pair_without_a_spare_is_waited_for() -> None:
    """The attempts are not used up on a pair that is known to be broken: a worker that joins while
    the client waits saves the request."""
    async with whole_mesh(timing=SLOW) as mesh:
        (broken,) = mesh.decodes
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(a_prompt(150), 12))
            await mesh.until(lambda: broken.pool.num_held)
            mesh.fabric.kill(broken.transport_address)
            await asyncio.sleep(1.0)
            assert not asked.done()
            await mesh.start_worker("decode")
        assert asked.result().token_ids == expected(a_prompt(150), 12)
        await mesh.kill(broken)


@virtual_time
async def test_silence_counts_once_whoever_reports_it() -> None:
    """Prefill, too, waits three seconds before it gives a silent decode worker up: the client does
    not wait for the gateway's patience on top."""
    async with whole_mesh(timing=SLOW) as mesh:
        loop = asyncio.get_running_loop()
        (hung,) = mesh.decodes
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(a_prompt(150), 12))
            await mesh.until(lambda: hung.pool.num_held)
            hung_at = loop.time()
            mesh.fabric.freeze(hung.transport_address)
            mesh.network.fabric.partition(hung.host, mesh.prefills[0].host)
            await asyncio.sleep(0.3)
            mesh.network.fabric.partition(hung.host, "gateway-0")
        assert isinstance(asked.result().error, WorkerLost)
        assert loop.time() - hung_at <= 4.0
        await mesh.kill(hung)


@virtual_time
async def test_a_partitioned_worker_comes_back_and_is_used_again() -> None:
    """After the network heals, the same process is a member again without a restart."""
    async with whole_mesh() as mesh:
        mesh.network.fabric.partition("prefill-0", "gateway-0")
        await mesh.until(lambda: mesh.gateways[0].members.table.sides.num_pairs == 0)
        refused = await mesh.ask(a_prompt(20), 4)
        assert isinstance(refused.error, WorkerLost | Overloaded)
        mesh.network.fabric.heal()
        await mesh.until(lambda: mesh.gateways[0].members.table.sides.num_pairs == 1)
        answer = await mesh.ask(a_prompt(20), 4)
        assert answer.token_ids == expected(a_prompt(20), 4)


@virtual_time
async def test_a_worker_that_joins_late_takes_a_waiting_request() -> None:
    """A request that found no pair waits a bounded while, and a new worker saves it."""
    async with whole_mesh() as mesh:
        await mesh.kill(mesh.decodes[0])
        await mesh.until(lambda: mesh.gateways[0].members.table.sides.num_pairs == 0)
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(a_prompt(40), 6))
            await asyncio.sleep(0.2)
            await mesh.start_worker("decode")
        assert asked.result().token_ids == expected(a_prompt(40), 6)


@virtual_time
async def test_a_request_that_comes_before_all_workers_waits_for_one() -> None:
    """A gateway that has just been started, or replaced, knows nobody yet: as long as for a pair,
    as many as may wait, and never beyond a deadline.
    """
    settings = {"max_wait_s": 3.0, "max_waiting": 2}
    async with whole_mesh(num_prefill=0, num_decode=0, gateway=settings) as mesh:
        loop = asyncio.get_running_loop()

        async def refused(after_s: float, timeout_s: float | None = None) -> MeshError:
            began_at = loop.time()
            error = (await mesh.ask(a_prompt(40), 6, timeout_s=timeout_s)).error
            assert loop.time() - began_at == pytest.approx(after_s, abs=0.1)
            assert error is not None
            return error

        assert (await refused(3.0)).code == "not_ready"
        assert isinstance(await refused(1.0, timeout_s=1.0), DeadlinePassed)
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(a_prompt(40, seed=i), 6)) for i in range(2)]
            await asyncio.sleep(0.2)
            assert (await refused(0.0)).code == "not_ready"  # two wait already
            await mesh.start_worker("prefill")
            await mesh.start_worker("decode")
        for seed, task in enumerate(asked):
            assert task.result().token_ids == expected(a_prompt(40, seed=seed), 6)


@virtual_time
async def test_who_waits_for_the_first_worker_hears_that_the_gateway_ends() -> None:
    """At once, and not when the wait is over."""
    async with whole_mesh(num_prefill=0, num_decode=0, gateway={"max_wait_s": 20.0}) as mesh:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(a_prompt(40), 6))
            await asyncio.sleep(0.2)
            mesh.gateways[0].stop.set()
            ended_at = asyncio.get_running_loop().time() + 1
        assert isinstance(asked.result().error, ShuttingDown)
        assert asyncio.get_running_loop().time() < ended_at


@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual_time
async def test_a_bug_that_ends_a_worker_costs_no_answer(role: str) -> None:
    """What its steps held was not at fault, and is answered elsewhere, as after a kill."""
    async with whole_mesh(num_prefill=2, num_decode=2, timing=SLOW) as mesh:
        running = (mesh.prefills if role == "prefill" else mesh.decodes)[0]

        def broken(_: object) -> None:
            raise InvariantViolated("a count does not hold")

        prompts = [a_prompt(40, seed=i) for i in range(6)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(prompt, 12)) for prompt in prompts]
            await asyncio.sleep(0.05)
            running.worker.requests.announce = broken
        assert isinstance(running.error, InvariantViolated)
        answers = [task.result() for task in asked]
        assert [answer.error for answer in answers] == [None] * 6
        assert [answer.token_ids for answer in answers] == [expected(it, 12) for it in prompts]


@virtual_time
async def test_both_gateways_of_two_serve_and_one_dies() -> None:
    """Killing a gateway ends its own clients' calls and frees their blocks; the other's go on."""
    async with whole_mesh(num_gateways=2, timing=SLOW) as mesh:
        async with asyncio.TaskGroup() as tasks:
            lost = tasks.create_task(mesh.ask(a_prompt(50, seed=1), 200, gateway=0))
            kept = tasks.create_task(mesh.ask(a_prompt(50, seed=2), 20, gateway=1))
            await asyncio.sleep(0.2)
            await mesh.kill(mesh.gateways[0])
        assert lost.result().error is not None
        assert kept.result().token_ids == expected(a_prompt(50, seed=2), 20)


@pytest.mark.parametrize("leave_after", [1, 3])
@virtual_time
async def test_a_client_that_hangs_up_frees_everything(leave_after: int) -> None:
    """Both legs stop long before the answer would have ended."""
    async with whole_mesh(timing=SLOW) as mesh:
        await mesh.ask(a_prompt(100), 500, leave_after=leave_after)
        await mesh.until(lambda: all(not w.pool.num_held for w in mesh.workers), limit_s=1.0)


@virtual_time
async def test_a_deadline_ends_the_request_everywhere() -> None:
    """The client's own gRPC deadline is kept, and the blocks come home."""
    async with whole_mesh(timing=SLOW) as mesh:
        answer = await mesh.ask(a_prompt(100), 500, timeout_s=1.0)
        assert isinstance(answer.error, DeadlinePassed)
        await mesh.until(lambda: all(not w.pool.num_held for w in mesh.workers), limit_s=1.0)
        # Its client has not left: it was failed, and is counted so.
        assert mesh.gateways[0].mesh.cluster()["window"]["failed"] == 1


@virtual_time
async def test_the_longest_deadline_of_a_client_is_none() -> None:
    """Go sends 292 years where a program gives its longest time."""
    async with whole_mesh() as mesh:
        answer = await mesh.ask(a_prompt(100), 5, timeout_s=2562047 * 3600.0)
        assert (answer.error, answer.token_ids) == (None, expected(a_prompt(100), 5))


@virtual_time
async def test_overload_is_refused_at_once_or_after_a_bounded_wait() -> None:
    """One runs, one waits and is refused after its time, the third is refused at once."""
    limits = {"max_running": 1, "max_waiting": 1, "max_wait_s": 0.5}
    async with whole_mesh(timing=SLOW, gateway=limits) as mesh:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(mesh.ask(a_prompt(50), 100))
            await asyncio.sleep(0.05)
            began_at = loop.time()
            second = tasks.create_task(mesh.ask(a_prompt(51), 4))
            await asyncio.sleep(0.05)
            third = await mesh.ask(a_prompt(52), 4)
            assert isinstance(third.error, Overloaded)
            assert third.error.retry_after_s > 0
            assert loop.time() - began_at < 0.1
        assert isinstance(second.result().error, Overloaded)
        assert first.result().token_ids == expected(a_prompt(50), 100)


@virtual_time
async def test_the_context_is_what_the_smallest_pool_holds() -> None:
    """An answer that would outgrow a worker is refused before it begins, as too long a context;
    one that just fits is generated to its end."""
    async with whole_mesh(num_blocks=8) as mesh:
        for num_prompt, num_tokens in ((200, 4), (60, 69)):
            answer = await mesh.ask(a_prompt(num_prompt), num_tokens)
            assert isinstance(answer.error, InvalidRequest)
            assert answer.error.code == "context_length_exceeded"
        answer = await mesh.ask(a_prompt(60), 68)
        assert answer.token_ids == expected(a_prompt(60), 68)


@virtual_time
async def test_no_room_on_decode_is_an_error_before_the_answer_begins() -> None:
    """Where all is sent to the workers at once, the first token is held until decode has room, and
    one wait is all: whoever is refused has read nothing, and was not kept for longer than the
    gateway's limit."""
    at_once = {"max_wait_s": 1.0, "max_pending_tokens": 0}
    async with whole_mesh(num_blocks=16, timing=SLOW, gateway=at_once) as mesh:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mesh.ask(a_prompt(150), 100))
            await asyncio.sleep(0.5)
            asked_at = loop.time()
            refused = await mesh.ask(a_prompt(150, seed=2), 20)
            assert isinstance(refused.error, Overloaded)
            assert refused.error.retry_after_s > 0
            assert refused.token_ids == []
            assert loop.time() - asked_at < 1.5


@virtual_time
async def test_by_default_nobody_is_refused_for_want_of_room() -> None:
    """Ten times as many as fit, each for longer than one may wait for a place: two are sent ahead
    at most, the others wait in the gateway, and all are answered."""
    async with whole_mesh(num_blocks=16, timing=SLOW, gateway={"max_wait_s": 0.2}) as mesh:
        prompts = [a_prompt(150, seed=seed) for seed in range(10)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(prompt, 20)) for prompt in prompts]
            await asyncio.sleep(0.3)
            counts = mesh.gateways[0].mesh.statistics
            assert counts.num_running <= 4
            assert counts.num_waiting >= 6
        assert [one.result().token_ids for one in asked] == [expected(one, 20) for one in prompts]


@virtual_time
async def test_an_answer_that_moves_waits_for_room_as_long_as_it_takes() -> None:
    """Its decode worker dies, and the other one is full for longer than who begins may wait."""
    options: dict[str, Any] = {"num_decode": 2, "num_blocks": 16, "timing": SLOW}
    async with whole_mesh(**options, gateway={"max_wait_s": 1.0}) as mesh:
        prompts = [a_prompt(150, seed=seed) for seed in (1, 2)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(prompt, 100)) for prompt in prompts]
            await asyncio.sleep(1.0)
            await mesh.kill(_busy(mesh, "decode"))
        answers = [one.result() for one in asked]
        assert [one.token_ids for one in answers] == [expected(one, 100) for one in prompts]
        assert sorted(one.receipt["attempts"] for one in answers) == [1, 2]
        assert max(one.receipt["reserve_wait_s"] for one in answers) > 1.0


@virtual_time
async def test_prefill_that_dies_while_decode_has_no_room_yet_is_replaced_at_once() -> None:
    """The other prefill worker takes over without waiting for a verdict of decode."""
    async with whole_mesh(
        num_prefill=2, num_blocks=16, timing=SLOW, gateway={"max_wait_s": 30.0}
    ) as mesh:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(mesh.ask(a_prompt(150), 60))
            await asyncio.sleep(0.5)
            asked = tasks.create_task(mesh.ask(a_prompt(150, seed=2), 20))
            await asyncio.sleep(0.5)
            await mesh.kill(_busy(mesh, "prefill"))
        answer = asked.result()
        assert answer.token_ids == expected(a_prompt(150, seed=2), 20)
        assert answer.receipt["attempts"] == 2


@virtual_time
async def test_a_drain_limit_is_a_typed_error() -> None:
    """What has not ended by then hears that the gateway shuts down, not that a worker was lost."""
    async with whole_mesh(timing=SLOW, gateway={"drain_s": 0.5}) as mesh:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(mesh.ask(a_prompt(50), 400))
            await asyncio.sleep(0.2)
            mesh.gateways[0].stop.set()
        answer = running.result()
        assert isinstance(answer.error, ShuttingDown)
        assert answer.token_ids == expected(a_prompt(50), 400)[: len(answer.token_ids)]


@virtual_time
async def test_a_drain_limit_reaches_who_waits() -> None:
    """For a turn, and for another pair of workers: both hear the same, at once."""
    settings = {"drain_s": 0.5, "max_wait_s": 20.0, "failover_wait_s": 20.0}
    async with whole_mesh(timing=SLOW, gateway=settings) as mesh:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(a_prompt(50), 400))]
            await asyncio.sleep(0.2)
            await mesh.kill(mesh.decodes[0])
            await mesh.until(lambda: not mesh.gateways[0].members.table.sides.num_pairs)
            asked.append(tasks.create_task(mesh.ask(a_prompt(50, seed=1), 400)))
            await asyncio.sleep(0.2)
            counts = mesh.gateways[0].mesh.statistics
            assert (counts.num_running, counts.num_waiting) == (1, 1)
            mesh.gateways[0].stop.set()
        for task in asked:
            error = task.result().error
            assert isinstance(error, ShuttingDown)
            assert error.code == "drain_limit"


@virtual_time
async def test_a_lost_session_fails_over_before_its_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing may take seconds; nothing is sent to the worker meanwhile, and nobody waits for
    it."""
    channel = MemoryNetwork.channel

    @asynccontextmanager
    async def slow_to_close(self: MemoryNetwork, address: Address) -> AsyncGenerator[Any]:
        async with channel(self, address) as opened:
            yield opened
            await asyncio.sleep(4.0)

    monkeypatch.setattr(MemoryNetwork, "channel", slow_to_close)
    async with whole_mesh(num_decode=2, timing=SLOW) as mesh:
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(a_prompt(50), 100))
            await asyncio.sleep(0.5)
            session = _session_with(mesh, _busy(mesh, "decode"))
            session._control.close(WorkerLost("for a test"))
        answer = asked.result()
        assert answer.token_ids == expected(a_prompt(50), 100)
        assert answer.receipt["attempts"] == 2
        gaps = [after - before for before, after in pairwise(answer.arrived_at)]
        assert max(gaps) < 1.0


@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual_time
async def test_a_session_that_breaks_while_kv_travels_costs_no_answer(role: str) -> None:
    """The client has its first token, and the worker at the other end still a session: it must
    not wait for KV that nobody sends any more, and the gateway not for its word."""
    async with whole_mesh(num_prefill=2, num_decode=2, timing=SLOW) as mesh:
        mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e4)

        def break_session(answer: Answer) -> None:
            if len(answer.token_ids) == 1:
                _session_with(mesh, _busy(mesh, role))._control.close(WorkerLost("for a test"))
                mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e9)

        prompt = a_prompt(200)
        answer = await mesh.ask(prompt, 8, on_token=break_session, timeout_s=60.0)
        assert answer.token_ids == expected(prompt, 8)
        assert answer.receipt["attempts"] == 2


@virtual_time
async def test_an_announcement_that_comes_late_costs_no_worker() -> None:
    """What a worker said on a connection that it gave up meanwhile replaces its entry, and ends at
    once: the stream that lives must not be taken for a membership that nobody counts."""
    async with whole_mesh() as mesh:
        worker, gateway = mesh.prefills[0], Address(mesh.gateways[0].host, MESH_PORT)
        announce = worker.worker._life._registration._announce()
        async with (
            mesh.network.at(worker.host).channel(gateway) as channel,
            open_stream(channel, REGISTRY_JOIN) as late,
        ):
            await late.send(wire.WorkerReport(announce=announce))
            await late.receive()
        answer = await mesh.ask(a_prompt(40), 8)
        assert answer.token_ids == expected(a_prompt(40), 8)


@virtual_time
async def test_sessions_follow_a_worker_to_its_new_address() -> None:
    """A host that gets another address joins again before its old stream is missed."""
    async with whole_mesh() as mesh:
        worker, fabric = mesh.prefills[0], mesh.network.fabric
        registration = worker.worker._life._registration
        registration._announcement = replace(registration._announcement, address=Address("", 9000))
        fabric._listeners[Address("new", 9000)] = fabric._listeners[Address(worker.host, 9000)]
        worker.worker._platform.network.host = "new"
        fabric.partition(worker.host, mesh.gateways[0].host)
        await asyncio.sleep(20.0)
        answer = await mesh.ask(a_prompt(40), 8)
        assert answer.token_ids == expected(a_prompt(40), 8)


@virtual_time
async def test_a_session_that_falls_silent_after_another_took_its_place_costs_nothing() -> None:
    """Its end was lost on the way: the gateway is there all the same, and is not joined anew."""
    async with whole_mesh(timing=SLOW) as mesh:
        worker = mesh.decodes[0]
        session = _session_with(mesh, worker)
        stream: Any = session._control._stream
        lost: Any = stream._raw._stream._transport
        while not isinstance(lost, MemoryTransport):
            lost = lost._transport
        lost._send = lambda _: None
        session._control.close(WorkerLost("for a test"))
        await mesh.until(
            lambda: session._control is not None and len(worker.worker.door.sessions) == 2
        )
        answer = await mesh.ask(a_prompt(40), 250)
        assert answer.token_ids == expected(a_prompt(40), 250)
        assert answer.receipt["attempts"] == 1


@virtual_time
async def test_a_session_that_has_numbered_all_orders_begins_anew() -> None:
    """Its answers go on, and the next ones have small numbers again."""
    async with whole_mesh(timing=SLOW) as mesh:
        for session in mesh.gateways[0].members.sessions.values():
            session._next_stream_id = peers.MAX_STREAM_ID - 1
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(a_prompt(40, seed=it), 30)) for it in range(4)]
        for number, task in enumerate(asked):
            assert task.result().token_ids == expected(a_prompt(40, seed=number), 30)
        assert all(it._next_stream_id < 20 for it in mesh.gateways[0].members.sessions.values())


@virtual_time
async def test_every_decision_is_logged_with_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all turns of a request are logged: which pair was chosen, by which policy, and why."""
    monkeypatch.setattr(log, "_is_debugging", True)
    async with whole_mesh(num_decode=2) as mesh:
        with structlog.testing.capture_logs() as records:
            await mesh.ask(a_prompt(20), 4)
        (routed,) = (record for record in records if record["event"] == "routed")
        decision = routed["decision"]
        assert decision["policy"] == "conductor"
        assert decision["prefill"]["score"] >= 0
        assert routed["decode"] in {f"{it.worker.incarnation:016x}" for it in mesh.decodes}


@virtual_time
async def test_a_worker_with_another_model_is_refused_and_ends() -> None:
    """It says why; the mesh goes on with those that fit."""
    async with whole_mesh() as mesh:
        stranger = await mesh.start_worker("decode", model=FakeModel(vocab_size=77))
        assert stranger.task is not None
        await asyncio.wait([stranger.task])
        assert isinstance(stranger.error, IncompatiblePeer)
        assert "--model" in str(stranger.error)
        answer = await mesh.ask(a_prompt(20), 4)
        assert answer.token_ids == expected(a_prompt(20), 4)


@virtual_time
async def test_under_block_pressure_all_answers_are_exact() -> None:
    """Reservations wait, sequences are preempted and recomputed; every token is right."""
    async with whole_mesh(num_blocks=24, gateway={"max_wait_s": 30.0}) as mesh:
        prompts = [a_prompt(40 + i, seed=i) for i in range(12)]
        answers = await _ask_all(mesh, prompts, 60)
        assert [a.token_ids for a in answers] == [expected(p, 60) for p in prompts]


@virtual_time
async def test_a_gateway_that_drains_finishes_what_it_has_and_takes_nothing_new() -> None:
    """Running answers come to their end; new ones hear that it shuts down."""
    async with whole_mesh(timing=SLOW) as mesh:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(mesh.ask(a_prompt(50), 20))
            await asyncio.sleep(0.2)
            mesh.gateways[0].stop.set()
            await asyncio.sleep(0.01)
            late = await mesh.ask(a_prompt(51), 4)
        assert isinstance(late.error, ShuttingDown)
        assert running.result().token_ids == expected(a_prompt(50), 20)


@virtual_time
async def test_a_drained_decode_worker_loses_nothing() -> None:
    """With a second worker there, a drain in the middle of answers is invisible."""
    async with whole_mesh(num_decode=2, timing=SLOW) as mesh:
        prompts = [a_prompt(30 + i, seed=i) for i in range(8)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(p, 20)) for p in prompts[:4]]
            await asyncio.sleep(0.2)
            mesh.decodes[0].stop.set()
            await asyncio.sleep(0.05)
            asked += [tasks.create_task(mesh.ask(p, 20)) for p in prompts[4:]]
        assert [t.result().token_ids for t in asked] == [expected(p, 20) for p in prompts]
        assert {t.result().receipt["attempts"] for t in asked} == {1}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@virtual_time
async def test_a_request_in_the_instant_of_a_drain_waits_for_the_next_worker(role: str) -> None:
    """The gateway has not heard that the only worker drains: it hears it from the refusal, and does
    not ask it again and again."""
    async with whole_mesh(timing=SLOW) as mesh, asyncio.TaskGroup() as tasks:
        (draining,) = mesh.prefills if role == "prefill" else mesh.decodes
        draining.stop.set()
        asked = tasks.create_task(mesh.ask(a_prompt(30), 20))
        await asyncio.sleep(0.5)
        await mesh.start_worker(role)
        answer = await asked
        assert answer.error is None
        assert answer.token_ids == expected(a_prompt(30), 20)
        assert answer.receipt["attempts"] == 2


@pytest.mark.parametrize("is_orderly", [True, False])
@virtual_time
async def test_only_a_worker_that_is_lost_is_a_warning(is_orderly: bool) -> None:
    """One that drained and left is news; who watches the log for warnings is not called."""
    async with whole_mesh(num_decode=2) as mesh:
        with structlog.testing.capture_logs() as logs:
            if is_orderly:
                mesh.decodes[0].stop.set()
            else:
                await mesh.kill(mesh.decodes[0])
            await asyncio.sleep(10.0)
        (left,) = (line for line in logs if line["event"] == "worker left")
        assert left["log_level"] == ("info" if is_orderly else "warning")
        warned = [line for line in logs if line["log_level"] == "warning"]
        assert bool(warned) is not is_orderly, warned


def _busy(mesh: WholeMesh, role: str) -> Any:
    """Return the worker that has the one request."""
    worker = next(
        session.worker
        for session in mesh.gateways[0].members.sessions.values()
        if session.worker.role.value == role and session.num_legs
    )
    return next(w for w in mesh.workers if w.incarnation == worker.incarnation)


def _session_with(mesh: WholeMesh, worker: Any) -> Any:
    """Return the gateway's session with a worker."""
    return next(
        session
        for session in mesh.gateways[0].members.sessions.values()
        if session.worker.incarnation == worker.incarnation
    )


async def _ask_all(mesh: WholeMesh, prompts: list[list[int]], num_tokens: int) -> list[Answer]:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(mesh.ask(prompt, num_tokens)) for prompt in prompts]
    answers = [task.result() for task in asked]
    assert not [answer.error for answer in answers if answer.error is not None]
    return answers
