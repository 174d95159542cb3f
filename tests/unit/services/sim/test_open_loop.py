"""The simulator: production's cores under a virtual clock, with a time model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from services.gateway.core.worker import Role
from services.sim.engine import TimedEngine
from services.sim.mesh import CoreMesh
from services.sim.open_loop import (
    SimAnswer,
    SimRequest,
    run_open_loop,
    simulated_model,
)
from services.sim.orders import WorkerSize
from shared.engine.fake import DEFAULT_TIMING
from shared.predict.times import AffineTimes
from shared.worker.core.leases import Effect, Leases
from tests.support.core_mesh import MODEL, ExactEngine, simulated_mesh

COST = AffineTimes(base_s=0.010, prompt_token_s=1e-4, decode_row_s=2e-4, context_token_s=1e-7)
TOKEN_BYTES = 1000.0


def mesh_of(
    num_prefill: int = 1,
    num_decode: int = 1,
    num_mixed: int = 0,
    *,
    cost: AffineTimes = COST,
    link_bytes_s: float = 0.0,
    num_blocks: int = 4096,
    policy: str = "least_loaded",
    skips: bool = False,
) -> CoreMesh:
    """A mesh of workers with room for everybody."""
    size = WorkerSize(num_blocks=num_blocks, link_bytes_s=link_bytes_s)
    spec, layout = simulated_model("m", TOKEN_BYTES, 65536)
    core = CoreMesh(
        spec,
        layout,
        lambda _: TimedEngine(cost),
        size,
        policy=policy,
        max_running=1024,
        skips=skips,
    )
    return simulated_mesh(num_prefill, num_decode, num_mixed, core)


def drawn(seed: int, num: int = 60, rate: float = 6.0) -> list[SimRequest]:
    """Requests by Poisson, a third of which begin alike."""
    rng = random.Random(seed)
    at, requests = 0.0, list[SimRequest]()
    for idx in range(num):
        own = (idx + 10,) * rng.randint(1, 400)
        shared = (1,) * 256 if rng.random() < 0.33 else ()
        requests.append(SimRequest(at, shared + own, rng.randint(1, 40)))
        at += rng.expovariate(rate)
    return requests


def test_a_request_alone_is_its_steps_and_a_few_words() -> None:
    """First token: a prefill step and the ways of five messages at most; then decode steps."""
    (answer,) = run_open_loop(mesh_of(), [SimRequest(0.0, (5,) * 1000, 5)])
    assert answer.is_complete
    first_s = answer.token_times[0] - answer.arrived_at
    assert 0 <= first_s - (COST.base_s + 1000 * COST.prompt_token_s) <= 0.003
    step_s = COST.base_s + COST.decode_row_s + 1002 * COST.context_token_s
    gaps = [b - a for a, b in zip(answer.token_times[1:], answer.token_times[2:], strict=False)]
    assert gaps == pytest.approx([step_s] * 3, abs=1e-6)


@pytest.mark.slow
def test_a_mesh_may_take_all_day() -> None:
    """Far too much work for a mesh is done in the end, however long that takes."""
    mesh = mesh_of(cost=replace(COST, base_s=60.0), skips=True)
    answers = run_open_loop(mesh, [SimRequest(0.0, (5,) * 10, 100)] * 3)
    assert all(answer.is_complete for answer in answers)
    assert answers[0].token_times[-1] > 5000


def test_the_last_layers_of_kv_wait_for_the_link() -> None:
    """1000 tokens of 1 kB: three quarters leave while the last quarter is computed; on a slow link
    all of it is felt in the second token."""

    def second_gap_s(link_bytes_s: float) -> float:
        mesh = mesh_of(link_bytes_s=link_bytes_s)
        (answer,) = run_open_loop(mesh, [SimRequest(0.0, (5,) * 1000, 3)])
        return answer.token_times[1] - answer.token_times[0]

    free_s = second_gap_s(0.0)
    fast_s, slow_s = second_gap_s(50e6), second_gap_s(1e6)
    assert fast_s - free_s == pytest.approx(0.25e6 / 50e6, rel=0.02)  # a quarter: 5 ms
    assert slow_s - free_s == pytest.approx(1.0 - 0.75 * 0.11, rel=0.03)


@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "splitwise"])
def test_equal_runs_are_equal_to_the_last_bit(policy: str) -> None:
    """And another seed is another run."""

    def run(seed: int) -> list[SimAnswer]:
        return run_open_loop(mesh_of(2, 2, policy=policy), drawn(seed))

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kinds", [(1, 1, 0), (3, 2, 0), (0, 0, 2), (1, 1, 1)])
def test_nothing_is_lost(seed: int, kinds: tuple[int, int, int]) -> None:
    """Every request ends with all its tokens in order, and every ledger is full again (that is
    checked by the run itself)."""
    requests = drawn(seed)
    answers = run_open_loop(mesh_of(*kinds, num_blocks=512), requests)
    for answer, request in zip(answers, requests, strict=True):
        assert answer.is_complete
        assert answer.arrived_at == pytest.approx(request.at_s)
        assert len(answer.token_times) == request.num_output
        assert list(answer.token_times) == sorted(answer.token_times)


@pytest.mark.parametrize("policy", ["least_loaded", "conductor"])
@pytest.mark.parametrize("kinds", [(2, 2, 0), (1, 1, 1), (0, 0, 2)])
def test_skipping_equal_steps_changes_nothing_even_if_a_worker_dies(
    kinds: tuple[int, int, int], policy: str
) -> None:
    """Tokens that were told late have the times of their steps, and those that nobody was told of
    when their worker died are computed again in both."""

    def run(*, skips: bool) -> tuple[list[SimAnswer], int]:
        mesh = mesh_of(*kinds, num_blocks=512, policy=policy, skips=skips)
        last = list(mesh.members.values())[-1].core
        mesh.clock.after(4.0321, lambda: mesh.kill(last))
        return run_open_loop(mesh, drawn(7)), mesh.clock.num_events

    (exact, num_exact), (runs, num_runs) = run(skips=False), run(skips=True)
    assert [it.token_times for it in runs] == [it.token_times for it in exact]
    assert runs == exact
    assert any(it.num_attempts > 1 for it in runs)
    assert num_runs < 0.7 * num_exact


@pytest.mark.parametrize("seed", [0, 33, 210])
def test_skipping_equal_steps_changes_nothing_where_blocks_are_short(seed: int) -> None:
    """Who waits for room is asked at the end of the step in which its prefix came (33), a block
    that had to go is told of in time (210), and as many are held at most (0)."""
    rng = random.Random(seed)
    kinds = rng.choice([(1, 1, 0), (2, 2, 0), (1, 1, 1), (0, 0, 2), (3, 1, 1)])
    num_blocks = rng.choice([64, 100, 512])
    policy = rng.choice(["least_loaded", "conductor", "splitwise", "local"])
    at, requests = 0.0, list[SimRequest]()
    for idx in range(60):
        prompt = (1,) * rng.choice([0, 0, 256]) + (idx + 10,) * rng.randint(1, 400)
        requests.append(SimRequest(at, prompt, rng.randint(1, 80)))
        at += rng.expovariate(rng.choice([3, 20]))

    def run(*, skips: bool) -> tuple[list[SimAnswer], list[int]]:
        mesh = mesh_of(*kinds, num_blocks=num_blocks, policy=policy, skips=skips)
        answers = run_open_loop(mesh, requests)
        return answers, [it.core.work.most_held for it in mesh.members.values()]

    assert run(skips=True) == run(skips=False)


@pytest.mark.parametrize("seed", [5029, 5088, 5092])
def test_skipping_equal_steps_changes_nothing_where_reservations_give_way(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of workers that do both: prompts wait for room that leases hold, until the newest lease goes
    and its request is tried again."""
    gave: list[Effect] = []
    give_way = Leases._give_way

    def counted(leases: Leases) -> list[Effect]:
        effects = give_way(leases)
        gave.extend(effects)
        return effects

    monkeypatch.setattr(Leases, "_give_way", counted)
    rng = random.Random(seed)
    kinds = rng.choice([(1, 1, 0), (2, 2, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1)])
    num_blocks = rng.choice([40, 48, 64])
    at, requests = 0.0, list[SimRequest]()
    for idx in range(60):
        prompt = (idx + 10,) * rng.randint(200, num_blocks * 16 - 100)
        requests.append(SimRequest(at, prompt, rng.randint(1, 80)))
        at += rng.expovariate(rng.choice([30, 300]))

    def run(*, skips: bool) -> list[SimAnswer]:
        gave.clear()
        return run_open_loop(
            mesh_of(*kinds, num_blocks=num_blocks, policy="splitwise", skips=skips), requests
        )

    exact = run(skips=False)
    assert gave
    assert run(skips=True) == exact
    assert gave


@pytest.mark.parametrize("what", ["joins", "moves"])
def test_skipping_equal_steps_delays_no_word_of_a_partner_or_a_home(what: str) -> None:
    """A worker amid a step of half a second tells of either at once."""

    def heard_at(*, skips: bool) -> float:
        slow = replace(COST, base_s=0.5)
        mesh = mesh_of(0, 0, 2, cost=slow, policy="splitwise", skips=skips)
        core = next(iter(mesh.members.values())).core
        mesh.ask((5,) * 10, max_tokens=40, ignore_eos=True)
        mesh.ask((6,) * 10, max_tokens=40, ignore_eos=True)
        known = mesh.worker(core)
        if what == "joins":
            mesh.clock.after(3.7, lambda: mesh.start("decode", serves_both=True))
            mesh.run(lambda: len(known.status.paired) == 3)
        else:
            mesh.clock.after(3.7, lambda: mesh.move(core, "prompt"))
            mesh.run(lambda: known.home is Role.PREFILL)
        return mesh.clock.now

    assert heard_at(skips=True) == heard_at(skips=False)


def test_prefixes_that_are_there_are_not_computed_again() -> None:
    """The second of two equal prompts has its first token much sooner."""
    prompt = (7,) * 2000
    answers = run_open_loop(mesh_of(), [SimRequest(0.0, prompt, 2), SimRequest(5.0, prompt, 2)])
    first, second = (answer.token_times[0] - answer.arrived_at for answer in answers)
    assert second < 0.2 * first


def test_more_workers_are_quicker_under_load() -> None:
    """Twice the prefill workers: the median first token comes sooner."""

    def median_ttft(num_prefill: int) -> float:
        answers = run_open_loop(mesh_of(num_prefill, 2), drawn(3, num=120, rate=40.0))
        ttfts = sorted(answer.token_times[0] - answer.arrived_at for answer in answers)
        return ttfts[len(ttfts) // 2]

    assert median_ttft(4) < median_ttft(2) < median_ttft(1)


@pytest.mark.parametrize("seed", range(4))
def test_times_do_not_depend_on_what_is_computed(seed: int) -> None:
    """The fake engine with all its bytes and the time model alone: equal times of every token."""
    cost = AffineTimes(
        base_s=DEFAULT_TIMING.base_s,
        prompt_token_s=DEFAULT_TIMING.prefill_token_s,
        decode_row_s=DEFAULT_TIMING.decode_row_s,
        context_token_s=DEFAULT_TIMING.context_token_s,
    )

    class AtTheEnd(TimedEngine):
        spreads_layers = False

        def step(self, rows, on_layer):  # type: ignore[no-untyped-def]
            for layer in range(MODEL.num_layers):
                on_layer(layer)
            return super().step(rows, on_layer)

    size = WorkerSize(
        num_blocks=96, block_size=4, token_budget=32, num_slots=4, frame_bytes=1 << 12
    )
    rng = random.Random(seed)
    requests = [
        SimRequest(idx * 0.004, tuple(rng.choices(range(1, 60), k=rng.randint(1, 60))), 12)
        for idx in range(40)
    ]

    def run(engine: object) -> list[SimAnswer]:
        core = CoreMesh(MODEL.spec, MODEL.layout, engine, size, max_running=64)  # type: ignore[arg-type]
        return run_open_loop(simulated_mesh(2, 2, 0, core), requests)

    for exact, timed in zip(run(ExactEngine), run(lambda _: AtTheEnd(cost)), strict=True):
        assert timed.is_complete
        assert timed.token_times == pytest.approx(exact.token_times, abs=1e-9)


@pytest.mark.parametrize("skips", [False, True])
def test_an_answer_that_outgrows_its_worker_fails_and_the_others_go_on(skips: bool) -> None:
    """As it fails it gives its blocks back in the middle of a step's planning."""
    mesh = mesh_of(0, 0, 1, num_blocks=12, skips=skips)
    requests = [
        SimRequest(0.0, (5,) * 30, 150),
        SimRequest(0.0, (6,) * 90, 120),
        SimRequest(1.0, (7,) * 60, 100),
        SimRequest(1.0, (8,) * 30, 20),
    ]
    answers = run_open_loop(mesh, requests)
    assert [answer.error for answer in answers] == ["", "no_blocks", "", ""]
    assert [answer.is_complete for answer in answers] == [True, False, True, True]
