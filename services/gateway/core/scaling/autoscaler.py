"""The live planner: what to change of a mesh now, so that its limits are kept with few workers.

``decide`` is one look. What it looks at goes in, with what it remembers; what is to be done comes
out, with the reason, and what to remember. The gateway and the simulator call the same function.

The levers, the cheapest first:

| lever | costs | when |
|---|---|---|
| refuse early | answers that would be late | work comes faster than it is done |
| borrow | steps that do both | a role is short, the other has some to spare that may be either |
| move a home | nothing, if it stays | likewise, and it has lasted |
| add, remove workers | a start-up; device hours | nobody has any to spare; or too many are there |

How many workers are wanted is remembered, and the orders are what is missing to it: a cluster that
another autoscaler runs reads the number. A number that rose does not fall within ``dwell_s``, and
one that fell rises within that only if work comes faster than it is done. It falls to the most that
was needed in that time, so that a dip removes nobody; and at once where others have started workers
that fill ``max_workers``. Where something is not known, nothing is changed. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from services.gateway.core.scaling.need import (
    MOST_WORKERS,
    AnswerLoad,
    Limits,
    PromptLoad,
    answer_workers,
    both_workers,
    prompt_workers,
)
from services.gateway.core.scaling.scaling import (
    AddWorkers,
    Borrow,
    Decision,
    Kind,
    Memory,
    MeshSeen,
    MoveHome,
    Numbers,
    Order,
    RefuseEarly,
    RemoveWorkers,
    Rules,
    Times,
    WorkerSeen,
    why_hold,
)
from services.gateway.core.scaling.traffic import RECENT_SECONDS, Traffic
from shared.ids import Incarnation
from shared.predict.step_time import StepFit

SETTLE_S = 30.0
"""So long a role must be short until a home moves for it: a wave is borrowed for."""

CALM_S = 60.0
"""So long nothing may be short until borrowing, or refusing early, ends."""

STARTUP_S = 60.0
"""Of a worker, until one start was measured."""

MOST_BUSY, OVERFULL = 0.88, 0.97
"""Shares of workers' time: what is planned for, and from where on work piles up."""

SPARE = 1.1
"""A worker goes if the others could do so much more."""

JUMP_SIGMAS = 4.5
"""So many deviations above the expected count are no chance: at an even load one of some 30,000
looks would show them."""

LEVEL_S, SLOPE_S = 180.0, 900.0
"""Time constants of the rate and of its slope (Holt's linear smoothing, 1957: the steady state of a
local linear trend's Kalman filter)."""

MOST_GROWTH = 1.25
"""Most that a forecast adds."""

DRAIN_S = 60.0
"""Within which what has piled up is to be done."""

LEARNED_S = 3600.0
"""So long it counts that limits were missed at a load that should have been fine."""

LEAST_LEARNED = 0.5
"""Share of the time in which workers are busy; at less the load is not what missed limits."""

LEAST_JUDGED = 30
"""Fewer answers say nothing of limits."""


def decide(seen: MeshSeen, memory: Memory, rules: Rules, now: float) -> Decision:
    """Return what is to be done now."""
    here = [worker for worker in seen.workers if not worker.is_draining]
    present = _count(here)
    memory = _note_start(memory, present, now)
    why = why_hold(here, seen.traffic)
    if why:
        # Nobody knows what was needed meanwhile: the whole dwell is watched anew before one falls.
        memory = replace(memory, needs=(), level_at=None, short_since={}, calm_since=now)
        return Decision(memory, wanted=memory.targets, hold=why)
    return _Look(seen, here, memory, rules, now, present).decide()


def _count(here: Sequence[WorkerSeen]) -> dict[Kind, int]:
    """Neither role is left out while the other is there."""
    kinds = [worker.kind for worker in here]
    if set(kinds) == {Kind.COLOCATED}:
        return {Kind.COLOCATED: len(kinds)}
    return {it: kinds.count(it) for it in Kind if it is not Kind.COLOCATED or it in kinds}


def _note_start(memory: Memory, present: Numbers, now: float) -> Memory:
    """A worker that was ordered has come: so long does a start take. What comes back later, or has
    moved, tells nothing of it."""
    took_s, ordered = memory.startup_s, dict(memory.ordered)
    for kind, num in present.items():
        if num > memory.present.get(kind, num) and kind in ordered:
            took_s = now - ordered[kind]
        if num >= memory.targets.get(kind, 0):
            ordered.pop(kind, None)
    return replace(memory, present=present, startup_s=took_s, ordered=ordered)


class _Look:
    """One decision under way. here: who does not drain."""

    def __init__(
        self,
        seen: MeshSeen,
        here: Sequence[WorkerSeen],
        memory: Memory,
        rules: Rules,
        now: float,
        present: dict[Kind, int],
    ) -> None:
        assert seen.traffic is not None
        self.seen, self.memory, self.rules, self.now = seen, memory, rules, now
        self.traffic: Traffic = seen.traffic
        self.present = present
        self.targets = {kind: memory.targets.get(kind, num) for kind, num in present.items()}
        self.ups, self.downs = dict(memory.ups), dict(memory.downs)
        self.ordered = dict(memory.ordered)
        self.reasons = dict(memory.reasons)
        self.jumped_at = memory.jumped_at
        self.limit = ""
        self.here = here
        self.answer_steps, self.capacity = answering(here)
        self.queue_s = sum(it.queue_s for it in here) + seen.num_waiting * self.traffic.prompt_s

    def decide(self) -> Decision:
        level, slope, rate = self._rates()
        busy = self._busy(level)
        overfull = {kind for kind, share in busy.items() if share > OVERFULL}
        # Of all workers together: so much for each, and a prompt that comes now begins too late.
        if self.queue_s > self.rules.limits.ttft_s * self.present.get(self.prompt_kind, 1):
            overfull.add(self.prompt_kind)
        learned = self._learn(busy)
        needs = self._needs(rate + self._backlog_rate(), learned)
        # For falling, and for giving workers away: what has piled up passes, and is left out.
        spare = self._needs(max(level, rate) * SPARE, learned)
        self._say_limit(rate)
        if self.seen.acts:
            self._adopt()
        else:
            self._follow()
        # Held against who is here, not who is ordered: until they have come, others lend.
        short_since = {
            kind: self.memory.short_since.get(kind, self.now)
            for kind in self.targets
            if needs[kind] > self.present[kind]
        }
        lacking = self._raise(needs, spare, overfull, short_since) if self.seen.acts else 0
        since = self.now - self.rules.dwell_s
        history = (*(entry for entry in self.memory.needs if entry[0] >= since), (self.now, spare))
        began = self.memory.needs[0][0] if self.memory.needs else self.now
        is_fine = not overfull and not short_since and self._is_kept
        if self.seen.acts and began <= since and (is_fine or lacking):
            # Where all that are allowed are here, as many go as a role that is short needs places.
            most = MOST_WORKERS if is_fine else lacking
            self._lower([numbers for _, numbers in history], most, overfull | short_since.keys())
        # One older than the time, so that it shows how far back is known.
        older = [entry for entry in self.memory.needs if entry[0] < since][-1:]
        calm_since = self.now if short_since or overfull else self.memory.calm_since
        is_calm = self.now - calm_since >= CALM_S
        is_refusing = bool(overfull) or (self.memory.is_refusing and not is_calm)
        lender = self._lender(short_since, needs)
        is_borrowing = lender is not None or (self.memory.is_borrowing and not is_calm)
        memory = replace(
            self.memory,
            targets=self.targets,
            ups=self.ups,
            downs=self.downs,
            ordered=self.ordered,
            reasons=self.reasons,
            needs=(*older, *history),
            level=level,
            slope=slope,
            level_at=self.now,
            jumped_at=self.jumped_at,
            short_since=short_since,
            calm_since=calm_since,
            is_refusing=is_refusing and not self.seen.refuses,
            is_borrowing=is_borrowing and not self.seen.borrows,
            learned=learned,
        )
        orders = tuple(self._orders(memory, busy))
        hold = "" if self.seen.acts else "another gateway decides how many workers there are"
        return Decision(memory, orders, self.targets, busy, hold, self.limit)

    @property
    def prompt_kind(self) -> Kind:
        """Who computes prompts."""
        return Kind.COLOCATED if Kind.COLOCATED in self.present else Kind.PREFILL

    # --- load -----------------------------------------------------------------------------------

    def _rates(self) -> tuple[float, float, float]:
        """Return level and slope of the rate, and the most that is expected until a worker that is
        started now serves."""
        memory, recent = self.memory, self.traffic.recent_s
        if memory.level_at is None:
            level = max(self.traffic.arrivals_s, recent)
            return level, 0.0, level
        passed_s = self.now - memory.level_at
        before = max(0.0, memory.level + memory.slope * passed_s)
        # By the time that passed: looks come late where an order takes long.
        level = before + (recent - before) * -math.expm1(-passed_s / LEVEL_S)
        # A count of what comes by chance alone (Poisson) deviates by the root of its mean.
        expected = before * RECENT_SECONDS
        if recent * RECENT_SECONDS > expected + JUMP_SIGMAS * math.sqrt(max(1.0, expected)):
            self.jumped_at = self.now
        if self.now - self.jumped_at < RECENT_SECONDS:
            return recent, 0.0, recent  # until all that is counted came after the jump
        gain = -math.expm1(-passed_s / SLOPE_S)
        grown = (level - memory.level) / passed_s if passed_s > 0 else 0.0
        slope = memory.slope + (grown - memory.slope) * gain
        ahead_s = self.memory.startup_s or STARTUP_S
        forecast = min(level + slope * ahead_s, level * MOST_GROWTH)
        return level, slope, max(level, forecast)

    def _backlog_rate(self) -> float:
        """Return the rate of requests that what has piled up is worth."""
        normal_s = self.rules.limits.ttft_s * self.present[self.prompt_kind]
        over_s = max(0.0, self.queue_s - normal_s)
        return over_s / DRAIN_S / self.traffic.prompt_s if over_s and self.traffic.prompt_s else 0.0

    def _loads(self, rate: float) -> tuple[PromptLoad, AnswerLoad]:
        limits = self.rules.limits
        answers = AnswerLoad.of(self.traffic, rate, self.answer_steps, self.capacity, limits.tpot_s)
        return PromptLoad.of(self.traffic, rate), answers

    def _busy(self, rate: float) -> dict[Kind, float]:
        prompts, answers = self._loads(rate)
        work = {
            Kind.PREFILL: prompts.work,
            Kind.DECODE: answers.work,
            Kind.COLOCATED: prompts.work + answers.work,
        }
        return {kind: work[kind] / max(1, num) for kind, num in self.present.items()}

    def _needs(self, rate: float, learned: Mapping[Kind, tuple[float, float]]) -> dict[Kind, int]:
        most = {kind: learned[kind][0] if kind in learned else MOST_BUSY for kind in Kind}
        return needed(self.present, *self._loads(rate), self.rules.limits, most)

    # --- how the limits fare --------------------------------------------------------------------

    @property
    def _is_kept(self) -> bool:
        share, is_said = self.seen.attainment.share, self.seen.attainment.num_judged >= LEAST_JUDGED
        return not is_said or share is None or share >= self.rules.limits.target

    def _learn(self, busy: Mapping[Kind, float]) -> dict[Kind, tuple[float, float]]:
        """Limits that were missed at a load that should have been fine: plan for less."""
        learned = {
            kind: it for kind, it in self.memory.learned.items() if self.now - it[1] < LEARNED_S
        }
        judged = self.seen.attainment
        # What is judged ended within the last minute: all of it must have met the present workers.
        is_steady = all(
            self.memory.targets.get(kind) == num
            and self.now - max(self.ups.get(kind, -math.inf), self.downs.get(kind, -math.inf))
            > CALM_S + self.memory.startup_s
            for kind, num in self.present.items()
        )
        if judged.num_judged < LEAST_JUDGED or not is_steady or self.memory.short_since:
            return learned
        target = self.rules.limits.target
        # What is judged late came with a load that may have passed: it says nothing of this one.
        now_busy = self._busy(self.traffic.recent_s)
        for kind, share in busy.items():
            kept = judged.num_kept if kind is Kind.COLOCATED else judged.num_ttft_kept
            kept = judged.num_tpot_kept if kind is Kind.DECODE else kept
            if now_busy[kind] < LEAST_LEARNED:
                continue
            if kept < target * judged.num_judged and LEAST_LEARNED < share < MOST_BUSY:
                learned[kind] = max(LEAST_LEARNED, 0.95 * share), self.now
        return learned

    def _say_limit(self, rate: float) -> None:
        """Name a limit that no number of workers keeps."""
        prompts, answers = self._loads(rate)
        limits = self.rules.limits
        share = prompts.hopeless_share(limits.ttft_s)
        if share > 1.0 - limits.target:
            place = min(len(prompts.prompts_s) - 1, int(limits.target * len(prompts.prompts_s)))
            self.limit = (
                f"ttft: {share:.0%} of the prompts compute longer than {limits.ttft_s:g} s on an "
                f"idle worker, and no number of workers helps them; "
                f"{prompts.prompts_s[place]:.2g} s could be kept"
            )
        elif answers.single_s > limits.tpot_s:
            self.limit = (
                f"tpot: a single answer takes {answers.single_s:.3g} s a token on an idle worker, "
                f"over {limits.tpot_s:g} s, and no number of workers helps it"
            )

    # --- how many are wanted --------------------------------------------------------------------

    def _follow(self) -> None:
        """Another gateway decides: what it did counts when this one has to go on."""
        for kind, num in self.present.items():
            if num != self.targets[kind]:
                (self.ups if num > self.targets[kind] else self.downs)[kind] = self.now
                self.targets[kind] = num

    def _adopt(self) -> None:
        """Somebody else has started workers: they are wanted."""
        for kind, num in self.present.items():
            # After a fall, who is too many is one that has not left yet.
            has_fallen = self.now - self.downs.get(kind, -math.inf) <= self.rules.dwell_s
            if num > self.targets[kind] and not has_fallen:
                self.targets[kind] = num
                self.ups[kind] = self.now
        # They take the places of those that have not come.
        over = sum(self.targets.values()) - self.rules.max_workers
        for kind, num in self.present.items():
            given_up = min(over, self.targets[kind] - num)
            if self.rules.max_workers and given_up > 0:
                over -= given_up
                self.targets[kind] -= given_up
                self.downs[kind] = self.now

    def _raise(self, needs: Numbers, spare: Numbers, overfull: set[Kind], since: Times) -> int:
        """Return how many are needed and not allowed. since: when each role fell short."""
        lacking = 0
        short = {kind: needs[kind] - num for kind, num in self.targets.items()}
        most = self.rules.max_workers or math.inf
        while True:
            kinds = [kind for kind, num in short.items() if num > 0]
            if not kinds:
                return lacking
            # The order tells who gets the last one that is allowed: the shortest in proportion.
            kind = max(kinds, key=lambda it: needs[it] / max(1, self.targets[it]))
            fell_s = self.now - self.downs.get(kind, -math.inf)
            if fell_s < self.rules.dwell_s and kind not in overfull:
                short[kind] = 0
                continue
            donor = self._donor(kind, spare)
            if donor is not None and self.now - since.get(kind, self.now) < SETTLE_S:
                short[kind] = 0  # borrowed for meanwhile
            elif donor is not None:
                self.targets[donor] -= 1
                self.downs[donor] = self.now
                self._rise(kind, needs)
                short[kind] -= 1
            elif sum(self.targets.values()) < most:
                self._rise(kind, needs)
                if self.rules.is_obeyed:
                    self.ordered[kind] = self.now
                short[kind] -= 1
            else:
                self.limit = self.limit or (
                    f"workers: {needs[kind]} {kind.value} workers are needed, and "
                    f"{self.rules.max_workers} in all are allowed (--max-workers)"
                )
                lacking += short[kind]
                short[kind] = 0

    def _rise(self, kind: Kind, needs: Numbers) -> None:
        self.targets[kind] += 1
        self.ups[kind] = self.now
        self.reasons[kind] = f"{needs[kind]} needed for {self._load_text}"

    def _donor(self, kind: Kind, spare: Numbers) -> Kind | None:
        """Return the role that can do without one of its workers, one that may be either."""
        for other, num in self.targets.items():
            is_free = self.now - self.ups.get(other, -math.inf) >= self.rules.dwell_s
            may_move = any(it.moves for it in self.here if it.kind is other)
            if other is not kind and num > max(1, spare[other]) and is_free and may_move:
                return other
        return None

    def _lower(self, history: list[Numbers], limit: int, but: Collection[Kind]) -> None:
        for kind, num in self.targets.items():
            most = max(1, *(numbers.get(kind, num) for numbers in history), num - limit)
            is_free = self.now - self.ups.get(kind, -math.inf) >= self.rules.dwell_s
            if most < num and is_free and kind not in but:
                limit -= num - most
                self.targets[kind] = most
                self.downs[kind] = self.now
                self.reasons[kind] = (
                    f"{most} were enough for the last {self.rules.dwell_s / 60:.0f} min, "
                    f"now {self._load_text}"
                )

    @property
    def _load_text(self) -> str:
        it = self.traffic
        return (
            f"{it.recent_s:.3g} requests/s, {it.prompt_s:.2g} s a prompt, "
            f"{it.output_tokens:.0f} tokens an answer"
        )

    # --- orders ---------------------------------------------------------------------------------

    def _lender(self, short_since: Times, needs: Numbers) -> Kind | None:
        """Return the role whose workers may help out one that is short."""
        for kind, num in self.present.items():
            may_move = any(it.moves for it in self.here if it.kind is kind)
            if short_since and kind not in short_since and may_move and num > needs[kind]:
                return kind
        return None

    def _orders(self, memory: Memory, busy: Mapping[Kind, float]) -> Iterable[Order]:
        loads = ", ".join(f"{kind.value} {share:.0%}" for kind, share in busy.items())
        why = f"the load is {loads} of what is here"
        if memory.is_refusing is not self.memory.is_refusing:
            yield RefuseEarly(memory.is_refusing, why)
        if memory.is_borrowing is not self.memory.is_borrowing:
            yield Borrow(memory.is_borrowing, why)
        over = {kind: num - self.targets[kind] for kind, num in self.present.items()}
        moved = set[Incarnation]()
        for kind, lacking in [(kind, -num) for kind, num in over.items() if num < 0]:
            why = self.reasons.get(kind, "")
            moving = [
                (other, worker)
                for other, left in over.items()
                for worker in self._freest(other, left, lambda it: it.moves)
            ][:lacking]
            for other, worker in moving:
                over[other] -= 1
                moved.add(worker)
                yield MoveHome(worker, kind, why)
            if lacking > len(moving):
                yield AddWorkers(kind, lacking - len(moving), why)
        for kind, left in over.items():
            if left > 0:
                gone = self._freest(kind, left, lambda it: it.incarnation not in moved)
                yield RemoveWorkers(kind, gone, self.reasons.get(kind, ""))

    def _freest(
        self, kind: Kind, num: int, may: Callable[[WorkerSeen], bool]
    ) -> tuple[Incarnation, ...]:
        """Return so many of those that hold least."""
        own = [it for it in self.here if it.kind is kind and may(it)]
        own.sort(key=lambda it: (it.num_held, it.queue_s, it.incarnation))
        return tuple(it.incarnation for it in own[: max(0, num)])


def answering(workers: Iterable[WorkerSeen]) -> tuple[StepFit, int]:
    """Return the slowest steps and the least room of those that answer, one of which tells of its
    steps."""
    own = [worker for worker in workers if worker.kind is not Kind.PREFILL]
    known = (worker.answer_steps for worker in own if worker.answer_steps.is_known)
    # Two fits may change places with the batch: compared is one of 16 answers, 1,000 tokens each.
    slowest = max(known, key=lambda fit: fit.seconds(16, 16_000))
    return slowest, min(worker.capacity_tokens for worker in own)


def needed(
    kinds: Iterable[Kind], prompts: PromptLoad, answers: AnswerLoad, limits: Limits, most: Times
) -> dict[Kind, int]:
    """Return how many workers of each kind keep the limits, of a mesh that has these kinds. most:
    shares of their time that may be planned for."""
    if Kind.COLOCATED in kinds:
        return {Kind.COLOCATED: both_workers(prompts, answers, limits, most[Kind.COLOCATED])}
    return {
        Kind.PREFILL: prompt_workers(prompts, limits, most[Kind.PREFILL]),
        Kind.DECODE: answer_workers(answers, most[Kind.DECODE]),
    }
