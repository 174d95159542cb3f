"""When a worker tells the gateway of itself, and what: as ``shared/membership/join.py`` does."""

from __future__ import annotations

import math
from collections.abc import Callable

from services.gateway.core.index.prefixes import PrefixReports
from services.gateway.core.worker import WorkerStatus
from services.sim.worker import CoreWorker
from shared.home import Home
from shared.ids import StreamId
from shared.kv.journal import KvChanges, Tier


class Reporter:
    """One worker's reports to the gateway. read: what arrives, after a message's way. report_s: how
    often, if there is nothing new; news within gather_s make one report."""

    def __init__(
        self,
        core: CoreWorker,
        status: Callable[[], WorkerStatus],
        read: Callable[[WorkerStatus, KvChanges | None], None],
        report_s: float,
        gather_s: float,
    ) -> None:
        self._report_s = report_s
        self.gather_s = gather_s
        self._core = core
        self._clock = core.clock
        self._status = status
        self._read = read
        self._reported_at = core.clock.now
        self._number = 0
        self._news_at = math.inf
        self._kv_interval_s = self._kv_due_at = 0.0
        core.on_change = self.changed

    def changed(self, at: float) -> None:
        """The load changes at this time: now, or with the end of the first of equal steps."""
        if at < self._news_at:
            self._news_at = at
            self._report_at(
                # Never later than it would come without news.
                min(at + self.gather_s, self._reported_at + self._report_s)
            )

    def asked(self, reports: PrefixReports) -> None:
        """The gateway wants to know what is cached here, from a snapshot on."""
        self._core.journal.subscribe("gateway", reports.granule_tokens)
        self._kv_interval_s, self._kv_due_at = reports.interval_s, 0.0
        self.changed(self._clock.now)

    def _report_at(self, when: float) -> None:
        self._number += 1
        number = self._number
        self._clock.at(when, lambda: self._due(number))

    def _due(self, number: int) -> None:
        # Events are not taken back: a report that was ordered after this one stands for it.
        if number == self._number and self._core.is_alive:
            self.report()

    def report(self) -> None:
        self._reported_at, self._news_at = self._clock.now, math.inf
        # A snapshot may take several reports (``KvChanges``).
        while True:
            status = self._status()
            changes = self._changes(status.free_blocks)
            self._clock.send(lambda it=(status, changes): self._read(*it))
            if changes is None or changes.is_whole:
                break
        # The end of each equal step changes the load, and is no event that would tell so.
        if (ends_at := self._core.step_ends_at) > 0.0:
            self.changed(ends_at)
        else:
            self._report_at(self._reported_at + self._report_s)

    def _changes(self, num_left: int) -> KvChanges | None:
        """Load goes out at once, what is cached when it is due."""
        if self._clock.now < self._kv_due_at:
            return None
        core = self._core
        if num_left < core.pool.num_idle:
            core.catch_up()  # for a step among equal ones, a cached block had to go
        changes = core.journal.report("gateway")
        if changes is not None and changes.is_whole:
            self._kv_due_at = self._clock.now + self._kv_interval_s
        return changes


def status_of(core: CoreWorker, home: Home, seen: StreamId, *, is_mixed: bool) -> WorkerStatus:
    """Return what a worker says of itself: see ``MeshWorker.load``. is_mixed: it is its own
    partner."""
    scheduled, leased = core.scheduler.statistics(), core.leases.statistics()
    sinks = core.ends.sinks  # the same object until it changes, which the gateway looks at first
    prompt_steps, answer_steps = core.engine.fits()
    num_held = core.num_held
    token_s = {} if core.tiers is None else core.tiers.core.token_s
    return WorkerStatus(
        pending_tokens=scheduled.pending_tokens,
        num_waiting=scheduled.num_waiting + leased.num_waiting,
        num_running=scheduled.num_running + scheduled.num_held,
        free_blocks=core.pool.num_blocks - num_held,
        reserved_blocks=num_held - leased.num_quarantined_blocks,
        quarantined_blocks=leased.num_quarantined_blocks,
        paired=sinks | {core.incarnation} if is_mixed else sinks,
        num_prompts=core.num_prompts,
        num_answers=core.num_answers,
        home=home.role,
        home_epoch=home.epoch,
        home_order=home.order,
        queue_s=core.queue_s(),
        step_tokens=core.size.token_budget,
        batch_tokens=core.size.batch_tokens or core.size.token_budget,
        max_running=core.size.max_running,
        prompt_steps=prompt_steps,
        answer_steps=answer_steps,
        speeds=core.ends.speeds,
        egress_bytes=core.ends.senders.pending_bytes,
        seen=seen,
        dram_token_s=token_s.get(Tier.DRAM, 0.0),
        ssd_token_s=token_s.get(Tier.SSD, 0.0),
    )
