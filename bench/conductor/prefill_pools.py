"""Prefill workers and gateways under virtual time: production's decisions, pools and journals, over
an analytic engine.

Of production: each gateway's ``Router`` with its policy, its peer table and its index of prefixes;
each worker's ``BlockPool`` and ``Journal``. Modelled: what a prompt takes on a device, the links,
and the order of things within a worker (``PrefillWorker``). One decode worker has room for
everything and takes no time. A prompt has no tokens here: its blocks' hashes come from a trace's
ids.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.cli.bench.workload import BLOCK_TOKENS, Ask
from services.gateway.core.index.prefixes import HashedPrompt, PrefixReports
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.routing.router import SMALL_SURPRISE, Router
from services.gateway.core.routing.routing import POLICIES, RouteDecision
from services.gateway.core.routing.sides import RouteRequest
from services.gateway.core.worker import Role, Worker, WorkerStatus
from services.planner.core.fetch import ATTENTION_OPS, LINEAR_OPS
from services.planner.core.kv_size import PUBLISHED
from services.planner.core.roofline import DEVICES
from services.sim.clock import WIRE_S, EventClock
from shared.errors import InvariantViolated
from shared.ids import NO_ORDER, Incarnation, StreamId
from shared.kv.events import KvEvent
from shared.kv.journal import Journal, KvChanges
from shared.kv.layout import KvLayout
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.prefix_hash import PrefixChain
from shared.model_spec import ModelSpec
from shared.predict.step_time import StepFit
from shared.transfer.orders import PrefixAt

SHAPE = PUBLISHED["llama-3-70b"]
LAYOUT = KvLayout(
    dtype="bfloat16", num_layers=SHAPE.num_layers, num_kv_heads=SHAPE.num_kv_heads,
    head_dim=SHAPE.head_dim,
)  # fmt: skip
"""320 KiB a token."""

FLOPS = 8 * DEVICES["a800"].flops / 2
"""A worker is a node of eight A800 that reaches half of their peak."""

STEPS = StepFit(
    0.0,
    SHAPE.num_layers * LINEAR_OPS * SHAPE.hidden**2 / FLOPS,
    # A token attends to half of a prompt's positions in the mean: l a n^2 d of a whole one.
    SHAPE.num_layers * 2 * ATTENTION_OPS * SHAPE.hidden / FLOPS,
    num_steps=1000,
)
"""Mooncake's count of a prompt's operations: l (a n^2 d + b n d^2), with a = 4 and b = 22."""

STEP_TOKENS = 8192
"""Most of a step; its blocks can be found when it ends."""

MODEL = ModelSpec(
    name=SHAPE.name, fingerprint=bytes(32), vocab_size=1, max_model_len=1 << 20, dtype="bfloat16",
    engine="analytic",
)  # fmt: skip

DECODE = Incarnation(1 << 32)

START_S = 2.0
"""When a run's first second begins: all gateways know all workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Who serves. num_blocks: of 512 tokens, of each worker: 3 M tokens. link: bytes a second out
    of each worker. report_s: between two reports of a worker to each gateway."""

    policy: str
    num_workers: int = 8
    num_gateways: int = 3
    num_blocks: int = 5859
    link: float = 50e9
    report_s: float = 0.5
    seed: int = 0


class TracePrompt(HashedPrompt):
    """One that is known by the names of its blocks; its last, started one has no hash. The first
    one's name stands for the tokens that the policy ``hash`` goes by, which it holds."""

    __slots__ = ("blocks",)

    def __init__(self, ask: Ask) -> None:
        super().__init__(ask.block_ids[0].to_bytes(8), b"")
        ids = ask.block_ids[: ask.num_input // BLOCK_TOKENS]
        self.blocks = [hashlib.sha256(it.to_bytes(8, "little")).digest() for it in ids]

    def has(self, num_tokens: int) -> bool:
        """See ``HashedPrompt``."""
        return len(self.blocks) * BLOCK_TOKENS >= num_tokens

    def hashes(self, model_key: bytes, every: int) -> list[bytes]:
        """See ``HashedPrompt``: of the granules of a block, only the last one is ever looked at."""
        return [it for it in self.blocks for _ in range(BLOCK_TOKENS // every)]


class _Chain(PrefixChain):
    """What a pool asks for a prompt's hashes."""

    def __init__(self, blocks: list[bytes]) -> None:
        super().__init__(b"", BLOCK_TOKENS)
        self._blocks = blocks

    def hashes(self, tokens: Sequence[int], num_blocks: int) -> list[bytes]:
        """See ``PrefixChain``."""
        return self._blocks[:num_blocks]


@dataclass(slots=True, eq=False)
class Prompt:
    """One request's. num_expected: tokens that it need not compute, as far as its worker knows
    before it begins. fetching: the prefix that it waits for."""

    ask: Ask
    gateway: Gateway
    hashed: TracePrompt
    decision: RouteDecision
    stream_id: StreamId
    chain: PrefixChain = field(init=False)
    tokens: range = field(init=False)
    received_at: float | None = None
    num_expected: int = 0
    num_computed: int = 0
    num_cached: int = 0
    num_fetched: int = 0
    step_began_at: float = 0.0
    fetching: _PrefixFetch | None = None
    table: BlockTable | None = None

    def __post_init__(self) -> None:
        self.chain = _Chain(self.hashed.blocks)
        self.tokens = range(self.ask.num_input)  # a pool looks at how many there are alone

    @property
    def most_cached(self) -> int:
        """The last token is computed in any case."""
        return self.ask.num_input - 1

    def left_s(self, start: int) -> float:
        """Seconds of its tokens from this one on."""
        return STEPS.prompt_seconds(start, self.ask.num_input, STEP_TOKENS)


@dataclass(slots=True, eq=False)
class _PrefixFetch:
    """A prefix on its way, and the prompts that wait for it: the first one's gateway has named its
    source."""

    table: BlockTable
    num_tokens: int
    began_at: float
    prompts: list[Prompt]

    def brings(self, prompt: Prompt) -> int:
        """Return how many tokens this prompt begins with of those, 0 if no more than it has."""
        num_blocks = min(self.num_tokens, prompt.most_cached) // BLOCK_TOKENS
        if num_blocks * BLOCK_TOKENS <= prompt.num_expected:
            return 0
        last = num_blocks - 1
        is_same = prompt.hashed.blocks[last] == self.prompts[0].hashed.blocks[last]
        return num_blocks * BLOCK_TOKENS if is_same else 0


class PrefillWorker:
    """One prompt after the other in order of arrival, in steps; one that waits for a prefix is
    passed. What it sends to others goes one after the other, at its link's speed.

    As ``shared/worker/prefixes.py`` does it: who fetches takes blocks and asks; the source pins
    what it has and sends that; prompts that begin with a prefix on its way here wait for it; what
    takes too long is given up and computed.
    """

    def __init__(self, setting: Setting, incarnation: Incarnation, clock: EventClock) -> None:
        self.incarnation = incarnation
        self.pool = BlockPool(setting.num_blocks, BLOCK_TOKENS)
        self.journal = Journal(BLOCK_TOKENS)
        self.pool.listen(self.journal)
        self.pool.listen(self._changed)
        self.num_late_fetches = 0
        self._others: dict[Incarnation, PrefillWorker] = {}
        self._paired = frozenset[Incarnation]()
        self._speeds: dict[Incarnation, float] = {}
        self._seen: dict[Gateway, StreamId] = {}
        self._num_changes = 0
        self._told: dict[Gateway, int] = {}
        self._link = setting.link
        self._clock = clock
        self._waiting: deque[Prompt] = deque()
        self._running: Prompt | None = None
        self._fetches: list[_PrefixFetch] = []
        self._sent_at = 0.0
        self._egress_bytes = 0

    def meet(self, others: Iterable[PrefillWorker]) -> None:
        """All pairs are made."""
        self._others = {it.incarnation: it for it in others if it is not self}
        self._speeds = dict.fromkeys([*self._others, DECODE], self._link)
        self._paired = frozenset(self._speeds)

    def _changed(self, event: KvEvent) -> None:
        self._num_changes += 1

    # --- prompts ---------------------------------------------------------------------------------

    def take(self, prompt: Prompt) -> None:
        """A gateway's order has come."""
        self._seen[prompt.gateway] = prompt.stream_id
        prompt.received_at = self._clock.now
        prompt.num_expected = self._num_cached(prompt)
        self._waiting.append(prompt)
        fetch = next((it for it in self._fetches if it.brings(prompt)), None)
        if fetch is not None:
            fetch.prompts.append(prompt)
        elif (wanted := prompt.decision.fetch_order(prompt.ask.num_input)) is not None:
            fetch = self._fetch(prompt, wanted)
        if fetch is not None:
            prompt.fetching = fetch
            prompt.num_expected = fetch.brings(prompt)
        self._begin()

    def _num_cached(self, prompt: Prompt) -> int:
        return self.pool.num_cached_tokens(prompt.chain, prompt.tokens, prompt.most_cached)

    def _begin(self) -> None:
        if self._running is not None:
            return
        for prompt in self._waiting:
            if prompt.fetching is None:
                break
        else:
            return
        prompt.table = self.pool.acquire(
            prompt.chain, prompt.tokens, prompt.ask.num_input, max_hit_tokens=prompt.most_cached
        )
        if prompt.table is None:
            return  # a fetch holds what is missing, and ends
        self._waiting.remove(prompt)
        self._running = prompt
        prompt.num_computed = prompt.num_cached = prompt.table.num_hit_tokens
        self._step(prompt)

    def _step(self, prompt: Prompt) -> None:
        start, prompt.step_began_at = prompt.num_computed, self._clock.now
        stop = min(start + STEP_TOKENS, prompt.ask.num_input)
        seconds = STEPS.prompt_seconds(start, stop, STEP_TOKENS)
        self._clock.after(seconds, partial(self._stepped, prompt, stop))

    def _stepped(self, prompt: Prompt, stop: int) -> None:
        assert prompt.table is not None
        prompt.num_computed = stop
        self.pool.publish(prompt.table, prompt.chain, prompt.tokens, stop)
        if stop < prompt.ask.num_input:
            self._step(prompt)
            return
        self.pool.release(prompt.table)
        self._running = None
        self._clock.after(WIRE_S, partial(prompt.gateway.first_token, prompt))
        self._begin()

    # --- prefixes --------------------------------------------------------------------------------

    def _fetch(self, prompt: Prompt, wanted: PrefixAt) -> _PrefixFetch | None:
        num_tokens = min(wanted.num_tokens, prompt.most_cached) // BLOCK_TOKENS * BLOCK_TOKENS
        if num_tokens <= prompt.num_expected:
            return None
        table = self.pool.acquire(
            prompt.chain, prompt.tokens[:num_tokens], num_tokens, max_hit_tokens=num_tokens
        )
        if table is None:
            return None
        fetch = _PrefixFetch(table, num_tokens, self._clock.now, [prompt])
        self._fetches.append(fetch)
        give_up_at = self._clock.now + wanted.wait_s
        source = self._others[wanted.worker]
        self._clock.after(WIRE_S, partial(source.pulled, self, prompt, fetch, give_up_at))
        return fetch

    def pulled(
        self, sink: PrefillWorker, prompt: Prompt, fetch: _PrefixFetch, give_up_at: float
    ) -> None:
        """Another worker asks for a prefix: send what there is."""
        table = self.pool.pin(prompt.chain, prompt.tokens[: fetch.num_tokens])
        num_bytes = max(0, table.num_hit_tokens - fetch.table.num_hit_tokens) * LAYOUT.token_bytes
        ends_at = max(self._sent_at, self._clock.now) + num_bytes / self._link
        if ends_at + WIRE_S > give_up_at:
            self.num_late_fetches += 1
            self.pool.release(table)
            self._clock.at(give_up_at, partial(sink._fetched, fetch, 0, 0))
            return
        self._sent_at = ends_at
        self._egress_bytes += num_bytes

        def sent() -> None:
            self._egress_bytes -= num_bytes
            self.pool.release(table)

        self._clock.at(ends_at, sent)
        come = partial(sink._fetched, fetch, table.num_hit_tokens, num_bytes)
        self._clock.at(ends_at + WIRE_S, come)

    def _fetched(self, fetch: _PrefixFetch, num_tokens: int, num_bytes: int) -> None:
        first = fetch.prompts[0]
        num_new = num_tokens - fetch.table.num_hit_tokens
        if num_new > 0:
            self.pool.publish(fetch.table, first.chain, first.tokens, num_tokens)
            first.num_fetched = num_new
            wanted = first.decision.fetch
            assert wanted is not None
            first.gateway.router.expectations.fetches.fetched(
                wanted.source, self.incarnation, num_bytes=num_bytes,
                seconds=self._clock.now - fetch.began_at,
            )  # fmt: skip
        self.pool.release(fetch.table)
        self._fetches.remove(fetch)
        for prompt in fetch.prompts:
            prompt.fetching = None
            prompt.num_expected = self._num_cached(prompt)
        self._begin()

    # --- what it tells ---------------------------------------------------------------------------

    @property
    def queue_s(self) -> float:
        """Seconds until all its prompts are computed."""
        seconds = sum(prompt.left_s(prompt.num_expected) for prompt in self._waiting)
        if self._running is not None:
            prompt = self._running
            seconds += prompt.left_s(prompt.num_computed)
            seconds -= self._clock.now - prompt.step_began_at
        return seconds

    def report_to(self, gateways: Iterable[Gateway]) -> None:
        """Tell all gateways how it is, and what has changed in its cache."""
        running = () if self._running is None else (self._running,)
        load: dict[str, Any] = {
            "pending_tokens": sum(
                prompt.ask.num_input - prompt.num_computed for prompt in (*self._waiting, *running)
            ),
            "num_waiting": len(self._waiting),
            "num_running": len(running),
            "free_blocks": self.pool.num_available,
            "reserved_blocks": self.pool.num_held,
            "paired": self._paired,
            "queue_s": self.queue_s,
            "step_tokens": STEP_TOKENS,
            "prompt_steps": STEPS,
            "speeds": self._speeds,
            "egress_bytes": self._egress_bytes,
        }
        for gateway in gateways:
            status = WorkerStatus(**load, seen=self._seen.get(gateway, NO_ORDER))
            changes = None
            if self._told.get(gateway) != self._num_changes:
                changes = self.journal.report(gateway)
                self._told[gateway] = self._num_changes
            told = partial(gateway.told, self, status, changes, self._clock.now)
            self._clock.after(WIRE_S, told)

    def asked(self, gateway: Gateway, asked: PrefixReports) -> None:
        """A gateway wants to know what is in the cache."""
        self.journal.subscribe(gateway, asked.granule_tokens)
        self._told.pop(gateway, None)


class Gateway:
    """One gateway's decisions, and what it believes of the workers.

    done: its prompts that are computed, each with its TTFT.
    """

    def __init__(
        self, number: int, setting: Setting, workers: Sequence[PrefillWorker], clock: EventClock
    ) -> None:
        self.table = PeerTable()
        self.router = Router(POLICIES[setting.policy](), self.table, index_bytes=1 << 30)
        self.done: list[tuple[Prompt, float]] = []
        self.num_resyncs = 0
        self.num_checks = 0
        self._clock = clock
        self._random = random.Random(f"{setting.seed} {number}")
        self._prefills = {worker.incarnation: worker for worker in workers}
        self._open: dict[Incarnation, list[Prompt]] = {it: [] for it in self._prefills}
        self._reported_at = dict.fromkeys(self._prefills, -1.0)
        self._num_sent = dict.fromkeys(self._prefills, 0)
        for incarnation in (*self._prefills, DECODE):
            role = Role.DECODE if incarnation == DECODE else Role.PREFILL
            worker = Worker(
                role=role, incarnation=incarnation, host="", port=1, model=MODEL, layout=LAYOUT,
                num_blocks=setting.num_blocks if role is Role.PREFILL else 1 << 40,
                block_size=BLOCK_TOKENS, is_connected=True,
            )  # fmt: skip
            self.table.join(worker)
            if role is Role.PREFILL and self.router.prefixes is not None:
                self.router.prefixes.joined(worker)
        self.table.report(self._worker(DECODE), WorkerStatus(answer_steps=STEPS), 0.0)

    def _worker(self, incarnation: Incarnation) -> Worker:
        worker = self.table.get(incarnation)
        assert worker is not None
        return worker

    def ask(self, ask: Ask) -> None:
        """A client's request has come."""
        now, hashed = self._clock.now, TracePrompt(ask)
        request = RouteRequest(
            num_tokens=ask.num_input, max_new_tokens=ask.num_output, prompt=hashed
        )
        decision = self.router.route(request, now, self._random.random()).decision
        assert decision is not None
        self.router.sent(decision, hashed, now)
        prefill = decision.prefill
        self._num_sent[prefill] += 1
        prompt = Prompt(ask, self, hashed, decision, StreamId(self._num_sent[prefill]))
        worker = self._worker(prefill)
        worker.sent(
            Role.PREFILL, prompt.stream_id, num_tokens=ask.num_input,
            num_blocks=worker.blocks_for(ask.num_input), now=now, num_cached=decision.num_cached,
        )  # fmt: skip
        self._open[prefill].append(prompt)
        self._check(worker)
        self._clock.after(WIRE_S, partial(self._prefills[prefill].take, prompt))

    def first_token(self, prompt: Prompt) -> None:
        """A worker has computed a prompt: its leg is over."""
        now, prefill = self._clock.now, prompt.decision.prefill
        worker, expectations = self._worker(prefill), self.router.expectations
        self._open[prefill].remove(prompt)
        worker.ended(prompt.stream_id)
        ttft_s = now - START_S - prompt.ask.due_s
        self.done.append((prompt, ttft_s))
        expectations.lengths.ended(prompt.ask.num_input, prompt.ask.num_output)
        prediction = prompt.decision.prediction
        surprise = abs(prompt.num_cached - prompt.decision.num_cached)
        if surprise <= SMALL_SURPRISE * prompt.ask.num_input and prediction is not None:
            is_believed = expectations.answered(
                prefill, predicted_s=prediction.ttft_s, actual_s=ttft_s, now=now
            )
            worker.is_believed = worker.is_believed if is_believed is None else is_believed

    def told(
        self, source: PrefillWorker, status: WorkerStatus, changes: KvChanges | None, made_at: float
    ) -> None:
        """A worker's report has come."""
        worker, prefixes = self._worker(source.incarnation), self.router.prefixes
        self._reported_at[source.incarnation] = made_at
        self.table.report(worker, status, self._clock.now)
        self._check(worker)
        if prefixes is None:
            return
        if changes is not None:
            self.num_resyncs += prefixes.told(worker, changes)
        asked = prefixes.take_ask(source.incarnation)
        if asked is not None:
            source.asked(self, asked)

    def _check(self, worker: Worker) -> None:
        """The load equation: the worker's report, and exactly those of this gateway's orders that
        had not reached it when the report was made.

        Raises InvariantViolated: the gateway believes in another load.
        """
        reported_at = self._reported_at[worker.incarnation]
        lengths = [
            prompt.ask.num_input
            for prompt in self._open[worker.incarnation]
            if prompt.received_at is None or prompt.received_at > reported_at
        ]
        num_tokens = worker.status.pending_tokens + sum(lengths)
        num_blocks = worker.status.reserved_blocks + sum(map(worker.blocks_for, lengths))
        if (worker.pending_tokens, worker.reserved_blocks) != (num_tokens, num_blocks):
            raise InvariantViolated(
                f"a gateway believes in {worker.pending_tokens} tokens and "
                f"{worker.reserved_blocks} blocks, not {num_tokens} and {num_blocks}"
            )
        self.num_checks += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run. prompts: with the TTFT of each. queues: seconds of each worker's queue at
    the times that were asked for. num_checks: how often the load equation was looked at, and
    held."""

    prompts: Sequence[tuple[Prompt, float]]
    queues: Sequence[Sequence[float]]
    num_checks: int
    num_resyncs: int
    num_late_fetches: int


def simulate(setting: Setting, asks: Iterable[Ask], look_at: Iterable[float] = ()) -> Outcome:
    """Serve requests, each gateway's in turn, until all are computed. look_at: when to look at the
    queues."""
    clock = EventClock()
    workers = [
        PrefillWorker(setting, Incarnation(idx + 1), clock) for idx in range(setting.num_workers)
    ]
    for worker in workers:
        worker.meet(workers)
    gateways = [Gateway(idx, setting, workers, clock) for idx in range(setting.num_gateways)]
    queues: list[list[float]] = []

    def report(worker: PrefillWorker) -> None:
        worker.report_to(gateways)
        clock.after(setting.report_s, partial(report, worker))

    for idx, worker in enumerate(workers):
        worker.report_to(gateways)  # they ask for prefixes, and have them with the next report
        clock.at(setting.report_s * (1 + idx) / len(workers), partial(report, worker))
    num_asks = 0
    for num_asks, ask in enumerate(asks, 1):
        clock.at(START_S + ask.due_s, partial(gateways[num_asks % len(gateways)].ask, ask))
    for at in look_at:
        clock.at(START_S + at, lambda: queues.append([worker.queue_s for worker in workers]))
    clock.run(lambda: sum(len(gateway.done) for gateway in gateways) == num_asks, math.inf)
    for worker in workers:
        worker.pool.check_integrity()
    return Outcome(
        prompts=[each for gateway in gateways for each in gateway.done],
        queues=queues,
        num_checks=sum(gateway.num_checks for gateway in gateways),
        num_resyncs=sum(gateway.num_resyncs for gateway in gateways),
        num_late_fetches=sum(worker.num_late_fetches for worker in workers),
    )
