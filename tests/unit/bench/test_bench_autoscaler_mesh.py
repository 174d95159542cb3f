"""The autoscaler in the simulator: a step of the load, a fall, and homes that move."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.autoscaler.scaled import ScaledMesh
from services.gateway.core.admission.overload import OverloadMode
from services.gateway.core.scaling.need import Limits
from services.gateway.core.scaling.scaling import Kind, MoveHome, RefuseEarly, Rules
from services.sim.engine import TimedEngine
from services.sim.mesh import CoreAnswer
from services.sim.open_loop import simulated_model
from services.sim.worker import WorkerSize
from shared.errors import WouldBeLate
from shared.predict.times import AffineTimes
from shared.telemetry.definitions import RequestOutcome, Slo

TIMES = AffineTimes(base_s=0.02, prompt_token_s=1e-3, decode_row_s=2e-3, context_token_s=0.0)
LIMITS = Limits(ttft_s=15.0, tpot_s=0.06)
PROMPT = 4096
"""Tokens: 4.1 s of a prefill worker."""
STARTUP_S = 60.0


def a_mesh(num_prefill: int, num_decode: int, *, movable: bool = False) -> ScaledMesh:
    spec, layout = simulated_model("m", 1.0, 1 << 14)
    mesh = ScaledMesh(
        spec,
        layout,
        TimedEngine(TIMES),
        WorkerSize(num_blocks=256, block_size=512, token_budget=4096),
        rules=Rules(LIMITS),
        startup_s=STARTUP_S,
        movable=movable,
    )
    for kind, num in ((Kind.PREFILL, num_prefill), (Kind.DECODE, num_decode)):
        for _ in range(num):
            mesh.begin(kind)
    mesh.settle()
    return mesh


def run(mesh: ScaledMesh, arrivals: Iterator[float], seconds: float) -> list[bool]:
    """Ask at these times; which requests kept both limits, by arrival."""
    began_s = mesh.clock.now
    slo = Slo(LIMITS.ttft_s, LIMITS.tpot_s)
    kept: dict[int, bool] = {}

    def come(number: int) -> None:
        mesh.ask((number,) * PROMPT, max_tokens=4, ignore_eos=True, temperature=0)

    count_ended = mesh.on_end

    def ended(answer: CoreAnswer) -> None:
        count_ended(answer)
        outcome = RequestOutcome(answer.asked_at, answer.token_times, answer.error is None)
        kept[answer.prompt[0]] = outcome.meets(slo)

    mesh.on_end = ended
    num = 0
    for num, at_s in enumerate(arrivals, 1):
        mesh.clock.at(began_s + at_s, lambda number=num: come(number))
    mesh.watch()
    mesh.run(lambda: mesh.clock.now - began_s >= seconds and len(kept) == num, seconds + 600)
    return [kept[number] for number in sorted(kept)]


def every(*stretches: tuple[float, float]) -> Iterator[float]:
    """Arrivals at even distances: (requests a second, until when) each."""
    at_s = 0.0
    for rate, until_s in stretches:
        while at_s < until_s:
            yield at_s
            at_s += 1 / rate


@pytest.mark.slow
def test_a_step_times_three_is_over_a_minute_after_the_start_up() -> None:
    """Meanwhile what would be late is refused at once; and nobody flaps."""
    mesh = a_mesh(2, 1)
    kept = run(mesh, every((0.25, 300.0), (0.75, 900.0)), 900.0)
    before, after = 75, 75 + round(0.75 * (STARTUP_S + 60))
    assert all(kept[:before])
    assert all(kept[after:])
    refusals = [order.on for _, order in mesh.orders if isinstance(order, RefuseEarly)]
    assert refusals == [True, False]
    assert next((it.kind, it.before) for it in mesh.changes) == (Kind.PREFILL, 2)
    assert all(it.after > it.before for it in mesh.changes)
    assert mesh.decisions[-1][1].wanted[Kind.PREFILL] == 4
    assert mesh.decisions[-1][1].memory.startup_s == pytest.approx(STARTUP_S, abs=10.0)


def test_a_worker_tells_of_its_queue_what_it_tells_in_production() -> None:
    """Prompts that share no step wait for each other, however few their tokens: who would be late
    is refused, and does not wait in vain."""
    times = AffineTimes(base_s=0.2, prompt_token_s=0.0, decode_row_s=0.0, context_token_s=0.0)
    spec, layout = simulated_model("m", 1.0, 1 << 14)
    mesh = ScaledMesh(
        spec,
        layout,
        TimedEngine(times),
        WorkerSize(num_blocks=256, batch_tokens=1),
        rules=Rules(Limits(ttft_s=2.0, tpot_s=0.5)),
        startup_s=STARTUP_S,
    )
    for kind in (Kind.PREFILL, Kind.DECODE):
        mesh.begin(kind)
    mesh.settle()
    mesh.overload.mode = OverloadMode.EARLY
    answers = [mesh.ask((number,) * 40, max_tokens=2) for number in range(30)]
    mesh.run(lambda: all(it.is_over for it in answers), 60.0)
    late = [it for it in answers if isinstance(it.error, WouldBeLate)]
    assert 18 <= len(late) <= 21
    assert all(it.token_times[0] - it.asked_at < 2.5 for it in answers if it.error is None)


def test_what_has_drained_is_paid_for_no_more_and_nothing_is_lost() -> None:
    """Four are too many for this load: after ten minutes two end, when they have finished."""
    mesh = a_mesh(4, 1)
    kept = run(mesh, every((0.25, 1200.0)), 1200.0)
    assert all(kept)
    assert [(it.before, it.after) for it in mesh.changes] == [(4, 2)]
    ended = [it.ended_s for it in mesh.devices if it.ended_s is not None]
    assert len(ended) == 2
    assert mesh.device_s(1200.0) == pytest.approx(3 * 1200 + sum(ended), abs=5.0)
    mesh.check()


def test_a_home_moves_before_a_worker_is_started() -> None:
    """Movable workers, and far more for answers than these need."""
    mesh = a_mesh(1, 4, movable=True)
    kept = run(mesh, every((0.5, 400.0)), 400.0)
    moved = [order for _, order in mesh.orders if isinstance(order, MoveHome)]
    assert moved
    assert len(mesh.devices) == 5  # nobody was started
    assert sum(kept) > 0.9 * len(kept)
    assert mesh.decisions[-1][1].memory.present[Kind.PREFILL] >= 3
