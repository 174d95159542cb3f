"""One Splitwise machine: which tasks share its next iteration (ISCA'24, section 4.2, as coded)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from services.sim.baselines.splitwise_times import MachineTimes

MAX_BATCH: Final = 512
MAX_BATCH_TOKENS: Final = 2048
MAX_PREEMPTIONS: Final = 4

Role = Literal["prompt", "token"]


@dataclass(slots=True, eq=False)
class SplitwiseRequest:
    """One request, and both of its tasks. Times in s, memory in bytes."""

    idx: int
    at: float
    prompt_len: int
    output_len: int
    first_at: float = -1.0
    end_at: float = -1.0
    num_generated: int = 0
    num_preempted: int = 0
    is_resident: bool = False
    """Whether its decode task has its memory."""

    @property
    def num_decodes(self) -> int:
        """Steps after the first token."""
        return self.output_len - 1


@dataclass(slots=True, eq=False)
class SplitwiseMachine:
    """A server: its queues and its memory.

    pending: tokens as the router counts them; reserved: bytes promised, weights included.
    """

    name: str
    home: Role
    times: MachineTimes
    capacity: float
    weights: float
    kv: Callable[[int], float]
    pool: Literal["prompt", "token", "mixed"] = "prompt"
    pending: int = 0
    reserved: float = 0.0
    used: float = 0.0
    prompts: list[SplitwiseRequest] = field(default_factory=list[SplitwiseRequest])
    waiting: list[SplitwiseRequest] = field(default_factory=list[SplitwiseRequest])
    preempted: list[SplitwiseRequest] = field(default_factory=list[SplitwiseRequest])
    running: list[SplitwiseRequest] = field(default_factory=list[SplitwiseRequest])
    busy: tuple[list[SplitwiseRequest], list[SplitwiseRequest]] | None = None

    def __post_init__(self) -> None:
        self.pool = self.home
        self.reserved = self.used = self.weights

    @property
    def has_queue(self) -> bool:
        """Whether any task waits here that is not in the running iteration."""
        return bool(self.prompts or self.waiting or self.preempted)

    @property
    def is_idle(self) -> bool:
        """Whether it may go home."""
        return self.busy is None and not self.has_queue and not self.running

    def select(self) -> tuple[list[SplitwiseRequest], list[SplitwiseRequest]]:
        """Return the prompts and the decodes of the next iteration, in their order of claims: who
        was passed over too often, prompts, preempted decodes, those of the last iteration, others
        by arrival. What ran and is not taken is preempted."""
        prompts: list[SplitwiseRequest] = []
        decodes: list[SplitwiseRequest] = []
        chosen: set[int] = set()
        tokens = 0

        def has_room(cost: int) -> bool:
            taken = len(prompts) + len(decodes)
            # The first has no budget: a prompt that is longer than it runs alone.
            return taken < MAX_BATCH and (not taken or tokens + cost <= MAX_BATCH_TOKENS)

        def take_decode(one: SplitwiseRequest) -> bool:
            nonlocal tokens
            if id(one) in chosen:
                return True
            if not has_room(1):
                return False
            if not one.is_resident:
                need = self.kv(one.num_decodes)
                if self.used + need > self.capacity:
                    return False
                self.used += need
                one.is_resident = True
            decodes.append(one)
            chosen.add(id(one))
            tokens += 1
            return True

        for one in self.preempted + self.waiting:
            if one.num_preempted >= MAX_PREEMPTIONS and not take_decode(one):
                break
        for one in list(self.prompts):
            need = self.kv(one.prompt_len + 1)
            if not has_room(one.prompt_len) or self.used + need > self.capacity:
                break
            self.used += need
            tokens += one.prompt_len
            prompts.append(one)
            self.prompts.remove(one)
        for queue in (self.preempted, self.running, self.waiting):
            if not all(take_decode(one) for one in queue):
                break
        left = [one for one in self.preempted + self.running if id(one) not in chosen]
        self.waiting = [one for one in self.waiting if id(one) not in chosen]
        # As coded, an iteration missed counts for who never ran, too.
        for one in (*left, *self.waiting):
            one.num_preempted += 1
        self.preempted = left
        self.running = decodes
        return prompts, decodes
