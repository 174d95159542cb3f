"""Splitwise's cluster as coded (Mutinifni/splitwise-sim): two pools, one between them.

For each request a prompt and a token machine are chosen at arrival. The shortest queue of the home
pool serves, then of the mixed pool; else a machine of the other pool becomes mixed, and goes home
when it is idle. If nothing is left, both tasks run on the machine with the shortest queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from services.sim.baselines.splitwise_times import MachineTimes
from services.sim.clock import EventClock

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


MAX_PENDING_TOKENS: Final = 8192

TRAP_BANDWIDTH: Final = 200 * 1024**3
"""Their code: 200 Gb/s becomes 200 GiB/s."""
LINK_BANDWIDTH: Final = 200e9 / 8


@dataclass(frozen=True, slots=True)
class HostedModel:
    """Size of a model on one server, bytes. kv_token: of one token in all layers."""

    weights: float
    kv_token: float


LLAMA2_70B: Final = HostedModel(135e9, 2 * 80 * 8 * 128 * 2)
LLAMA2_70B_AS_CODED: Final = HostedModel(135e9, 2 * 80 * 8192 * 2)
"""Their code takes the hidden size, as if every head had keys and values: 8 times too much."""
BLOOM_176B: Final = HostedModel(329e9, 2 * 70 * 14336 * 2)

SERVER_MEMORY: Final = 640e9


class SplitwiseSim:
    """A cluster under a clock of its own, in seconds."""

    def __init__(
        self, machines: Sequence[SplitwiseMachine], *, bandwidth: float = LINK_BANDWIDTH
    ) -> None:
        self.machines = machines
        self._bandwidth = bandwidth
        self._clock = EventClock()
        self._pair: dict[int, tuple[SplitwiseMachine, SplitwiseMachine]] = {}

    def run(self, requests: Iterable[SplitwiseRequest]) -> None:
        """Serve requests, in order of arrival; what each felt is written into it."""
        for request in requests:
            self._clock.at(request.at, partial(self._route, request))
        self._clock.run_out()

    # Routing.

    def _pool(self, name: str) -> list[SplitwiseMachine]:
        return [machine for machine in self.machines if machine.pool == name]

    def choose(self, request: SplitwiseRequest) -> tuple[SplitwiseMachine, SplitwiseMachine]:
        """Return the prompt and the token machine, which may be one; pools change."""
        prompt = token = None
        for pool in ("prompt", "mixed"):
            if machines := self._pool(pool):
                best = min(machines, key=lambda m: m.pending)
                # As coded: a pool has one chance, its best; one without a queue is never long.
                is_long = best.has_queue and best.pending + request.prompt_len > MAX_PENDING_TOKENS
                if not is_long:
                    prompt = best
                    break
        for pool in ("token", "mixed"):
            if machines := self._pool(pool):
                # By memory, as coded; the paper's rule is the shortest queue here, too.
                best = min(machines, key=lambda m: m.reserved)
                if best.reserved + self._need(best, request) < best.capacity:
                    token = best
                    break
        if prompt is None and (tokens := self._pool("token")):
            prompt = min(tokens, key=lambda m: m.pending)
            prompt.pool = "mixed"
        if token is None and (prompts := self._pool("prompt")):
            token = min(prompts, key=lambda m: m.reserved)
            token.pool = "mixed"
        if prompt is None or token is None:
            prompt = token = min(self.machines, key=lambda m: m.pending)
        return prompt, token

    @staticmethod
    def _need(machine: SplitwiseMachine, request: SplitwiseRequest) -> float:
        # The + 1 is token 1, which their prompt task holds.
        return machine.kv(request.prompt_len + 1) + machine.kv(request.num_decodes)

    def _route(self, request: SplitwiseRequest) -> None:
        prompt, token = self._pair[request.idx] = self.choose(request)
        prompt.pending += request.prompt_len
        token.pending += 1
        token.reserved += self._need(token, request)
        if prompt is not token:
            prompt.reserved += prompt.kv(request.prompt_len + 1)
        prompt.prompts.append(request)
        self._start(prompt)

    # What machines do.

    def _start(self, machine: SplitwiseMachine) -> None:
        if machine.busy is not None:
            return
        prompts, decodes = machine.select()
        if not prompts and not decodes:
            if machine.is_idle:
                machine.pool = machine.home
            return
        machine.busy = prompts, decodes
        num_tokens = sum(one.prompt_len for one in prompts)
        took = machine.times.iteration_s(num_tokens, len(decodes))
        self._clock.after(took, partial(self._iterated, machine))

    def _iterated(self, machine: SplitwiseMachine) -> None:
        assert machine.busy is not None
        prompts, decodes = machine.busy
        machine.busy = None
        has_ended = False
        for one in decodes:
            one.num_generated += 1
            if one.num_generated == one.output_len:
                has_ended = True
                self._finish(one, machine)
        if has_ended:
            machine.running = [one for one in machine.running if one.end_at < 0]
        for one in prompts:
            one.first_at = self._clock.now
            one.num_generated = 1
            machine.pending -= one.prompt_len
            _, token = self._pair[one.idx]
            if one.output_len == 1:
                self._finish(one, machine)
            elif token is machine:
                machine.waiting.append(one)
            else:
                size = machine.kv(one.prompt_len + 1)
                # While it moves both ends hold it.
                token.used += size
                self._clock.after(size / self._bandwidth, partial(self._moved, one))
        self._start(machine)

    def _moved(self, request: SplitwiseRequest) -> None:
        prompt, token = self._pair[request.idx]
        size = prompt.kv(request.prompt_len + 1)
        prompt.used -= size
        prompt.reserved -= size
        token.waiting.append(request)
        self._start(token)
        # What has gone may be the room that its next prompt lacks.
        self._start(prompt)

    def _finish(self, request: SplitwiseRequest, machine: SplitwiseMachine) -> None:
        request.end_at = self._clock.now
        prompt, token = self._pair[request.idx]
        token.pending -= 1
        token.reserved -= self._need(token, request)
        machine.used -= machine.kv(request.prompt_len + 1)
        if request.is_resident:
            machine.used -= machine.kv(request.num_decodes)
        if prompt is not token and machine is prompt:  # one token: nothing was moved
            prompt.reserved -= prompt.kv(request.prompt_len + 1)


def cluster(
    num_prompt: int,
    num_token: int,
    prompt_times: MachineTimes,
    token_times: MachineTimes,
    model: HostedModel,
) -> list[SplitwiseMachine]:
    """Return idle machines: so many whose home is the prompt pool, so many of the token pool."""

    def kv(num_tokens: int) -> float:
        return num_tokens * model.kv_token

    return [
        SplitwiseMachine(f"prompt {n}", "prompt", prompt_times, SERVER_MEMORY, model.weights, kv)
        for n in range(num_prompt)
    ] + [
        SplitwiseMachine(f"token {n}", "token", token_times, SERVER_MEMORY, model.weights, kv)
        for n in range(num_token)
    ]
