"""Workers that may be either, under virtual time: pools follow what is held, homes change while
requests run, and no token is wrong or missing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

from services.gateway.core.routing.pools import Pool, pool_of
from services.gateway.core.worker import Role
from shared import wire
from shared.engine.fake import FakeEngine, FakeTiming
from shared.errors import DeadlinePassed, InvalidRequest, NotFound, WorkerLost
from shared.predict.step_time import attended
from shared.rpc.methods import CHANGE_ROLE
from shared.step import StepRow
from tests.support.calls import call_unary
from tests.support.core_mesh import ThereAndBack
from tests.support.grpc_client import Answer
from tests.support.loopback import LoopbackSettings
from tests.support.tiers import few
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import RunningWorker, a_prompt, expected

EITHER: dict[str, Any] = {
    "gateway": {"policy": "splitwise"},
    "prefill": {"movable": True},
    "decode": {"movable": True},
}
SLOW = FakeTiming(base_s=0.01, prefill_token_s=0.0005)


class DeepIsDear(FakeEngine):
    """A microsecond for each position that a token attends to."""

    def step_seconds(self, rows: Sequence[StepRow]) -> float:
        return super().step_seconds(rows) + 1e-6 * sum(attended(it.start, it.stop) for it in rows)


def pools(mesh: WholeMesh, gateway: int = 0) -> list[str]:
    """What each living worker is, as a gateway sees it."""
    table = mesh.gateways[gateway].members.table
    return [pool_of(table.get(running.incarnation)).value for running in mesh.workers]


async def ask_all(mesh: WholeMesh, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    """Ask for all at once."""
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(mesh.ask(prompt, max_tokens)) for prompt in prompts]
    return [task.result() for task in asked]


async def all_home(mesh: WholeMesh) -> None:
    """Wait until nobody holds foreign work."""
    await mesh.until(lambda: Pool.MIXED.value not in pools(mesh))


def move(mesh: WholeMesh, running: RunningWorker, home: str, gateway: int = 0) -> Any:
    """Order a new home, as an operator does."""
    return mesh.gateways[gateway].mesh.change_role(f"{running.incarnation:016x}", home)


@virtual_time
async def test_at_home_prompts_and_answers_are_apart() -> None:
    """Without load each worker does its home's work: the KV is pushed from one to the other."""
    async with whole_mesh(**EITHER) as mesh:
        answer = await mesh.ask(a_prompt(70), 12)
        assert answer.token_ids == expected(a_prompt(70), 12)
        assert answer.receipt["prefill"] == f"{mesh.prefills[0].incarnation:016x}"
        assert answer.receipt["decode"] == f"{mesh.decodes[0].incarnation:016x}"
        await all_home(mesh)
        assert pools(mesh) == ["prompt", "token"]


@virtual_time
async def test_a_spike_of_prompts_borrows_the_token_pool_and_lets_it_go() -> None:
    """Queues over the threshold make token machines mixed; when the spike is gone all are home."""
    async with whole_mesh(**EITHER, num_decode=2, num_blocks=4096, timing=SLOW) as mesh:
        prompts = [a_prompt(1500, seed=i) for i in range(24)]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(prompt, 6)) for prompt in prompts]
            await mesh.until(lambda: pools(mesh).count("mixed") >= 1)
        answers = [task.result() for task in asked]
        assert [a.error for a in answers] == [None] * 24
        assert [a.token_ids for a in answers] == [expected(p, 6) for p in prompts]
        assert len({a.receipt["prefill"] for a in answers}) > 1  # others computed prompts, too
        await all_home(mesh)
        assert pools(mesh) == ["prompt", "token", "token"]


@pytest.mark.slow
@virtual_time
async def test_a_prompt_that_begins_deep_in_the_cache_gets_its_first_row_a_step_later() -> None:
    """Beside answers a step's budget is time: tokens cost more the deeper they lie, so there may be
    room for a prompt's beginning, and none for where this one goes on. What it has of the cache is
    pushed all the same."""
    sizes = {"num_prefill": 2, "num_decode": 2, "num_blocks": 2048}
    async with whole_mesh(**EITHER, **sizes, timing=SLOW, engine=DeepIsDear) as mesh:
        prompts = [a_prompt(1500, seed=1) + a_prompt(30, seed=10 + i) for i in range(28)]
        answers = await ask_all(mesh, prompts, 12)
        assert [answer.error for answer in answers] == [None] * 28
        assert [answer.token_ids for answer in answers] == [expected(it, 12) for it in prompts]


@virtual_time
async def test_a_home_changes_without_losing_a_request() -> None:
    """What the worker had in hand goes on; what comes after goes where its home says."""
    async with whole_mesh(**EITHER, num_prefill=2, num_decode=2, timing=SLOW) as mesh:
        moving = mesh.prefills[0]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(a_prompt(200, seed=i), 40)) for i in range(8)]
            await asyncio.sleep(0.15)
            body = await move(mesh, moving, "token")
            assert body["home"] == "token"
        for i, task in enumerate(asked):
            assert task.result().token_ids == expected(a_prompt(200, seed=i), 40)
        await all_home(mesh)
        assert pools(mesh) == ["token", "prompt", "token", "token"]
        answers = await ask_all(mesh, [a_prompt(60, seed=i) for i in range(9)], 5)
        assert {a.receipt["prefill"] for a in answers} == {f"{mesh.prefills[1].incarnation:016x}"}
        assert f"{moving.incarnation:016x}" in {a.receipt["decode"] for a in answers}


@virtual_time
async def test_every_gateway_sees_a_move_and_the_newer_one_counts() -> None:
    """Two gateways order at once: both see the same home in the end."""
    async with whole_mesh(**EITHER, num_gateways=2, num_prefill=2, num_decode=2) as mesh:
        moving = mesh.prefills[0]
        await move(mesh, moving, "token", gateway=0)
        await move(mesh, moving, "prompt", gateway=1)
        await move(mesh, moving, "token", gateway=1)
        for gateway in (0, 1):
            await mesh.until(lambda g=gateway: pools(mesh, g)[0] == "token")
        assert moving.worker.home.epoch == 3


@virtual_time
async def test_of_two_gateways_that_order_at_once_one_is_told_that_it_lost() -> None:
    """The worker takes one of the two, and nobody is told of a home that it does not have."""
    async with whole_mesh(**EITHER, num_gateways=2, num_prefill=3, num_decode=2) as mesh:
        moving = mesh.prefills[0]
        async with asyncio.TaskGroup() as tasks:
            orders = [
                tasks.create_task(_home_or_error(move(mesh, moving, home, gateway)))
                for gateway, home in ((0, "token"), (1, "prompt"))
            ]
        said = [order.result() for order in orders]
        assert sorted(said) in (["old_epoch", "prompt"], ["old_epoch", "token"])
        (home,) = {*said} - {"old_epoch"}
        for gateway in (0, 1):
            await mesh.until(lambda g=gateway: pools(mesh, g)[0] == home)


@virtual_time
async def test_of_two_moves_at_once_the_second_finds_the_role_without_others() -> None:
    """What is on its way counts: two orders that are right alone may not empty a role together."""
    async with whole_mesh(**EITHER, num_prefill=2, num_decode=1) as mesh:
        async with asyncio.TaskGroup() as tasks:
            orders = [
                tasks.create_task(_home_or_error(move(mesh, running, "token")))
                for running in mesh.prefills
            ]
        assert [order.result() for order in orders] == ["token", "last_of_role"]
        assert pools(mesh) == ["token", "prompt", "token"]


@pytest.mark.parametrize("later_s", [0.0, 0.01, 0.05, 0.06, 0.08, 0.12, 0.2, 0.5])
@virtual_time
async def test_two_gateways_that_move_two_workers_cannot_empty_a_role_together(
    later_s: float,
) -> None:
    """Neither knows of the other's order, and each alone is right; whoever loses is told."""
    async with whole_mesh(**EITHER, num_gateways=2, num_prefill=2, num_decode=1) as mesh:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(_home_or_error(move(mesh, mesh.prefills[0], "token", 0)))
            await asyncio.sleep(later_s)
            second = tasks.create_task(_home_or_error(move(mesh, mesh.prefills[1], "token", 1)))
        said = [first.result(), second.result()]
        assert said.count("token") <= 1
        assert {*said} <= {"token", "old_epoch", "last_of_role"}
        await asyncio.sleep(1.0)
        for gateway in (0, 1):
            assert pools(mesh, gateway).count("token") == 1 + said.count("token")
        # Who is told to look again and repeat finds out who is right.
        if "token" not in said:
            assert await _home_or_error(move(mesh, mesh.prefills[0], "token", 1)) == "token"
        assert pools(mesh, 1).count("prompt") == 1


@virtual_time
async def test_three_gateways_in_a_ring_leave_one_worker() -> None:
    """Each one's witness is the worker that the next one moves."""
    async with whole_mesh(**EITHER, num_gateways=3, num_prefill=3, num_decode=1) as mesh:
        for _ in range(4):  # until all have tried so often that only the rule holds them
            async with asyncio.TaskGroup() as tasks:
                for gateway, running in enumerate(mesh.prefills):
                    tasks.create_task(_home_or_error(move(mesh, running, "token", gateway)))
            for gateway in range(3):
                assert pools(mesh, gateway).count("prompt") >= 1
        assert (await mesh.ask(a_prompt(40), 8)).token_ids == expected(a_prompt(40), 8)


@virtual_time
async def test_an_order_that_was_lost_with_a_stream_is_told_again() -> None:
    """The worker joins anew before the gateway gives up waiting for its word."""
    async with whole_mesh(**EITHER, num_prefill=2) as mesh:
        moving, gateway = mesh.prefills[0], mesh.gateways[0]
        fabric = mesh.network.fabric
        fabric.hold(gateway.host, moving.host)
        async with asyncio.TaskGroup() as tasks:
            ordered = tasks.create_task(move(mesh, moving, "token"))
            await asyncio.sleep(0.1)
            for transport in fabric.dialled(moving.host, gateway.host):
                transport._send = lambda _: None  # type: ignore[method-assign]
            moving.worker._life.rejoin(gateway.gateway.incarnation)
            await asyncio.sleep(0.1)
            fabric.release(gateway.host, moving.host)
        assert ordered.result()["home"] == "token"


async def _home_or_error(order: Any) -> str:
    try:
        return (await order)["home"]
    except InvalidRequest as refusal:
        return refusal.code


@virtual_time
async def test_moves_that_cannot_be_are_refused_and_change_nothing() -> None:
    """Each refusal names its remedy; the mesh goes on."""
    async with whole_mesh(**EITHER) as mesh:
        with pytest.raises(InvalidRequest, match="last one for prompts") as last:
            await move(mesh, mesh.prefills[0], "token")
        assert last.value.code == "last_of_role"
        with pytest.raises(NotFound, match="pdmesh top"):
            await mesh.gateways[0].mesh.change_role("00000000000000ff", "token")
        with pytest.raises(InvalidRequest, match="16 hexadecimal digits"):
            await mesh.gateways[0].mesh.change_role("prefill-0", "token")
        with pytest.raises(InvalidRequest, match="one of prompt, token"):
            await move(mesh, mesh.prefills[0], "both")
        assert pools(mesh) == ["prompt", "token"]
        assert (await mesh.ask(a_prompt(30), 5)).token_ids == expected(a_prompt(30), 5)


@virtual_time
async def test_a_worker_of_one_role_stays_what_it_is() -> None:
    """The remedy is another worker."""
    async with whole_mesh(num_prefill=2) as mesh:
        with pytest.raises(InvalidRequest, match="serves prefill alone") as refusal:
            await move(mesh, mesh.prefills[0], "token")
        assert refusal.value.code == "one_role"


@pytest.mark.parametrize("when_s", few((0.0, 0.02, 0.05, 0.1, 0.2, 0.4), 0.05))
@pytest.mark.parametrize("which", ["prefill", "decode"])
@virtual_time
async def test_a_move_in_any_phase_changes_no_token(which: str, when_s: float) -> None:
    """While leases wait, while KV is pushed, while answers run: there and back again, twice."""
    async with whole_mesh(
        **EITHER, num_prefill=2, num_decode=2, num_blocks=40, timing=SLOW
    ) as mesh:
        moving = (mesh.prefills if which == "prefill" else mesh.decodes)[0]
        prompts = [a_prompt(90 + 31 * i, seed=i) for i in range(12)]  # more than there is room for
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(prompt, 30)) for prompt in prompts]
            await asyncio.sleep(when_s)
            homes = ["token", "prompt"] if which == "prefill" else ["prompt", "token"]
            for home in homes * 2:
                await move(mesh, moving, home)
        for prompt, task in zip(prompts, asked, strict=True):
            assert task.result().error is None
            assert task.result().token_ids == expected(prompt, 30)
        await all_home(mesh)
        assert pools(mesh) == ["prompt", "prompt", "token", "token"]
        await mesh.idle()
        mesh.assert_nothing_left()


SLOW_LINK = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e5)
"""Half a second for the KV of 400 tokens."""


@pytest.mark.parametrize("state", ["a receive is quarantined", "a push is unacknowledged"])
@virtual_time
async def test_a_move_while_kv_is_on_its_way_changes_no_token(state: str) -> None:
    """Both workers of the transfer move at that moment. Blocks into which somebody may still write
    stay nobody's, and a push goes on to its end, whatever the homes are then."""
    async with whole_mesh(**EITHER, num_prefill=2, num_decode=2) as mesh:
        fast, mesh.fabric.settings = mesh.fabric.settings, SLOW_LINK
        prompt, is_given_up = a_prompt(400), state == "a receive is quarantined"
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(mesh.ask(prompt, 20))
            source, sink = mesh.prefills[0], mesh.decodes[0]
            await mesh.until(lambda: sink.worker.receiver.core.statistics().num_live)
            if is_given_up:
                asked.cancel()
                await mesh.until(lambda: sink.worker.leases.statistics().num_quarantined_blocks)
            else:
                await mesh.until(lambda: source.worker.requests.num_prompts == 1)
                await mesh.until(lambda: not source.worker.scheduler.has_prompts)
            for running, home in ((source, "token"), (sink, "prompt")):
                await move(mesh, running, home)
            if is_given_up:
                assert sink.worker.leases.statistics().num_quarantined_blocks
            else:
                assert source.worker.pusher.core.statistics().num_transfers == 1
        if not is_given_up:
            assert asked.result().token_ids == expected(prompt, 20)
        mesh.fabric.settings = fast
        answers = await ask_all(mesh, [a_prompt(90, seed=i) for i in range(8)], 12)
        assert [it.token_ids for it in answers] == [
            expected(a_prompt(90, seed=i), 12) for i in range(8)
        ]
        await all_home(mesh)
        assert pools(mesh) == ["token", "prompt", "prompt", "token"]
        await mesh.idle()
        mesh.assert_nothing_left()


@virtual_time
async def test_a_worker_that_dies_as_it_moves_costs_no_answer() -> None:
    """Its requests go elsewhere with the same text, and the order is refused or forgotten."""
    async with whole_mesh(**EITHER, num_prefill=2, num_decode=2, timing=SLOW) as mesh:
        moving = mesh.decodes[0]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(a_prompt(150, seed=i), 30)) for i in range(10)]
            await asyncio.sleep(0.2)
            ordered = tasks.create_task(_tried(move(mesh, moving, "prompt")))
            await mesh.kill(moving)
            await ordered
        for i, task in enumerate(asked):
            assert task.result().error is None
            assert task.result().token_ids == expected(a_prompt(150, seed=i), 30)


async def _tried(order: Any) -> None:
    with contextlib.suppress(WorkerLost, DeadlinePassed, NotFound):
        await order


@virtual_time
async def test_a_gateway_that_dies_between_leaves_the_worker_where_it_was_or_where_it_goes() -> (
    None
):
    """The worker is where it was or where it goes, and the other gateway knows which."""
    async with whole_mesh(**EITHER, num_gateways=2, num_prefill=2, num_decode=2) as mesh:
        moving = mesh.prefills[0]
        async with asyncio.TaskGroup() as tasks:
            ordered = tasks.create_task(_tried(move(mesh, moving, "token", gateway=0)))
            await asyncio.sleep(0)
            await mesh.kill(mesh.gateways[0])
            ordered.cancel()
        await asyncio.sleep(2.0)
        seen = mesh.gateways[1].members.table.get(moving.incarnation)
        assert seen.home is (Role.DECODE if moving.worker.home.epoch else Role.PREFILL)
        answer = await mesh.ask(a_prompt(40), 8, gateway=1)
        assert answer.token_ids == expected(a_prompt(40), 8)


@virtual_time
async def test_a_draining_worker_finishes_what_it_has_and_moves_no_more() -> None:
    """It has said that it leaves: the others see to its work."""
    async with whole_mesh(**EITHER, num_prefill=2, num_decode=2, timing=SLOW) as mesh:
        leaving = mesh.decodes[0]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(mesh.ask(a_prompt(150, seed=i), 30)) for i in range(8)]
            await asyncio.sleep(0.2)
            leaving.stop.set()
            await _tried(move(mesh, leaving, "prompt"))
        for i, task in enumerate(asked):
            assert task.result().error is None
            assert task.result().token_ids == expected(a_prompt(150, seed=i), 30)


@virtual_time
async def test_a_role_is_changed_over_grpc() -> None:
    """The same as over HTTP, with the same refusals."""
    async with (
        whole_mesh(**EITHER, num_prefill=2) as mesh,
        mesh.network.at("client").channel(mesh.gateways[0].address) as channel,
    ):
        worker = f"{mesh.prefills[0].incarnation:016x}"
        order = wire.ChangeRoleRequest(worker=worker, role="token")
        assert await call_unary(channel, CHANGE_ROLE, order) == wire.ChangeRoleResponse(
            worker=worker, home="token", pool="token"
        )
        order.worker = f"{mesh.prefills[1].incarnation:016x}"
        with pytest.raises(InvalidRequest, match="last one for prompts"):
            await call_unary(channel, CHANGE_ROLE, order)
        order.worker = "ff"
        with pytest.raises(NotFound, match="no worker"):
            await call_unary(channel, CHANGE_ROLE, order)


@pytest.mark.parametrize(("num_blocks", "num_answers"), [(10, 24), (6, 4)])
@virtual_time
async def test_workers_with_little_memory_refuse_nobody(num_blocks: int, num_answers: int) -> None:
    """Both are full of computed prompts that wait for room at the other one, which has memory for
    two prompts, or for one alone."""
    either = {**EITHER, "gateway": {"policy": "splitwise", "max_wait_s": 10.0}}
    async with whole_mesh(**either, num_blocks=num_blocks, timing=SLOW) as mesh:
        await mesh.ask(a_prompt(5), 2)
        mesh.gateways[0].members.router.policy = ThereAndBack()
        prompts = [a_prompt(70, seed=i) for i in range(num_answers)]
        for prompt, answer in zip(prompts, await ask_all(mesh, prompts, 5), strict=True):
            assert answer.error is None
            assert answer.token_ids == expected(prompt, 5)
        await mesh.idle()
        mesh.assert_nothing_left()
