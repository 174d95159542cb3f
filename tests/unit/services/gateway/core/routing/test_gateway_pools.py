"""Pools that move: what a worker is by what it holds, Splitwise's routing, who may move home."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.pools import (
    MAX_PENDING_TOKENS,
    HomeOrder,
    Pool,
    change_home,
    home_of,
    is_confirmed,
    pool_of,
)
from services.gateway.core.routing.router import Router
from services.gateway.core.routing.routing import POLICIES
from services.gateway.core.routing.sides import RouteRequest
from services.gateway.core.worker import Role, Worker, WorkerStatus
from shared.errors import InvalidRequest, NotFound
from shared.home import Home
from shared.ids import Incarnation, StreamId
from tests.support.routing import a_worker, decide

BOTH = (Role.PREFILL, Role.DECODE)
REQUEST = RouteRequest(num_tokens=100, max_new_tokens=60)
"""It needs 10 of 64 blocks of 16."""

Where = Literal["prompt", "token", "mixed prompt", "mixed token"]


def a_mesh_of(*pools: Where, **load: list[int]) -> PeerTable:
    """Workers 1, 2, ... that serve both roles and are paired with all, themselves included: what
    each is at the moment. load: fields of their reports, one value each."""
    table = PeerTable()
    everybody = frozenset(Incarnation(idx + 1) for idx in range(len(pools)))
    for idx, pool in enumerate(pools):
        role = Role.PREFILL if pool.endswith("prompt") else Role.DECODE
        worker = a_worker(role, idx + 1, serves=BOTH)
        table.join(worker)
        is_mixed = pool.startswith("mixed")
        status = WorkerStatus(
            paired=everybody,
            num_answers=int(is_mixed and role is Role.PREFILL),
            num_prompts=int(is_mixed and role is Role.DECODE),
            **{name: values[idx] for name, values in load.items()},  # type: ignore[arg-type]
        )
        table.report(worker, status)
        assert pool_of(worker) is Pool(pool.split()[0])
    return table


def chosen(table: PeerTable, request: RouteRequest = REQUEST) -> tuple[int, int]:
    decision = decide("splitwise", table, request=request)
    return decision.prefill, decision.decode


# --- what a worker is -----------------------------------------------------------------------------


@pytest.mark.parametrize("home", BOTH)
def test_a_worker_with_foreign_work_is_mixed_until_none_is_left(home: Role) -> None:
    """By its report; an order that the report has not seen counts at once, so that the next
    request finds the worker moved."""
    worker = a_worker(home, 1, serves=BOTH)
    at_home = Pool.PROMPT if home is Role.PREFILL else Pool.TOKEN
    other = Role.DECODE if home is Role.PREFILL else Role.PREFILL
    worker.sent(home, StreamId(1), num_tokens=9 * (home is Role.PREFILL), num_blocks=1)
    assert pool_of(worker) is at_home
    worker.sent(other, StreamId(2), num_tokens=9 * (other is Role.PREFILL), num_blocks=1)
    assert pool_of(worker) is Pool.MIXED
    seen = StreamId(2)
    worker.report(WorkerStatus(num_prompts=1, num_answers=1, seen=seen))
    assert pool_of(worker) is Pool.MIXED
    own = {"num_prompts" if home is Role.PREFILL else "num_answers": 1}
    worker.report(WorkerStatus(**own, seen=seen))  # type: ignore[arg-type]
    assert pool_of(worker) is at_home


def test_a_prompt_is_held_until_its_order_ends() -> None:
    """Computed is not over: its KV has to be sent."""
    worker = a_worker(Role.DECODE, 1, serves=BOTH)
    worker.sent(Role.PREFILL, StreamId(1), num_tokens=50, num_blocks=4)
    worker.computed(StreamId(1))
    assert (worker.pending_tokens, pool_of(worker)) == (0, Pool.MIXED)
    worker.ended(StreamId(1))
    assert pool_of(worker) is Pool.TOKEN


def test_a_home_is_what_the_worker_reports() -> None:
    """Else the role that it joined with; a role that it does not serve is no home of it."""
    worker = a_worker(Role.PREFILL, 1, serves=BOTH)
    worker.report(WorkerStatus(home=Role.DECODE, num_answers=3))
    assert pool_of(worker) is Pool.TOKEN
    worker.report(WorkerStatus(num_answers=3))
    assert pool_of(worker) is Pool.MIXED
    single = a_worker(Role.PREFILL, 2)
    single.report(WorkerStatus(home=Role.DECODE))
    assert pool_of(single) is Pool.PROMPT


# --- Splitwise's rules ----------------------------------------------------------------------------


def test_home_pools_come_first_by_tokens_and_by_memory() -> None:
    """The shortest queue of prompts, the least memory for the answer, however idle others are."""
    table = a_mesh_of(
        "prompt", "prompt", "token", "token", "mixed token",
        pending_tokens=[300, 200, 0, 0, 0], reserved_blocks=[0, 0, 9, 8, 0],
    )  # fmt: skip
    assert chosen(table) == (2, 4)


def test_memory_is_compared_in_tokens_whatever_a_block_is() -> None:
    """3 blocks of 32 are more than 5 of 16."""
    table = a_mesh_of("prompt", "token", "token")
    large, small = table.workers[1:]
    large.block_size = 32
    for worker, reserved in ((large, 3), (small, 5)):
        table.report(worker, WorkerStatus(paired=worker.status.paired, reserved_blocks=reserved))
    assert chosen(table) == (1, 3)


@pytest.mark.parametrize(("over", "prefill"), [(0, 1), (1, 2)])
def test_a_queue_is_long_above_the_limit_and_not_at_it(over: int, prefill: int) -> None:
    """8192 tokens with this prompt are accepted; one more goes to the mixed pool."""
    pending = MAX_PENDING_TOKENS - REQUEST.num_tokens + over
    table = a_mesh_of(
        "prompt", "mixed prompt", "token",
        pending_tokens=[pending, 0, 0], num_waiting=[1, 0, 0], num_running=[1, 0, 0],
    )  # fmt: skip
    assert chosen(table)[0] == prefill


def test_a_busy_worker_with_an_empty_queue_is_never_long() -> None:
    """What it computes already nobody waits behind; an order that it has not reported waits if it
    does anything else."""
    table = a_mesh_of(
        "prompt", "mixed prompt", "token", pending_tokens=[50_000, 0, 0], num_running=[1, 0, 0]
    )
    assert chosen(table)[0] == 1
    busy = table.workers[0]
    busy.sent(Role.PREFILL, StreamId(1), num_tokens=1, num_blocks=1)
    assert chosen(table)[0] == 2

    table = a_mesh_of("prompt", "mixed prompt", "token")
    idle = table.workers[0]
    idle.sent(Role.PREFILL, StreamId(1), num_tokens=9000, num_blocks=63)
    table.report(table.workers[1], WorkerStatus(num_answers=1, pending_tokens=9500,
                                                paired=idle.status.paired))  # fmt: skip
    assert chosen(table)[0] == 1  # the first order of an idle worker runs
    idle.sent(Role.PREFILL, StreamId(2), num_tokens=1, num_blocks=1)
    assert chosen(table)[0] == 2


def test_only_the_shortest_queue_of_a_pool_is_asked() -> None:
    """Another one of the pool would have taken the prompt: it is busy, but nobody waits there."""
    table = a_mesh_of(
        "prompt", "prompt", "mixed prompt", "token",
        pending_tokens=[8193, 9000, 100, 0], num_waiting=[1, 0, 0, 0],
        num_running=[1, 1, 0, 0],
    )  # fmt: skip
    assert chosen(table)[0] == 3


def test_a_long_home_and_a_long_mixed_pool_borrow_from_the_tokens() -> None:
    """By the fewest pending prompt tokens; that worker is mixed from then on."""
    table = a_mesh_of(
        "prompt", "mixed token", "token", "token",
        pending_tokens=[9000, 9000, 5, 4], num_waiting=[1, 1, 0, 0],
        reserved_blocks=[0, 0, 7, 8],
    )  # fmt: skip
    assert chosen(table) == (4, 3)
    lent = table.workers[3]
    lent.sent(Role.PREFILL, StreamId(1), num_tokens=100, num_blocks=7)
    assert pool_of(lent) is Pool.MIXED


def test_a_worker_borrowed_for_the_prompt_may_be_the_one_for_the_answer() -> None:
    """It is in the token pool still when its decode side is looked for: one worker does both."""
    table = a_mesh_of("prompt", "token", pending_tokens=[9000, 0], num_waiting=[1, 0])
    decision = decide("splitwise", table, request=REQUEST)
    assert (decision.prefill, decision.decode) == (2, 2)
    assert decision.is_colocated


def test_an_empty_home_pool_is_passed_over() -> None:
    """Without prompt workers a mixed one, without those a token worker; and the same for tokens."""
    assert chosen(a_mesh_of("token", "mixed token", reserved_blocks=[0, 50]))[0] == 2
    assert chosen(a_mesh_of("token", "token", pending_tokens=[1, 0]))[0] == 2
    assert chosen(a_mesh_of("prompt", "mixed prompt", pending_tokens=[0, 9]))[1] == 2
    assert chosen(a_mesh_of("prompt", "prompt", reserved_blocks=[1, 0]))[1] == 2


@pytest.mark.parametrize("pool", ["prompt", "token", "mixed prompt", "mixed token"])
def test_one_worker_alone_does_everything(pool: Where) -> None:
    """Whatever it is, and however much waits."""
    table = a_mesh_of(pool, pending_tokens=[50_000], num_waiting=[9], reserved_blocks=[64])
    assert chosen(table) == (1, 1)


@pytest.mark.parametrize(("reserved", "decode"), [(53, 2), (54, 3)])
def test_prompt_and_answer_must_leave_a_block_over(reserved: int, decode: int) -> None:
    """10 blocks beside 53 of 64 are less than all, beside 54 they are not: the comparison is
    strict."""
    table = a_mesh_of("prompt", "token", "mixed token", reserved_blocks=[0, reserved, 5])
    assert chosen(table)[1] == decode


def test_only_the_emptiest_of_a_pool_is_asked_for_room() -> None:
    """Worker 2 has less reserved but fewer blocks in all; worker 3 had room."""
    table = a_mesh_of("prompt", "token", "token", "mixed token", reserved_blocks=[0, 20, 30, 40])
    table.workers[1].num_blocks = 25
    assert chosen(table)[1] == 4


def test_full_token_and_mixed_pools_borrow_from_the_prompts() -> None:
    """By the least memory, whether there is room or not; it may be the very worker that computes
    the prompt."""
    table = a_mesh_of(
        "prompt", "prompt", "token", "mixed prompt",
        reserved_blocks=[3, 2, 60, 60], pending_tokens=[0, 7, 0, 0],
    )  # fmt: skip
    assert chosen(table) == (1, 2)
    table = a_mesh_of("prompt", "token", reserved_blocks=[63, 60])
    assert chosen(table) == (1, 1)


def test_with_everybody_mixed_and_full_one_worker_does_both() -> None:
    """The baseline without pools: the shortest queue of all."""
    table = a_mesh_of(
        "mixed prompt", "mixed token", "mixed token",
        pending_tokens=[9000, 8500, 8600], num_waiting=[1, 1, 1], reserved_blocks=[60, 61, 60],
    )  # fmt: skip
    assert chosen(table) == (2, 2)


def test_without_a_decode_side_the_prefill_side_is_given_up_too() -> None:
    """Room for the prompt is found, none for the answer, and no prompt worker is there to borrow:
    one does both, and that is the shortest queue of all."""
    table = a_mesh_of(
        "mixed prompt", "mixed token", pending_tokens=[20, 10], reserved_blocks=[60, 60]
    )
    assert chosen(table) == (2, 2)


def test_the_decode_side_is_one_that_the_prefill_side_reaches() -> None:
    """Pools are looked through among its partners."""
    table = a_mesh_of("prompt", "token", "token", "mixed token", reserved_blocks=[0, 9, 0, 0])
    table.report(table.workers[0], WorkerStatus(paired=frozenset({Incarnation(2)})))
    assert chosen(table) == (1, 2)
    table.report(table.workers[0], WorkerStatus(paired=frozenset({Incarnation(4)})))
    assert chosen(table) == (1, 4)


def test_workers_of_one_role_are_a_queue_however_long() -> None:
    """Prefill and decode workers that serve nothing else: nobody can be borrowed, nothing is
    refused."""
    table = PeerTable()
    for idx in (1, 2):
        prefill = a_worker(Role.PREFILL, idx)
        table.join(prefill)
        table.join(a_worker(Role.DECODE, 10 + idx))
    for prefill, pending in zip(table.all(Role.PREFILL), (9500, 9400), strict=True):
        both = frozenset({Incarnation(11), Incarnation(12)})
        status = WorkerStatus(pending_tokens=pending, num_waiting=3, num_running=1, paired=both)
        table.report(prefill, status)
    for decode, reserved in zip(table.all(Role.DECODE), (62, 63), strict=True):
        table.report(decode, WorkerStatus(reserved_blocks=reserved))
    assert chosen(table) == (2, 11)


def test_idle_workers_take_turns() -> None:
    """Ties go to the one chosen longest ago."""
    table = a_mesh_of("prompt", "prompt", "token", "token")
    policy = POLICIES["splitwise"]()
    pairs = [decide(policy, table, request=REQUEST) for _ in range(4)]
    assert [(p.prefill, p.decode) for p in pairs] == [(1, 3), (2, 4), (1, 3), (2, 4)]


@pytest.mark.parametrize("seed", range(60))
def test_it_decides_as_the_simulator_does(seed: int) -> None:
    """Its code, written out once more over plain lists: no two workers alike, all paired."""
    source = random.Random(seed)
    count = source.randrange(1, 9)
    names: list[Where] = ["prompt", "token", "mixed prompt", "mixed token"]
    step = source.choice([7, 2000])
    table = a_mesh_of(
        *source.choices(names, k=count),
        pending_tokens=[step * i + 1 for i in source.sample(range(count), count)],
        num_waiting=[source.randrange(2) for _ in range(count)],
        num_running=[1] * count,
        reserved_blocks=source.sample(range(40, 64) if seed % 2 else range(64), count),
    )
    workers = table.workers
    pools = {pool: [w for w in workers if pool_of(w) is pool] for pool in Pool}

    def by_queue(pool: list[Worker]) -> Worker:
        return min(pool, key=lambda worker: worker.status.pending_tokens)

    def by_memory(pool: list[Worker]) -> Worker:
        return min(pool, key=lambda worker: worker.status.reserved_blocks)

    prefill = decode = None
    for pool in (pools[Pool.PROMPT], pools[Pool.MIXED]):
        if pool and prefill is None:
            best = by_queue(pool)
            is_long = best.status.pending_tokens + REQUEST.num_tokens > 8192
            if not (best.status.num_waiting and is_long):
                prefill = best
    for pool in (pools[Pool.TOKEN], pools[Pool.MIXED]):
        if pool and decode is None:
            best = by_memory(pool)
            if best.status.reserved_blocks + 10 < 64:
                decode = best
    if prefill is None and pools[Pool.TOKEN]:
        prefill = by_queue(pools[Pool.TOKEN])
    if decode is None and pools[Pool.PROMPT]:
        decode = by_memory(pools[Pool.PROMPT])
    if prefill is None or decode is None:
        prefill = decode = by_queue(workers)
    assert chosen(table) == (prefill.incarnation, decode.incarnation)


# --- the other policies ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_loaded"])
def test_other_policies_leave_everybody_at_home_unless_nobody_is(policy: str) -> None:
    """A worker that serves both stands on its home's side alone; a worker to avoid, or one that is
    too small, is a reason to look further."""
    table = a_mesh_of("prompt", "token", pending_tokens=[9000, 0], num_waiting=[9, 0])
    decision = decide(policy, table, request=REQUEST)
    assert (decision.prefill, decision.decode) == (1, 2)
    assert (len(decision.sides.prefills), len(decision.sides.decodes)) == (1, 1)

    away = RouteRequest(num_tokens=100, max_new_tokens=60, avoid=frozenset({Incarnation(1)}))
    decision = decide(policy, table, request=away)
    assert (decision.prefill, decision.decode) == (2, 2)
    table.leave(Incarnation(2))
    assert decide(policy, table, request=REQUEST).is_colocated
    assert decide(policy, table, request=away).is_colocated


def test_what_a_gateway_counts_on_are_the_workers_that_its_policy_chooses_from() -> None:
    """Those at home, of a policy that leaves them there; where nobody is, or no pair is made,
    whoever could be one of a pair."""
    table = a_mesh_of("prompt", "token")

    def numbers(policy: str) -> tuple[list[int], list[int]]:
        sides = Router(POLICIES[policy](), table, index_bytes=1 << 20).sides
        return [it.incarnation for it in sides.prefills], [it.incarnation for it in sides.decodes]

    assert numbers("least_loaded") == ([1], [2])
    assert numbers("splitwise") == ([1, 2], [1, 2])
    for worker in table.workers:
        table.report(worker, WorkerStatus())
    assert not table.sides
    assert numbers("least_loaded") == numbers("splitwise") == ([1, 2], [1, 2])
    for worker in table.workers:
        worker.is_silent = True
    table.note_usability()
    assert numbers("least_loaded") == ([], [])


def test_a_colocated_worker_of_one_role_is_at_home_on_both_sides() -> None:
    """Beside workers that serve both it goes on as before: a pair with itself."""
    table = a_mesh_of("prompt", "token", pending_tokens=[50, 0])
    colocated = a_worker(Role.DECODE, 9)
    table.join(colocated)
    table.report(colocated, WorkerStatus(paired=frozenset({Incarnation(9)})))
    decision = decide("least_loaded", table, request=REQUEST)
    assert (decision.prefill, decision.decode) == (9, 9)
    assert len(decision.sides.prefills) == len(decision.sides.decodes) == 2


def test_colocated_workers_of_one_role_share_the_work_of_both() -> None:
    """They are at home on both sides and never mixed: what one was just sent is no reason to send
    it more."""
    table = PeerTable()
    for incarnation in (1, 2):
        worker = a_worker(Role.DECODE, incarnation)
        table.join(worker)
        table.report(worker, WorkerStatus(paired=frozenset({worker.incarnation})))
    for turn in range(1, 5):
        prefill, decode = chosen(table)
        assert prefill == decode == 2 - turn % 2
        worker = table.workers[decode - 1]
        worker.sent(Role.DECODE, StreamId(turn), num_tokens=100, num_blocks=7)
        assert pool_of(worker) is Pool.TOKEN


# --- a new home -----------------------------------------------------------------------------------


G1, G2 = 101, 102


def _given(table: PeerTable, order: HomeOrder) -> bool:
    """Have a worker take an order, as it does, and report it; False = it refused."""
    worker = table.get(order.worker)
    assert worker is not None
    if not order.home.replaces(home_of(worker)):
        return False
    role, epoch, number = order.home
    status = WorkerStatus(
        paired=worker.status.paired, home=role, home_epoch=epoch, home_order=number
    )
    table.report(worker, status)
    return True


def test_a_worker_is_given_its_other_home_with_the_next_epoch() -> None:
    """As long as somebody stays for what it did, and has been ordered to."""
    table = a_mesh_of("prompt", "prompt", "token")
    worker, witness, _ = table.workers
    stay, move = change_home(table, worker.incarnation, "token", G1)
    assert stay == HomeOrder(witness.incarnation, Home(Role.PREFILL, 1, G1))
    assert move == HomeOrder(worker.incarnation, Home(Role.DECODE, 1, G1))
    assert not is_confirmed(witness, stay.home)
    assert _given(table, stay)
    assert is_confirmed(witness, stay.home)
    assert _given(table, move)
    assert home_of(worker) == move.home
    *_, back = change_home(table, worker.incarnation, "prompt", G1)
    assert back.home == Home(Role.PREFILL, 2, G1)


def test_who_cannot_move_needs_no_order_to_stay() -> None:
    """One order is enough then."""
    table = a_mesh_of("prompt", "prompt", "token")
    table.join(a_worker(Role.PREFILL, 9))
    table.report(table.workers[-1], WorkerStatus(paired=table.workers[0].status.paired))
    table.workers[-1].is_connected = True
    (move,) = change_home(table, Incarnation(1), "token", G1)
    assert move.worker == 1


def test_an_order_that_another_gateway_gave_is_not_ones_own() -> None:
    """Two renewals with one number: only one of the two gateways may go on."""
    table = a_mesh_of("prompt", "prompt", "token")
    worker = table.workers[0]
    assert _given(table, HomeOrder(worker.incarnation, Home(Role.PREFILL, 1, G2)))
    with pytest.raises(InvalidRequest, match="at the same time") as caught:
        is_confirmed(worker, Home(Role.PREFILL, 1, G1))
    assert caught.value.code == "old_epoch"


STEPS = ("report", "report", "decide", "decide", "arrive", "arrive", "look", "look", "give up")


@pytest.mark.slow
@given(st.data())
def test_gateways_with_old_views_never_empty_a_role_together(data: st.DataObject) -> None:
    """Any number of gateways, whose reports come late and whose orders are on their way as long as
    they like: somebody is always at home with prompts."""
    num_workers = data.draw(st.integers(2, 3))
    numbers = itertools.count(1)
    truth = {w: Home(Role.PREFILL, 0) for w in range(num_workers)}
    views = [dict(truth) for _ in range(data.draw(st.integers(2, 3)))]
    running: list[list[HomeOrder]] = [[] for _ in views]
    sent: list[list[HomeOrder]] = [[] for _ in views]
    for _ in range(data.draw(st.integers(1, 60))):
        gateway = data.draw(st.integers(0, len(views) - 1))
        view, todo, mail = views[gateway], running[gateway], sent[gateway]
        match data.draw(st.sampled_from(STEPS)):
            case "report":
                worker = data.draw(st.integers(0, num_workers - 1))
                view[worker] = truth[worker]
            case "decide" if not todo:
                table = a_mesh_of(*["prompt"] * num_workers, "token")
                for worker, home in view.items():
                    it = table.workers[worker]
                    role, epoch, number = home
                    status = WorkerStatus(
                        paired=it.status.paired, home=role, home_epoch=epoch, home_order=number
                    )
                    table.report(it, status)
                mover = data.draw(st.integers(0, num_workers - 1))
                with contextlib.suppress(InvalidRequest):
                    orders = change_home(table, Incarnation(1 + mover), "token", next(numbers))
                    todo += orders
                    mail.append(orders[0])
            case "arrive" if mail:
                order = mail.pop(0)
                if order.home.replaces(truth[order.worker - 1]):
                    truth[order.worker - 1] = order.home
            case "give up":
                todo.clear()  # what it has sent may still arrive
            case "look" if todo:
                home, wanted = view[todo[0].worker - 1], todo[0].home
                if home == wanted:
                    todo.pop(0)
                    mail += todo[:1]
                elif not wanted.replaces(home):
                    todo.clear()
            case _:
                pass
        assert any(home.role is Role.PREFILL for home in truth.values())


@pytest.mark.parametrize(
    ("worker", "home", "code", "remedy"),
    [
        (77, "token", "no_worker", "`pdmesh top` lists"),
        (1, "chef", "unknown_home", "one of prompt, token"),
        (4, "prompt", "one_role", "start one that serves both"),
        (1, "token", "last_of_role", "start another one, or give another one the home"),
    ],
)
def test_a_move_that_cannot_be_is_refused_with_its_remedy(
    worker: int, home: str, code: str, remedy: str
) -> None:
    """Typed, and nothing has changed."""
    table = a_mesh_of("prompt", "token", "token")
    table.join(a_worker(Role.DECODE, 4))
    with pytest.raises((InvalidRequest, NotFound)) as caught:
        change_home(table, Incarnation(worker), home, G1)
    assert caught.value.code == code
    assert remedy in caught.value.message
    assert isinstance(caught.value, NotFound) == (code == "no_worker")


def test_who_drains_or_is_silent_does_not_count_as_left() -> None:
    """A colocated worker does, on both sides."""
    table = a_mesh_of("prompt", "prompt", "token")
    first, second, _ = table.workers
    table.report(second, WorkerStatus(paired=second.status.paired, is_draining=True))
    with pytest.raises(InvalidRequest, match="last one for prompts"):
        change_home(table, first.incarnation, "token", G1)
    colocated = a_worker(Role.DECODE, 9)
    table.join(colocated)
    table.report(colocated, WorkerStatus(paired=frozenset({Incarnation(9)})))
    (move,) = change_home(table, first.incarnation, "token", G1)
    assert move.home.role is Role.DECODE


def test_a_home_that_it_has_already_needs_nobody_else() -> None:
    """The order is repeated with a newer epoch."""
    table = a_mesh_of("prompt", "token")
    (order,) = change_home(table, Incarnation(1), "prompt", G1)
    assert order.home == Home(Role.PREFILL, 1, G1)
