"""What the autoscaler decides, case by case."""

from __future__ import annotations

import pytest

from services.gateway.core.scaling.autoscaler import CALM_S, SETTLE_S, decide
from services.gateway.core.scaling.scaling import (
    DWELL_S,
    AddWorkers,
    Borrow,
    Kind,
    Memory,
    MeshSeen,
    MoveHome,
    RefuseEarly,
    RemoveWorkers,
    Rules,
    WorkerSeen,
    is_first,
)
from services.gateway.core.scaling.traffic import Attainment
from services.gateway.core.worker import Role, Worker, WorkerStatus
from shared.ids import Incarnation
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from tests.support.scaling import LOOK_S, RULES, ObedientMesh, traffic, worker, workers

ROUND = {Kind.PREFILL: 3, Kind.DECODE: 1}
EASY = traffic(2.0)
"""Two prompt workers would be busy all the time; three are right."""


def decided(mesh: ObedientMesh, kind: type) -> list[object]:
    """All orders of a kind so far."""
    return [it for decision in mesh.decisions for it in decision.orders if isinstance(it, kind)]


# --- holding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "is_known", "why"),
    [
        ((), True, "no worker has joined"),
        (workers(3, 0), True, "a role has no worker"),
        (workers(2, 1, 1), True, "plan for one kind alone"),
        (workers(3, 1), False, "too little has been asked"),
        ((*workers(2, 1), worker(9, age_s=30.0)), True, "last report is 30 s old"),
        ((worker(1, is_cold=True), worker(2, Kind.DECODE)), True, "how long its prompts take"),
        ((worker(1), worker(2, Kind.DECODE, is_cold=True)), True, "answers' steps take"),
    ],
)
def test_it_holds_and_says_why(here: tuple[WorkerSeen, ...], is_known: bool, why: str) -> None:
    """Where an input is missing or stale nothing is changed."""
    memory = Memory(targets=ROUND)
    decision = decide(MeshSeen(here, traffic(50.0) if is_known else None), memory, RULES, 100.0)
    assert why in decision.hold
    assert decision.orders == ()
    assert decision.wanted == ROUND


def test_after_a_hold_the_whole_time_is_waited_for_again() -> None:
    """What was not seen may have been a peak."""
    mesh = ObedientMesh(list(workers(6, 1)))
    mesh.looks(DWELL_S - 60, EASY)
    mesh.look(None)
    mesh.looks(DWELL_S - 60, EASY)
    assert mesh.num(Kind.PREFILL) == 6
    mesh.looks(120, EASY)
    assert mesh.num(Kind.PREFILL) == 3


def test_a_gateway_that_is_not_the_first_changes_no_worker() -> None:
    """One writes; but every gateway refuses early for itself."""
    mesh = ObedientMesh(list(workers(2, 1)))
    decision = [mesh.look(traffic(9.0), acts=False) for _ in range(300)][-1]
    assert "another gateway" in decision.hold
    assert decided(mesh, AddWorkers) == []
    assert [it.on for it in decided(mesh, RefuseEarly)] == [True]  # type: ignore[attr-defined]


# --- more ---------------------------------------------------------------------------------------


def test_all_that_is_missing_is_ordered_at_once() -> None:
    """Not one a start-up."""
    mesh = ObedientMesh(list(workers(2, 1)))
    orders = [it for it in mesh.look(traffic(8.0)).orders if isinstance(it, AddWorkers)]
    assert [(it.kind, it.num) for it in orders] == [(Kind.PREFILL, 8), (Kind.DECODE, 3)]
    assert "10 needed for 8 requests/s" in orders[0].reason
    mesh.looks(90, traffic(8.0))
    assert (mesh.num(Kind.PREFILL), mesh.coming) == (10, [])


def test_all_of_a_jump_counts_while_it_is_being_counted() -> None:
    """A jump is half counted at first; the second half is no chance either."""
    mesh = ObedientMesh(list(workers(3, 1)))
    mesh.looks(300, EASY)
    assert mesh.look(traffic(4.5)).wanted[Kind.PREFILL] == 6
    assert mesh.look(traffic(5.6)).wanted[Kind.PREFILL] == 7


def test_a_wave_that_is_chance_refuses_nobody_and_brings_nobody_back() -> None:
    """A sixth more in half a minute than three workers do is four deviations."""
    mesh = ObedientMesh(list(workers(5, 1)))
    mesh.looks(DWELL_S + 60, EASY)
    assert mesh.num(Kind.PREFILL) == 3
    mesh.looks(15, traffic(3.1))
    mesh.looks(60, EASY)
    assert decided(mesh, RefuseEarly) == decided(mesh, AddWorkers) == []


def test_what_comes_faster_than_it_is_done_is_refused_until_there_are_workers() -> None:
    """Overload is the cheapest lever: it is on before a worker has started, and off after."""
    mesh = ObedientMesh(list(workers(2, 1)))
    first = mesh.look(traffic(4.0))
    assert any(isinstance(it, RefuseEarly) and it.on for it in first.orders)
    mesh.looks(60 + CALM_S + 3 * LOOK_S, traffic(4.0))
    assert [it.on for it in decided(mesh, RefuseEarly)] == [True, False]  # type: ignore[attr-defined]


def test_a_gateway_that_refuses_anyhow_is_left_alone() -> None:
    """What an operator has chosen stays."""
    seen = MeshSeen(workers(2, 1), traffic(9.0), refuses=True)
    assert not any(isinstance(it, RefuseEarly) for it in decide(seen, Memory(), RULES, 5.0).orders)


def test_no_more_than_allowed_and_it_says_so() -> None:
    """--max-workers bounds all kinds together; the limit is named."""
    mesh = ObedientMesh(list(workers(2, 1)), rules=Rules(RULES.limits, max_workers=5))
    decision = mesh.looks(600, traffic(8.0))
    assert mesh.num(Kind.PREFILL) + mesh.num(Kind.DECODE) == 5
    assert "10 prefill workers are needed" in decision.limit
    assert "--max-workers" in decision.limit


def test_who_is_started_by_others_takes_the_place_of_one_that_has_not_come() -> None:
    """Of twelve allowed, seven and four are here: one comes, and not the two that were wanted."""
    memory = Memory(targets={Kind.PREFILL: 6, Kind.DECODE: 6})
    rules = Rules(RULES.limits, max_workers=12)
    decision = decide(MeshSeen(workers(7, 4), EASY), memory, rules, 100.0)
    assert decision.wanted == {Kind.PREFILL: 7, Kind.DECODE: 5}
    assert [(it.kind, it.num) for it in decision.orders if isinstance(it, AddWorkers)] == [
        (Kind.DECODE, 1)
    ]


def test_where_no_more_are_allowed_a_role_with_too_many_makes_room() -> None:
    """Not before it had too many for the whole dwell, and no more than the other role lacks."""
    mesh = ObedientMesh(list(workers(5, 1)), rules=Rules(RULES.limits, max_workers=6))
    long_answers = traffic(1.0, prompt_s=0.2, output=700.0)
    mesh.looks(DWELL_S - 60, long_answers)
    assert (mesh.num(Kind.PREFILL), mesh.num(Kind.DECODE)) == (5, 1)
    mesh.looks(60 + 2 * LOOK_S, long_answers)
    assert (mesh.num(Kind.PREFILL), len(mesh.coming)) == (3, 2)
    mesh.looks(2 * DWELL_S, long_answers)
    assert (mesh.num(Kind.PREFILL), mesh.num(Kind.DECODE)) == (1, 3)
    assert [len(it.workers) for it in decided(mesh, RemoveWorkers)] == [2, 2]  # type: ignore[attr-defined]


def test_a_role_that_is_short_itself_makes_no_room() -> None:
    """What has piled up before it may pass, but has not yet."""
    mesh = ObedientMesh(list(workers(4, 1)), rules=Rules(RULES.limits, max_workers=5))
    mesh.here = [it._replace(queue_s=60.0) if it.kind is Kind.PREFILL else it for it in mesh.here]
    mesh.looks(2 * DWELL_S, traffic(1.0, prompt_s=0.2, output=700.0))
    assert (mesh.num(Kind.PREFILL), mesh.num(Kind.DECODE)) == (4, 1)


def test_a_limit_that_nobody_can_keep_is_named_and_buys_nothing() -> None:
    """A prompt of 10 s is late on an idle worker, too."""
    mesh = ObedientMesh(list(workers(3, 1)))
    decision = mesh.looks(60, traffic(0.2, prompt_s=10.0))
    assert decision.limit.startswith("ttft: 100% of the prompts compute longer than 5 s")
    assert mesh.num(Kind.PREFILL) == 3
    tight = Rules(RULES.limits._replace(tpot_s=0.01))
    decision = ObedientMesh(list(workers(3, 1)), rules=tight).looks(60, traffic(0.2))
    assert decision.limit.startswith("tpot: a single answer takes 0.022 s")


def test_the_start_up_is_measured() -> None:
    """By the first worker that was ordered."""
    mesh = ObedientMesh(list(workers(2, 1)), startup_s=95.0)
    mesh.looks(200, traffic(4.0))
    assert mesh.memory.startup_s == pytest.approx(95.0, abs=LOOK_S)


def test_what_a_person_takes_to_add_a_worker_is_no_start_up() -> None:
    """Who is only advised adds one after half an hour: nobody looks half an hour ahead for it."""
    rules = RULES._replace(is_obeyed=False)
    mesh = ObedientMesh(list(workers(2, 1)), startup_s=1800.0, rules=rules)
    mesh.looks(2000, traffic(4.0))
    assert mesh.num(Kind.PREFILL) > 2
    assert mesh.memory.startup_s == 0.0


def test_neither_a_worker_that_comes_back_nor_one_that_moves_tells_of_a_start_up() -> None:
    """Not even hours after the last start."""
    mesh = ObedientMesh(list(workers(2, 1)))
    mesh.looks(1000, traffic(4.0))
    measured_s, lost = mesh.memory.startup_s, mesh.here.pop(0)
    mesh.look(traffic(4.0))
    mesh.here.append(lost)
    mesh.coming.clear()
    mesh.looks(60, traffic(4.0))
    assert mesh.memory.startup_s == measured_s > 0
    mesh = ObedientMesh(list(workers(2, 4, moves=True)), rules=Rules(RULES.limits, max_workers=6))
    mesh.looks(300, traffic(3.0))
    assert decided(mesh, MoveHome) != []
    assert mesh.memory.startup_s == 0


def test_limits_missed_at_a_load_that_should_do_count() -> None:
    """Predictions are off: it plans for less, once, and not for ever more."""
    mesh = ObedientMesh(list(workers(3, 1)))
    missed = Attainment(num_judged=100, num_ttft_kept=80, num_tpot_kept=100, num_kept=80)
    for _ in range(60):
        mesh.look(EASY, missed)
    assert mesh.num(Kind.PREFILL) == 4
    for _ in range(60):
        mesh.look(EASY, Attainment(100, 100, 100, 100))
    assert mesh.num(Kind.PREFILL) == 4


# --- fewer --------------------------------------------------------------------------------------


def test_a_worker_goes_after_ten_quiet_minutes_and_the_freest_first() -> None:
    """Not sooner, and never the last."""
    mesh = ObedientMesh(list(workers(5, 2)))
    mesh.here[0] = worker(1, num_held=3)
    mesh.looks(DWELL_S - 2 * LOOK_S, EASY)
    assert mesh.num(Kind.PREFILL) == 5
    mesh.looks(4 * LOOK_S, EASY)
    assert mesh.num(Kind.PREFILL) == 3
    assert mesh.num(Kind.DECODE) == 1
    (prefill, _) = decided(mesh, RemoveWorkers)
    assert prefill.workers == (2, 3)  # type: ignore[attr-defined]
    mesh.looks(2 * DWELL_S, traffic(0.0))
    assert mesh.num(Kind.PREFILL) == 1


def test_a_peak_within_ten_minutes_keeps_its_workers() -> None:
    """It falls to the most that was needed."""
    mesh = ObedientMesh(list(workers(8, 1)))
    mesh.looks(300, EASY)
    mesh.looks(120, traffic(4.0))
    mesh.looks(240, EASY)
    assert mesh.num(Kind.PREFILL) == 5


def test_answers_that_were_late_in_a_load_that_is_over_buy_nothing() -> None:
    """They end, and are judged, when the rate has fallen already; the level falls slowly."""
    mesh = ObedientMesh(list(workers(3, 1)))
    mesh.looks(1200, EASY)
    missed = Attainment(num_judged=100, num_ttft_kept=20, num_tpot_kept=100, num_kept=20)
    for _ in range(12):
        mesh.look(traffic(0.2), missed)
    assert decided(mesh, AddWorkers) == []


def test_nobody_goes_while_limits_are_missed() -> None:
    """Whatever the arithmetic says."""
    mesh = ObedientMesh(list(workers(5, 1)))
    for _ in range(300):
        mesh.look(EASY, Attainment(num_judged=100, num_kept=80))
    assert mesh.num(Kind.PREFILL) == 5


def test_who_was_started_by_others_is_adopted() -> None:
    """An operator's worker is not sent away at once."""
    mesh = ObedientMesh(list(workers(3, 1)))
    mesh.looks(DWELL_S + 60, EASY)
    mesh.here.append(worker(77))
    assert mesh.look(EASY).wanted[Kind.PREFILL] == 4
    mesh.looks(DWELL_S - 60, EASY)
    assert mesh.num(Kind.PREFILL) == 4


# --- homes --------------------------------------------------------------------------------------


def test_a_role_with_workers_to_spare_lends_first_and_gives_then() -> None:
    """Borrowing at once, another home when it lasts, no new worker."""
    mesh = ObedientMesh(list(workers(2, 4, moves=True)))
    first = mesh.look(traffic(3.0, output=10.0))
    assert any(isinstance(it, Borrow) and it.on for it in first.orders)
    assert decided(mesh, MoveHome) == []
    mesh.looks(SETTLE_S + LOOK_S, traffic(3.0, output=10.0))
    assert (mesh.num(Kind.PREFILL), mesh.num(Kind.DECODE)) == (4, 2)
    assert decided(mesh, AddWorkers) == []
    mesh.looks(CALM_S + LOOK_S, traffic(3.0, output=10.0))
    assert [it.on for it in decided(mesh, Borrow)] == [True, False]  # type: ignore[attr-defined]


def test_workers_that_serve_one_role_are_not_moved() -> None:
    """Then it takes new ones."""
    mesh = ObedientMesh(list(workers(2, 4)))
    mesh.looks(120, traffic(3.0, output=10.0))
    assert decided(mesh, MoveHome) == []
    assert mesh.num(Kind.PREFILL) == 4


def test_colocated_workers_are_one_kind() -> None:
    """They are counted by the sum of both."""
    mesh = ObedientMesh(list(workers(0, 0, 2)))
    mesh.looks(120, traffic(4.0))
    assert mesh.num(Kind.COLOCATED) == 7


# --- several gateways --------------------------------------------------------------------------


def test_who_moves_is_not_removed_as_well() -> None:
    """Of five one goes to the other role, and two others end."""
    memory = Memory(
        targets={Kind.PREFILL: 2, Kind.DECODE: 2}, downs={Kind.PREFILL: 95.0, Kind.DECODE: 95.0}
    )
    orders = decide(MeshSeen(workers(5, 1, moves=True), EASY), memory, RULES, 100.0).orders
    assert [it.worker for it in orders if isinstance(it, MoveHome)] == [1]
    assert [it.workers for it in orders if isinstance(it, RemoveWorkers)] == [(2, 3)]


def joined_worker(number: int, first_gateway: int) -> Worker:
    """One that knows this gateway as the lowest of those it has joined."""
    made = Worker(
        role=Role.PREFILL,
        incarnation=Incarnation(number),
        host="h",
        port=1,
        model=ModelSpec(
            name="m", fingerprint=b"", vocab_size=1, max_model_len=1, dtype="float32", engine=""
        ),
        layout=KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8),
        num_blocks=1,
        block_size=16,
    )
    made.report(WorkerStatus(first_gateway=first_gateway))
    return made


@pytest.mark.parametrize(
    ("firsts", "decides"),
    [((5, 5), True), ((5, 3), False), ((3, 3), False), ((0, 5), True), ((), True)],
)
def test_the_lowest_gateway_that_any_worker_knows_decides(
    firsts: tuple[int, ...], decides: bool
) -> None:
    """And nobody while they disagree; a worker that does not say is no objection."""
    joined = [joined_worker(number, first) for number, first in enumerate(firsts, 1)]
    assert is_first(Incarnation(5), joined) is decides


def test_what_waits_in_the_gateway_has_piled_up_too() -> None:
    """Workers are given only what keeps them busy: the rest of a queue is not seen there."""
    few, many = (
        decide(MeshSeen(workers(2, 1), traffic(1.0), num_waiting=num), Memory(), RULES, 100.0)
        for num in (0, 1000)
    )
    assert few.wanted[Kind.PREFILL] == 2
    assert many.wanted[Kind.PREFILL] > 2
