"""A request's way into the mesh: drain check, admission, then its shell for as long as it lives.

``GatewayMesh`` is what the client side sees of all workers together. It counts who is inside; who
may come in is decided by the admission core, and what happens then by ``session.py``.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from services.gateway.core.admission.admission import (
    Admission,
    AdmissionStatistics,
    Admit,
    Effect,
    TurnAway,
)
from services.gateway.core.admission.overload import Overload, OverloadMode
from services.gateway.core.admission.tenants import Tenants
from services.gateway.core.window import LastMinute
from services.gateway.core.worker import Worker
from services.gateway.mesh import GenerationRequest, ServedModel, Take
from services.gateway.workers.cluster import (
    MeshWatcher,
    cluster_body,
    recent_body,
    worker_body,
)
from services.gateway.workers.delivery import Delivery
from services.gateway.workers.membership import Membership
from services.gateway.workers.planning import Planner
from services.gateway.workers.session import RequestShell
from services.gateway.workers.timeline import AnswerWatcher, Timeline
from shared.config import GatewayConfig
from shared.errors import InvalidRequest, MeshError, NotFound, Overloaded, ShuttingDown
from shared.ids import Incarnation
from shared.tenants import Tenant

MOST_REMEMBERED, LEAST_REMEMBERED, REMEMBERED_VIEWS = 1024, 32, 1 << 16
"""Requests whose decisions can be explained: in a large mesh fewer, for each decision has a view of
every worker."""


@dataclass(slots=True, eq=False)
class _Stay:
    """One request's whole stay in the mesh. A class: as a generator it costs three times as much,
    and every request has one.

    is_settled, error: what admission says. wake: there only if that takes its time.
    """

    _mesh: GatewayMesh
    request: GenerationRequest
    take: Take
    is_settled: bool = False
    error: MeshError | None = None
    wake: asyncio.Event | None = None
    shell: RequestShell | None = None

    async def __aenter__(self) -> RequestShell:
        try:
            return await self._mesh.enter(self)
        except BaseException:
            self._mesh.leave(self)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self.shell is not None:
                self.shell.leave(failure)
        finally:
            self._mesh.leave(self)


class GatewayMesh:
    """All workers together, as one thing that continues token lists: the ``Mesh`` of ``mesh.py``.

    ``generate`` is one request's whole stay.
    """

    def __init__(
        self,
        members: Membership,
        config: GatewayConfig,
        watchers: tuple[AnswerWatcher, ...] = (),
        tenants: Mapping[str, Tenant] | None = None,
    ) -> None:
        self._members = members
        self._config = config
        self._created = int(time.time())
        self._started_at = asyncio.get_running_loop().time()
        self._window = LastMinute(self._started_at)
        self._overload = Overload(OverloadMode(config.overload))
        self.planner: Planner | None = None
        if config.planner != "off":
            self.planner = Planner(
                config,
                members,
                self._overload,
                lambda: self.statistics.num_waiting,
                self._started_at,
            )
            watchers = (*watchers, self.planner)
        self._watchers = (*watchers, MeshWatcher(self._window, members))
        self._delivery = Delivery(self._watchers)
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._admission = Admission(
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_wait_s=config.max_wait_s,
            overload=self._overload,
            sides=lambda: members.router.sides,
            why_not_ready=members.table.why_not_ready,
            tenants=Tenants(tenants),
            max_pending_tokens=config.max_pending_tokens,
        )
        members.on_news = self._look_again
        self._stays: dict[bytes, _Stay] = {}
        self._num_early = 0  # requests that came before any worker
        self._timer: asyncio.TimerHandle | None = None
        # An ordinary dict looks through all that has left it before it finds its oldest.
        self._recent = OrderedDict[bytes, Timeline]()

    @property
    def model(self) -> ServedModel | None:
        model = self._members.table.model
        if model is None:
            return None
        return ServedModel(
            name=self._config.model_name or model.name,
            vocab_size=model.vocab_size,
            max_model_len=self._members.table.max_model_len,
            created=self._created,
        )

    async def wait_for_model(self, deadline_at: float | None) -> ServedModel:
        until = asyncio.get_running_loop().time() + self._config.max_wait_s
        if deadline_at is not None:
            until = min(until, deadline_at)
        may_wait = self._num_early < self._config.max_waiting
        self._num_early += 1
        try:
            async with asyncio.timeout_at(until):
                while self.model is None and may_wait and not self.is_draining:
                    await self._members.usability.next.wait()
        except TimeoutError:
            pass
        finally:
            self._num_early -= 1
        if self.is_draining:
            raise ShuttingDown("this gateway is shutting down", retry_after_s=1.0)
        if (model := self.model) is None:
            raise Overloaded(self.not_ready_reason, code="not_ready", retry_after_s=1.0)
        return model

    @property
    def is_ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        if self.is_draining:
            return "the gateway is shutting down"
        return self._members.table.why_not_ready()

    @property
    def statistics(self) -> AdmissionStatistics:
        """How many run, wait and were refused."""
        return self._admission.statistics()

    def cluster(self) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        return cluster_body(
            incarnation=self._members.incarnation,
            not_ready_reason=self.not_ready_reason,
            uptime_s=now - self._started_at,
            model=self.model,
            table=self._members.table,
            expectations=self._members.expectations,
            prefixes=self._members.prefixes,
            now=now,
            counts=self.statistics,
            summary=self._window.summary(now),
            planner=None if self.planner is None else self.planner.body(),
        )

    def recent(self) -> dict[str, Any]:
        return recent_body(
            self._members,
            self._recent.values(),
            model="" if self.model is None else self.model.name,
            config=self._config,
            overload=self._overload.mode,
            num_waiting=self.statistics.num_waiting,
            started_at=self._started_at,
            now=asyncio.get_running_loop().time(),
        )

    def _remember(self, key: bytes, timeline: Timeline) -> None:
        self._recent[key] = timeline
        most = min(MOST_REMEMBERED, REMEMBERED_VIEWS // (len(self._members.table) + 1))
        while len(self._recent) > max(LEAST_REMEMBERED, most):
            self._recent.popitem(last=False)

    def explain(self, request_id: str) -> dict[str, Any]:
        name = re.split("[-_]", request_id)[-1]  # chatcmpl-, cmpl-, resp_, msg_
        if re.fullmatch(r"[0-9a-fA-F]{32}", name) is None:
            raise InvalidRequest(
                "a request is named by 32 hexadecimal digits: its answer's id, or x-request-id",
                param="request_id",
                code="no_request",
            )
        timeline = self._recent.get(bytes.fromhex(name))
        if timeline is None:
            raise NotFound(
                f"this gateway remembers no request {name}, only its last {len(self._recent)}: ask "
                "sooner, and of several gateways the one that answered",
                param="request_id",
                code="no_request",
            )
        return timeline.explanation()

    async def change_role(self, worker: str, role: str) -> dict[str, Any]:
        try:
            incarnation = Incarnation(int(worker, 16))
        except ValueError:
            raise InvalidRequest(
                f"a worker is named by its incarnation, 16 hexadecimal digits, not {worker!r}: GET "
                "/cluster has them; `pdmesh role` takes the addresses of `pdmesh top`, too",
                param="worker",
                code="no_worker",
            ) from None
        moved = await self._members.change_home(incarnation, role)
        now = asyncio.get_running_loop().time()
        members, prompts = self._members, self._window.summary(now).prompts
        return worker_body(moved, members.expectations, members.prefixes, now, prompts)

    def generate(self, request: GenerationRequest, take: Take) -> _Stay:
        return _Stay(self, request, take)

    async def enter(self, stay: _Stay) -> RequestShell:
        """Admit a request and dispatch it; ``leave`` follows, whatever comes of it."""
        request = stay.request
        # A further answer is of a request that is here already: that is finished as a whole.
        if self.is_draining and not request.follows:
            raise ShuttingDown("this gateway is shutting down", retry_after_s=1.0)
        timeline = Timeline(
            request.arrived_at,
            request_id=request.request_id,
            prompt_tokens=len(request.token_ids),
            watchers=self._watchers,
            span=request.span,
        )
        self._remember(request.request_id, timeline)
        self._stays[request.request_id] = stay
        self._idle.clear()
        if self.planner is not None:
            self.planner.traffic.asked(asyncio.get_running_loop().time())
        try:
            terms = self._admission.tenants.terms(request.asked)
            prompt = self._members.prompt(request.token_ids, request.cache_salt)
            effects = self._admission.arrive(
                request.request_id,
                asyncio.get_running_loop().time(),
                terms=terms,
                num_tokens=len(request.token_ids),
                arrived_at=request.arrived_at,
                deadline_at=request.deadline_at,
                cached=lambda now: self._members.router.cached(prompt, now),
                follows=request.follows,
            )
            self._apply(effects)
            if not stay.is_settled:
                stay.wake = asyncio.Event()
                self._set_timer()
                await stay.wake.wait()
            if stay.error is not None:
                raise stay.error
        except BaseException as failure:
            timeline.refused(failure if isinstance(failure, MeshError) else None)
            raise
        timeline.admitted()
        shell = stay.shell = RequestShell(
            request,
            stay.take,
            self._members,
            timeline,
            self._delivery,
            self._admission,
            self._apply,
            max_attempts=self._config.max_attempts,
            pair_wait_s=self._config.max_wait_s,
            failover_wait_s=self._config.failover_wait_s,
            # Where no more is sent than the workers have room for, none is refused for waiting.
            may_be_refused=not (request.follows or self._config.max_pending_tokens),
            prompt=prompt,
        )
        await shell.dispatch()
        return shell

    def _apply(self, effects: Iterable[Effect]) -> None:
        """Tell those who wait what admission decided."""
        for effect in effects:
            stay = self._stays.get(effect.key)
            if stay is None:
                continue
            match effect:
                case Admit():
                    stay.is_settled = True
                case TurnAway(_, error):
                    stay.is_settled, stay.error = True, error
            if stay.wake is not None:
                stay.wake.set()

    def _look_again(self, worker: Worker | None) -> None:
        """Of workers something new is known: who waits may be next."""
        self._apply(self._admission.changed(asyncio.get_running_loop().time(), worker))

    def _set_timer(self) -> None:
        due_at = self._admission.next_tick_at
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due_at is not None:
            self._timer = asyncio.get_running_loop().call_at(due_at, self._tick, due_at)

    def _tick(self, due_at: float) -> None:
        # Of a timer that fires a little early: it was asked for at this very instant.
        self._apply(self._admission.tick(max(due_at, asyncio.get_running_loop().time())))
        self._set_timer()

    def leave(self, stay: _Stay) -> None:
        """A request is over, or was not let in."""
        key = stay.request.request_id
        self._stays.pop(key, None)
        self._apply(self._admission.leave(key, asyncio.get_running_loop().time()))
        if not self._stays:
            self._idle.set()

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new and wait for what runs or waits; False if the limit came first.

        What is left then fails with ShuttingDown.
        """
        self.is_draining = True
        self._members.usability.tell()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            error = ShuttingDown("this gateway is shutting down", code="drain_limit")
            self._apply(self._admission.close(error))
            for stay in self._stays.values():
                if stay.shell is not None:
                    stay.shell.fail(error)
            self._members.usability.tell()  # who looks for a pair looks no longer
            return False
        return True
