"""The planner of a running gateway: looks every few seconds, says what it finds, and with ``act``
does it.

What is to be done is decided by ``core/scaling/autoscaler.py``. Here is who does it: refusing early
and borrowing are this gateway's own, homes are ordered from workers, and workers are started and
ended by others, who hear of it over the cord (``pdmesh up``) or read it from the metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import structlog

from services.gateway.core.admission.overload import Overload, OverloadMode
from services.gateway.core.routing.pools import Pool
from services.gateway.core.scaling.autoscaler import decide
from services.gateway.core.scaling.need import Limits
from services.gateway.core.scaling.scaling import (
    AddWorkers,
    Borrow,
    Decision,
    Kind,
    Memory,
    MeshSeen,
    MoveHome,
    Order,
    RefuseEarly,
    RemoveWorkers,
    Rules,
    is_first,
    seen_workers,
    text_of,
)
from services.gateway.core.scaling.traffic import TrafficMeter
from services.gateway.workers.membership import Membership
from services.gateway.workers.timeline import AnswerWatcher
from shared.config import GatewayConfig
from shared.errors import MeshError
from shared.ids import Incarnation
from shared.telemetry.lifetime import Receipt
from shared.telemetry.tracing import CANCELLED

_log = structlog.get_logger(__name__)

LOOK_S = 5.0
"""Between two decisions."""

_HOMES = {Kind.PREFILL: Pool.PROMPT.value, Kind.DECODE: Pool.TOKEN.value}

Tell = Callable[[Mapping[str, Any]], None]
"""Takes what is wanted, for who starts workers."""


class Planner(AnswerWatcher):
    """One gateway's. It watches answers, for it counts the traffic."""

    def __init__(
        self,
        config: GatewayConfig,
        members: Membership,
        overload: Overload,
        num_waiting: Callable[[], int],
        started_at: float,
    ) -> None:
        limits = Limits(config.planner_ttft_s, config.planner_tpot_s, config.planner_target)
        self._mode = config.planner
        is_obeyed = config.planner == "act"
        self._rules = Rules(limits, config.max_workers, config.planner_dwell_s, is_obeyed)
        self._members = members
        self._overload = overload
        self._num_waiting = num_waiting
        # As they are configured: only what an order has switched on does an order switch off.
        self._refuses = overload.mode is not OverloadMode.OFF
        self._borrows = members.router.policy.moves_roles
        self._memory = Memory()
        self._said: tuple[object, ...] = ()
        self.traffic = TrafficMeter(limits.ttft_s, limits.tpot_s, started_at)
        self.decision = Decision(self._memory, hold="it has just begun")
        self.acts = False
        self._num_looks = 0

    async def run(self, tell: Tell) -> NoReturn:
        """Look until cancelled. tell: called after every look of the gateway that decides."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look(tell)

    async def _look(self, tell: Tell) -> None:
        members, now = self._members, asyncio.get_running_loop().time()
        workers = members.table.workers
        # Before ``traffic``, which learns from it how much comes to other gateways.
        self.traffic.taken(now, {it.incarnation: it.status.num_taken for it in workers})
        self.acts = is_first(members.incarnation, workers)
        seen = MeshSeen(
            seen_workers(workers, now),
            self.traffic.traffic(now),
            self.traffic.attainment(now),
            acts=self.acts,
            refuses=self._refuses,
            borrows=self._borrows,
            num_waiting=self._num_waiting(),
        )
        decision = self.decision = decide(seen, self._memory, self._rules, now)
        self._memory = decision.memory
        self._num_looks += 1
        self._say(decision)
        if self._mode != "act":
            return
        for order in decision.orders:
            await self._carry_out(order)
        if self.acts and decision.wanted:
            tell(self._wish(decision))

    async def _carry_out(self, order: Order) -> None:
        match order:
            case RefuseEarly(on):
                self._overload.mode = OverloadMode.EARLY if on else OverloadMode.OFF
            case Borrow(on):
                self._members.router.policy.moves_roles = on
            case MoveHome(worker, to):
                try:
                    await self._members.change_home(worker, _HOMES[to])
                except MeshError as error:
                    _log.warning("a home did not change", worker=worker, reason=error.message)
            case AddWorkers() | RemoveWorkers():
                pass  # whoever starts workers is told what is wanted

    def _say(self, decision: Decision) -> None:
        """Log what is new: it comes again at every look until it is done."""
        facts = (decision.hold, decision.limit, *map(_key, decision.orders))
        if facts == self._said:
            return
        before, self._said = self._said, facts
        does = "planner: does" if self._mode == "act" else "planner: would do"
        for order in decision.orders:
            if _key(order) not in before:
                _log.info(does, order=text_of(order), reason=order.reason, compose=self.compose)
        if decision.hold and decision.hold not in before:
            _log.info("planner: holds", reason=decision.hold)
        if decision.limit and decision.limit not in before:
            _log.warning("planner: a limit cannot be kept", reason=decision.limit)

    @property
    def compose(self) -> str:
        """The command that gives a mesh of containers the workers that are wanted."""
        scales = [f"--scale {_service(kind)}={num}" for kind, num in self.decision.wanted.items()]
        return " ".join(["docker compose up -d --no-recreate", *scales])

    def _wish(self, decision: Decision) -> dict[str, Any]:
        table = self._members.table
        gone = [
            worker
            for order in decision.orders
            if isinstance(order, RemoveWorkers)
            for worker in map(table.get, order.workers)
            if worker is not None
        ]
        return {
            "wanted": {kind.value: num for kind, num in decision.wanted.items()},
            "present": {kind.value: num for kind, num in decision.memory.present.items()},
            # Whoever hears of it runs all its workers on one machine, so a port names one.
            "drain": [worker.port for worker in gone],
        }

    def body(self) -> dict[str, Any]:
        """Return what ``/cluster`` tells of it, JSON-ready."""
        decision = self.decision
        attained = self.traffic.attainment(asyncio.get_running_loop().time()).share
        return {
            "mode": self._mode,
            "decides": self.acts,
            "num_looks": self._num_looks,
            "wanted": {kind.value: num for kind, num in decision.wanted.items()},
            "present": {kind.value: num for kind, num in decision.memory.present.items()},
            "busy": {kind.value: round(share, 4) for kind, share in decision.busy.items()},
            "attained": None if attained is None else round(attained, 4),
            "refuses_early": decision.memory.is_refusing,
            "borrows": decision.memory.is_borrowing,
            "startup_s": round(decision.memory.startup_s, 3),
            "orders": [f"{text_of(order)}: {order.reason}" for order in decision.orders],
            "hold": decision.hold,
            "limit": decision.limit,
        }

    def dispatched(self, now: float) -> None:
        self.traffic.sent(now)

    def ended(self, now: float, receipt: Receipt, error: str) -> None:
        worker = self._members.table.get(Incarnation(int(receipt.prefill or "0", 16)))
        self.traffic.ended(
            now,
            is_whole=not error,
            has_left=error == CANCELLED,
            num_attempts=receipt.attempts,
            steps=worker.status.prompt_steps if worker else None,
            step_tokens=worker.status.step_tokens if worker else 0,
            num_prompt=receipt.prompt_tokens,
            num_cached=receipt.cached_tokens,
            num_output=receipt.output_tokens,
            ttft_s=receipt.ttft_s,
            tpot_s=receipt.tpot_s or 0.0,
        )


def _service(kind: Kind) -> str:
    # A colocated worker is a decode worker with ``--colocated``: no service is called so.
    return "decode" if kind is Kind.COLOCATED else kind.value


def _key(order: Order) -> object:
    """The same for an order that comes again."""
    # A reason has figures in it, which are others at each look.
    return order._replace(reason="")
