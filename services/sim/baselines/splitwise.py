"""Splitwise's cluster as coded (Mutinifni/splitwise-sim): two pools, one between them.

For each request a prompt and a token machine are chosen at arrival. The shortest queue of the home
pool serves, then of the mixed pool; else a machine of the other pool becomes mixed, and goes home
when it is idle. If nothing is left, both tasks run on the machine with the shortest queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from services.sim.baselines.splitwise_machine import SplitwiseMachine, SplitwiseRequest
from services.sim.baselines.splitwise_times import MachineTimes
from services.sim.clock import EventClock

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
