"""What a gateway believes of a worker's load: the report and exactly those of its own orders that
the report has not seen."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.gateway.core.lifecycle import Leg
from services.gateway.core.routing.routing import POLICIES
from services.gateway.core.worker import Worker, WorkerStatus
from services.gateway.workers.membership import Membership
from services.gateway.workers.peers import WorkerSession
from services.gateway.workers.registry import Registry
from shared import worker_status
from shared.engine.fake import FakeTiming
from shared.ids import Incarnation, StreamId
from shared.worker_status import GATHER_S, MOST_REPORTS, REPORT_S, gather_s
from tests.support.storm import storm
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import whole_mesh
from tests.support.worker_mesh import a_prompt, expected

SLOW = FakeTiming(base_s=0.02, prefill_token_s=0.001)


class Reports:
    """Looks at a worker after each of its reports and each order; the open legs are counted by
    their requests' own life-cycles, which know nothing of load."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_reports = 0
        self.num_unseen = 0
        update = Membership.update

        def watched(members: Membership, incarnation: Incarnation, status: WorkerStatus) -> None:
            update(members, incarnation, status)
            worker = members.table.get(incarnation)
            if worker is not None:
                self._check(members.sessions[incarnation])
                self.num_reports += 1

        send = WorkerSession.send

        def sent(session: WorkerSession, *order: Any, **more: Any) -> StreamId:
            stream_id = send(session, *order, **more)
            self._check(session)
            return stream_id

        monkeypatch.setattr(Membership, "update", watched)
        monkeypatch.setattr(WorkerSession, "send", sent)

    def _check(self, session: WorkerSession) -> None:
        worker = session.worker
        status = worker.status
        num_tokens = num_blocks = 0
        for stream_id, leg in session._legs.items():
            if stream_id <= status.seen:
                continue
            lifecycle = leg._request.lifecycle  # type: ignore[attr-defined]
            num_order = len(lifecycle.token_ids)
            if leg.leg is Leg.PREFILL:
                num_tokens += 0 if lifecycle._attempt.has_first_token else num_order
                num_blocks += -(-num_order // worker.block_size)
            else:
                num_blocks += num_order // worker.block_size + 1
            self.num_unseen += 1
        assert worker.pending_tokens == status.pending_tokens + num_tokens
        assert worker.reserved_blocks == status.reserved_blocks + num_blocks


def test_the_sum_holds_at_every_report_of_a_storm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Clients that hang up, workers that are killed, sessions that are lost, requests that fail
    over."""
    reports = Reports(monkeypatch)
    storm(1, "apart", tmp_path)
    assert reports.num_reports > 100
    assert reports.num_unseen > 20


@virtual_time
async def test_no_prompt_counts_twice_and_none_is_forgotten() -> None:
    """A burst to one worker: until its first step ends, what the gateway believes is all that was
    sent, whether a report has seen it or not; at the end nothing is left."""
    prompts = [a_prompt(40 + i, seed=i) for i in range(6)]
    slow = FakeTiming(base_s=5.0)
    async with whole_mesh(timing=slow) as mesh:
        members: Any = mesh.gateways[0].members
        session = next(s for s in members.sessions.values() if s.worker.role.value == "prefill")
        num_sent = 0
        asking: list[asyncio.Task[Any]] = []
        async with asyncio.TaskGroup() as tasks:
            for i, prompt in enumerate(prompts):
                asking.append(tasks.create_task(mesh.ask(prompt, 2)))
                await mesh.until(lambda i=i: session.num_legs == i + 1)
                num_sent += len(prompt)
                for _ in range(10):  # across the report that sees it
                    assert session.worker.pending_tokens == num_sent
                    await asyncio.sleep(0.02)
            assert session.worker.status.pending_tokens == num_sent
        for prompt, task in zip(prompts, asking, strict=True):
            assert task.result().token_ids == expected(prompt, 2)
        await mesh.until(lambda: session.worker.pending_tokens == 0)


@virtual_time
async def test_reports_of_load_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a busy mesh and in an idle one reports come, and nobody is woken who waits for a pair, or
    to tell prefill workers of decode workers. A worker that drains wakes the first, one that comes
    or goes both; each prefill worker is told once."""
    told: list[int] = []
    list_of = Registry._list

    def counted(registry: Registry, peers: tuple[Worker, ...]) -> Any:
        told.append(len(peers))
        return list_of(registry, peers)

    monkeypatch.setattr(Registry, "_list", counted)
    async with whole_mesh(num_prefill=3, num_decode=2) as mesh:
        members: Any = mesh.gateways[0].members
        reports: list[Incarnation] = []
        update = members.update
        members.update = lambda *report: (reports.append(report[0]), update(*report))
        usability = members.usability.next
        directives = [it.next for it in members.directives.values()]
        told.clear()
        async with asyncio.TaskGroup() as tasks:
            for seed in range(8):
                tasks.create_task(mesh.ask(a_prompt(50, seed=seed), 8))
        await asyncio.sleep(3.0)
        assert len(reports) >= 5 * 2
        assert len(set(reports)) == 5
        assert not usability.is_set()
        assert not any(it.is_set() for it in directives)

        mesh.decodes[0].stop.set()
        await usability.wait()
        # It drains, and what is on its way to it goes on.
        assert not any(it.is_set() for it in directives)
        await directives[0].wait()
        await asyncio.sleep(0.1)
        assert told == [1, 1, 1]
        await mesh.start_worker("decode")
        await mesh.until(lambda: members.table.sides.num_pairs == 6)
        assert told == [1, 1, 1, 2, 2, 2]


@virtual_time
async def test_many_workers_gather_their_news_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are told when one more joins than may report so often, and when it has gone."""
    monkeypatch.setattr(worker_status, "MOST_REPORTS", 2 / GATHER_S)
    async with whole_mesh() as mesh:

        def paces() -> set[float]:
            links = [it.worker._life._registration._links.values() for it in mesh.workers]
            return {link.gather_s for both in links for link in both}

        assert paces() == {GATHER_S}
        more = await mesh.start_worker("decode")
        await mesh.until(lambda: paces() == {2 * GATHER_S})
        await mesh.kill(more)
        await mesh.until(lambda: paces() == {GATHER_S})


@pytest.mark.parametrize(
    ("num_workers", "seconds"), [(1, 0.05), (50, 0.05), (51, 0.1), (128, 0.2), (1000, REPORT_S)]
)
def test_a_gateway_hears_a_thousand_reports_a_second(num_workers: int, seconds: float) -> None:
    """However many workers have news; beyond five hundred no news waits longer."""
    assert gather_s(num_workers) == seconds
    assert num_workers / seconds <= max(MOST_REPORTS, num_workers / REPORT_S)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("colocated", [False, True])
def test_workers_of_one_role_serve_under_every_policy(policy: str, colocated: bool) -> None:
    """Prefill workers, decode workers and colocated ones: all answers are exact, and the work is
    shared."""

    @virtual_time
    async def run() -> None:
        options: dict[str, Any] = {"num_prefill": 0, "decode": {"colocated": True}}
        async with whole_mesh(
            num_decode=2, gateway={"policy": policy}, **(options if colocated else {})
        ) as mesh:
            answers: list[asyncio.Task[Any]] = []
            async with asyncio.TaskGroup() as tasks:
                for seed in range(12):
                    asked = mesh.ask(a_prompt(40 + seed, seed=seed), 6)
                    answers.append(tasks.create_task(asked))
            for seed, answer in enumerate(answers):
                assert answer.result().token_ids == expected(a_prompt(40 + seed, seed=seed), 6)
            assert len({answer.result().receipt["decode"] for answer in answers}) == 2

    run()
