"""A request's marks become a receipt."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.core.routing import RouteDecision
from services.gateway.timeline import Timeline
from shared.errors import WorkerLost
from shared.ids import Incarnation
from shared.telemetry.lifetime import TTFT_PHASES
from tests.support.worker_mesh import virtual_time

PAIR = RouteDecision(
    policy="test", prefill=Incarnation(0xA), decode=Incarnation(0xB), candidates=()
)


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
    timeline.prefilled(queue_s=0.1, compute_s=0.5, cached_tokens=3)
    timeline.emitted(1)
    await asyncio.sleep(0.05)
    timeline.emitted(2)
    timeline.ended(None)
    receipt = timeline.receipt(attempts=2, output_tokens=3)
    phases = [getattr(receipt, name) for name in TTFT_PHASES]
    assert phases == pytest.approx([0.1, 0.2, 0.4, 0.1, 0.5, 0.2])
    assert receipt.ttft_s == pytest.approx(1.5)
    assert receipt.first_step_s == pytest.approx(0.05)
    assert (receipt.attempts, receipt.cached_tokens, receipt.errors) == (2, 3, ("worker_lost",))


@virtual_time
async def test_a_retry_after_the_first_token_leaves_its_phases_alone() -> None:
    """TTFT is that of the attempt that brought the token, whatever happens later."""
    timeline = Timeline(asyncio.get_running_loop().time())
    timeline.admitted()
    timeline.dispatched(PAIR, has_decode=True)
    await asyncio.sleep(0.3)
    timeline.prefilled(queue_s=0.0, compute_s=0.3, cached_tokens=0)
    timeline.emitted(1)
    await asyncio.sleep(5.0)
    timeline.rerouted(WorkerLost("gone"))
    timeline.dispatched(PAIR, has_decode=False)
    timeline.prefilled(queue_s=9.0, compute_s=9.0, cached_tokens=7)
    timeline.emitted(1)
    timeline.ended(None)
    receipt = timeline.receipt(attempts=2, output_tokens=2)
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
    timeline.emitted(2)
    assert timeline.receipt(attempts=1, output_tokens=2).first_step_s == 0.0
