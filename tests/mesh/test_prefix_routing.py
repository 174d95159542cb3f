"""Requests go where their beginning lies: workers tell of their caches, gateways look there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.gateway.core.index.prefixes import Indexed
from services.gateway.core.routing.decision_record import replay
from services.gateway.http.cluster_bodies import Explanation
from services.gateway.workers.mesh_metrics import register_mesh_metrics
from services.gateway.workers.registry import Registry
from shared import wire
from shared.address import Address
from shared.engine.fake import FakeTiming
from shared.errors import WouldBeLate
from shared.ids import MeshPeer
from shared.kv.journal import Journal
from shared.liveness import IDLE, Liveness
from tests.support.grpc_client import Answer
from tests.support.loopback import LoopbackSettings
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import WholeMesh, whole_mesh
from tests.support.worker_mesh import a_prompt, expected

LOCAL: dict[str, Any] = {"gateway": {"policy": "local"}}
UNIT = 128
TIMING = FakeTiming(prefill_token_s=1e-3)
"""What is cached is worth going for: 0.13 s a granule."""


async def ask(mesh: WholeMesh, prompt: list[int]) -> Answer:
    answer = await mesh.ask(prompt, 4)
    assert answer.token_ids == expected(prompt, 4)
    return answer


@virtual_time
async def test_a_conversation_stays_where_its_kv_is() -> None:
    """Each prompt of three conversations goes where the one before it went, in whichever order
    they are asked, and finds there what the gateway expected."""
    async with whole_mesh(
        **LOCAL, num_prefill=3, num_decode=1, num_blocks=256, timing=TIMING
    ) as mesh:
        members = mesh.gateways[0].members
        talks = [a_prompt(2 * UNIT, seed=seed) for seed in range(3)]
        homes: dict[int, str] = {}
        for turn, order in enumerate([(0, 1, 2), (1, 2, 0), (2, 2, 1, 0), (0, 2, 1), (1, 1)]):
            for number in order:
                answer = await ask(mesh, talks[number])
                here = answer.receipt["prefill"]
                assert homes.setdefault(number, here) == here
                if turn:
                    assert answer.receipt["cached_tokens"] >= len(talks[number]) - 2 * UNIT
                talks[number] += a_prompt(2 * UNIT, seed=7 * turn + number)
                await asyncio.sleep(1.0)
        assert len({*homes.values()}) == 3
        index = members.prefixes.index
        places = [members.table.get(it.incarnation).place for it in mesh.prefills]
        assert {index.state(place) for place in places} == {Indexed.KNOWN}
        assert index.num_resyncs == 0
        told = mesh.gateways[0].mesh.cluster()["workers"]
        assert all(it["prefixes"]["count"] >= 8 for it in told if it["role"] == "prefill")
        read = [it["prompts"] for it in told if it["role"] == "prefill"]
        assert all(it["cached_tokens"] > it["tokens"] / 2 for it in read)
        assert [it["prefixes"] for it in told if it["role"] == "decode"] == [None]


@virtual_time
async def test_a_limit_that_the_cache_keeps_is_no_reason_to_refuse() -> None:
    """Half a second to compute, and a limit of 0.3 s: refused, but where somebody has it."""
    early = {"gateway": {"policy": "local", "overload": "early"}}
    async with whole_mesh(
        **early, num_prefill=2, num_decode=1, num_blocks=256, timing=TIMING
    ) as mesh:
        prompt = a_prompt(4 * UNIT, seed=1)
        for seed in range(2, 5):  # workers learn how long their steps take
            await ask(mesh, a_prompt(2 * UNIT, seed=seed))
        refused = await mesh.ask(prompt, 4, terms={"ttft_ms": 300.0})
        assert isinstance(refused.error, WouldBeLate)
        await ask(mesh, prompt)
        await asyncio.sleep(1.0)
        answer = await mesh.ask(prompt, 4, terms={"ttft_ms": 300.0})
        assert answer.error is None
        assert answer.receipt["ttft_s"] < 0.3
        (hot,) = mesh.gateways[0].members.prefixes.hottest(9)
        assert hot[0].share == 2 / 5  # who only asks, or is refused, is no prompt more


@virtual_time
async def test_colocated_workers_are_told_apart_by_their_caches_too() -> None:
    """That one computes prompts shows in its reports: it is asked from then on."""
    async with whole_mesh(
        **LOCAL,
        num_prefill=0,
        num_decode=2,
        num_blocks=256,
        decode={"colocated": True},
        timing=TIMING,
    ) as mesh:
        talk, homes = a_prompt(2 * UNIT, seed=1), set[str]()
        for turn in range(4):
            answer = await ask(mesh, talk)
            homes.add(answer.receipt["prefill"])
            assert answer.receipt["cached_tokens"] >= 2 * UNIT * turn
            talk += a_prompt(2 * UNIT, seed=7 * turn + 2)
            await asyncio.sleep(1.0)
        assert len(homes) == 1


@virtual_time
async def test_an_index_that_is_wrong_finds_out() -> None:
    """A change that was never told shows in the next report's digest; a snapshot mends it, and a
    worker that has left is in no answer any more."""
    async with whole_mesh(**LOCAL, num_prefill=2, num_decode=1) as mesh:
        members = mesh.gateways[0].members
        await ask(mesh, a_prompt(4 * UNIT))
        await asyncio.sleep(1.0)
        index = members.prefixes.index
        (holder,) = [it for it in mesh.prefills if len(_granules(it.worker.journal))]
        place = members.table.get(holder.incarnation).place
        told = index.num_granules(place)
        assert told == 4 * UNIT // UNIT
        journal = holder.worker.journal
        (reader,) = journal._readers.values()
        reader.told = {}  # what changes now is not told
        journal.stored(12345, 8 * UNIT, 0)
        reader.told = {}
        await mesh.until(lambda: index.num_resyncs == 1)
        await mesh.until(lambda: index.state(place) is Indexed.KNOWN)
        assert index.num_granules(place) == told + 1
        register_mesh_metrics(registry := CollectorRegistry(), mesh.gateways[0].mesh, members)
        count = registry.get_sample_value
        assert count("pdmesh_gateway_prefix_index_resyncs_total") == 1
        assert count("pdmesh_gateway_prefix_index_bytes") == index.num_bytes
        await mesh.kill(holder)
        await mesh.until(lambda: len(members.table) == 2)
        assert index.num_granules(place) == 0


@virtual_time
async def test_an_index_that_is_full_says_so_once() -> None:
    """Whom it leaves out is in the log, with what helps, and goes on being asked by its queue."""
    async with whole_mesh(**LOCAL, num_prefill=2, num_decode=1) as mesh:
        members = mesh.gateways[0].members
        members.prefixes.index._max_bytes = 0
        with capture_logs() as logs:
            for seed in range(3):
                await ask(mesh, a_prompt(4 * UNIT, seed=seed))
                await asyncio.sleep(1.0)
        told = [it["worker"] for it in logs if "--index-memory-mib" in it["event"]]
        assert {*told} == {it.incarnation for it in mesh.prefills}
        assert len(told) == 2
        places = [members.table.get(it).place for it in told]
        assert {members.prefixes.index.state(it).value for it in places} == {Indexed.LEFT_OUT}


@virtual_time
async def test_with_one_worker_for_prompts_nobody_is_asked() -> None:
    """There is no choice: no index is made, and no prompt is hashed."""
    async with whole_mesh(**LOCAL, num_prefill=1, num_decode=2) as mesh:
        await ask(mesh, a_prompt(2 * UNIT))
        assert mesh.gateways[0].members.prefixes.index is None
        assert not mesh.prefills[0].worker.journal._readers


def _granules(journal: Journal) -> dict[int, int]:
    return journal._entries


CONDUCTOR: dict[str, Any] = {"gateway": {"policy": "conductor"}}


@virtual_time
async def test_the_next_turn_has_the_answer_s_kv_sent_from_decode() -> None:
    """What decode computed of a conversation, prefill fetches; receipt and replay say so."""
    async with whole_mesh(
        **CONDUCTOR, num_prefill=1, num_decode=1, num_blocks=256, timing=TIMING
    ) as mesh:
        talk = a_prompt(2 * UNIT, seed=1)
        first = await mesh.ask(talk, 2 * UNIT)
        await asyncio.sleep(1.0)
        talk += [*first.token_ids, *a_prompt(40, seed=2)]
        second = await ask(mesh, talk)
        receipt = second.receipt
        assert receipt["cached_tokens"] == 4 * UNIT - 16  # of the last token there is no KV
        assert receipt["fetched_tokens"] == 2 * UNIT - 16
        assert receipt["fetched_from"] == f"{mesh.decodes[0].incarnation:016x}"
        assert receipt["prefill_s"] < 0.1  # 0.3 s to compute it again
        gateway = mesh.gateways[0].mesh
        told = json.loads(json.dumps(gateway.explain(list(gateway._recent)[-1].hex())))
        msgspec.convert(told, Explanation)
        remembered = [it for timeline in gateway._recent.values() for _, it in timeline._decisions]
        assert all(it.seen.request.prompt is None for it in remembered)
        (decision,) = told["decisions"]
        terms = decision["prefills"][0]["terms"]
        assert terms["source"] == receipt["fetched_from"]
        assert terms["fetched_tokens"] == UNIT  # whole granules are known
        assert replay(decision) == []


@virtual_time
async def test_a_fetch_outlives_the_request_that_began_it() -> None:
    """Another prompt waits for what the first had sent: when the first client has left, that one
    has the fetched tokens in its receipt, though its own decision named no source."""
    async with whole_mesh(
        **CONDUCTOR, num_prefill=1, num_decode=1, num_blocks=256, timing=TIMING
    ) as mesh:
        talk = a_prompt(2 * UNIT, seed=1)
        first = await mesh.ask(talk, 2 * UNIT)
        await asyncio.sleep(1.0)
        talk += [*first.token_ids, *a_prompt(40, seed=2)]
        mesh.fabric.settings = LoopbackSettings(latency_s=0.0005, bytes_per_s=1e6)
        async with asyncio.TaskGroup() as tasks:
            leaves = tasks.create_task(mesh.ask(talk, 4))
            await asyncio.sleep(0.005)
            stays = tasks.create_task(ask(mesh, talk))
            await asyncio.sleep(0.005)
            leaves.cancel()
        receipt = stays.result().receipt
        assert receipt["fetched_tokens"] == 2 * UNIT - 16
        assert receipt["fetched_from"] == ""
        await asyncio.sleep(1.0)
        await ask(mesh, talk)
        assert mesh.gateways[0].lives


@pytest.mark.parametrize("first", ["prefill", "decode"])
@virtual_time
async def test_whoever_joins_first_is_asked_when_the_second_joins(first: str) -> None:
    """With one worker there is no choice; as soon as there is, both tell of their caches."""
    others = {"prefill": "decode", "decode": "prefill"}
    start = {f"num_{first}": 1, f"num_{others[first]}": 0}
    async with whole_mesh(**CONDUCTOR, **start, num_blocks=256, timing=TIMING) as mesh:
        await asyncio.sleep(1.0)
        await mesh.start_worker(others[first])
        await mesh.ready()
        await ask(mesh, a_prompt(2 * UNIT))
        await asyncio.sleep(1.0)
        members = mesh.gateways[0].members
        places = [members.table.get(it.incarnation).place for it in mesh.workers]
        assert {members.prefixes.index.state(place) for place in places} == {Indexed.KNOWN}


@virtual_time
async def test_all_workers_of_a_mesh_that_starts_anew_are_asked() -> None:
    """All have left, and the first that comes back is alone for a moment: it is asked, too."""
    async with whole_mesh(**LOCAL, num_prefill=2, num_decode=1, num_blocks=256) as mesh:
        members = mesh.gateways[0].members
        for running in list(mesh.workers):
            await mesh.kill(running)
        await mesh.until(lambda: not len(members.table))
        new = [await mesh.start_worker(kind) for kind in ("prefill", "prefill", "decode")]
        await mesh.ready()
        await ask(mesh, a_prompt(2 * UNIT))
        await asyncio.sleep(1.0)
        places = [members.table.get(it.incarnation).place for it in new[:2]]
        assert {members.prefixes.index.state(place) for place in places} == {Indexed.KNOWN}


class OldStream:
    """A join stream whose worker has long been on another one, as after a partition."""

    def __init__(self) -> None:
        self.sent: list[wire.GatewayDirective] = []
        self.late = asyncio.Queue[wire.WorkerReport]()

    async def send(self, directive: wire.GatewayDirective) -> None:
        self.sent.append(directive)

    async def receive(self) -> wire.WorkerReport:
        return await self.late.get()


@virtual_time
async def test_a_stream_that_a_rejoin_has_replaced_takes_nothing_away() -> None:
    """What the worker is to be told goes to its new stream; what still comes by the old one is no
    news."""
    async with whole_mesh(**LOCAL, num_prefill=2, num_decode=1, num_blocks=256) as mesh:
        members, running = mesh.gateways[0].members, mesh.prefills[0]
        before = members.table.get(running.incarnation)
        registry, stream = Registry(members, members.incarnation), OldStream()
        async with asyncio.TaskGroup() as tasks:
            old: Any = stream
            heard = Liveness(asyncio.get_running_loop().time(), IDLE)
            both = [
                tasks.create_task(registry._tell(old, before)),
                tasks.create_task(registry._read(old, before, heard)),
            ]
            await asyncio.sleep(0.1)
            stream.sent.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(members, "leave", lambda *_: None)  # the gateway hears of no end
                running.worker._life.rejoin(members.incarnation)
                await mesh.until(lambda: members.table.get(running.incarnation) is not before)
            stream.late.put_nowait(wire.WorkerReport(status=wire.WorkerStatus(pending_tokens=99)))
            await asyncio.sleep(0.0)
            now = members.table.get(running.incarnation)
            assert now.status.pending_tokens == 0
            index = members.prefixes.index
            await mesh.until(lambda: index.state(now.place) is Indexed.KNOWN)
            assert not any(it.kv for it in stream.sent)
            for task in both:
                task.cancel()


@virtual_time
async def test_a_full_gateway_takes_a_worker_that_joins_anew() -> None:
    """Its old entry, which stands until the old stream is known to be dead, is no other worker."""
    async with whole_mesh(**LOCAL, num_prefill=2, num_decode=1, num_blocks=256) as mesh:
        members, running = mesh.gateways[0].members, mesh.prefills[0]
        before = members.table.get(running.incarnation)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("services.gateway.workers.registry.MAX_WORKERS", len(members.table))
            patch.setattr(members, "leave", lambda *_: None)  # the gateway hears of no end
            running.worker._life.rejoin(members.incarnation)
            await mesh.until(lambda: members.table.get(running.incarnation) is not before)


@virtual_time
async def test_a_hot_prefix_is_sent_where_the_queue_is_short() -> None:
    """Many prompts that begin alike do not wait for the one worker that has it, and are not
    computed whole elsewhere: the others fetch it, and every answer is right."""
    hot = a_prompt(8 * UNIT, seed=5)
    prompts = [hot + a_prompt(UNIT, seed=10 + number) for number in range(9)]
    waits: dict[str, float] = {}
    for policy in ("local", "conductor"):
        async with whole_mesh(
            gateway={"policy": policy}, num_prefill=3, num_decode=2, num_blocks=512, timing=TIMING
        ) as mesh:
            first, *others = mesh.prefills
            for other in others:  # as after a decision that would have used these pairs
                other.worker.pairs.ask(MeshPeer(first.incarnation, Address(first.host, 9000)))
            pairs = first.worker.pairs
            await mesh.until(lambda pairs=pairs: len(pairs.speeds) == 4)
            assert (await ask(mesh, hot)).receipt["prefill"] == f"{first.incarnation:016x}"
            await asyncio.sleep(1.0)
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(ask(mesh, prompt)) for prompt in prompts]
            receipts = [task.result().receipt for task in asked]
            waits[policy] = sum(receipt["ttft_s"] for receipt in receipts)
            fetched = sum(receipt["fetched_tokens"] > 0 for receipt in receipts)
            assert fetched == (2 if policy == "conductor" else 0)
            await asyncio.sleep(1.0)
            told = mesh.gateways[0].mesh.cluster()["hot_prefixes"]
            assert (told[0]["tokens"], told[0]["share"]) == (8 * UNIT, 1.0)  # all ten begin so
            if policy == "conductor":  # computed once, fetched twice
                assert told[0]["workers"] >= 3
    assert waits["conductor"] < 0.8 * waits["local"]


@virtual_time
async def test_who_computes_faster_than_the_link_fetches_nothing() -> None:
    """A slow link is slower than computing: the prompt is computed."""
    async with whole_mesh(
        **CONDUCTOR, num_prefill=1, num_decode=1, num_blocks=256, timing=FakeTiming()
    ) as mesh:
        talk = a_prompt(2 * UNIT, seed=1)
        first = await mesh.ask(talk, 2 * UNIT)
        await asyncio.sleep(1.0)
        talk += [*first.token_ids, *a_prompt(40, seed=2)]
        for worker in (*mesh.prefills, *mesh.decodes):
            for link in worker.worker.pairs._links.values():
                link.bytes_per_s = 1e4
        await asyncio.sleep(0.5)
        second = await ask(mesh, talk)
        assert second.receipt["fetched_tokens"] == 0
        assert second.receipt["cached_tokens"] == 2 * UNIT
