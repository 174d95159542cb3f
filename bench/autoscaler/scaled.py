"""A simulated mesh whose number of workers changes: the autoscaler of production decides, workers
start when they have started, and end when they have drained."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from services.gateway.core.admission.overload import OverloadMode
from services.gateway.core.admission.tenants import Terms
from services.gateway.core.routing.pools import Pool
from services.gateway.core.scaling.autoscaler import decide
from services.gateway.core.scaling.scaling import (
    AddWorkers,
    Borrow,
    Decision,
    Kind,
    Memory,
    MeshSeen,
    MoveHome,
    RefuseEarly,
    RemoveWorkers,
    Rules,
    seen_workers,
)
from services.gateway.core.scaling.traffic import TrafficMeter
from services.sim.engine import TimedEngine
from services.sim.members import Member
from services.sim.mesh import CoreAnswer, CoreMesh
from services.sim.orders import WorkerSize
from services.sim.worker import CoreWorker
from shared.config import GatewayConfig
from shared.errors import MeshError
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.telemetry.definitions import tpot
from shared.worker_status import WorkerStatus

LOOK_S: Final = 5.0
"""Between two decisions, as in production."""

_HOMES = {Kind.PREFILL: Pool.PROMPT.value, Kind.DECODE: Pool.TOKEN.value}


class Change(NamedTuple):
    """A number of wanted workers changed."""

    at_s: float
    kind: Kind
    before: int
    after: int
    reason: str


@dataclass(slots=True)
class PaidDevice:
    """A device that is paid for: from the order of its worker until that has ended."""

    began_s: float
    ended_s: float | None = None


class ScaledMesh(CoreMesh):
    """A mesh that an autoscaler looks at every ``LOOK_S``.

    startup_s: from the order of a worker until it has joined. acts: whether its orders are carried
    out. movable: whether homes may change.
    """

    report_s = gather_s = 1.0

    def __init__(
        self,
        spec: ModelSpec,
        layout: KvLayout,
        engine: TimedEngine,
        size: WorkerSize,
        *,
        rules: Rules,
        startup_s: float,
        acts: bool = True,
        movable: bool = False,
    ) -> None:
        super().__init__(
            spec,
            layout,
            lambda _: engine,
            size,
            policy="least_loaded",
            max_running=1 << 16,
            max_pending_tokens=GatewayConfig().max_pending_tokens,
            skips=True,
        )
        self._prompt_steps, self._rules = engine.fits()[0], rules
        self._startup_s, self._movable = startup_s, movable
        self._step_tokens = size.token_budget
        self._acts = acts
        self._starting: Counter[Kind] = Counter()
        self._draining: dict[CoreWorker, PaidDevice] = {}
        self._leases: dict[CoreWorker, PaidDevice] = {}
        self.devices: list[PaidDevice] = []
        self.changes: list[Change] = []
        self.orders: list[tuple[float, object]] = []
        self.decisions: list[tuple[float, Decision]] = []
        self._memory = Memory()
        limits = rules.limits
        self._terms = Terms(ttft_s=limits.ttft_s, tpot_s=limits.tpot_s)
        self.meter = TrafficMeter(limits.ttft_s, limits.tpot_s, 0.0)
        self.on_end = self._ended

    # --- workers ----------------------------------------------------------------------------------

    def begin(self, kind: Kind, lease: PaidDevice | None = None) -> CoreWorker:
        """A worker joins."""
        core = self.start(kind.value, serves_both=self._movable)
        if lease is None:
            lease = PaidDevice(self.clock.now)
            self.devices.append(lease)
        self._leases[core] = lease
        return core

    def watch(self) -> None:
        """Let the autoscaler look from now on."""
        self.clock.after(LOOK_S, self._look_at_load)

    def report_of(self, member: Member, load: WorkerStatus) -> WorkerStatus:
        """See CoreMesh."""
        return replace(load, is_draining=member.core in self._draining)

    def device_s(self, until: float) -> float:
        """Return the seconds of devices that were paid for until then."""
        return sum(
            min(until, until if it.ended_s is None else it.ended_s) - it.began_s
            for it in self.devices
            if it.began_s < until
        )

    def _retire(self, core: CoreWorker) -> None:
        if core not in self._draining:
            self._draining[core] = self._leases[core]
            self.members[core.incarnation].reporter.report()
            self._look_at_drain(core)

    def _look_at_drain(self, core: CoreWorker) -> None:
        member = self.members[core.incarnation]
        if not core.is_idle or any(member.worker.orders.values()):
            self.clock.after(LOOK_S, lambda: self._look_at_drain(core))
            return
        self._draining[core].ended_s = self.clock.now
        self.end(core)

    # --- requests ---------------------------------------------------------------------------------

    def ask(
        self, prompt: tuple[int, ...], terms: Terms | None = None, **more: object
    ) -> CoreAnswer:
        """See CoreMesh. Every request has the mesh's limits."""
        self.meter.asked(self.clock.now)
        return super().ask(prompt, terms or self._terms, **more)

    def _ended(self, answer: CoreAnswer) -> None:
        times = answer.token_times
        self.meter.ended(
            self.clock.now,
            is_whole=answer.error is None,
            has_left=False,
            num_attempts=len(answer.decisions),
            steps=self._prompt_steps,
            step_tokens=self._step_tokens,
            num_prompt=len(answer.prompt),
            num_cached=0,
            num_output=len(times),
            ttft_s=times[0] - answer.asked_at if times else None,
            tpot_s=tpot(times[0], times[-1], len(times)) if times else 0.0,
        )

    # --- the autoscaler ---------------------------------------------------------------------------

    def _look_at_load(self) -> None:
        now = self.clock.now
        seen = MeshSeen(
            seen_workers(self.table.workers, now),
            self.meter.traffic(now),
            self.meter.attainment(now),
            num_waiting=self.num_waiting,
        )
        decision = decide(seen, self._memory, self._rules, now)
        before, self._memory = self._memory.targets, decision.memory
        self.decisions.append((now, decision))
        for kind, num in decision.wanted.items():
            if before and num != before[kind]:
                reason = decision.memory.reasons.get(kind, "")
                self.changes.append(Change(now, kind, before[kind], num, reason))
        if self._acts:
            for order in decision.orders:
                self._carry_out(order)
        self.clock.after(LOOK_S, self._look_at_load)

    def _carry_out(self, order: object) -> None:
        now = self.clock.now
        match order:
            case RefuseEarly(on):
                self.overload.mode = OverloadMode.EARLY if on else OverloadMode.OFF
                self.orders.append((now, order))
            case Borrow(on):
                self.policy.moves_roles = on
                self.orders.append((now, order))
            case MoveHome(worker, to):
                if not self._orders:  # one after the other, as in production; it comes again
                    self.orders.append((now, order))
                    with contextlib.suppress(MeshError):
                        self.move(self.members[worker].core, _HOMES[to])
            case AddWorkers(kind, num):
                for _ in range(num - self._starting[kind]):
                    self._order(kind)
            case RemoveWorkers(_, workers):
                for worker in workers:
                    self._retire(self.members[worker].core)
            case _:
                raise AssertionError(order)

    def _order(self, kind: Kind) -> None:
        lease = PaidDevice(self.clock.now)
        self.devices.append(lease)
        self._starting[kind] += 1

        def joined() -> None:
            self._starting[kind] -= 1
            self.begin(kind, lease)

        self.clock.after(self._startup_s, joined)
