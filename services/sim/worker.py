"""One worker of cores alone: scheduler, block pool, leases, lives, both ends of transfers. No
asyncio, socket, task or thread: a heap of events is all that moves. What stands here is what the
shells of ``shared/worker`` perform, and nothing that decides.

With ``skips`` equal decode steps are one event (``Scheduler.runway``, ``advance``). Whatever else
happens on the worker has it catch up first, so that everybody sees what stepping would have shown;
tokens have the times of their steps, and are told at their answer's end, or when somebody looks.
Events of one instant may come in another order (two workers whose steps are equally long).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

from services.sim.clock import EventClock
from services.sim.ends import KvEnds
from services.sim.engine import ANSWER_TOKEN, DoneWork, TimedEngine
from services.sim.orders import SimJob, Word, WorkerSize, slot_of
from services.sim.steps import LEAST_SKIPPED, MOST_SKIPPED, EqualSteps, Stages
from services.sim.tier_copies import TierCopies
from services.sim.token_times import StepEnds
from shared.errors import MeshError
from shared.ids import Incarnation
from shared.kv.journal import Journal
from shared.kv.layout import KvLayout
from shared.kv.pool import BlockPool
from shared.model_spec import ModelSpec
from shared.request import FinishReason
from shared.schedule.budget import budget_of
from shared.schedule.plan import NewToken, StepPlan
from shared.schedule.queue_time import queue_left_s
from shared.schedule.runs import num_blocks_for
from shared.schedule.scheduler import SchedulePolicy, Scheduler
from shared.schedule.sequence import Sequence
from shared.transfer.messages import TransferKey
from shared.transfer.orders import Order
from shared.worker.core import life as lives
from shared.worker.core.lease import (
    AbortReceive,
    GrantLease,
    LeasePolicy,
    LeaseState,
    MakeRoom,
    Refuse,
    RefuseOpen,
)
from shared.worker.core.lease import Effect as LeaseEffect
from shared.worker.core.leases import Leases
from shared.worker.core.life import Life, LifeEvent, LifeState, Task
from shared.worker.core.lower_tiers import prompt_times


class CoreWorker:
    """One worker, for prompts, answers and whole requests alike. tell: a word to the gateway.
    is_mixed: it computes whole requests, too. skips: see the module's text."""

    def __init__(
        self,
        incarnation: int,
        clock: EventClock,
        spec: ModelSpec,
        layout: KvLayout,
        engine: TimedEngine,
        tell: Callable[[CoreWorker, Word], None],
        *,
        size: WorkerSize,
        pushes: bool = True,
        is_mixed: bool = False,
        skips: bool = False,
    ) -> None:
        self.incarnation = Incarnation(incarnation)
        self.clock = clock
        self.is_alive = True
        self.engine, self._fit = engine, engine.fits()[0]
        self.size = size
        self.pool = BlockPool(
            size.num_blocks, size.block_size, model_key=spec.fingerprint + layout.digest
        )
        self.journal = Journal(size.block_size)
        self.leases = Leases(self.pool, LeasePolicy())
        self.jobs: dict[tuple[TransferKey, Task], SimJob] = {}
        self._budget = budget_of(
            size.token_budget,
            together=size.batch_tokens or size.token_budget,
            pushes=pushes,
            tbt_target_s=size.tbt_target_s if is_mixed else None,
            predict=self.predict,
            is_expecting=lambda: self.leases.is_expecting,
            has_answers=lambda: bool(self.num_answers),
        )
        policy = SchedulePolicy(
            max_model_len=spec.max_model_len,
            eos_token_ids=spec.eos_token_ids,
            max_running=size.max_running,
            budget=self._budget,
        )
        self.scheduler = Scheduler(self.pool, policy)
        self.num_prompts = self.num_answers = 0
        self.on_change: Callable[[float], None] = lambda at: None
        self.ends = KvEnds(self, layout, size)
        has_prompts = pushes or is_mixed
        self.tiers = TierCopies(self, layout, size) if size.tiers and has_prompts else None
        self.work = DoneWork()
        self._stages = Stages(clock, size.num_stages)
        self._num_layers = layout.num_layers
        self._tell = tell
        self._skips = skips and engine.times is not None
        self.jobs_of: dict[Sequence, SimJob] = {}
        self._stepping: tuple[StepPlan, float] | None = None
        self._is_due = False
        self._run: EqualSteps | None = None
        self._run_ends = array("d")
        self._most_skipped = LEAST_SKIPPED
        self._untold: list[SimJob] = []
        self._looks_at = math.inf

    def predict(self, num_tokens: int, num_attended: int) -> float:
        return self._fit.seconds(num_tokens, num_attended) if self._fit.is_known else 0.0

    # --- orders -----------------------------------------------------------------------------------

    def take(self, task: Task, order: Order) -> None:
        self.catch_up(ends_run=task is not Task.ANSWER)
        now, key = self.clock.now, order.key
        life = Life(task, has_push=task is Task.PROMPT and order.peer is not None)
        job = self.jobs[key, slot_of(task)] = SimJob(order, life, now)
        self.num_prompts += life.is_prompt
        self.num_answers += task in (Task.ANSWER, Task.WHOLE)
        if task in (Task.ANSWER, Task.PREFIX):
            assert order.peer is not None
            job.lease, effects = self.leases.reserve(
                key, order.item, order.peer, now=now, wait_s=order.wait_s
            )
            self.do_leases(effects)
            if job.lease.state is LeaseState.WAITING:
                self._arm(self.leases.next_tick_at)
            self._end_run_for_room()
            return
        job.sequence = Sequence(order.item)
        self.jobs_of[job.sequence] = job
        if task is Task.WHOLE:
            self.scheduler.add(job.sequence)
        else:
            self.scheduler.add_prefill(job.sequence)
            if order.peer is not None:
                self.ends.begin(key, order.peer, len(order.item.token_ids))
        if self.tiers is None or not self.tiers.begin(job):
            self.ends.await_prefix(job)
        self.on_change(self.clock.now)
        self.wake()

    def cancel(self, key: TransferKey, task: Task) -> None:
        """The gateway wants no more, or nobody waits for a prefix."""
        if (job := self.jobs.get((key, slot_of(task)))) is not None:
            self.handle(job, LifeEvent.CANCELLED)

    def taker(self, key: TransferKey) -> SimJob:
        """Return who takes the KV of this transfer, which has begun."""
        return self.jobs[key, Task.ANSWER]

    def handle(self, job: SimJob, event: LifeEvent, error: MeshError | None = None) -> None:
        self.catch_up()
        key, was_prompt = job.order.key, job.life.is_prompt
        effects = job.life.handle(event, error)
        self.num_prompts += job.life.is_prompt - was_prompt
        for effect in effects:
            match effect:
                case lives.ReportFailed(why):
                    if job.life.task is Task.PREFIX:
                        self.ends.fetch_ended(key)
                    else:
                        self._say(job, "failed", error=why)
                case lives.ReportDone():
                    self._say(job, "done")
                case lives.StopCompute():
                    assert job.sequence is not None
                    # Its blocks stay until the commit of a step that uses them; a run has none.
                    self._step_alone()
                    self.scheduler.abort(job.sequence)
                case lives.AbortPush(why):
                    self.ends.do(self.ends.senders.give_up(key, why, self.clock.now))
                case lives.CancelLease(why):
                    lease = job.its_lease
                    self.do_leases(self.leases.cancel(lease, why, now=self.clock.now))
                    if lease.state is LeaseState.RELEASED:
                        self.handle(job, LifeEvent.SETTLED)
                case lives.Close():
                    self._close(job)

    def _close(self, job: SimJob) -> None:
        task = job.life.task
        del self.jobs[job.order.key, slot_of(task)]
        self.num_answers -= task in (Task.ANSWER, Task.WHOLE)
        if task is Task.PREFIX:
            self.ends.fetch_ended(job.order.key)
        if job.sequence is not None:
            del self.jobs_of[job.sequence]
            if task is Task.PROMPT:
                self.scheduler.release(job.sequence)
        self.ends.leave_prefix(job)
        self.blocks_freed()

    def blocks_freed(self) -> None:
        """What somebody held may be what others lack."""
        self.grant_waiting()
        self.wake()

    def grant_waiting(self) -> None:
        """Grant what fits now."""
        self.do_leases(self.leases.grant_waiting(now=self.clock.now))

    def _say(self, job: SimJob, what: str, token: NewToken | None = None, **more: Any) -> None:
        self._tell(self, Word(job.order.stream_id, what, token, **more))

    # --- leases -----------------------------------------------------------------------------------

    def do_leases(self, effects: list[LeaseEffect]) -> None:
        """Perform what the leases decided; their worker has caught up before."""
        for effect in effects:
            match effect:
                case GrantLease(lease):
                    job = self.taker(lease.key)
                    if job.life.task is Task.PREFIX:
                        self.ends.prefix_granted(lease.key)
                    else:
                        self._say(job, "granted")
                    self._arm(lease.expires_at)
                    self.ends.do(self.ends.receivers.lease_changed(lease.key, self.clock.now))
                case Refuse(lease, error):
                    self.handle(self.taker(lease.key), LifeEvent.FAILED, error)
                case RefuseOpen(lease, error) | AbortReceive(lease, error):
                    self.ends.do(self.ends.receivers.give_up(lease.key, error, self.clock.now))
                case MakeRoom(num_tokens, error):
                    self.ends.do(self.ends.senders.give_way(num_tokens, error, self.clock.now))
        self.on_change(self.clock.now)

    def _arm(self, when: float | None) -> None:
        """See to it that leases are looked at then or before: see ``Reservations``."""
        if when is not None and when < self._looks_at:
            self._looks_at = when
            self.clock.at(when, lambda: self._tick_leases(when))

    def _tick_leases(self, when: float) -> None:
        if when != self._looks_at or not self.is_alive:
            return
        self._looks_at = math.inf
        self.catch_up()
        self.do_leases(self.leases.tick(now=self.clock.now))
        self._arm(self.leases.next_tick_at)

    # --- steps ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Step behind this instant, if no step runs: whoever comes together shares one."""
        if not (self._is_due or self._stepping or self._run):
            self._is_due = True
            self.clock.after(0.0, self._step)

    def _step(self) -> None:
        """Plan a step if none runs; it is computed at its end."""
        self._is_due = False
        if self._stepping or self._run or not self.is_alive:
            return
        if self._skips and (num_steps := self.scheduler.runway()):
            self._begin_run(min(num_steps, self._most_skipped))
            return
        # Before this plan's tokens: a run's first is counted back from the newest (``_tell_run``).
        self._tell_runs()
        plan = self.scheduler.plan()
        # Before anything follows from it: blocks that come free begin no second one.
        self._stepping = None if plan.is_empty else (plan, self.clock.now)
        for sequence in plan.admitted:
            job = self.jobs_of[sequence]
            # A preempted one is admitted again, and has begun before.
            if job.life.state is LifeState.QUEUED:
                job.started_at = self.clock.now
                self.handle(job, LifeEvent.ADMITTED)
        for failure in plan.failed:
            self.handle(self.jobs_of[failure.sequence], LifeEvent.FAILED, failure.error)
        if plan.is_empty:
            if not self._is_due:  # else who failed made room
                self.leases.rests(now=self.clock.now)
                self._arm(self.leases.next_tick_at)
            return
        self.leases.steps()
        pushes = self.ends.announce(plan)
        seconds = self.engine.step_seconds(plan.rows)
        self.work.note(seconds, self.pool.num_held)
        if pushes and self.engine.spreads_layers:
            for layer in range(1, self._num_layers):
                at_s = seconds * layer / self._num_layers
                self.clock.after(at_s, lambda num=layer: self.ends.layers_ready(pushes, num))
        self.clock.after(seconds, lambda: self._finish(plan, pushes, seconds))

    def _finish(self, plan: StepPlan, pushes: list[TransferKey], seconds: float = 0.0) -> None:
        if not self.is_alive:
            return
        self._stepping = None
        results = self.engine.step(plan.rows, lambda num: self.ends.layers_ready(pushes, num + 1))
        if self.engine.spreads_layers:
            self.ends.layers_ready(pushes, self._num_layers)
        outcome = self.scheduler.commit(plan, results)
        self._is_due = True  # below, as soon as all of this one is told
        self.ends.computed(pushes)
        self._stages.leave(seconds, [partial(self._sampled, token) for token in outcome.tokens])
        self.grant_waiting()
        self._step()

    def _sampled(self, token: NewToken) -> None:
        if (job := self.jobs_of.get(token.sequence)) is None:
            return  # cancelled in a later stage
        is_first = job.life.state is LifeState.COMPUTING
        if is_first:
            self._say(job, "first", token, prompt=prompt_times(job, self.clock.now))
        else:
            self._say(job, "token", token)
        if token.finish_reason is not FinishReason.NONE:
            self.handle(job, LifeEvent.ENDED)
        elif is_first and job.life.task is Task.WHOLE:
            self.handle(job, LifeEvent.BEGUN)
        elif is_first and job.order.peer is None:
            self.handle(job, LifeEvent.ENDED)
        elif is_first:
            self.handle(job, LifeEvent.SAMPLED)
            self.ends.commit(job.order.key, token.token_id)

    # --- steps of which nothing is to be decided --------------------------------------------------

    def _begin_run(self, num_steps: int) -> None:
        times, running = self.engine.times, self.scheduler.running
        assert times is not None
        self.leases.steps()
        rows, context, num_told = len(running), 0, len(self._run_ends)
        for sequence in running:
            context += len(sequence.tokens)
            job = self.jobs_of[sequence]
            if job.told_until < 0:
                job.told_until = num_told
                self._untold.append(job)
        run = self._run = EqualSteps.begin(times, self.clock.now, num_steps, rows, context)
        self._end_run_at(run, run.ends[-1])
        self.on_change(run.ends[0])

    def _end_run_at(self, run: EqualSteps, at: float) -> None:
        self.clock.at(at, lambda: self._end_run(run, at))

    def _end_run(self, run: EqualSteps, at: float) -> None:
        # Caught up since: the step that ran then is the last, and has an event of its own.
        if self._run is not run or run.ends[-1] != at or not self.is_alive:
            return
        self._run, self._is_due = None, True
        self._most_skipped = min(2 * self._most_skipped, MOST_SKIPPED)
        self._take_steps(run, len(run.ends))
        self.grant_waiting()
        self._step()

    def catch_up(self, *, ends_run: bool = True) -> None:
        """Have done what has been skipped; the step that runs now is the last of its run, unless
        whoever comes changes nothing of the batch."""
        run = self._run
        if run is None or run.is_last:
            return
        if num_done := run.num_done(self.clock.now):
            self._take_steps(run, num_done)
        if not run.has_blocks:
            self.scheduler.begin_step(run.num_rows)
            run.has_blocks = True
            self.work.note(0.0, self.pool.num_held, 0)
        if ends_run:
            self._shorten(run)

    def _end_run_for_room(self) -> None:
        """Blocks were promised: the run goes on if it has as many as its rows could need at most,
        and nobody waits who is asked at a step's end."""
        if (run := self._run) is not None:
            most = run.num_rows * (len(run.ends) // self.pool.block_size + 1)
            if most > self.pool.num_available or self.leases.has_waiting:
                self._shorten(run)

    def _shorten(self, run: EqualSteps) -> None:
        if len(run.ends) > 1:
            del run.ends[1:]
            self._most_skipped = LEAST_SKIPPED
            self._end_run_at(run, run.ends[0])

    def _step_alone(self) -> None:
        """The step that runs now is an ordinary one again, and all that came before it is told."""
        run = self._run
        if run is None:
            return
        self.catch_up()
        self._run = None
        self._tell_runs()
        plan = self.scheduler.plan()
        self._stepping = plan, run.began_at
        self.work.note(run.ends[0] - run.began_at, 0)
        self.clock.at(run.ends[0], lambda: self._finish(plan, []))

    def tell_all(self) -> None:
        """Catch up, and tell the gateway what it would know by now."""
        self.catch_up()
        self._tell_runs()

    def _take_steps(self, run: EqualSteps, num_steps: int) -> None:
        times, held = run.ends[:num_steps], 0
        if not run.has_blocks or num_steps > 1:
            held = self.pool.num_held + num_blocks_for(num_steps, self.scheduler.running, self.pool)
        # After ``held``: an answer that ends gives its blocks back, and held them to the last step.
        ended = self.scheduler.advance([[ANSWER_TOKEN] * num_steps] * run.num_rows)
        self._run_ends.extend(times)
        self.work.note(times[-1] - run.began_at, held, num_steps)
        run.began_at, run.has_blocks = times[-1], False
        del run.ends[:num_steps]
        for job in [self.jobs_of[sequence] for sequence in ended]:
            self._untold.remove(job)
            self._tell_run(job, FinishReason.LENGTH)
            self.handle(job, LifeEvent.ENDED)

    def _tell_runs(self) -> None:
        """Tell every answer's tokens that nobody has been told of yet."""
        for job in self._untold:
            self._tell_run(job, FinishReason.NONE)
        self._untold.clear()

    def _tell_run(self, job: SimJob, finish_reason: FinishReason) -> None:
        steps = StepEnds(self._run_ends, job.told_until, len(self._run_ends))
        job.told_until = -1
        if steps.num:
            sequence = job.sequence
            assert sequence is not None
            index = sequence.num_output_tokens - steps.num
            first = NewToken(sequence, ANSWER_TOKEN, index, finish_reason, None, ())
            self._say(job, "run", first, steps=steps)

    # --- looking at it ----------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Blocks that are held, what the running step takes included."""
        run, num_held = self._run, self.pool.num_held
        if run is None or run.is_last:
            return num_held
        num_done = run.num_done(self.clock.now)
        return num_held + num_blocks_for(num_done + 1, self.scheduler.running, self.pool)

    @property
    def step_ends_at(self) -> float:
        """When the step ends that runs among equal ones; 0 = there are none."""
        return 0.0 if self._run is None else self._run.step_ends_at(self.clock.now)

    def queue_s(self) -> float:
        """Predict when every prompt that is here now is computed."""
        if not self.scheduler.has_prompts:
            return 0.0
        done_s = 0.0
        if self._stepping is not None and self._stepping[0].num_prefill_tokens:
            plan, began_at = self._stepping
            takes_s = self.predict(plan.num_tokens, plan.num_attended)
            done_s = min(self.clock.now - began_at, takes_s)
        return queue_left_s(self.scheduler.unfinished, self._budget, self.predict, done_s)

    @property
    def is_idle(self) -> bool:
        """Whether it holds nothing: no order, no block, no slot."""
        return not (self.jobs or self._stepping or self._run or self.pool.num_held)

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.leases.check_integrity()
        self.ends.check()
        tables = [*self.scheduler.tables(), *self.leases.tables(), *self.ends.tables()]
        if self.tiers is not None:
            self.tiers.core.check_integrity()
            tables += self.tiers.core.tables()
        self.pool.check_integrity(tables)

    def join(self, job: SimJob, first_token: int) -> None:
        self.catch_up()
        job.sequence = self.leases.join(job.its_lease, first_token)
        self.jobs_of[job.sequence] = job
        self.handle(job, LifeEvent.BEGUN)
        self.scheduler.add_ready(job.sequence)
        self._say(job, "joined")
        self.on_change(self.clock.now)
        if self.leases.has_waiting:  # for room; asked at a step's end, it may begin as this prompt
            self._most_skipped = 1
        self.wake()

    def release(self, job: SimJob) -> None:
        """Nothing writes the blocks of a lease any more."""
        self.catch_up()
        effects = self.leases.settled(job.its_lease, now=self.clock.now)
        self.handle(job, LifeEvent.SETTLED)
        self.do_leases(effects)
