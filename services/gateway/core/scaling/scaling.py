"""What the autoscaler goes by and what it says (``autoscaler.py`` decides)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from services.gateway.core.scaling.need import Limits
from services.gateway.core.scaling.traffic import Attainment, Traffic
from services.gateway.core.worker import Role, Worker
from shared.ids import Incarnation
from shared.predict.step_time import StepFit

DWELL_S = 600.0

STALE_S = 5.0
"""A report older than this says nothing."""


class Kind(StrEnum):
    """What a worker is at home, with those that do both for good told apart."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class WorkerSeen(NamedTuple):
    """One worker. moves: whether its home may change. age_s: of its report. num_held: prompts and
    answers. queue_s: predicted seconds of prompts that wait there. address: where it serves."""

    incarnation: Incarnation
    kind: Kind
    moves: bool
    is_draining: bool
    age_s: float
    num_held: int
    queue_s: float
    prompt_steps: StepFit
    answer_steps: StepFit
    capacity_tokens: int
    address: str = ""


class MeshSeen(NamedTuple):
    """All that a decision goes by. traffic: None = nobody knows. acts: whether it is this gateway
    that changes workers; of several it is one. refuses, borrows: whether it does so anyhow.
    num_waiting: requests that wait in this gateway."""

    workers: tuple[WorkerSeen, ...]
    traffic: Traffic | None
    attainment: Attainment = Attainment()
    acts: bool = True
    refuses: bool = False
    borrows: bool = False
    num_waiting: int = 0


class Rules(NamedTuple):
    """limits: what is to be kept. max_workers: all kinds together, 0 = as many as it takes.
    dwell_s: between a rise and a fall of one number. is_obeyed: False = whoever is advised adds a
    worker when he likes, which tells nothing of how long a start takes."""

    limits: Limits
    max_workers: int = 0
    dwell_s: float = DWELL_S
    is_obeyed: bool = True


class RefuseEarly(NamedTuple):
    """Refuse requests that would miss their own limits, or no more."""

    on: bool
    reason: str


class Borrow(NamedTuple):
    """Let workers that may be either take the other role's work, or no more."""

    on: bool
    reason: str


class MoveHome(NamedTuple):
    """Give a worker the other home."""

    worker: Incarnation
    to: Kind
    reason: str


class AddWorkers(NamedTuple):
    """Start so many."""

    kind: Kind
    num: int
    reason: str


class RemoveWorkers(NamedTuple):
    """Let these finish what they hold, and end."""

    kind: Kind
    workers: tuple[Incarnation, ...]
    reason: str


Order = RefuseEarly | Borrow | MoveHome | AddWorkers | RemoveWorkers
Numbers = Mapping[Kind, int]
Times = Mapping[Kind, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What one decision leaves to the next. targets: workers wanted. ups, downs: when each of these
    rose and fell last. ordered: when those that have not all come were ordered. needs: the last
    ``dwell_s``. level, slope: of the rate, as of level_at; jumped_at: when it jumped last.
    startup_s: as measured last, 0 = never. short_since: of kinds that have too few. learned: the
    load at which limits were missed, and when."""

    targets: Numbers = field(default_factory=dict[Kind, int])
    present: Numbers = field(default_factory=dict[Kind, int])
    ups: Times = field(default_factory=dict[Kind, float])
    downs: Times = field(default_factory=dict[Kind, float])
    ordered: Times = field(default_factory=dict[Kind, float])
    reasons: Mapping[Kind, str] = field(default_factory=dict[Kind, str])
    needs: tuple[tuple[float, Numbers], ...] = ()
    level: float = 0.0
    slope: float = 0.0
    level_at: float | None = None
    jumped_at: float = -math.inf
    startup_s: float = 0.0
    short_since: Times = field(default_factory=dict[Kind, float])
    calm_since: float = 0.0
    is_refusing: bool = False
    is_borrowing: bool = False
    learned: Mapping[Kind, tuple[float, float]] = field(
        default_factory=dict[Kind, tuple[float, float]]
    )


NOTHING: Mapping[Kind, Any] = MappingProxyType({})


class Decision(NamedTuple):
    """One look's outcome. orders: to be carried out; those that are not done come again. wanted:
    workers. busy: the share of their time that those here would compute. hold: why nothing is
    changed, '' = it is free to. limit: what keeps the mesh from its limits, whatever is done."""

    memory: Memory
    orders: tuple[Order, ...] = ()
    wanted: Numbers = NOTHING
    busy: Times = NOTHING
    hold: str = ""
    limit: str = ""


def seen_workers(workers: Iterable[Worker], now: float) -> tuple[WorkerSeen, ...]:
    """Return the workers of a table as ``decide`` sees them."""
    return tuple(
        WorkerSeen(
            worker.incarnation,
            _kind_of(worker),
            moves=len(worker.serves) > 1,
            is_draining=worker.status.is_draining,
            age_s=now - worker.reported_at,
            num_held=worker.status.num_prompts + worker.status.num_answers,
            queue_s=sum(worker.wait_s(now)),
            prompt_steps=worker.status.prompt_steps,
            answer_steps=worker.status.answer_steps,
            capacity_tokens=worker.capacity_tokens,
            address=f"{worker.host}:{worker.port}",
        )
        for worker in workers
    )


def _kind_of(worker: Worker) -> Kind:
    if len(worker.serves) == 1 and worker.is_colocated:
        return Kind.COLOCATED
    return Kind.PREFILL if worker.home is Role.PREFILL else Kind.DECODE


def why_hold(here: Sequence[WorkerSeen], traffic: Traffic | None) -> str:
    """Return what is not known of workers that do not drain, or of their load; '' = nothing."""
    kinds = {worker.kind for worker in here}
    if not here:
        return "no worker has joined"
    if Kind.COLOCATED in kinds and len(kinds) > 1:
        return "colocated workers stand beside prefill and decode workers: plan for one kind alone"
    if Kind.COLOCATED not in kinds and len(kinds) < 2:
        return "a role has no worker"
    if traffic is None:
        return "too little has been asked yet to tell the load"
    oldest_s = max(worker.age_s for worker in here)
    if oldest_s > STALE_S:
        return f"a worker's last report is {oldest_s:.0f} s old"
    for kind in kinds:
        own = [worker for worker in here if worker.kind is kind]
        if kind is not Kind.DECODE and not any(it.prompt_steps.is_known for it in own):
            return "no worker has told yet how long its prompts take"
        if kind is not Kind.PREFILL and not any(it.answer_steps.is_known for it in own):
            return "no worker has told yet how long its answers' steps take"
    return ""


def is_first(own: Incarnation, workers: Iterable[Worker]) -> bool:
    """Whether this gateway decides for all: no worker knows one with a lower incarnation. Nobody is
    elected; where workers disagree, because they have just joined, nobody decides."""
    firsts = [worker.status.first_gateway for worker in workers]
    # 0 = it does not say (``WorkerStatus``).
    return all(not first or first >= own for first in firsts)


def text_of(order: Order) -> str:
    """Return an order in words."""
    match order:
        case RefuseEarly(on):
            return "refuse early what would be late" if on else "refuse early no more"
        case Borrow(on):
            return "borrow from the other role" if on else "borrow no more"
        case MoveHome(worker, to):
            return f"move worker {worker:016x} to {to.value}"
        case AddWorkers(kind, num):
            return f"add {num} {kind.value}"
        case RemoveWorkers(kind, workers):
            names = ", ".join(f"{worker:016x}" for worker in workers)
            return f"remove {len(workers)} {kind.value} ({names})"
