"""An answer's marks become a receipt, and what happens is told to whoever watches."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.core.admission.overload import Overload, OverloadMode
from services.gateway.core.routing.routing import RouteDecision
from services.gateway.workers.planning import Planner
from services.gateway.workers.timeline import AnswerWatcher, Timeline, Transfer
from shared.config import GatewayConfig
from shared.errors import Overloaded, WorkerLost
from shared.ids import Incarnation
from shared.schedule.plan import PromptTimes
from shared.telemetry.lifetime import TTFT_PHASES, Receipt
from shared.telemetry.tracing import CANCELLED
from tests.support.routing import a_decision
from tests.support.virtual_loop import virtual_time


def emit(timeline: Timeline, num_tokens: int) -> tuple[float, int]:
    """Hand tokens on now."""
    return timeline.emitted(asyncio.get_running_loop().time(), num_tokens)


PAIR = a_decision(0xA, 0xB)


def sent(**options: Any) -> Timeline:
    """One that was admitted and dispatched as it came."""
    timeline = Timeline(asyncio.get_running_loop().time(), **options)
    timeline.admitted()
    timeline.dispatched(PAIR, has_decode=True)
    return timeline


@virtual_time
async def test_phases_of_a_retried_request_add_up_to_its_ttft() -> None:
    """Time lost to an attempt that brought no token is its own phase."""
    timeline = Timeline(asyncio.get_running_loop().time())
    await asyncio.sleep(0.1)
    timeline.admitted()
    await asyncio.sleep(0.2)
    timeline.dispatched(PAIR, has_decode=True)
    await asyncio.sleep(0.4)
    timeline.rerouted(WorkerLost("gone"))
    timeline.dispatched(PAIR, has_decode=True)
    await asyncio.sleep(0.8)
    timeline.prefilled(PromptTimes(0.1, 0.5, 3, dram_tokens=1, ssd_tokens=1, load_s=0.07))
    emit(timeline, 1)
    await asyncio.sleep(0.05)
    emit(timeline, 2)
    timeline.ended(None)
    receipt = timeline.receipt()
    phases = [getattr(receipt, name) for name in TTFT_PHASES]
    assert phases == pytest.approx([0.1, 0.2, 0.4, 0.1, 0.5, 0.2])
    assert receipt.ttft_s == pytest.approx(1.5)
    assert receipt.first_step_s == pytest.approx(0.05)
    assert (receipt.attempts, receipt.cached_tokens, receipt.errors) == (2, 3, ("worker_lost",))
    assert receipt.cached_by_tier == {"pool": 1, "dram": 1, "ssd": 1, "peer": 0}
    assert receipt.load_s == pytest.approx(0.07)


@virtual_time
async def test_a_retry_after_the_first_token_leaves_its_phases_alone() -> None:
    """TTFT is that of the attempt that brought the token, whatever happens later."""
    timeline = sent()
    await asyncio.sleep(0.3)
    timeline.prefilled(PromptTimes(0.0, 0.3, 0))
    emit(timeline, 1)
    await asyncio.sleep(5.0)
    timeline.rerouted(WorkerLost("gone"))
    timeline.dispatched(PAIR, has_decode=False)
    timeline.prefilled(PromptTimes(9.0, 9.0, 7))
    emit(timeline, 1)
    timeline.ended(None)
    receipt = timeline.receipt()
    assert receipt.ttft_s == pytest.approx(0.3)
    assert receipt.prefill_s == pytest.approx(0.3)
    assert receipt.cached_tokens == 0
    assert receipt.first_step_s == pytest.approx(5.0)
    assert receipt.decode == ""


@virtual_time
async def test_two_tokens_at_once_have_no_first_step() -> None:
    """Tokens that arrive together are given the same instant."""
    timeline = Timeline(asyncio.get_running_loop().time())
    timeline.dispatched(PAIR, has_decode=True)
    emit(timeline, 2)
    assert timeline.receipt().first_step_s == 0.0


class Watcher(AnswerWatcher):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[object, ...]] = []
        self.last = Receipt()

    def first_token(
        self, now: float, *, ttft_s: float, prompt_tokens: int, cached_tokens: int
    ) -> None:
        self.heard.append(("first", ttft_s, prompt_tokens, cached_tokens))

    def later_tokens(self, now: float, num_tokens: int, gap_s: float) -> None:
        self.heard.append(("later", num_tokens, gap_s))

    def transferred(self, now: float, decision: RouteDecision, transfer: Transfer) -> None:
        assert decision is PAIR
        self.heard.append(("transferred", transfer.num_bytes, transfer.lane, transfer.mode))

    def ended(self, now: float, receipt: Receipt, error: str) -> None:
        self.heard.append(("ended", error))
        self.last = receipt


@virtual_time
async def test_watchers_hear_of_tokens_as_they_come() -> None:
    """One hook feeds all of them: TTFT at the first token, then every gap, then the end."""
    one, two = Watcher(), Watcher()
    timeline = sent(prompt_tokens=7, watchers=(one, two))
    await asyncio.sleep(0.25)
    assert emit(timeline, 2) == (0.25, 1)  # who delivers tells of what follows the first
    await asyncio.sleep(0.5)
    assert emit(timeline, 3) == (0.25, 3)
    timeline.ended(None)
    heard = [("first", 0.25, 7, 0), ("ended", "")]
    assert one.heard == two.heard == heard
    assert one.last == timeline.receipt()
    assert (one.last.attempts, one.last.output_tokens, one.last.e2e_s) == (1, 5, 0.75)


@virtual_time
async def test_watchers_hear_how_an_answer_ended() -> None:
    """A client that leaves, a refusal and a failure can be told apart from a whole answer."""
    watcher = Watcher()

    def a_timeline() -> Timeline:
        return Timeline(asyncio.get_running_loop().time(), watchers=(watcher,))

    left = a_timeline()
    left.admitted()
    left.abandoned()
    left.ended(None)
    refused = a_timeline()
    refused.refused(Overloaded("full"))
    a_timeline().refused(None)
    failed = sent(watchers=(watcher,))
    failed.attempt_failed(WorkerLost("gone"))
    failed.ended(WorkerLost("gone"))
    assert [error for _, error in watcher.heard] == [
        CANCELLED, "overloaded", CANCELLED, "worker_lost"
    ]  # fmt: skip
    assert watcher.last.errors == ("worker_lost",)
    ends = [it.explanation()["error"] for it in (left, refused, a_timeline())]
    assert ends == ["its client left", "full", ""]


@virtual_time
async def test_a_transfer_is_told_once_and_by_who_knows_more() -> None:
    """Prefill's word counts; decode's does if the answer is over before prefill has spoken."""
    for has_prefill_spoken in (True, False):
        watcher = Watcher()
        timeline = sent(watchers=(watcher,))
        timeline.prefilled(PromptTimes(0.0, 0.0, 0))
        await asyncio.sleep(0.5)
        timeline.joined(num_bytes=1000, receive_s=0.25, lane="sysv")
        assert timeline.receipt().transfer_exposed_s == 0.5
        if has_prefill_spoken:
            timeline.pushed(Transfer(1000, 0.5, 0.125, "sysv", "layerwise"))
        timeline.ended(None)
        mode = "layerwise" if has_prefill_spoken else ""
        assert watcher.heard == [("transferred", 1000, "sysv", mode), ("ended", "")]
        assert watcher.last.gb_per_s == (2e-6 if has_prefill_spoken else 4e-6)
        assert watcher.last.transfer_exposed_s == (0.125 if has_prefill_spoken else 0.5)


@virtual_time
async def test_the_transfer_of_a_failed_attempt_is_not_the_next_ones() -> None:
    """A receipt names the workers of the last attempt, and only what moved between those."""
    timeline = sent()
    timeline.joined(num_bytes=1000, receive_s=0.25, lane="sysv")
    timeline.rerouted(WorkerLost("gone"))
    timeline.dispatched(PAIR, has_decode=True)
    timeline.ended(WorkerLost("gone"))
    receipt = timeline.receipt()
    assert (receipt.transfer_bytes, receipt.lane, receipt.attempts) == (0, "", 2)


@virtual_time
async def test_what_moved_before_the_token_was_not_exposed() -> None:
    """Decode's word comes over another stream, and may be heard before prefill's: neither the time
    since the request came counts then, nor that since a failed attempt's token."""
    timeline = sent()
    await asyncio.sleep(1.0)
    timeline.joined(num_bytes=1000, receive_s=0.25, lane="sysv")
    assert timeline.receipt().transfer_exposed_s == 0.0
    timeline.prefilled(PromptTimes(0.0, 0.0, 0))
    await asyncio.sleep(1.0)
    timeline.rerouted(WorkerLost("gone"))
    timeline.dispatched(PAIR, has_decode=True)
    timeline.joined(num_bytes=1000, receive_s=0.25, lane="sysv")
    timeline.ended(None)
    assert timeline.receipt().transfer_exposed_s == 0.0


@virtual_time
async def test_the_planner_counts_attempts_as_workers_do() -> None:
    """A request that failed and was sent again is no other gateway's."""
    members: Any = SimpleNamespace(
        router=SimpleNamespace(policy=SimpleNamespace(moves_roles=False))
    )
    overload = Overload(OverloadMode.OFF)
    planner = Planner(GatewayConfig(planner="advise"), members, overload, lambda: 0, 0.0)
    worker = Incarnation(1)
    planner.traffic.taken(0.0, {worker: 0})
    await asyncio.sleep(40.0)
    planner.traffic.asked(40.0)
    timeline = sent(watchers=(planner,))
    timeline.rerouted(WorkerLost("gone"))
    timeline.dispatched(PAIR, has_decode=True)
    planner.traffic.taken(40.0, {worker: 2})
    assert planner.traffic._others_factor(40.0) == 1.0
