"""Meshes as the autoscaler sees them, and one that does as it is told."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.gateway.core.scaling.autoscaler import decide
from services.gateway.core.scaling.need import Limits
from services.gateway.core.scaling.scaling import (
    AddWorkers,
    Decision,
    Kind,
    Memory,
    MeshSeen,
    MoveHome,
    RemoveWorkers,
    Rules,
    WorkerSeen,
)
from services.gateway.core.scaling.traffic import Attainment, Traffic
from shared.ids import Incarnation
from shared.predict.step_time import NO_FIT, StepFit

LOOK_S = 5.0
PROMPTS = StepFit(0.0, 1e-3, 0.0, 100)
"""A prompt of 1,000 tokens takes a second."""
ANSWERS = StepFit(0.02, 2e-3, 0.0, 100)
"""16 answers a worker within 52 ms a token."""
RULES = Rules(Limits(ttft_s=5.0, tpot_s=0.052))


def traffic(rate: float, *, prompt_s: float = 1.0, output: float = 100.0) -> Traffic:
    """Requests at an even rate, all alike."""
    return Traffic(
        arrivals_s=rate,
        recent_s=rate,
        prompts_s=(prompt_s,),
        prompt_s=prompt_s,
        prompt_square_s=prompt_s * prompt_s,
        prompt_tokens=1000.0 * prompt_s,
        output_tokens=output,
    )


def worker(
    number: int,
    kind: Kind = Kind.PREFILL,
    *,
    moves: bool = False,
    is_draining: bool = False,
    age_s: float = 0.5,
    num_held: int = 0,
    queue_s: float = 0.0,
    is_cold: bool = False,
) -> WorkerSeen:
    """One worker."""
    return WorkerSeen(
        Incarnation(number),
        kind,
        moves,
        is_draining,
        age_s,
        num_held,
        queue_s,
        NO_FIT if is_cold else PROMPTS,
        NO_FIT if is_cold else ANSWERS,
        100_000,
    )


def workers(
    num_prefill: int, num_decode: int, num_colocated: int = 0, *, moves: bool = False
) -> tuple[WorkerSeen, ...]:
    """So many of each."""
    kinds = [
        *[Kind.PREFILL] * num_prefill,
        *[Kind.DECODE] * num_decode,
        *[Kind.COLOCATED] * num_colocated,
    ]
    return tuple(worker(number, kind, moves=moves) for number, kind in enumerate(kinds, 1))


@dataclass
class ObedientMesh:
    """Workers that come so long after they were asked for, and go at once."""

    here: list[WorkerSeen]
    startup_s: float = 60.0
    rules: Rules = RULES
    look_s: float = LOOK_S
    now: float = 0.0
    memory: Memory = field(default_factory=Memory)
    coming: list[tuple[float, Kind]] = field(default_factory=list[tuple[float, Kind]])
    decisions: list[Decision] = field(default_factory=list[Decision])
    _number: int = 1000

    def look(
        self, asked: Traffic | None, judged: Attainment | None = None, *, acts: bool = True
    ) -> Decision:
        """One decision, carried out, so long after the one before."""
        self.now += self.look_s
        for at, kind in [it for it in self.coming if it[0] <= self.now]:
            self.coming.remove((at, kind))
            self._number += 1
            self.here.append(worker(self._number, kind, moves=self.here[0].moves))
        seen = MeshSeen(tuple(self.here), asked, judged or Attainment(), acts)
        decision = decide(seen, self.memory, self.rules, self.now)
        self.memory = decision.memory
        self.decisions.append(decision)
        for order in decision.orders:
            match order:
                case AddWorkers(kind, num):
                    num -= sum(it[1] is kind for it in self.coming)
                    self.coming += [(self.now + self.startup_s, kind)] * num
                case RemoveWorkers(_, gone):
                    self.here = [it for it in self.here if it.incarnation not in gone]
                case MoveHome(moved, to):
                    self.here = [
                        it._replace(kind=to) if it.incarnation == moved else it for it in self.here
                    ]
                case _:
                    pass
        return decision

    def looks(self, seconds: float, asked: Traffic | None) -> Decision:
        """Look at the same for so long; returns the last decision."""
        return [self.look(asked) for _ in range(max(1, round(seconds / self.look_s)))][-1]

    def num(self, kind: Kind) -> int:
        """How many are here."""
        return sum(it.kind is kind for it in self.here)
