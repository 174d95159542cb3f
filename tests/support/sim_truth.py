"""One set of requests on the whole mesh under virtual time, with all its bytes, and on the
simulator: what every request felt on each."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from services.sim.ends import AT_ONCE_BYTES_S
from services.sim.engine import TimedEngine
from services.sim.mesh import CoreMesh
from services.sim.open_loop import SimRequest, run_open_loop
from services.sim.orders import TierSize, WorkerSize
from shared.config import STEP_TOKENS
from shared.engine.fake import FakeModel, FakeTiming
from shared.errors import InvalidRequest
from shared.home import Role
from shared.ids import Incarnation
from shared.kv.journal import Tier
from shared.kv.tiers import CachePolicy
from shared.predict.times import AffineTimes
from shared.request import FinishReason
from shared.transfer.plan import DEFAULT_GROUP_BYTES, DEFAULT_MAX_FRAME_BYTES
from shared.worker.core.lower_tiers import TierLevel
from shared.worker.pairs import PairTable
from shared.worker.step_times import StepTimes
from tests.support.core_mesh import simulated_mesh
from tests.support.loopback import LoopbackSettings
from tests.support.timed_tiers import take_time
from tests.support.virtual_loop import run_virtual
from tests.support.whole_mesh import WholeMesh, whole_mesh

MODEL = FakeModel(max_model_len=2048)
TIMING = FakeTiming()
BLOCK_BYTES = 16 * MODEL.layout.token_bytes
MAX_RUNNING = 64
STAGING_MIB, MIB = 128, 1 << 20
MAX_WAIT_S = 2.0
SETTLED_S = 3.0
"""Until every worker has reported again: since then what it sends is under way for ``wire_s``."""


class Felt(NamedTuple):
    """What one request saw: seconds since the first one's arrival. finish: '' = it failed."""

    token_times: tuple[float, ...]
    finish: str


class PoolLedger(NamedTuple):
    """A worker's blocks at the end, and what its prefix cache has saved."""

    num_free: int
    num_idle: int
    num_hit_tokens: int


class TierLedger(NamedTuple):
    """What one tier decided, in order: prefixes that went down, with their tokens and slots (None =
    no copy), and those that came back. How many were evicted before their turn, and what a load
    took a block."""

    decisions: list[tuple[Any, ...]]
    num_lost: int
    block_s: float


class Outcome(NamedTuple):
    """Of all requests, and of all workers in the order in which they joined. tiers: theirs, the
    fastest first."""

    felt: list[Felt]
    ledgers: list[PoolLedger]
    tiers: list[TierLedger]


class Move(NamedTuple):
    """A movable worker, numbered from 0, is ordered to another home, so long after the first
    request."""

    at_s: float
    worker: int
    home: str


@dataclass(frozen=True)
class Case:
    """A mesh and a load. prompt_blocks: of workers that compute prompts, 0 = as all. num_shared:
    tokens of which two thirds of the prompts begin with half at least; num_roots: of so many kinds.
    most_output: of an answer. places: how many requests run at the gateway, and how many may wait
    there. max_pending_tokens: of the gateway. wire_s, link_s: how long what is sent is under way to
    or from the gateway, and between workers: of what happens in one instant nobody knows the order.
    batch_tokens: of workers, 0 = a whole step's. dram_slots, ssd_slots: blocks below the pool, 0 =
    no such tier; dram_block_s, ssd_block_s: how long each is copied. movable: workers that may be
    either, by the role with which they join; moves: other homes for them, one after the other.
    slowness: of steps; 1 = times are round, and may end when a report is due."""

    seed: int
    num_prefill: int
    num_decode: int
    num_mixed: int
    policy: str
    num_requests: int = 200
    num_blocks: int = 2000
    prompt_blocks: int = 0
    rate: float = 60.0
    num_shared: int = 0
    num_roots: int = 1
    most_output: int = 60
    places: int = 512
    max_pending_tokens: int = 8192
    wire_s: float = 0.0005
    link_s: float = 0.0003
    batch_tokens: int = 0
    dram_slots: int = 0
    ssd_slots: int = 0
    dram_block_s: float = 0.0
    ssd_block_s: float = 0.0
    cache_policy: str = "lru"
    movable: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    slowness: float = 1.0

    @property
    def timing(self) -> FakeTiming:
        """Of a step."""
        return FakeTiming(**{name: it * self.slowness for name, it in asdict(TIMING).items()})

    @property
    def tiers(self) -> list[tuple[Tier, int, float]]:
        """Which there are: slots, and seconds a block."""
        both = (
            (Tier.DRAM, self.dram_slots, self.dram_block_s),
            (Tier.SSD, self.ssd_slots, self.ssd_block_s),
        )
        return [it for it in both if it[1]]

    def latency(self, source: str, target: str) -> float:
        """Return it by hosts of the whole mesh; a client is where its gateway is."""
        kinds = {host.partition("-")[0] for host in (source, target)}
        if "client" in kinds:
            return 0.0
        return self.wire_s if "gateway" in kinds else self.link_s

    @property
    def requests(self) -> list[SimRequest]:
        """The load, drawn from the seed."""
        rng = random.Random(self.seed)
        tokens = range(1, MODEL.vocab_size)
        roots = [rng.choices(tokens, k=self.num_shared) for _ in range(self.num_roots)]
        at, asked = 0.0, list[SimRequest]()
        for _ in range(self.num_requests):
            shared = roots[0] if len(roots) == 1 else rng.choice(roots)
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
        wire_s=rng.uniform(1e-4, 2e-3),
        link_s=rng.uniform(1e-5, 1e-3),
    )


def drawn_mixture(case: Case) -> Case:
    """Return the same with colocated workers, or such as may be either and change their home,
    beside the others; also by the policy that borrows workers."""
    rng = random.Random(f"mixture {case.seed}")
    num_mixed, num_movable = rng.choice([(1, 0), (2, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2)])
    movable = rng.choices(["prefill", "decode"], k=num_movable)
    moves, at_s = list[Move](), 0.0
    while num_movable and at_s < case.num_requests / case.rate:
        at_s += rng.uniform(0.2, 0.8)
        moves.append(Move(at_s, rng.randrange(num_movable), rng.choice(["prompt", "token"])))
    return replace(
        case,
        num_prefill=rng.choice([1, 2, 3]),
        num_decode=rng.choice([1, 2]),
        num_mixed=num_mixed,
        movable=tuple(movable),
        moves=tuple(moves),
        slowness=rng.uniform(0.9, 1.1),
        policy=rng.choice([*POLICIES, "splitwise", "splitwise"]),
        num_roots=rng.choice([1, 4]),
        num_shared=rng.choice([0, 256, 512]),
        num_blocks=rng.choice([2000, 300, 200]),
        most_output=rng.choice([4, 40, 120]),
    )


def drawn_tiers(case: Case, *, has_disk: bool) -> Case:
    """Return the same with tiers below pools that are too small for it, memory or a disk and maybe
    memory: quick ones and slow ones, of which a load is late."""
    rng = random.Random(f"tiers {case.seed}")
    return replace(
        case,
        # Of prompts that share a step, those for several decode workers end in nobody's order.
        batch_tokens=int(case.num_decode > 1),
        # Mixed workers have answers beside, which leave no room for loads where many come.
        prompt_blocks=rng.choice([64, 80, 160]),
        rate=rng.choice([8.0, 20.0] if case.num_mixed else [15.0, 40.0, 150.0]),
        num_shared=rng.choice([256, 512]),
        num_roots=rng.choice([2, 4, 8]),
        dram_slots=0 if has_disk and rng.random() < 0.5 else rng.choice([16, 64, 300]),
        ssd_slots=rng.choice([40, 100, 1000]) if has_disk else 0,
        dram_block_s=rng.choice([1e-6, 1e-4, 1e-3]) * rng.uniform(1.0, 2.0),
        ssd_block_s=rng.choice([1e-5, 1e-4, 2e-3]) * rng.uniform(1.0, 2.0),
        cache_policy=rng.choice(["lru", "lfu", "length-aware"]),
    )


def recorded(level: TierLevel) -> list[tuple[Any, ...]]:
    """Return what a tier decides from now on. Keys are numbered as they come: an answer's tokens
    are others in the simulator, and so are its keys."""
    tier, told = level.tier, list[tuple[Any, ...]]()
    numbers: dict[bytes, int] = {}
    begin_store, begin_load = tier.begin_store, tier.begin_load

    def store(key: bytes, end: int) -> int | None:
        slot = begin_store(key, end)
        told.append(("down", numbers.setdefault(key, len(numbers)), end, slot))
        return slot

    def load(keys: Sequence[bytes]) -> list[int]:
        told.append(("up", *(numbers[key] for key in keys)))
        return begin_load(keys)

    tier.begin_store, tier.begin_load = store, load  # type: ignore[method-assign]
    return told


def is_quiet(level: TierLevel) -> bool:
    """Nothing is copied, nor will be."""
    return not level.queue and not level.tier.num_moving


def levels_of(worker: Any) -> Sequence[Any]:
    """Return what lies below a worker's pool."""
    return [] if worker.tiers is None else worker.tiers.levels


def ledger_of(pool: Any) -> PoolLedger:
    """Return a pool's."""
    it = pool.statistics()
    return PoolLedger(it.num_free, it.num_idle, it.num_hit_tokens)


class Truth(NamedTuple):
    """What the whole mesh did. start: when the first request came, on its clock. reported: when
    each worker had reported last before that."""

    outcome: Outcome
    start: float
    reported: list[float]


def on_the_mesh(case: Case) -> Truth:
    """Run it with every byte, under virtual time."""
    asked = case.requests
    # One that is planned ahead may have its next block a step sooner: the same times, but not the
    # same reports.
    both: dict[str, Any] = {
        "max_running": MAX_RUNNING,
        "batch_tokens": case.batch_tokens,
        "look_ahead": False,
        "staging_mib": STAGING_MIB,
        "cache_policy": case.cache_policy,
        "dram_cache": case.dram_slots * BLOCK_BYTES,
    }

    async def run(folder: Path) -> Truth:
        prompts = {"num_blocks": case.prompt_blocks} if case.prompt_blocks else {}
        if case.ssd_slots:
            both.update(ssd_cache=folder, ssd_cache_size=case.ssd_slots * BLOCK_BYTES)
        async with whole_mesh(
            num_prefill=case.num_prefill,
            num_decode=case.num_decode,
            num_blocks=case.num_blocks,
            model=MODEL,
            timing=case.timing,
            seed=case.seed,
            gateway={
                "policy": case.policy,
                "max_running": case.places,
                "max_waiting": case.places,
                "max_wait_s": MAX_WAIT_S,
                "max_pending_tokens": case.max_pending_tokens,
            },
            prefill={**both, **prompts},
            decode=both,
        ) as mesh:
            first = [*mesh.workers]
            colocated = [
                await mesh.start_worker("decode", colocated=True, **both, **prompts)
                for _ in range(case.num_mixed)
            ]
            movable = [
                await mesh.start_worker(role, movable=True, **{**both, **prompts})
                for role in case.movable
            ]
            joined = [*first, *colocated, *movable]
            await mesh.ready()
            await make_pairs(mesh)
            mesh.fabric.settings = LoopbackSettings(latency_s=case.link_s, eager_bytes=1 << 30)
            mesh.network.fabric.latency = case.latency
            loop = asyncio.get_running_loop()
            await asyncio.sleep(SETTLED_S)
            start = loop.time()
            levels = [level for it in joined for level in levels_of(it.worker)]
            told = [recorded(level) for level in levels]
            for level in levels:
                is_disk = level.kind is Tier.SSD
                take_time(level.arena, case.ssd_block_s if is_disk else case.dram_block_s)
            table = mesh.gateways[0].members.table
            reported = [worker.reported_at for worker in table.workers]
            felt: dict[int, Felt] = {}

            async def ask(idx: int, request: SimRequest) -> None:
                await asyncio.sleep(start + request.at_s - loop.time())
                answer = await mesh.ask(request.prompt, request.num_output, ignore_eos=True)
                times = tuple(at - start for at in answer.arrived_at)
                name = "" if answer.error else FinishReason(answer.finish).name
                felt[idx] = Felt(times, name)

            async def move(order: Move) -> None:
                await asyncio.sleep(start + order.at_s - loop.time())
                worker = movable[order.worker].worker.incarnation
                with contextlib.suppress(InvalidRequest):
                    await mesh.gateways[0].members.change_home(worker, order.home)

            async with asyncio.TaskGroup() as tasks:
                for idx, request in enumerate(asked):
                    tasks.create_task(ask(idx, request))
                for order in case.moves:
                    tasks.create_task(move(order))
            await mesh.idle()
            await mesh.until(lambda: all(map(is_quiet, levels)))
            ledgers = [ledger_of(it.pool) for it in joined]
            outcome = Outcome(
                [felt[idx] for idx in range(len(asked))], ledgers, tier_ledgers(levels, told)
            )
            return Truth(outcome, start, reported)

    with _nothing_learned(), tempfile.TemporaryDirectory() as folder:
        return run_virtual(run(Path(folder)), seed=case.seed)


async def make_pairs(mesh: WholeMesh) -> None:
    """Have all pairs made that a decision could want: in the simulator they are there from the
    beginning."""
    members = mesh.gateways[0].members
    table = members.table
    wanted = [
        (source, sink)
        for source in table.serving(Role.PREFILL)
        for sink in table.serving(Role.DECODE)
        if not table.is_paired(source.incarnation, sink.incarnation)
    ]
    for source, sink in wanted:
        members.pairs.setdefault(source.incarnation, []).append(sink)
        members.directives[source.incarnation].tell()
    await mesh.until(lambda: all(source.partners & sink.bit for source, sink in wanted))


def tier_ledgers(
    levels: Sequence[TierLevel], told: Sequence[list[tuple[Any, ...]]]
) -> list[TierLedger]:
    """Return what each has decided, and see that it is whole."""
    for level in levels:
        level.tier.check_integrity()
    return [
        TierLedger(decisions, level.queue.num_lost, level.block_s.value)
        for level, decisions in zip(levels, told, strict=True)
    ]


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
        batch_tokens=case.batch_tokens,
        link_s=case.link_s,
        tbt_target_s=0.0,
        num_slots=STAGING_MIB * MIB // DEFAULT_MAX_FRAME_BYTES,
        frame_bytes=DEFAULT_MAX_FRAME_BYTES,
        group_bytes=DEFAULT_GROUP_BYTES,
        tiers=tuple(
            TierSize(kind, num_slots * BLOCK_BYTES, BLOCK_BYTES / block_s)
            for kind, num_slots, block_s in case.tiers
        ),
        cache_policy=CachePolicy(case.cache_policy),
    )
    core = CoreMesh(
        MODEL.spec,
        MODEL.layout,
        lambda _: TimedEngine(
            AffineTimes(
                base_s=case.timing.base_s,
                prompt_token_s=case.timing.prefill_token_s,
                decode_row_s=case.timing.decode_row_s,
                context_token_s=case.timing.context_token_s,
            )
        ),
        size,
        policy=case.policy,
        max_running=case.places,
        max_waiting=case.places,
        max_wait_s=MAX_WAIT_S,
        max_pending_tokens=case.max_pending_tokens,
        wire_s=case.wire_s,
        skips=skips,
    )
    prompt_size = replace(size, num_blocks=case.prompt_blocks or size.num_blocks)
    mesh = simulated_mesh(case.num_prefill, case.num_decode, 0, core, prompt_size)
    for _ in range(case.num_mixed):
        mesh.start("decode", is_colocated=True, size=prompt_size)
    movable = [mesh.start(role, serves_both=True, size=prompt_size) for role in case.movable]
    mesh.settle()
    levels = [
        level
        for it in mesh.members.values()
        if it.core.tiers
        for level in it.core.tiers.core.levels
    ]
    told = [recorded(level) for level in levels]
    for member, reported_at in zip(mesh.members.values(), truth.reported, strict=True):
        mesh.clock.at(reported_at - case.wire_s, member.reporter.report)
    mesh.clock.at(truth.start, lambda: None)
    mesh.run(lambda: mesh.clock.now >= truth.start)

    def move(order: Move) -> None:
        with contextlib.suppress(InvalidRequest):
            mesh.move(movable[order.worker], order.home)

    for order in case.moves:
        mesh.clock.at(truth.start + order.at_s, lambda it=order: move(it))
    answers = run_open_loop(mesh, case.requests)
    mesh.run(lambda: all(map(is_quiet, levels)))
    felt = [Felt(it.token_times, "LENGTH" if it.is_complete else "") for it in answers]
    ledgers = [ledger_of(it.core.pool) for it in mesh.members.values()]
    return Outcome(felt, ledgers, tier_ledgers(levels, told))
