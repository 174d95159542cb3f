"""What does a routing decision cost, and what do reports cost a gateway that is idle?

    python -m bench.router.run [--quick] [--sizes 1 4 16 64 500] [--repetitions 7]

Decisions of each policy over the real peer table, beside reading every worker's load once;
decisions for a long prompt whose beginning some workers have, index and fetches included; the index
alone; then reports of many workers through the real registry and membership, beside parsing them
alone. No network, CPU time of one process. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import operator
import random
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import structlog
import uvloop
from numpy.typing import NDArray

from bench.record import Record, arguments, ratios, spread
from services.gateway.core.index.prefix_index import PrefixIndex
from services.gateway.core.index.prefixes import HashedPrompt
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.router import Router
from services.gateway.core.routing.routing import POLICIES, RouteDecision, route
from services.gateway.core.routing.sides import RouteRequest, RoutingPolicy
from services.gateway.core.worker import Role, Worker, WorkerStatus
from services.gateway.workers.membership import Membership
from services.gateway.workers.registry import Registry, read_announcement
from shared import wire
from shared.address import Address
from shared.ids import Incarnation, StreamId
from shared.kv.journal import KvChanges, TierChanges, key_of
from shared.kv.prefix_hash import UNIT, prefix_hashes, root_hash
from shared.messages import codec
from shared.messages.columns import pack_u32, pack_u64
from shared.messages.message_codec import MessageCodec
from shared.predict.step_time import StepFit
from shared.runtime.service import GC_THRESHOLD
from shared.worker_status import REPORT_S

SIZES = (1, 4, 16, 64, 500)
LONG_PROMPT = 12_000
LONG_SIZES = (4, 32, 500)
LONG_GOALS_US = {32: 100.0, 500: 250.0}
"""Of a decision for a prompt of so many tokens, by workers a side."""

GOALS_US = {4: 15.0, 64: 60.0, 500: 400.0}
"""Of policies that compare loads, by workers a side."""

NUM_IDLE = 64
"""Workers a side of the gateway that only hears reports."""

NUM_TELLING = 64
"""Workers of the index that is measured alone."""

NUM_HOT = 1 << 12
"""Keys that are shared, each by workers of its own."""

REPORT_KEYS = 1 << 13
"""As in a piece of a snapshot (``shared/kv/journal.py``)."""

REQUEST = RouteRequest(num_tokens=700, max_new_tokens=200)


def announcement(role: wire.Role, incarnation: int) -> wire.WorkerAnnounce:
    """What a worker says first."""
    return wire.WorkerAnnounce(
        hello=wire.Hello(
            protocol_version=codec.PROTOCOL_VERSION, role=role, incarnation=incarnation
        ),
        model=wire.ModelInfo(
            name="m",
            fingerprint=bytes(32),
            vocab_size=1000,
            max_model_len=2 * LONG_PROMPT,
            dtype="float32",
            engine="torch",
        ),
        layout=wire.KvLayout(dtype="float32", num_layers=2, num_kv_heads=2, head_dim=8, parts=2),
        host=f"worker-{incarnation}",
        port=8001,
        num_blocks=4096,
        block_size=16,
    )


# --- a decision -----------------------------------------------------------------------------------


def joined(table: PeerTable, num_side: int) -> Iterator[tuple[Worker, frozenset[Incarnation]]]:
    """Have so many workers of each role join, prefill first; yields each with those that it is
    paired with, which are all of decode."""
    prefills = [Incarnation(1 + idx) for idx in range(num_side)]
    decodes = [Incarnation(10_000 + idx) for idx in range(num_side)]
    for incarnation in (*prefills, *decodes):
        is_prefill = incarnation < 10_000
        role = wire.Role.PREFILL if is_prefill else wire.Role.DECODE
        worker = read_announcement(announcement(role, incarnation), "here")
        worker.is_connected = True
        table.join(worker)
        yield worker, frozenset(decodes if is_prefill else ())


def a_table(num_side: int, *, is_busy: bool) -> PeerTable:
    """So many workers of each role, all paired. busy: no two alike; else all idle."""
    table = PeerTable()
    source = random.Random(num_side)
    for worker, paired in joined(table, num_side):
        status = WorkerStatus(
            pending_tokens=source.randrange(20_000) if is_busy else 0,
            reserved_blocks=source.randrange(4096) if is_busy else 0,
            paired=paired,
        )
        table.report(worker, status)
    return table


def read_all(prefills: list[Worker], decodes: list[Worker]) -> None:
    """The limit: every worker's load is read once, and the least found."""
    min(map(attrgetter("pending_tokens"), prefills))
    min(map(attrgetter("reserved_share"), decodes))


def us_of(work: Callable[[], object], seconds: float) -> float:
    """CPU of one call, in microseconds, over about so long."""
    num_calls = 1
    while True:
        began_s = time.process_time()
        for _ in range(num_calls):
            work()
        took_s = time.process_time() - began_s
        if took_s >= seconds:
            return took_s / num_calls * 1e6
        num_calls = max(2 * num_calls, int(num_calls * seconds / max(took_s, 1e-6)))


def measure_decisions(
    num_side: int, *, is_busy: bool, repetitions: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Every policy at one size, in turns with the limit."""
    table = a_table(num_side, is_busy=is_busy)
    prefills, decodes = table.all(Role.PREFILL), table.all(Role.DECODE)
    policies: list[RoutingPolicy] = [make() for make in POLICIES.values()]
    taken: dict[str, list[float]] = {policy.name: [] for policy in policies}
    limits: list[float] = []
    for _ in range(repetitions):
        limits.append(us_of(lambda: read_all(prefills, decodes), seconds))
        for policy in policies:

            def decide(policy: RoutingPolicy = policy) -> None:
                assert route(policy, REQUEST, table.sides, 0.37) is not None

            taken[policy.name].append(us_of(decide, seconds))
    for name, values in taken.items():
        yield {
            "what": "decision",
            "policy": name,
            "workers_a_side": num_side,
            "load": "busy" if is_busy else "idle",
            "us": spread(values),
            "limit_us": spread(limits),
            "times_limit": ratios(values, limits),
        }


# --- a long prompt --------------------------------------------------------------------------------


def measure_prompts(num_side: int, *, repetitions: int, seconds: float) -> Iterator[dict[str, Any]]:
    """A prompt of 12,000 tokens, as every attempt of a request asks: an eighth of the workers have
    some of it, no two are loaded alike, and a new prompt is hashed first.

    Known: it is hashed already. Live: as first, and before each decision the last one's orders go
    out, those of the one before end, and one worker of each role reports.
    """
    column = pack_u32(a_prompt())
    hashed = HashedPrompt(column, b"")
    for name in ("local", "conductor"):
        router, live = a_router(name, num_side), Live(a_router(name, num_side))

        def decide(router: Router = router, prompt: HashedPrompt | None = None) -> RouteDecision:
            prompt = prompt or HashedPrompt(column, b"")
            request = RouteRequest(num_tokens=LONG_PROMPT, max_new_tokens=200, prompt=prompt)
            decision = router.route(request, 0.0, 0.37).decision
            assert decision is not None
            router.sent(decision, prompt, 0.0)
            return decision

        def decide_live(live: Live = live, decide: Callable[..., RouteDecision] = decide) -> None:
            live.happen(decide(live.router))

        kinds: dict[str, Callable[[], object]] = {
            "us": decide,
            "known_us": lambda decide=decide: decide(prompt=hashed),
            "live_us": decide_live,
            "hashing_us": lambda: prefix_hashes(bytes(32), column, min(hashed.keys)),
        }
        decide(prompt=hashed)
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(repetitions):
            for kind, work in kinds.items():
                taken[kind].append(us_of(work, seconds))
        yield {
            "what": "long prompt",
            "policy": name,
            "workers_a_side": num_side,
            "num_tokens": LONG_PROMPT,
            **{kind: spread(values) for kind, values in taken.items()},
        }


class Live:
    """What happens to the workers of a router between two decisions."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._table = router._table
        self._turn = 0
        self._last: tuple[Worker, Worker] | None = None
        self._reports = [
            (worker, [replace(worker.status, speeds=dict(worker.status.speeds)) for _ in range(2)])
            for workers in zip(
                self._table.all(Role.PREFILL), self._table.all(Role.DECODE), strict=True
            )
            for worker in workers
        ]

    def happen(self, decision: RouteDecision) -> None:
        """Its orders go out, the last one's end, and two workers report."""
        turn = self._turn = self._turn + 1
        if self._last is not None:
            for worker in self._last:
                worker.ended(StreamId(turn - 1))
        prefill, decode = map(self._table.get, (decision.prefill, decision.decode))
        assert prefill is not None
        assert decode is not None
        prefill.sent(
            Role.PREFILL, StreamId(turn), num_tokens=LONG_PROMPT, num_blocks=750, num_cached=0
        )
        decode.sent(Role.DECODE, StreamId(turn), num_tokens=0, num_blocks=760)
        self._last = prefill, decode
        for place in (2 * turn, 2 * turn + 1):
            worker, statuses = self._reports[place % len(self._reports)]
            self._table.report(worker, statuses[turn // len(self._reports) % 2], 0.0)


def a_prompt() -> list[int]:
    """The one prompt that is decided, and of which workers have beginnings."""
    source = random.Random(3)
    return [source.randrange(1000) for _ in range(LONG_PROMPT)]


def a_router(policy: str, num_side: int) -> Router:
    """One gateway's decisions; its workers report step times, speeds and prefixes."""
    table = PeerTable()
    router = Router(POLICIES[policy](), table, index_bytes=1 << 26)
    source = random.Random(num_side)
    workers: list[Worker] = []
    for worker, paired in joined(table, num_side):
        others = paired or [Incarnation(1 + idx) for idx in range(num_side)]
        fit = StepFit(
            0.02 * source.uniform(0.9, 1.1), 1e-4 * source.uniform(0.9, 1.1), 1e-9, 100, 0.05, 0.1
        )
        status = WorkerStatus(
            pending_tokens=source.randrange(20_000),
            reserved_blocks=source.randrange(3000),
            queue_s=source.random(),
            prompt_steps=fit,
            answer_steps=fit,
            step_tokens=2048,
            paired=paired,
            speeds=dict.fromkeys(others, 1e10),
        )
        table.report(worker, status, 0.0)
        workers.append(worker)
    prefixes = router.prefixes
    assert prefixes is not None
    for worker in workers:
        prefixes.joined(worker)
    some = workers[0]
    root = root_hash(some.model.fingerprint + some.layout.digest, b"")
    for place, worker in enumerate(workers):
        asked = prefixes.take_ask(worker.incarnation)
        if asked is None:
            continue  # a policy without fetches asks nobody on decode
        hashes = prefix_hashes(root, pack_u32(a_prompt()), asked.granule_tokens)
        keys = [*map(key_of, hashes)]
        told = keys[: source.randrange(1, len(keys))] if place % 8 == 0 else []
        digest = functools.reduce(operator.xor, told, 0)
        nothing = TierChanges([], [], 0, 0)
        prefixes.told(
            worker,
            KvChanges(True, True, (TierChanges(told, [], len(told), digest), nothing, nothing)),
        )
        known = prefixes.known(worker)
        assert known is not None
        assert known[1] == len(told)
    return router


# --- the index ------------------------------------------------------------------------------------


def measure_index(num_keys: int, repetitions: int, seconds: float) -> dict[str, Any]:
    """The index of prefixes alone: workers tell in reports of ``REPORT_KEYS`` and as many go again,
    a prompt of 12,000 tokens of which two workers have all is looked up, and so is one of which
    nobody has anything.

    bytes_a_key: of the table, when each worker's keys are its own, and what 1,000 workers with
    10^6 blocks of 16 tokens would come to, in granules of 256 tokens. bytes_a_hot_key: see
    ``bytes_a_hot_key``.
    """
    source = np.random.default_rng(5)
    index = PrefixIndex(1 << 31)
    places = range(NUM_TELLING)
    for place in places:
        index.asked(place)
        index.apply(place, changes_of(np.empty(0, np.uint64)))
    keys = source.integers(1, 1 << 63, num_keys, np.uint64).reshape(NUM_TELLING, -1)
    for place in places:
        for start in range(0, keys.shape[1], REPORT_KEYS):
            index.apply(place, changes_of(keys[place, start : start + REPORT_KEYS]))
    bytes_a_key = index.num_bytes / len(index)
    prompt = source.integers(1, 1 << 63, LONG_PROMPT // UNIT, np.uint64)
    for place in (0, 1):
        index.apply(place, changes_of(prompt))
    alien = source.integers(1, 1 << 63, LONG_PROMPT // UNIT, np.uint64)
    fresh = source.integers(1, 1 << 63, REPORT_KEYS, np.uint64)
    come, go = changes_of(fresh), changes_of(fresh, gone=True)

    def tell() -> None:
        index.apply(0, come)
        index.apply(0, go)

    rates: dict[str, list[float]] = {"changes_per_s": [], "lookups_per_s": [], "misses_per_s": []}
    for _ in range(repetitions):
        rates["changes_per_s"].append(2e6 * REPORT_KEYS / us_of(tell, seconds))
        lookup_us = us_of(lambda: index.match(prompt, UNIT, 0.0), seconds)
        rates["lookups_per_s"].append(1e6 / lookup_us)
        rates["misses_per_s"].append(1e6 / us_of(lambda: index.match(alien, UNIT, 0.0), seconds))
    return {
        "what": "index",
        "num_keys": num_keys,
        "bytes_a_key": bytes_a_key,
        "bytes_a_hot_key": bytes_a_hot_key(),
        "gb_of_1000_workers": bytes_a_key * 1000 * 10**6 * 16 / 256 / 1e9,
        **{name: spread(values) for name, values in rates.items()},
    }


def bytes_a_hot_key() -> float:
    """The worst for memory: 1,000 workers, and keys that eight of them have, each key another
    eight, so that no two share a holding."""
    source, index = np.random.default_rng(5), PrefixIndex(1 << 31)
    keys = source.integers(1, 1 << 63, NUM_HOT, np.uint64)
    holders = source.integers(0, 1000, (NUM_HOT, 8))
    for place in range(1000):
        index.asked(place)
        index.apply(place, changes_of(np.empty(0, np.uint64)))
        index.apply(place, changes_of(keys[(holders == place).any(axis=1)]))
    return index.num_bytes / len(index)


def changes_of(keys: NDArray[np.uint64], *, gone: bool = False) -> KvChanges:
    """A report on what came to a pool, or went; not whole, so that it need not add up."""
    column = array("Q", keys.tobytes())  # as it is unpacked
    tier = TierChanges([], column, 0, 0) if gone else TierChanges(column, [], 0, 0)
    nothing = TierChanges([], [], 0, 0)
    return KvChanges(not len(keys), False, (tier, nothing, nothing))


# --- an idle gateway ------------------------------------------------------------------------------


class NoNetwork:
    """Sessions dial, and never hear."""

    @contextlib.asynccontextmanager
    async def channel(self, address: Address) -> AsyncGenerator[Any]:
        """Wait for ever."""
        await asyncio.Event().wait()
        yield address


class Reporter:
    """One worker's join stream: its announcement, then reports, each parsed from its bytes."""

    def __init__(self, role: wire.Role, incarnation: int, paired: bytes) -> None:
        self.peer = Address("here", 1)
        self.num_lists = 0
        self._announce = wire.WorkerReport(announce=announcement(role, incarnation))
        self._codec = MessageCodec()
        self._reports = [
            self._codec.encode(
                wire.WorkerReport(
                    status=wire.WorkerStatus(
                        free_blocks=4000, reserved_blocks=idx, step_s=0.02, paired=paired
                    )
                ),
                wire.WorkerReport,
            )
            for idx in range(2)
        ]
        self._turn = 0
        self._has_announced = False
        self._due = asyncio.Semaphore(0)

    def send_one(self) -> None:
        """Let one report arrive."""
        self._due.release()

    def parse(self) -> wire.WorkerReport:
        self._turn += 1
        return self._codec.decode(self._reports[self._turn % 2], wire.WorkerReport)

    async def receive(self, within_s: float | None = None) -> wire.WorkerReport:
        """See ``ServerStream``."""
        if not self._has_announced:
            self._has_announced = True
            return self._announce
        await self._due.acquire()
        return self.parse()

    async def send(self, message: wire.GatewayDirective) -> None:
        """See ``ServerStream``."""
        self.num_lists += message.peers is not None


async def measure_reports(num_side: int, repetitions: int, rounds: int) -> dict[str, Any]:
    """Seconds of CPU that the reports of so many workers a side cost in a second, and what of it
    parsing is."""
    decodes = [10_000 + idx for idx in range(num_side)]
    reporters = [Reporter(wire.Role.PREFILL, idx + 1, pack_u64(decodes)) for idx in range(num_side)]
    reporters += [Reporter(wire.Role.DECODE, incarnation, b"") for incarnation in decodes]
    network: Any = NoNetwork()
    policy = POLICIES["least_loaded"]()
    shares: list[float] = []
    parsing: list[float] = []
    async with (
        Membership(
            network, policy, Incarnation(9), random.Random(1).randbytes
        ).running() as members,
        asyncio.TaskGroup() as tasks,
    ):
        registry = Registry(members, Incarnation(9))
        joins = [tasks.create_task(registry.join(stream)) for stream in reporters]  # pyright: ignore[reportArgumentType]
        await _settled(members, reporters)
        told = [stream.num_lists for stream in reporters]
        for _ in range(repetitions):
            began_s = time.process_time()
            for _ in range(rounds):
                for stream in reporters:
                    stream.send_one()
                    await asyncio.sleep(0)  # one by one, as they come
                    await asyncio.sleep(0)
            shares.append((time.process_time() - began_s) / rounds / REPORT_S)
            began_s = time.process_time()
            for _ in range(rounds):
                for stream in reporters:
                    stream.parse()
            parsing.append((time.process_time() - began_s) / rounds / REPORT_S)
        assert [stream.num_lists for stream in reporters] == told, "a report caused a peer list"
        for join in joins:
            join.cancel()
    return {
        "what": "reports",
        "workers_a_side": num_side,
        "reports_per_s": 2 * num_side / REPORT_S,
        "share_of_core": spread(shares),
        "parsing_share_of_core": spread(parsing),
        "times_parsing": ratios(shares, parsing),
    }


async def _settled(members: Membership, reporters: list[Reporter]) -> None:
    """Wait until everybody has joined and is usable, and all peer lists are out."""
    while len(members.table) < len(reporters):
        await asyncio.sleep(0)
    for session in members.sessions.values():
        session.worker.is_connected = True
    for stream in reporters:
        stream.send_one()
    for _ in range(10):
        await asyncio.sleep(0)
    members.note_usability()
    assert members.table.sides.num_pairs == (len(reporters) // 2) ** 2


def main() -> None:
    parser = arguments(__doc__, "short, prints only")
    parser.add_argument(
        "--sizes", type=int, nargs="*", default=SIZES, help="workers a side of short prompts"
    )
    parser.add_argument("--repetitions", type=int, default=7)
    asked = parser.parse_args()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLD)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    seconds = 0.02 if asked.quick else 0.1
    if asked.quick:
        asked.repetitions = 3
    record = Record.of(__file__, asked)
    for num_side in asked.sizes:
        for is_busy in (False, True):
            for row in measure_decisions(
                num_side, is_busy=is_busy, repetitions=asked.repetitions, seconds=seconds
            ):
                record.add(row)
                print(
                    f"{num_side:4} + {num_side:<4} {row['load']}  {row['policy']:14}"
                    f"{row['us']['median']:8.1f} us CPU, {row['times_limit']['median']:5.1f} x "
                    f"reading every load ({row['limit_us']['median']:.1f} us)"
                )
                if row["policy"] in ("least_loaded", "splitwise") and num_side in GOALS_US:
                    workers = f"{num_side} + {num_side} {row['load']} workers"
                    what = f"{row['policy']}, {workers}: CPU us a decision"
                    record.goal(13, what, row["us"], "<=", GOALS_US[num_side])
    for num_side in LONG_SIZES:
        for row in measure_prompts(num_side, repetitions=asked.repetitions, seconds=seconds):
            record.add(row)
            print(
                f"{num_side:4} + {num_side:<4} {LONG_PROMPT} tokens  {row['policy']:10}"
                f"{row['us']['median']:8.1f} us CPU, "
                f"{row['hashing_us']['median']:.1f} of it hashing; hashed before "
                f"{row['known_us']['median']:.1f}, with orders and reports between "
                f"{row['live_us']['median']:.1f}"
            )
            if num_side in LONG_GOALS_US:
                what = f"{row['policy']}, {2 * num_side} workers, {LONG_PROMPT} tokens: CPU us"
                record.goal(13, what, row["us"], "<=", LONG_GOALS_US[num_side])
    row = measure_index(1 << (18 if asked.quick else 22), asked.repetitions, seconds)
    record.add(row)
    print(
        f"index of {row['num_keys']:,} keys: {row['bytes_a_key']:.1f} bytes a key, "
        f"{row['bytes_a_hot_key']:.0f} of one whose holders no other has; CPU: "
        f"{row['changes_per_s']['median']:,.0f} changes, {row['lookups_per_s']['median']:,.0f} "
        f"look-ups of {LONG_PROMPT} tokens, {row['misses_per_s']['median']:,.0f} of a prompt that "
        "nobody has"
    )
    record.goal(13, "index: changes a second of CPU", row["changes_per_s"], ">=", 1e6)
    what = f"index: look-ups a second of CPU, {LONG_PROMPT} tokens"
    record.goal(13, what, row["lookups_per_s"], ">=", 1e5)
    record.goal(13, "index: bytes a key", row["bytes_a_key"], "<=", 26.0)
    what = "index: GB for 1,000 workers with 10^6 blocks each, from its bytes a key"
    record.goal(13, what, row["gb_of_1000_workers"], "<=", 2.0)
    rounds = 20 if asked.quick else 200
    row = uvloop.run(measure_reports(NUM_IDLE, asked.repetitions, rounds))
    record.add(row)
    print(
        f"{row['reports_per_s']:.0f} reports/s of {NUM_IDLE} + {NUM_IDLE} idle workers: "
        f"{row['share_of_core']['median']:.2%} of a core (CPU), "
        f"{row['times_parsing']['median']:.2f} x parsing them"
    )
    record.goal(
        13,
        f"an idle gateway with {NUM_IDLE} + {NUM_IDLE} workers, share of a core",
        row["share_of_core"],
        "<=",
        0.02,
    )
    record.finish()


if __name__ == "__main__":
    main()
