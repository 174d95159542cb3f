"""DistServe's own simulator, by its rules: who runs what, when (algorithms: OSDI'24, section 4).

An instance is a ring of pipeline stages. A stage serves one batch at a time:

- prompts first, as many whole ones from the head of the queue as the KV capacity takes; later
  stages take the batches that the first one made;
- else decodes, from the head of the queue while sum(context + 1) <= 50,000. Whoever has made its
  step joins the queue's tail, so that a queue over the cap rotates.

The last prefill stage hands a request to the decode instance (in system ``vllm``: back to the head
of its own ring), and moving the KV takes no time. A stage with nothing to do is woken by whatever
is queued, and begins when all else of that instant has happened: requests that arrive together are
batched together.

Two fidelities with the same result, bit for bit: ``exact`` makes an event of every step; ``runs``
adds up the steps during which nobody comes, goes or is left out, in O(1) each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, NamedTuple, NoReturn

from services.sim.baselines.distserve_times import Coefficients, Degree, first_stage_ms
from services.sim.clock import EventClock
from shared.errors import InvalidRequest

DECODE_CAP_TOKENS: Final = 50_000
"""Most sum(context + 1) of one decode batch: fixed in their worker, whatever the capacity."""

BACK_PRESSURE_TOKENS: Final = 9_000_000
"""Contexts queued for decode beyond which a stage takes no prompts."""

MOST_STEP_MS: Final = 1e12
"""Of one step: with more the sums of a file become endless."""

Fidelity = Literal["exact", "runs"]


@dataclass(frozen=True, slots=True)
class Arrival:
    at_ms: float
    prompt_len: int
    output_len: int


class Latency(NamedTuple):
    """What one request felt. tpot_ms: decode time by output tokens, as DistServe counts it."""

    ttft_ms: float
    decode_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Instance:
    """One kind of instance. capacity: tokens of KV, which bound a prefill batch (and, as in their
    code, the number of sequences of a decode batch)."""

    degree: Degree
    coefficients: Coefficients
    capacity: int


class _Job:
    __slots__ = ("arrival", "context", "end_ms", "first_ms", "left")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.context = arrival.prompt_len
        # As coded: so many decode steps after the prefill, whose own token is none of them.
        self.left = arrival.output_len
        self.first_ms = self.end_ms = 0.0


_Batch = Sequence[_Job]


@dataclass(slots=True)
class _Stage:
    """One worker: a tensor-parallel group that holds a share of the layers."""

    prefill: Instance
    decode: Instance
    is_first: bool
    is_last: bool
    ring: list[_Stage]
    hand_over: Callable[[_Job], None] | None
    """Of the last prefill stage: gives a request to a decode instance; None: to its own ring."""
    next: _Stage = field(init=False)
    prompts: deque[_Job] = field(default_factory=deque[_Job])
    batches: deque[_Batch] = field(default_factory=deque[_Batch])
    decodes: deque[_Job] = field(default_factory=deque[_Job])
    queued_tokens: int = 0
    is_idle: bool = True
    is_woken: bool = False

    @property
    def has_work(self) -> bool:
        return bool(self.prompts or self.batches or self.decodes)

    def queue_decode(self, job: _Job) -> None:
        self.decodes.append(job)
        self.queued_tokens += job.context

    def take_prompts(self) -> _Batch:
        if not self.is_first:
            return self.batches.popleft()
        room, batch = self.prefill.capacity, list[_Job]()
        while self.prompts and self.prompts[0].arrival.prompt_len <= room:
            job = self.prompts.popleft()
            room -= job.arrival.prompt_len
            batch.append(job)
        return batch

    def take_decodes(self) -> _Batch:
        room, batch = DECODE_CAP_TOKENS, list[_Job]()
        most = self.decode.capacity
        while self.decodes and len(batch) < most and self.decodes[0].context + 1 <= room:
            job = self.decodes.popleft()
            room -= job.context + 1
            self.queued_tokens -= job.context
            batch.append(job)
        return batch


class DistServeSim:
    """One system under a clock of its own, in milliseconds."""

    def __init__(
        self,
        prefill: Instance,
        decode: Instance,
        *,
        is_split: bool = True,
        fidelity: Fidelity = "runs",
    ) -> None:
        """is_split: prefill and decode on instances of their own; else (vLLM) ``prefill`` says
        what the instances are, and ``decode`` is the same."""
        self.clock = EventClock()
        self.num_steps = 0
        self._fidelity = fidelity
        self._decode_head = _ring(prefill, decode, decode.degree.pp, None)
        hand_over = self._to_decode if is_split else None
        self._head = _ring(prefill, decode, prefill.degree.pp, hand_over)

    def run(
        self,
        workload: Sequence[Arrival],
        on_progress: Callable[[int], None] = lambda num_done: None,
    ) -> list[Latency]:
        """Serve requests, given by time of arrival, and return what each felt.

        on_progress is told now and then how many have arrived. No request may be larger than a
        batch: its capacity and DECODE_CAP_TOKENS bound it (theirs would never end). Raises
        InvalidRequest: a step's time comes out below zero or above MOST_STEP_MS.
        """
        jobs = [_Job(arrival) for arrival in workload]

        def arrive(number: int, job: _Job) -> None:
            self._head.prompts.append(job)
            self._wake(self._head)
            if number % 256 == 0:
                on_progress(number)

        for number, job in enumerate(jobs, 1):
            self.clock.arrive(job.arrival.at_ms, partial(arrive, number, job))
        self.clock.run_out()
        return [_latency(job) for job in jobs]

    # What happens.

    def _to_decode(self, job: _Job) -> None:
        self._decode_head.queue_decode(job)
        self._wake(self._decode_head)

    def _woken(self, stage: _Stage) -> None:
        stage.is_woken = False
        self._go_on(stage)

    def _go_on(self, stage: _Stage) -> None:
        stage.is_idle = not stage.has_work
        if stage.is_idle:
            return
        has_prompts = bool(stage.prompts or stage.batches)
        if has_prompts and stage.queued_tokens <= BACK_PRESSURE_TOKENS:
            self._begin_prefill(stage)
        else:
            self._begin_decode(stage)

    def _prefilled(self, stage: _Stage, batch: _Batch) -> None:
        if not stage.is_last:
            stage.next.batches.append(batch)
            self._wake(stage.next)
            batch = ()
        for job in batch:
            job.first_ms = job.end_ms = self.clock.now
            if not job.left:
                continue
            if stage.hand_over is not None:
                stage.hand_over(job)
            else:
                stage.next.queue_decode(job)
                self._wake(stage.next)
        self._go_on(stage)

    def _decoded(self, stage: _Stage, batch: _Batch) -> None:
        for job in batch:
            if stage.is_last:
                job.context += 1
                job.left -= 1
                if not job.left:
                    job.end_ms = self.clock.now
                    continue
            stage.next.queue_decode(job)
        if stage.next.decodes:
            self._wake(stage.next)
        self._go_on(stage)

    # What begins.

    def _wake(self, stage: _Stage) -> None:
        if stage.is_idle and not stage.is_woken:
            stage.is_woken = True
            self.clock.after(0.0, partial(self._woken, stage))

    def _begin_prefill(self, stage: _Stage) -> None:
        batch = stage.take_prompts()
        lengths = [job.arrival.prompt_len for job in batch]
        num_tokens = sum(lengths)
        phase = stage.prefill
        took = phase.coefficients.prefill_ms(
            num_tokens, sum(length * length for length in lengths), phase.degree.pp
        )
        if stage.is_first:
            took += first_stage_ms(num_tokens)
        if not 0 <= took <= MOST_STEP_MS:
            _refuse(phase, took, f"prompts {len(batch)}, tokens {num_tokens}")
        self.num_steps += 1
        self.clock.after(took, partial(self._prefilled, stage, batch))

    def _begin_decode(self, stage: _Stage) -> None:
        batch = stage.take_decodes()
        num_tokens = sum(job.context for job in batch) + len(batch)
        start = self.clock.now
        if self._fidelity == "runs" and stage.is_first and self._is_alone(stage):
            start, num_rounds = self._run(stage, batch, num_tokens)
            num_tokens += num_rounds * len(batch)
            for job in batch:
                job.context += num_rounds
                job.left -= num_rounds
        self.num_steps += 1
        ends_at = start + _decode_ms(stage, len(batch), num_tokens)
        self.clock.at(ends_at, partial(self._decoded, stage, batch))

    def _is_alone(self, head: _Stage) -> bool:
        """Whether the batch that this stage has just taken is all that its ring holds."""
        return not head.has_work and all(
            stage.is_idle and not stage.is_woken for stage in head.ring[1:]
        )

    def _run(self, head: _Stage, batch: _Batch, num_tokens: int) -> tuple[float, int]:
        """Go round the ring while nothing else can happen.

        Returns when the last round begins, and how many end before it.
        """
        num = len(batch)
        # The round in which an answer ends is an event: who goes on is decided at its end.
        most = min(job.left for job in batch) - 1
        most = min(most, (DECODE_CAP_TOKENS - num_tokens) // num)
        start, num_rounds, until = self.clock.now, 0, self.clock.next_at
        while num_rounds < most:
            end = start
            for stage in head.ring:
                end += _decode_ms(stage, num, num_tokens)
            # Also if it ends in that instant: a prompt that comes then goes before the next round.
            if end >= until:
                break
            start = end
            num_tokens += num
            num_rounds += 1
        self.num_steps += num_rounds * len(head.ring)
        return start, num_rounds


def _ring(
    prefill: Instance, decode: Instance, pp: int, hand_over: Callable[[_Job], None] | None
) -> _Stage:
    ring: list[_Stage] = []
    for rank in range(pp):
        is_last = rank == pp - 1
        ring.append(
            _Stage(prefill, decode, rank == 0, is_last, ring, hand_over if is_last else None)
        )
    for rank, stage in enumerate(ring):
        stage.next = ring[(rank + 1) % pp]
    return ring[0]


def _decode_ms(stage: _Stage, batch: int, num_tokens: int) -> float:
    phase = stage.decode
    took = phase.coefficients.decode_ms(batch, num_tokens, phase.degree.pp)
    if stage.is_first:
        took += first_stage_ms(num_tokens - batch)
    if not 0 <= took <= MOST_STEP_MS:
        _refuse(phase, took, f"sequences {batch}, tokens {num_tokens - batch}")
    return took


def _refuse(phase: Instance, took: float, step: str) -> NoReturn:
    raise InvalidRequest(
        f"the coefficients of {phase.degree} make a step ({step}) take {took:g} ms: "
        f"none takes less than no time, or more than {MOST_STEP_MS:g} ms"
    )


def _latency(job: _Job) -> Latency:
    decode_ms = job.end_ms - job.first_ms
    num = job.arrival.output_len
    return Latency(job.first_ms - job.arrival.at_ms, decode_ms, decode_ms / num if num else 0.0)
