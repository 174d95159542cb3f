"""Whatever numbers a worker tells, within what the gateway believes: no decision, no sum and no
receipt breaks by them, for that would end the gateway, and so every other worker's answers."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from services.gateway.core.admission.overload import Asking, ChosenPair, Overload, OverloadMode
from services.gateway.core.admission.tenants import Terms
from services.gateway.core.index.prefixes import HashedPrompt
from services.gateway.core.routing.decision_record import record_of
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.router import Router
from services.gateway.core.routing.routing import POLICIES
from services.gateway.core.routing.sides import RouteRequest
from services.gateway.core.scaling.autoscaler import decide
from services.gateway.core.scaling.need import Limits
from services.gateway.core.scaling.scaling import Memory, MeshSeen, Rules, seen_workers
from services.gateway.core.scaling.traffic import TrafficMeter
from services.gateway.core.window import LastMinute
from services.gateway.core.worker import Role
from services.gateway.workers.answer_metrics import AnswerMetrics
from services.gateway.workers.cluster import MeshWatcher, worker_body
from services.gateway.workers.timeline import Timeline, Transfer
from shared import wire
from shared.errors import WorkerLost
from shared.ids import Incarnation
from shared.messages.columns import pack_f32, pack_u32, pack_u64
from shared.messages.status_codec import StatusReader
from shared.predict.step_time import MIN_STEPS
from shared.schedule.plan import PromptTimes
from tests.support.routing import a_decision, a_worker
from tests.support.virtual_loop import run_virtual

SECONDS = st.floats(0, 1e9, exclude_max=True) | st.sampled_from([0.0, 5e-324, 1e-300])
U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)
PAIR = a_decision(0xA, 0xB)

EVENTS = st.one_of(
    st.tuples(
        st.just("prefilled"),
        st.builds(
            PromptTimes, SECONDS, SECONDS, U32, fetched_bytes=U64, fetch_s=SECONDS, load_s=SECONDS
        ),
    ),
    st.tuples(st.just("joined"), U64, SECONDS),
    st.tuples(
        st.just("pushed"),
        st.builds(Transfer, U64, SECONDS, SECONDS, st.just("tcp"), st.sampled_from(["", "x"])),
    ),
    st.tuples(st.just("emitted"), st.integers(1, 3)),
    st.tuples(st.just("failed")),
)


@given(st.lists(EVENTS, max_size=8), st.booleans())
def test_what_it_tells_of_a_request_ends_in_a_receipt(
    events: list[tuple[Any, ...]], has_failed: bool
) -> None:
    """Which is JSON, and so are windows and metrics."""
    run_virtual(_tell(events, WorkerLost("gone") if has_failed else None))


async def _tell(events: list[tuple[Any, ...]], error: WorkerLost | None) -> None:
    table, window, registry = PeerTable(), LastMinute(0.0), CollectorRegistry()
    table.join(a_worker(Role.PREFILL, 0xA))
    router = Router(POLICIES["conductor"](), table, index_bytes=1 << 20)
    members: Any = SimpleNamespace(
        expectations=router.expectations, learn=lambda came: router.learn(came, 1.0)
    )
    watchers = AnswerMetrics(registry), MeshWatcher(window, members)
    timeline = Timeline(0.0, prompt_tokens=10, watchers=watchers)
    timeline.admitted()
    timeline.dispatched(PAIR, has_decode=True)
    for now, (what, *told) in enumerate(events):
        match what:
            case "prefilled":
                timeline.prefilled(*told)
            case "joined":
                timeline.joined(num_bytes=told[0], receive_s=told[1], lane="tcp")
            case "pushed":
                timeline.pushed(*told)
            case "emitted":
                timeline.emitted(float(now), *told)
            case _:
                timeline.attempt_failed(WorkerLost("gone"))
                timeline.dispatched(PAIR, has_decode=True)
    timeline.ended(error)
    window.summary(1.0)
    generate_latest(registry)
    json.dumps(timeline.receipt().as_dict(), allow_nan=False)


WILD = st.floats() | SECONDS | st.floats(0, 1) | st.sampled_from([1.7e308, math.inf, -1.0])
SPEEDS = st.floats(width=32) | st.sampled_from([0.0, 1e-40, 1e10])
FITS = st.none() | st.builds(
    wire.StepFit,
    constant_s=WILD,
    token_s=WILD,
    attended_s=WILD,
    num_steps=st.sampled_from([0, MIN_STEPS]),
    error_p50=WILD,
    mean_ratio=WILD,
)
PREFILLS, DECODES = (1, 2), (101, 102)


def statuses(partners: tuple[int, ...]) -> st.SearchStrategy[wire.WorkerStatus]:
    return st.builds(
        wire.WorkerStatus,
        pending_tokens=U64,
        num_waiting=U32,
        num_running=U32,
        num_answers=U32,
        reserved_blocks=U32,
        step_tokens=U32,
        egress_bytes=U64,
        queue_s=WILD,
        step_s=WILD,
        dram_token_s=WILD,
        paired=st.just(pack_u64(partners)),
        pair_speeds=st.tuples(*[SPEEDS] * len(partners)).map(pack_f32),
        prompt_steps=FITS,
        answer_steps=FITS,
    )


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=25)
@given(data=st.data())
def test_what_it_reports_of_itself_is_weighed(name: str, data: st.DataObject) -> None:
    """Policies, forecasts and the planner come to a decision, and no sum overflows."""
    table = PeerTable()
    router = Router(POLICIES[name](), table, index_bytes=1 << 20)
    for number in (*PREFILLS, *DECODES):
        worker = a_worker(Role.PREFILL if number in PREFILLS else Role.DECODE, number)
        worker.is_connected = True
        table.join(worker)
    for number in (*PREFILLS, *DECODES):
        told = data.draw(statuses(DECODES if number in PREFILLS else ()))
        worker = table.get(Incarnation(number))
        assert worker is not None
        table.report(worker, StatusReader().read(told), 1.0)
        if router.prefixes is not None:
            router.prefixes.joined(worker)
    prompt = HashedPrompt(pack_u32(range(300)), b"") if router.needs_prompt else None
    decision = router.route(RouteRequest(300, 10, prompt=prompt), 2.0, 0.3).decision
    assert decision is not None
    json.dumps(record_of(decision, attempt=0, at_s=2.0), allow_nan=False)
    asking, pair = Asking(Terms(ttft_s=1.0, tpot_s=0.1), 300, 0.0), ChosenPair(*decision.workers)
    for mode in OverloadMode:
        overload = Overload(mode)
        overload.dispatched(b"1", pair, 300, 2.0)
        for error in (
            overload.late_anywhere(asking, table.sides, 2.0),
            overload.late_at(asking, pair, 2.0),
        ):
            assert error is None or error.retry_after_s < math.inf
    meter, status = TrafficMeter(2.0, 0.1, 0.0), decision.workers[0].status
    for second in range(40):
        meter.asked(second)
        meter.sent(second)
        meter.ended(
            second, is_whole=True, has_left=False, num_attempts=1, steps=status.prompt_steps,
            step_tokens=status.step_tokens, num_prompt=300, num_cached=0, num_output=20,
            ttft_s=0.5, tpot_s=0.01,
        )  # fmt: skip
    workers = tuple(it._replace(age_s=0.1) for it in seen_workers(table.workers, 41.0))
    seen = MeshSeen(workers, meter.traffic(41.0), meter.attainment(41.0))
    decide(seen, Memory(), Rules(Limits(2.0, 0.1), 50), 41.0)
    for worker in table.workers:
        body = worker_body(worker, router.expectations, router.prefixes, 2.0, {})
        json.dumps(body, allow_nan=False)
