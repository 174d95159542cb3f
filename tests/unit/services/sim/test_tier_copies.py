"""Memory and disk below simulated pools. That they do what a worker's own do, block by block,
``tests/mesh/test_simulator_truth.py`` shows."""

from __future__ import annotations

import random

import pytest

from services.planner.mesh_run import cached_tokens
from services.sim.engine import TimedEngine
from services.sim.mesh import CoreMesh
from services.sim.open_loop import SimAnswer, SimRequest, run_open_loop, simulated_model
from services.sim.orders import TierSize, WorkerSize
from shared.ids import LeaseToken, RequestId, StreamId
from shared.kv.journal import Tier
from shared.predict.times import AffineTimes
from shared.request import SamplingParams, WorkItem
from shared.transfer.messages import TransferKey
from shared.transfer.orders import Order, PrefixAt
from shared.worker.core.life import Task
from tests.support.core_mesh import simulated_mesh

COST = AffineTimes(base_s=0.010, prompt_token_s=1e-4, decode_row_s=2e-4, context_token_s=1e-7)
SPEC, LAYOUT = simulated_model("m", 1000.0, 65536)
BLOCK_BYTES = 16 * LAYOUT.token_bytes
NUM_BLOCKS = 80
QUICK, SLOW = 1e9, BLOCK_BYTES / 0.5
"""Bytes a second: a block in 16 us, and two blocks a second."""


def mesh_of(kinds: tuple[int, int, int], *tiers: TierSize, skips: bool = False) -> CoreMesh:
    """Workers whose pools hold no two prompts of ``CONVERSATIONS``."""
    size = WorkerSize(num_blocks=NUM_BLOCKS, tiers=tiers)
    core = CoreMesh(SPEC, LAYOUT, lambda _: TimedEngine(COST), size, policy="local", skips=skips)
    return simulated_mesh(*kinds, core)


def memory(num_blocks: int, bytes_s: float = QUICK) -> TierSize:
    return TierSize(Tier.DRAM, num_blocks * BLOCK_BYTES, bytes_s)


def disk(num_blocks: int, bytes_s: float = QUICK) -> TierSize:
    return TierSize(Tier.SSD, num_blocks * BLOCK_BYTES, bytes_s)


CONVERSATIONS = [
    SimRequest(0.4 * turn + 0.1 * idx, (idx + 1,) * (600 + 16 * turn), 4)
    for turn in range(4)
    for idx in range(4)
]
"""Four, each of four turns, of 600 tokens and 16 more with each."""


@pytest.mark.parametrize("kinds", [(1, 1, 0), (0, 0, 1)])
@pytest.mark.parametrize(
    ("tiers", "where"),
    [
        ((), "none"),
        ((memory(400),), "dram"),
        ((disk(400),), "ssd"),
        ((memory(20), disk(400)), "ssd"),
        ((memory(400, SLOW),), "none"),
        ((disk(400, SLOW),), "none"),
    ],
    ids=["none", "memory", "disk", "both", "slow memory", "slow disk"],
)
def test_what_pools_have_no_room_for_comes_back(
    kinds: tuple[int, int, int], tiers: tuple[TierSize, ...], where: str
) -> None:
    """From the tier that has it, and is told so; from one that is too slow nothing comes, and
    nobody waits for it long. Equal steps are skipped or not."""

    def run(*tiers: TierSize, skips: bool = False) -> list[SimAnswer]:
        return run_open_loop(mesh_of(kinds, *tiers, skips=skips), CONVERSATIONS)

    answers, without = run(*tiers), run()
    assert answers == run(*tiers, skips=True)
    cached, before = cached_tokens(answers), cached_tokens(without)
    assert all(it.is_complete for it in answers)
    assert sum(len(it.prompt) for it in CONVERSATIONS) == cached.prompts
    assert (cached.dram > 4000, cached.ssd > 4000) == (where == "dram", where == "ssd")
    if where != "none":
        assert cached.num_cached > before.num_cached + 4000
        assert sum(map(ttft_s, answers)) < 0.7 * sum(map(ttft_s, without))
        assert any(it.prompt.load_s > 0 for it in answers if it.prompt)
    else:
        assert max(map(ttft_s, answers)) < max(map(ttft_s, without)) + 1.5


def ttft_s(answer: SimAnswer) -> float:
    assert answer.ttft_s is not None
    return answer.ttft_s


@pytest.mark.parametrize("delay_us", range(50_000, 1_400_000, 150_037))
def test_a_worker_that_dies_while_blocks_are_copied_takes_nobody_along(delay_us: int) -> None:
    """Its copies end nowhere; the other answers, and all is accounted for."""
    mesh = mesh_of((2, 1, 0), memory(400, 1e7), disk(400, 1e7))
    first = next(iter(mesh.members.values())).core
    mesh.clock.after(delay_us / 1e6, lambda: mesh.kill(first))
    answers = run_open_loop(mesh, CONVERSATIONS)
    assert all(it.is_complete for it in answers)


@pytest.mark.parametrize(("seed", "rate"), [(0, 60.0), (1, 60.0), (5, 150.0)])
def test_prompts_that_pass_one_that_loads_do_not_wait_for_it_for_ever(
    seed: int, rate: float
) -> None:
    """Its KV has room on decode before theirs has. Without room of its own on prefill it waited for
    them there, and they for it, as long as a transfer may take, and failed."""
    rng, at, requests = random.Random(seed), 0.0, list[SimRequest]()
    for idx in range(60):
        root, own = rng.randrange(4) + 1, 100 + idx
        prompt = (root,) * rng.choice((0, 512, 256)) + (own,) * rng.randint(1, 300)
        requests.append(SimRequest(at, prompt, rng.randint(1, 12)))
        at += rng.expovariate(rate)
    times = AffineTimes(base_s=2e-3, prompt_token_s=2e-5, decode_row_s=5e-5, context_token_s=1e-8)
    tiers = (memory(300, BLOCK_BYTES / 2e-4),)
    size = WorkerSize(num_blocks=64, num_slots=64, batch_tokens=1, tiers=tiers)
    core = CoreMesh(
        SPEC,
        LAYOUT,
        lambda _: TimedEngine(times),
        size,
        policy="round_robin",
        max_running=512,
        max_waiting=512,
    )
    answers = run_open_loop(simulated_mesh(1, 1, 0, core), requests)
    assert all(it.is_complete for it in answers)
    assert max(map(ttft_s, answers)) < 1.0


def test_a_fetch_waits_for_no_room() -> None:
    """A worker whose blocks are all held computes what it would have fetched, as a real one does:
    it does not wait for them as long as the fetch may take."""
    mesh = mesh_of((2, 1, 0))
    source, worker = (it.core for it in list(mesh.members.values())[:2])
    tokens = tuple(range(1, 401))
    held = worker.pool.acquire(worker.pool.new_chain(), (), (NUM_BLOCKS - 8) * 16, max_hit_tokens=0)
    assert held is not None
    for link, (one, other) in enumerate(((source, worker), (worker, source)), 1000):
        one.ends.pair(other, link)  # type: ignore[arg-type]
    key = TransferKey(RequestId(bytes(16)), 0, LeaseToken(bytes(16)))
    item = WorkItem(
        token_ids=tokens, num_prompt_tokens=len(tokens), sampling=SamplingParams(max_tokens=1)
    )
    prefix = PrefixAt(source.incarnation, 384, 5.0)
    worker.take(Task.PROMPT, Order(StreamId(1), key, item, None, prefix=prefix))
    assert [it.life.task for it in worker.jobs.values()] == [Task.PROMPT]
    assert not worker.scheduler.unfinished[0].awaits_prefix
    worker.pool.release(held)
    worker.blocks_freed()
    mesh.run(lambda: not worker.jobs)
