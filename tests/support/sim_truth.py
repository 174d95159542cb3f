"""One set of requests on the whole mesh under virtual time, with all its bytes, and on the
simulator: what every request felt on each."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

from services.sim.ends import AT_ONCE_BYTES_S
from services.sim.engine import TimedEngine
from services.sim.mesh import CoreMesh
from services.sim.open_loop import SimRequest, run_open_loop
from services.sim.orders import WorkerSize
from shared.config import STEP_TOKENS
from shared.engine.fake import FakeModel, FakeTiming
from shared.ids import Incarnation
from shared.predict.times import AffineTimes
from shared.request import FinishReason
from shared.worker.pairs import PairTable
from shared.worker.step_times import StepTimes
from tests.support.core_mesh import simulated_mesh
from tests.support.loopback import LoopbackSettings
from tests.support.virtual_loop import run_virtual
from tests.support.whole_mesh import whole_mesh

MODEL = FakeModel(max_model_len=2048)
TIMING = FakeTiming()
TIMES = AffineTimes(
    base_s=TIMING.base_s,
    prompt_token_s=TIMING.prefill_token_s,
    decode_row_s=TIMING.decode_row_s,
    context_token_s=TIMING.context_token_s,
)
MAX_RUNNING = 64
MAX_WAIT_S = 2.0
SETTLED_S = 1.0


class Felt(NamedTuple):
    """What one request saw: seconds since the first one's arrival. finish: '' = it failed."""

    token_times: tuple[float, ...]
    finish: str


class PoolLedger(NamedTuple):
    """A worker's blocks at the end, and what its prefix cache has saved."""

    num_free: int
    num_idle: int
    num_acquired_tokens: int
    num_hit_tokens: int


class Outcome(NamedTuple):
    """Of all requests, and of all workers in the order in which they joined."""

    felt: list[Felt]
    ledgers: list[PoolLedger]


@dataclass(frozen=True)
class Case:
    """A mesh and a load. num_shared: tokens of which two thirds of the prompts begin with half at
    least. most_output: of an answer. places: how many requests run at the gateway, and how many may
    wait there. max_pending_tokens: of the gateway."""

    seed: int
    num_prefill: int
    num_decode: int
    num_mixed: int
    policy: str
    num_requests: int = 200
    num_blocks: int = 2000
    rate: float = 60.0
    num_shared: int = 0
    most_output: int = 60
    places: int = 512
    max_pending_tokens: int = 8192

    @property
    def requests(self) -> list[SimRequest]:
        """The load, drawn from the seed."""
        rng = random.Random(self.seed)
        tokens = range(1, MODEL.vocab_size)
        shared = rng.choices(tokens, k=self.num_shared)
        at, asked = 0.0, list[SimRequest]()
        for _ in range(self.num_requests):
            begin = shared[: rng.choice((0, self.num_shared, self.num_shared // 2))]
            own = rng.choices(tokens, k=rng.randint(1, 300))
            asked.append(SimRequest(at, (*begin, *own), rng.randint(1, self.most_output)))
            at += rng.expovariate(self.rate)
        return asked


POLICIES = ("conductor", "least_loaded", "local", "round_robin")
"""Those that go by load and prefixes; others go by workers' names, or by chance."""


def drawn_case(seed: int, num_requests: int) -> Case:
    """Draw a mesh and its load."""
    rng = random.Random(f"case {seed}")
    kinds = rng.choice([(1, 1, 0), (2, 2, 0), (3, 1, 0), (1, 2, 0), (0, 0, 1), (0, 0, 2)])
    return Case(
        seed,
        *kinds,
        rng.choice(POLICIES),
        num_requests=num_requests,
        num_blocks=rng.choice([2000, 300]),
        rate=rng.choice([30.0, 60.0, 150.0]),
        num_shared=rng.choice([0, 0, 256]),
        most_output=rng.choice([4, 12, 40]),
        max_pending_tokens=rng.choice([8192, 500]),
    )


def ledger_of(pool: Any) -> PoolLedger:
    """Return a pool's."""
    it = pool.statistics()
    return PoolLedger(it.num_free, it.num_idle, it.num_acquired_tokens, it.num_hit_tokens)


class Truth(NamedTuple):
    """What the whole mesh did. start: when the first request came, on its clock. reported: when
    each worker had reported last before that."""

    outcome: Outcome
    start: float
    reported: list[float]


def on_the_mesh(case: Case) -> Truth:
    """Run it with every byte, under virtual time. Messages and frames take none, and prompts share
    no step: of what happens in one instant nobody knows the order."""
    asked = case.requests
    # One that is planned ahead may have its next block a step sooner: the same times, but not the
    # same reports.
    # A frame is all layers of a span there and one layer of it in the simulator: nobody may wait
    # for a slot.
    both: dict[str, Any] = {
        "max_running": MAX_RUNNING,
        "look_ahead": False,
        "staging_mib": 128,
    }

    async def run() -> Truth:
        async with whole_mesh(
            num_prefill=case.num_prefill,
            num_decode=case.num_decode,
            num_blocks=case.num_blocks,
            model=MODEL,
            timing=TIMING,
            seed=case.seed,
            gateway={
                "policy": case.policy,
                "max_running": case.places,
                "max_waiting": case.places,
                "max_wait_s": MAX_WAIT_S,
                "max_pending_tokens": case.max_pending_tokens,
            },
            prefill={**both, "batch_tokens": 1},
            decode=both,
        ) as mesh:
            for _ in range(case.num_mixed):
                await mesh.start_worker("decode", colocated=True, **both)
            await mesh.ready()
            mesh.fabric.settings = LoopbackSettings(latency_s=0.0, bytes_per_s=0)
            loop = asyncio.get_running_loop()
            await asyncio.sleep(SETTLED_S)
            start = loop.time()
            table = mesh.gateways[0].members.table
            reported = [worker.reported_at for worker in table.workers]
            felt: dict[int, Felt] = {}

            async def ask(idx: int, request: SimRequest) -> None:
                await asyncio.sleep(start + request.at_s - loop.time())
                answer = await mesh.ask(request.prompt, request.num_output, ignore_eos=True)
                times = tuple(at - start for at in answer.arrived_at)
                name = "" if answer.error else FinishReason(answer.finish).name
                felt[idx] = Felt(times, name)

            async with asyncio.TaskGroup() as tasks:
                for idx, request in enumerate(asked):
                    tasks.create_task(ask(idx, request))
            await mesh.idle()
            ledgers = [ledger_of(running.pool) for running in mesh.workers]
            return Truth(
                Outcome([felt[idx] for idx in range(len(asked))], ledgers), start, reported
            )

    with _nothing_learned():
        return run_virtual(run(), seed=case.seed)


@contextlib.contextmanager
def _nothing_learned() -> Iterator[None]:
    """Workers report of their steps what they measured before they joined, and of their links that
    a frame takes no time, as the simulator's do: what they measure else is a thousandth off, and
    may decide whether two workers are equally quick."""

    measured = PairTable.speeds.fget
    assert measured is not None

    def at_once(self: PairTable) -> dict[Incarnation, float]:
        return dict.fromkeys(measured(self), AT_ONCE_BYTES_S)

    with (
        mock.patch.object(StepTimes, "learn", return_value=None),
        mock.patch.object(PairTable, "speeds", property(at_once)),
    ):
        yield


def simulated(case: Case, truth: Truth, *, skips: bool) -> Outcome:
    """Run it on the simulator; workers report in step with the mesh's."""
    size = WorkerSize(
        num_blocks=case.num_blocks,
        max_running=MAX_RUNNING,
        token_budget=STEP_TOKENS,
        batch_tokens=1,
        tbt_target_s=0.05,
        num_slots=64,
    )
    core = CoreMesh(
        MODEL.spec,
        MODEL.layout,
        lambda _: TimedEngine(TIMES),
        size,
        policy=case.policy,
        max_running=case.places,
        max_waiting=case.places,
        max_wait_s=MAX_WAIT_S,
        max_pending_tokens=case.max_pending_tokens,
        wire_s=0.0,
        skips=skips,
    )
    mesh = simulated_mesh(case.num_prefill, case.num_decode, case.num_mixed, core)
    for member, reported_at in zip(mesh.members.values(), truth.reported, strict=True):
        mesh.clock.at(reported_at, member.reporter.report)
    mesh.clock.at(truth.start, lambda: None)
    mesh.run(lambda: mesh.clock.now >= truth.start)
    answers = run_open_loop(mesh, case.requests)
    felt = [Felt(it.token_times, "LENGTH" if it.is_complete else "") for it in answers]
    return Outcome(felt, [ledger_of(it.core.pool) for it in mesh.members.values()])
