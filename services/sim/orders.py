"""What a simulated worker is asked, what it holds, and what it says. Records only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from services.sim.token_times import StepEnds
from shared.errors import MeshError
from shared.ids import StreamId
from shared.kv.journal import Tier
from shared.kv.tiers import CachePolicy
from shared.schedule.plan import NewToken, PromptTimes
from shared.schedule.sequence import Sequence
from shared.transfer.orders import Order
from shared.worker.core.lease import Lease
from shared.worker.core.life import Life, Task
from shared.worker.core.lower_tiers import Loaded
from shared.worker.core.prefixes import Fetched, PrefixFetch


class TierSize(NamedTuple):
    """A tier below the pool: its room, and how many bytes a second are copied there or back."""

    kind: Tier
    num_bytes: int
    bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """Limits of a worker. batch_tokens: prompts share a step up to so many tokens in all, 0 =
    ``token_budget``. tbt_target_s: of a mixed worker, how long a step may take beside answers; 0 =
    nobody says, None = ``token_budget`` is obeyed instead. num_slots, frame_bytes, group_bytes:
    staging of transfers. link_bytes_s: bandwidth with which it sends, one frame after the other;
    0 = a frame's bytes take no time. link_s: how long what it tells or sends another worker is
    under way; None = as a message to the gateway. num_stages: see ``Stages``; its engine tells how
    long a step is in one. tiers: below the pool of a worker that computes prompts, the fastest
    first; cache_policy: what gives way there."""

    num_blocks: int = 0
    block_size: int = 16
    max_running: int = 256
    token_budget: int = 2048
    batch_tokens: int = 0
    tbt_target_s: float | None = None
    num_slots: int = 8
    frame_bytes: int = 64 << 20
    group_bytes: int = 1
    link_bytes_s: float = 0.0
    link_s: float | None = None
    num_stages: int = 1
    tiers: tuple[TierSize, ...] = ()
    cache_policy: CachePolicy = CachePolicy.LRU


class Word(NamedTuple):
    """What a worker tells the gateway of an order; what: the event's name. prompt: how ``first``
    came. steps: those of ``run``, of the first of which ``token`` is; the last has its finish
    reason."""

    stream_id: StreamId
    what: str
    token: NewToken | None = None
    error: MeshError | None = None
    prompt: PromptTimes | None = None
    steps: StepEnds | None = None


NOTHING, NOT_LOADED = Fetched(), Loaded()


@dataclass(eq=False)
class SimJob:
    """An order that holds something. arrived_at, started_at: it came, and its first step was
    planned. prefix: what its prompt waits for; fetched, loaded: what came. told_until: of its
    worker's equal steps, how many the gateway knows of; -1 = of all that it has a token of."""

    order: Order
    life: Life
    arrived_at: float
    started_at: float | None = None
    sequence: Sequence | None = None
    lease: Lease | None = None
    prefix: PrefixFetch[SimJob] | None = None
    fetched: Fetched = NOTHING
    loaded: Loaded = NOT_LOADED
    told_until: int = -1

    @property
    def its_lease(self) -> Lease:
        assert self.lease is not None
        return self.lease


def slot_of(task: Task) -> Task:
    """Takers of KV are found by their transfer's key alone, prefixes as answers."""
    return Task.ANSWER if task is Task.PREFIX else task
