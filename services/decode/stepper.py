"""The decode loop: plan -> run -> commit, continuous batching over every sequence that has joined.

Iteration-level scheduling (Orca, OSDI'22) is the scheduler core's; this shell runs its plans and
hands each step's tokens on in one call. On a colocated worker the same steps carry prompt chunks.
It is woken by events and never polls. It knows no gateway and no transfer: where tokens go is its
``TokenSink``, how sequences come is ``reservation.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from shared.engine.worker import ComputeRunner
from shared.errors import MeshError
from shared.failpoints import failpoint
from shared.schedule.plan import Failure, NewToken, StepPlan
from shared.schedule.scheduler import Scheduler
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.worker import DecodeMetrics, MovingMean


class TokenSink(Protocol):
    """Who owns the sequences; every call is on the loop and returns at once."""

    def admitted(self, sequences: Sequence[TokenSequence]) -> None:
        """These got blocks, for the first time or again: their prompts are computed from now on."""
        ...

    def step_done(self, tokens: Sequence[NewToken]) -> None:
        """A step's new tokens, in row order. Blocks may have come free."""
        ...

    def sequences_failed(self, failures: Sequence[Failure]) -> None:
        """These can never run on; their blocks are free."""
        ...

    def engine_failed(self, error: MeshError) -> None:
        """Nothing will run any more."""
        ...


class Stepper:
    """The loop. ``add*`` and ``abort`` are synchronous and allowed at any time.

    on_step: told of every step and its seconds.
    """

    def __init__(
        self,
        *,
        compute: ComputeRunner,
        scheduler: Scheduler,
        metrics: DecodeMetrics,
        sink: TokenSink,
        on_step: Callable[[StepPlan, float], None] | None = None,
    ) -> None:
        self._compute = compute
        self._scheduler = scheduler
        self._metrics = metrics
        self._sink = sink
        self._on_step = on_step
        self._wake = asyncio.Event()
        self._step_s = MovingMean()

    def add(self, sequence: TokenSequence) -> None:
        """Take a sequence whose KV is placed: it runs from the next step on."""
        self._scheduler.add_ready(sequence)
        self._wake.set()

    def add_prompt(self, sequence: TokenSequence) -> None:
        """Take a sequence whose prompt is computed here, between the steps of those that run.

        Raises NoCapacity: it does not fit into the whole pool.
        """
        self._scheduler.add(sequence)
        self._wake.set()

    def abort(self, sequence: TokenSequence) -> None:
        """Never run it again; its blocks are free now, or when the running step ends."""
        self._scheduler.abort(sequence)
        self._wake.set()

    def wake(self) -> None:
        """Blocks came free: sequences that lack room may run."""
        self._wake.set()

    @property
    def step_s(self) -> float:
        """Moving mean of the step time, in seconds."""
        return self._step_s.value

    async def run(self) -> NoReturn:
        """Step until cancelled.

        Raises EngineFailed: the sink has been told; the process should end.
        """
        while True:
            plan = self._scheduler.plan()
            self._metrics.preemptions.inc(len(plan.preempted))
            if plan.admitted:
                self._sink.admitted(plan.admitted)
            if plan.failed:
                self._sink.sequences_failed(plan.failed)
            if plan.is_empty:
                await self._wake.wait()
                self._wake.clear()
                continue
            try:
                await self._step(plan)
            except MeshError as error:
                self._sink.engine_failed(error)
                raise

    async def _step(self, plan: StepPlan) -> None:
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        results = await self._compute.step(plan.rows)
        step_s = loop.time() - began_at
        outcome = self._scheduler.commit(plan, results)
        failpoint("decode.mid_decode")
        self._sink.step_done(outcome.tokens)
        if self._on_step is not None:
            self._on_step(plan, step_s)
        self._step_s.add(step_s)
        self._metrics.step_seconds.observe(step_s)
        self._metrics.step_rows.inc(len(plan.rows))
        self._metrics.step_tokens.inc(plan.num_decode_rows + plan.num_prefill_tokens)
