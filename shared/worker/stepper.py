"""The step loop: plan -> run -> commit, continuous batching over all that a worker computes.

Iteration-level scheduling (Orca, OSDI'22) is the scheduler core's; this shell runs its plans and
hands each step's tokens on in one call. Prompts for other workers, prompts for here and answers may
share a step. It is woken by events and never polls. It knows no gateway and no transfer: what a
step is for knows its ``StepSink``.

While one step runs the next is planned and given to the compute thread, which goes from one to the
other by itself (bench/engine has what that is worth):

    compute thread   |==== step n ====|==== step n+1 ====|==== step n+2
    loop                tokens of n-1    tokens of n        tokens of n+1
                        plan n+1         plan n+2           plan n+3

A sequence that joins during step n still runs in n+1: until that has begun it is taken back and
planned again. Where a plan needs more than tokens (prompt chunks, a full pool, penalties), the loop
waits for the results first, as the drawing without its overlap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Protocol

from shared.engine.worker import BegunStep, ComputeRunner, StepDone
from shared.errors import MeshError, Retry, WorkerLost
from shared.failpoints import failpoint
from shared.predict.moving_mean import MovingMean
from shared.schedule.plan import Failure, NewToken, StepPlan
from shared.schedule.scheduler import Scheduler
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.worker import WorkerMetrics
from shared.worker.pusher import PushHandle


class StepSink(Protocol):
    """Who owns the sequences; every call is on the loop and returns at once."""

    def admitted(self, sequences: Sequence[TokenSequence]) -> None:
        """These got blocks, for the first time or again: their prompts are computed from now on."""
        ...

    def announce(self, plan: StepPlan) -> Sequence[PushHandle]:
        """This step is about to run: say which pushes follow its layers."""
        ...

    def step_done(
        self, tokens: Sequence[NewToken], pushes: Sequence[PushHandle], done: StepDone | None
    ) -> None:
        """A step's new tokens, in row order; what was announced of it, and when its layers were
        written. Blocks may have come free."""
        ...

    def sequences_failed(self, failures: Sequence[Failure]) -> None:
        """These can never run on; their blocks are free."""
        ...

    def rests(self) -> None:
        """No step runs until something changes: nobody is here, or nobody has room."""
        ...

    def fail_all(self, error: MeshError) -> None:
        """Nothing will run any more."""
        ...


class Stepper:
    """The loop. ``changed`` and ``wake`` are synchronous and allowed at any time.

    on_step: told of every step and for how long it kept the next one waiting: what the loop does
    around it counts, which is felt where steps are short. look_ahead: plan a step while the one
    before it runs. metrics: of a step that gives answers tokens, and of one that has prompts alone.
    """

    def __init__(
        self,
        *,
        compute: ComputeRunner,
        scheduler: Scheduler,
        metrics: WorkerMetrics,
        prompt_metrics: WorkerMetrics | None = None,
        sink: StepSink,
        on_step: Callable[[StepPlan, float], None],
        look_ahead: bool = True,
    ) -> None:
        self._compute = compute
        self._scheduler = scheduler
        self._metrics = metrics
        self._prompt_metrics = prompt_metrics or metrics
        self._sink = sink
        self._on_step = on_step
        self._look_ahead = look_ahead
        # The device may have gone on from the first to the second: the loop hears of it later.
        self._running: _Step | None = None
        self._began_at = 0.0
        self._next: _Step | None = None
        self._is_to_plan_next = False
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._step_s = MovingMean()

    def changed(self) -> None:
        """A sequence was added or aborted: plan the next step again, once for all who come and go
        in this turn."""
        self._wake.set()
        self._withdraw()
        if self._running is not None and not self._is_to_plan_next:
            self._is_to_plan_next = True
            asyncio.get_running_loop().call_soon(self._plan_next)

    def wake(self) -> None:
        """Blocks came free: sequences that lack room may run."""
        self._wake.set()

    async def quiet(self) -> None:
        """Wait until no step runs. After the last answer's end one may, with a row too far."""
        await self._quiet.wait()

    def running(self) -> tuple[StepPlan, float] | None:
        """Return the step that runs and the seconds since it began; None if none does."""
        if self._running is None:
            return None
        return self._running.plan, asyncio.get_running_loop().time() - self._began_at

    @property
    def step_s(self) -> float:
        """Moving mean of the step time, in seconds."""
        return self._step_s.value

    async def run(self) -> NoReturn:
        """Step until cancelled.

        Raises EngineFailed, or another error that no request is to blame for: the sink has been
        told, and what it holds may be computed elsewhere; the process should end.
        """
        loop = asyncio.get_running_loop()
        self._began_at = loop.time()
        try:
            while True:
                if self._running is None and not self._begin():
                    self._quiet.set()
                    await self._wake.wait()
                    self._wake.clear()
                    self._began_at = loop.time()
                    continue
                await self._step()
        except MeshError as error:
            # Such an error says that trying again is no use. That is true of a bad request, not of
            # a bug here.
            is_bug = error.retry is Retry.NEVER
            self._sink.fail_all(WorkerLost(f"a worker ended: {error}") if is_bug else error)
            raise
        finally:
            self._withdraw()
            self._running = None
            self._quiet.set()

    def _begin(self) -> bool:
        """Begin a step if there is anything to compute."""
        plan = self._scheduler.plan()
        if plan.preempted:
            self._metrics.preempted(len(plan.preempted))
        if plan.admitted:
            self._sink.admitted(plan.admitted)
        if plan.failed:
            self._sink.sequences_failed(plan.failed)
        if plan.is_empty:
            self._sink.rests()
            return False
        pushes = self._sink.announce(plan)

        def layers_ready(num_layers: int) -> None:
            for push in pushes:
                push.layers_ready(num_layers)
            failpoint("prefill.mid_push")

        begun = self._compute.begin(plan.rows, (), layers_ready if pushes else None)
        self._running = _Step(plan, begun, pushes)
        self._quiet.clear()
        return True

    async def _step(self) -> None:
        """Wait for the step that runs, and hand its tokens on."""
        self._plan_next()
        assert self._running is not None
        plan, step, pushes = self._running
        results = await step.results()
        # As in the scheduler's commit: what was planned ahead runs now, and is not taken back.
        self._running, self._next = self._next, None
        now = asyncio.get_running_loop().time()
        seconds, self._began_at = now - self._began_at, now
        outcome = self._scheduler.commit(plan, results)
        if plan.num_decode_rows:
            failpoint("decode.mid_decode")
        if outcome.failed:
            self._sink.sequences_failed(outcome.failed)
        # Before what is only counted: clients wait for the tokens.
        self._sink.step_done(outcome.tokens, pushes, step.done if pushes else None)
        self._on_step(plan, seconds)
        self._step_s.add(step.seconds)
        metrics = self._metrics if plan.num_decode_rows else self._prompt_metrics
        metrics.step_seconds.observe(step.seconds)
        metrics.step_rows.inc(len(plan.rows))
        metrics.step_tokens.inc(plan.num_decode_rows + plan.num_prefill_tokens)

    # --- the step after the running one ----------------------------------------------------------

    def _plan_next(self) -> None:
        self._is_to_plan_next = False
        if not self._look_ahead or self._running is None or self._next is not None:
            return
        plan = self._scheduler.plan_next()
        if plan is not None:
            self._next = _Step(plan, self._compute.begin(plan.rows, plan.to_come))

    def _withdraw(self) -> None:
        """Take the next step back, if there is one and it does not run yet."""
        if self._next is not None and self._next.begun.withdraw():
            self._next = None
            self._scheduler.withdraw()


class _Step(NamedTuple):
    plan: StepPlan
    begun: BegunStep
    pushes: Sequence[PushHandle] = ()
