"""Pairs of workers that may be either, under virtual time: one for any two, which carries both
ways, is made when it is first needed and kept warm.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.gateway.core.routing.sides import Places, RouteRequest, RoutingPolicy, Scores, Sides
from shared.address import Address
from shared.ids import Incarnation, MeshPeer
from tests.support.grpc_client import Answer
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import RunningWorker, a_prompt, expected

EITHER: dict[str, Any] = {
    "gateway": {"policy": "splitwise"},
    "prefill": {"movable": True},
    "decode": {"movable": True},
}


class Chosen(RoutingPolicy):
    """A policy that wants one pair, and takes any that is made if that one is not."""

    name = "chosen"
    moves_roles = True

    def __init__(self, prefill: RunningWorker, decode: RunningWorker) -> None:
        self.pair = prefill.incarnation, decode.incarnation

    def score_prefill(self, worker: Any) -> float:
        return float(worker.incarnation != self.pair[0])

    def score_decode(self, worker: Any) -> float:
        return float(worker.incarnation != self.pair[1])

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        return min(
            (
                (prefill, decode)
                for prefill in range(len(sides.prefills))
                for decode in sides.partners_of(prefill)
            ),
            key=lambda it: scores.prefills[it[0]] + scores.decodes[it[1]],
        )


def choose(mesh: WholeMesh, prefill: RunningWorker, decode: RunningWorker) -> None:
    """Have the gateway want this pair from now on."""
    mesh.gateways[0].members.router.policy = Chosen(prefill, decode)


def pair_of(answer: Answer) -> tuple[str, str]:
    """Which workers gave it."""
    assert answer.error is None
    return answer.receipt["prefill"], answer.receipt["decode"]


def names(*workers: RunningWorker) -> tuple[str, ...]:
    return tuple(f"{running.incarnation:016x}" for running in workers)


def partners(running: RunningWorker) -> set[Incarnation]:
    return set(running.worker.pairs.speeds)


def link(running: RunningWorker, other: RunningWorker) -> Any:
    return running.worker.pairs._links.get(other.incarnation)


def ask_for_pair(running: RunningWorker, other: RunningWorker) -> None:
    """As a gateway's directive does."""
    running.worker.pairs.ask(MeshPeer(other.incarnation, Address(other.host, 9000)))


async def ask(mesh: WholeMesh, prompt: list[int], num_tokens: int = 12) -> Answer:
    answer = await mesh.ask(prompt, num_tokens)
    assert answer.token_ids == expected(prompt, num_tokens)
    return answer


@virtual_time
async def test_only_those_at_home_on_opposite_sides_pair_up_by_themselves() -> None:
    """One endpoint at each end of a pair, whichever way KV goes."""
    async with whole_mesh(**EITHER, num_prefill=2, num_decode=3) as mesh:
        prompts = {running.incarnation for running in mesh.prefills}
        tokens = {running.incarnation for running in mesh.decodes}
        assert [partners(running) for running in mesh.prefills] == [tokens] * 2
        assert [partners(running) for running in mesh.decodes] == [prompts] * 3
        for running in mesh.workers:
            assert len(running.worker.pairs._endpoints) == len(partners(running))


@virtual_time
async def test_a_pair_carries_both_ways() -> None:
    """After two workers have changed homes KV comes back over the very pair it went out on."""
    async with whole_mesh(**EITHER) as mesh:
        prompt, token = mesh.prefills[0], mesh.decodes[0]
        links = link(prompt, token), link(token, prompt)
        choose(mesh, prompt, token)
        assert pair_of(await ask(mesh, a_prompt(70))) == names(prompt, token)
        choose(mesh, token, prompt)
        assert pair_of(await ask(mesh, a_prompt(90))) == names(token, prompt)
        assert (link(prompt, token), link(token, prompt)) == links


@virtual_time
async def test_kv_flows_both_ways_at_once() -> None:
    """Requests one way and the other share one stream, staging and endpoint; each token is
    right."""
    async with whole_mesh(**EITHER) as mesh:
        prompt, token = mesh.prefills[0], mesh.decodes[0]
        asked: list[asyncio.Task[Answer]] = []
        async with asyncio.TaskGroup() as tasks:
            for number in range(12):
                choose(mesh, *((prompt, token) if number % 2 else (token, prompt)))
                asked.append(tasks.create_task(ask(mesh, a_prompt(150 + number, seed=number))))
                await asyncio.sleep(0.002)
        pairs = {pair_of(task.result()) for task in asked}
        assert pairs == {names(prompt, token), names(token, prompt)}


@pytest.mark.parametrize("apart_s", [0.0, 0.0003, 0.001, 0.003, 0.01])
@virtual_time
async def test_of_two_calls_that_cross_one_pair_survives(apart_s: float) -> None:
    """Two workers call each other at once or nearly so: one link, known to both, and KV goes both
    ways over it; nothing of the other call is left."""
    async with whole_mesh(**EITHER, num_decode=2) as mesh:
        one, other = mesh.decodes
        ask_for_pair(one, other)
        await asyncio.sleep(apart_s)
        ask_for_pair(other, one)
        await mesh.until(lambda: link(one, other) and link(other, one))
        links = link(one, other), link(other, one)
        for source, sink in ((one, other), (other, one)):
            choose(mesh, source, sink)
            await mesh.until(
                lambda source=source, sink=sink: mesh.gateways[0].members.table.is_paired(
                    source.incarnation, sink.incarnation
                )
            )
            assert pair_of(await ask(mesh, a_prompt(120))) == names(source, sink)
        await asyncio.sleep(5)
        assert (link(one, other), link(other, one)) == links
        tables = one.worker.pairs, other.worker.pairs
        assert [len(table._endpoints) for table in tables] == [2, 2]
        assert sum(len(table._calls) for table in tables) == 1


@virtual_time
async def test_a_decision_for_a_cold_pair_makes_it_and_waits_for_nothing() -> None:
    """The first request takes a pair that is there, in no more time than before; the next one finds
    the pair that was wanted."""
    async with whole_mesh(**EITHER, num_decode=2) as mesh:
        source, sink = mesh.decodes
        now = asyncio.get_running_loop().time
        began_at = now()
        await ask(mesh, a_prompt(100))
        usual_s = now() - began_at
        choose(mesh, source, sink)
        began_at = now()
        first = await ask(mesh, a_prompt(100, seed=1))
        assert pair_of(first) != names(source, sink)
        assert first.receipt["attempts"] == 1
        assert now() - began_at < 2 * usual_s
        await mesh.until(lambda: sink.incarnation in partners(source))
        await asyncio.sleep(0.1)
        assert pair_of(await ask(mesh, a_prompt(100, seed=2))) == names(source, sink)


@virtual_time
async def test_who_finds_no_pair_that_is_made_waits_for_one() -> None:
    """Every token worker is gone and nobody can do both alone: two at home with prompts pair up,
    and the answer comes in the first attempt."""
    async with whole_mesh(
        gateway={"policy": "splitwise"},
        prefill={"movable": True},
        num_prefill=2,
    ) as mesh:
        first, second = mesh.prefills
        await mesh.kill(mesh.decodes[0])
        await mesh.until(lambda: len(mesh.gateways[0].members.table) == 2)
        # What one of them does alone is a pair, too: take that away.
        for running in mesh.prefills:
            running.worker.launch = _without_whole(running.worker.launch)
            running.worker._life.changed()
        await mesh.until(lambda: not mesh.gateways[0].members.table.sides)
        answer = await ask(mesh, a_prompt(80))
        assert set(pair_of(answer)) == set(names(first, second))
        assert answer.receipt["attempts"] == 1


def _without_whole(launch: Any) -> Any:
    from shared.worker.core.life import Task

    return type(launch)(launch.home, launch.tasks - {Task.WHOLE})


@virtual_time
async def test_warm_pairs_are_bounded_and_standing_ones_are_not() -> None:
    """The pair that was used longest ago is closed, at both ends; it is not made again unasked."""
    settings = {**EITHER, "decode": {"movable": True, "warm_pairs": 2}}
    async with whole_mesh(**settings, num_prefill=1, num_decode=5) as mesh:
        source, first, *others = mesh.decodes
        for other in (first, *others[:2]):
            ask_for_pair(source, other)
            await mesh.until(lambda other=other: link(source, other) and link(other, source))
        await mesh.until(lambda: not link(source, first) and not link(first, source))
        choose(mesh, source, others[0])
        await asyncio.sleep(1)
        assert pair_of(await ask(mesh, a_prompt(50))) == names(source, others[0])  # used again
        ask_for_pair(source, others[2])
        await mesh.until(lambda: link(source, others[2]))
        await asyncio.sleep(5)
        assert partners(source) == {
            mesh.prefills[0].incarnation,
            others[0].incarnation,
            others[2].incarnation,
        }


@virtual_time
async def test_a_lost_gateway_closes_no_pair() -> None:
    """While nobody is listed pairs live, standing or not; the next gateway finds them warm."""
    async with whole_mesh(**EITHER, num_decode=2, num_gateways=2) as mesh:
        ask_for_pair(*mesh.decodes)
        await mesh.until(lambda: link(*mesh.decodes))
        before = [running.worker.pairs._links.copy() for running in mesh.workers]
        for gateway in mesh.gateways:
            await mesh.kill(gateway)
        await asyncio.sleep(60)
        assert [running.worker.pairs._links for running in mesh.workers] == before


@virtual_time
async def test_a_worker_that_moves_pairs_up_with_those_across() -> None:
    """Its new partners are standing ones; those it had stay warm."""
    async with whole_mesh(**EITHER, num_prefill=2, num_decode=2) as mesh:
        moving, stays = mesh.prefills
        assert not link(stays, moving)
        await mesh.gateways[0].mesh.change_role(f"{moving.incarnation:016x}", "token")
        await mesh.until(lambda: link(stays, moving) and link(moving, stays))
        assert partners(moving) == {running.incarnation for running in mesh.workers} - {
            moving.incarnation
        }
