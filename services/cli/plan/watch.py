"""``pdmesh plan watch``: what the live planner would do on a running mesh, and why."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import orjson
from cyclopts import Parameter

from services.cli.bench.endpoints import RECENT
from services.cli.client import LOCAL_GATEWAY, RunningGateway
from services.cli.interrupts import EXIT_INTERRUPTED, run_interruptible
from services.cli.plan.seen import read_body
from services.cli.plan.verify import LETTERS
from services.cli.plan.view import require_ranges
from services.cli.quantities import TpotFlag, TtftFlag
from services.cli.sources import OUTPUT, QUIET, JsonFlag
from services.cli.words import plain_console, print_lines
from services.gateway.core.scaling.autoscaler import decide
from services.gateway.core.scaling.need import Limits
from services.gateway.core.scaling.scaling import (
    Decision,
    Kind,
    Memory,
    MeshSeen,
    Rules,
    WorkerSeen,
    text_of,
)
from services.gateway.core.scaling.traffic import SECONDS, TrafficMeter
from services.gateway.http.cluster_bodies import RecentRequest, RecentRequests
from services.planner.core.outlook import Numbers, Outlook, outlook
from shared.errors import MeshError
from shared.ids import Incarnation
from shared.predict.step_time import StepFit
from shared.runtime.service import EXIT_OK
from shared.telemetry.tracing import CANCELLED

LOOK_S: Final = 5.0
"""Between two looks at most, as of the gateway's own planner: of what came and was forgotten
between them only the workers' orders tell, and a gateway that began anew must look younger."""

ALWAYS_KEPT: Final = 32
"""Requests that every gateway remembers."""

_LOOKS: Final = Parameter(group=OUTPUT, show_env_var=False)

WHO: Final = {
    Kind.PREFILL: "TTFT, by the prefill workers",
    Kind.DECODE: "TPOT or room for KV, by the decode workers",
    Kind.COLOCATED: "both limits, by the colocated workers",
}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WatchFlags:
    """What is to be kept: as --planner-ttft-s and its kin of the gateway.

    Parameters
    ----------
    attainment
        Share of requests that must keep both.
    max_workers
        Most workers of all kinds together; 0 = as many as it takes.
    """

    slo_ttft: TtftFlag = 2.0
    slo_tpot: TpotFlag = 0.1
    attainment: float = 0.95
    max_workers: int = 0

    def rules(self) -> Rules:
        """Return what ``decide`` goes by. Raises InvalidRequest."""
        require_ranges(
            ("--attainment", 0 < self.attainment < 1, "above 0 and below 1"),
            ("--max-workers", 0 <= self.max_workers <= 1024, "0..1024"),
        )
        limits = Limits(self.slo_ttft, self.slo_tpot, self.attainment)
        return Rules(limits, self.max_workers, is_obeyed=False)


class Look(NamedTuple):
    """One look: what was decided, and what the mesh could take. cut: why the rate is a guess, '' =
    it is none."""

    at_s: float
    decision: Decision
    attained: float | None
    outlook: Outlook | None
    cut: str = ""


def watch(
    *,
    flags: WatchFlags = WatchFlags(),
    interval: Annotated[float, _LOOKS] = 5.0,
    once: Annotated[bool, QUIET, _LOOKS] = False,
    gateway: RunningGateway = LOCAL_GATEWAY,
    as_json: JsonFlag = False,
) -> int:
    """Follow a live mesh, and say what the planner would do now, and why.

    Decides by the very function of --planner advise, from what the gateway tells of its last
    requests, whatever its own --planner is, and changes nothing. A gateway that goes away is waited
    for; Ctrl-C leaves.

    Parameters
    ----------
    interval
        Seconds between two lines; it looks at least every 5, as the gateway's own planner.
    once
        Look once and end.
    """
    rules = flags.rules()
    require_ranges(("--interval", 0.5 <= interval <= 3600, "0.5..3600 seconds"))

    async def follow() -> None:
        console = plain_console(stderr=True)
        watcher, trouble = Watcher(rules), ""
        num_looks, due = math.ceil(interval / LOOK_S), 0
        said: list[str] | None = None
        async with gateway.access.session() as session:
            while True:
                try:
                    body = await gateway.call(session, RECENT)
                    look = watcher.look(read_body(body, gateway.url))
                    if due <= 0:
                        if as_json:
                            print(orjson.dumps(facts_of(look)).decode(), flush=True)
                        else:
                            print_lines(lines_of(look, said or ()))
                        said, due = [*words_of(look)], num_looks
                    trouble = ""
                except MeshError as error:
                    if said is None:
                        raise
                    if error.message != trouble:
                        trouble = error.message
                        console.print(f"{trouble}. Trying again …", soft_wrap=True)
                if once:
                    return
                due -= 1
                await asyncio.sleep(interval / num_looks)

    code = run_interruptible(follow)
    return EXIT_OK if code == EXIT_INTERRUPTED else code


class Watcher:
    """Counts what a gateway tells, and decides by it as the gateway's own planner would."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._begin()

    def _begin(self) -> None:
        limits = self._rules.limits
        self._meter = TrafficMeter(limits.ttft_s, limits.tpot_s, 0.0)
        self._memory = Memory()
        self._asked: set[str] = set()
        self._ended: set[str] = set()
        self._now_s = 0.0

    def look(self, told: RecentRequests) -> Look:
        """Take in what is new, and decide. A gateway that began anew is another one."""
        if told.now_s < self._now_s:
            self._begin()
        now, is_first = told.now_s, not self._now_s
        self._now_s = now
        cut = self._guess_forgotten(told) if is_first else ""
        self._count(told)
        workers = tuple(
            WorkerSeen(
                Incarnation(int(it.incarnation, 16)),
                Kind(it.kind),
                it.moves,
                it.draining,
                it.age_s,
                it.held,
                it.queue_s,
                StepFit(**it.prompt_steps),  # type: ignore[arg-type]
                StepFit(**it.answer_steps),  # type: ignore[arg-type]
                it.blocks * it.block_size,
                it.address,
            )
            for it in told.workers
        )
        attainment = self._meter.attainment(now)
        seen = MeshSeen(
            workers,
            self._meter.traffic(now),
            attainment,
            acts=told.decides,
            num_waiting=told.waiting,
        )
        decision = decide(seen, self._memory, self._rules, now)
        self._memory = decision.memory
        return Look(now, decision, attainment.share, outlook(seen, self._rules.limits), cut)

    def _guess_forgotten(self, told: RecentRequests) -> str:
        """Count what came before the oldest that the gateway keeps, at the rate of those."""
        num = len(told.requests)
        num_sent = sum(it.receipt["attempts"] for it in told.requests)
        oldest_s = min((it.arrived_s for it in told.requests), default=0.0)
        since_s = max(0.0, told.now_s - SECONDS)
        num_taken = sum(it.taken for it in told.workers)
        if num < ALWAYS_KEPT or oldest_s <= since_s or num_taken <= num_sent:
            return ""
        step_s = (told.now_s - oldest_s) / num
        for back in range(int((oldest_s - since_s) / step_s), 0, -1):
            self._meter.asked(oldest_s - back * step_s)
            self._meter.sent(oldest_s - back * step_s)
        return (
            f"rate: a guess, for all that the gateway tells are its last {num} requests, of "
            f"{told.now_s - oldest_s:.0f} s"
        )

    def _count(self, told: RecentRequests) -> None:
        """Feed the meter in the order of time."""
        meter, here = self._meter, {it.incarnation: it for it in told.workers}
        meter.taken(told.now_s, {Incarnation(int(it, 16)): here[it].taken for it in here})
        events: list[tuple[float, int, RecentRequest]] = []
        for it in told.requests:
            if it.request_id not in self._asked:
                events.append((it.arrived_s, 0, it))
            if it.ended and it.request_id not in self._ended:
                events.append((it.arrived_s + (it.receipt["e2e_s"] or 0.0), 1, it))
        # Of one instant the arrivals first; requests themselves have no order.
        for at_s, is_end, it in sorted(events, key=lambda event: event[:2]):
            told_s = it.receipt
            if not is_end:
                meter.asked(at_s)
                for _ in range(told_s["attempts"]):
                    meter.sent(at_s)
                continue
            worker = here.get(told_s["prefill"])
            meter.ended(
                at_s,
                is_whole=not it.error,
                has_left=it.error == CANCELLED,
                num_attempts=told_s["attempts"],
                steps=StepFit(**worker.prompt_steps) if worker else None,  # type: ignore[arg-type]
                step_tokens=worker.step_tokens if worker else 0,
                num_prompt=told_s["prompt_tokens"],
                num_cached=told_s["cached_tokens"],
                num_output=told_s["output_tokens"],
                ttft_s=told_s.get("ttft_s"),
                tpot_s=told_s.get("tpot_s") or 0.0,
            )
        # Who is forgotten there is not told again.
        self._asked = {it.request_id for it in told.requests}
        self._ended = {it.request_id for it in told.requests if it.ended}


def facts_of(look: Look) -> dict[str, Any]:
    decision, found = look.decision, look.outlook
    return {
        "at_s": look.at_s,
        "cut": look.cut,
        "orders": [f"{text_of(order)}: {order.reason}" for order in decision.orders],
        "wanted": {kind.value: num for kind, num in decision.wanted.items()},
        "present": {kind.value: num for kind, num in decision.memory.present.items()},
        "busy": {kind.value: share for kind, share in decision.busy.items()},
        "hold": decision.hold,
        "limit": decision.limit,
        "attained": look.attained,
        "rate": found and found.rate,
        "binds": found and found.binds.value,
        "most_rate": found and found.most_rate,
        "headroom": found and found.headroom,
        "runner_up": found and found.runner_up and mesh_of(found.runner_up[0]),
        "runner_up_rate": found and found.runner_up and found.runner_up[1],
    }


def mesh_of(numbers: Numbers) -> str:
    """Return numbers of workers as plans write them: 3P+2D."""
    return "+".join(f"{num}{LETTERS[kind.value]}" for kind, num in numbers.items() if num)


def _line(look: Look) -> str:
    decision = look.decision
    parts = [f"{look.at_s:8.0f} s", mesh_of(decision.memory.present) or "no workers"]
    if look.outlook is not None:
        parts.append(f"{look.outlook.rate:.3g} requests/s")
    parts += [f"{kind.value} {share:.0%} busy" for kind, share in decision.busy.items()]
    if look.attained is not None:
        parts.append(f"attained {look.attained:.1%}")
    does = "would act" if decision.orders else "holds" if decision.hold else "would do nothing"
    return f"{', '.join(parts)}: {does}"


def lines_of(look: Look, said: Collection[str] = ()) -> list[str]:
    """Return a look in a line, and below it what the one before has not said."""
    new = (f"    {word}" for word in words_of(look) if word not in said)
    return [_line(look), *new]


def words_of(look: Look) -> Iterator[str]:
    """Yield what is said once, until it changes."""
    decision, found = look.decision, look.outlook
    if look.cut:
        yield look.cut
    for order in decision.orders:
        yield f"would {text_of(order)}: {order.reason}"
    if decision.hold:
        yield f"holds: {decision.hold}"
    if decision.limit:
        yield f"limit: {decision.limit}"
    if found is not None:
        most = f"up to {found.most_rate:.3g} requests/s" if found.most_rate else "at no rate"
        yield f"binds: {WHO[found.binds]}, {most}"
        if found.headroom is not None:
            yield f"headroom: {found.headroom:.1f} x what is asked"
        if found.runner_up is not None:
            numbers, rate = found.runner_up
            yield f"runner-up: {mesh_of(numbers)} would keep the limits up to {rate:.3g} requests/s"
