"""A request's way into the mesh: drain check, admission, then its shell for as long as it lives.

``GatewayMesh`` is what the client side sees of all workers together. It counts who is inside; who
may come in is decided by the admission core, and what happens then by ``session.py``.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any

from services.gateway.core.admission import Admission, AdmissionStatistics, Admitted
from services.gateway.core.window import LastMinute
from services.gateway.mesh import GenerationRequest, ServedModel
from services.gateway.workers.cluster import WindowWatcher, cluster_body, worker_body
from services.gateway.workers.delivery import Delivery
from services.gateway.workers.membership import Membership
from services.gateway.workers.session import RequestShell
from services.gateway.workers.timeline import AnswerWatcher, Timeline
from shared.config import GatewayConfig
from shared.errors import InvalidRequest, MeshError, ShuttingDown
from shared.ids import Incarnation


class _Stay:
    """One request's whole stay in the mesh. A class: as a generator it costs three times as much,
    and every request has one."""

    def __init__(self, mesh: GatewayMesh, request: GenerationRequest) -> None:
        self._mesh = mesh
        self._request = request
        self._shell: RequestShell | None = None

    async def __aenter__(self) -> RequestShell:
        try:
            self._shell = await self._mesh.enter(self._request)
        except BaseException:
            self._mesh.leave(self._request.request_id)
            raise
        return self._shell

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if self._shell is not None:
                self._shell.leave(failure)
        finally:
            self._mesh.leave(self._request.request_id)


class GatewayMesh:
    """All workers together, as one thing that continues token lists: the ``Mesh`` of ``mesh.py``.

    ``generate`` is one request's whole stay.
    """

    def __init__(
        self,
        members: Membership,
        config: GatewayConfig,
        watchers: tuple[AnswerWatcher, ...] = (),
    ) -> None:
        self._members = members
        self._config = config
        self._created = int(time.time())
        self._started_at = asyncio.get_running_loop().time()
        self._window = LastMinute(self._started_at)
        self._watchers = (*watchers, WindowWatcher(self._window))
        self._delivery = Delivery(self._watchers)
        self._is_draining = False
        self._drain_error: ShuttingDown | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._admission = Admission(
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_wait_s=config.max_wait_s,
        )
        self._turns: dict[bytes, asyncio.Event] = {}
        self._shells: dict[bytes, RequestShell] = {}

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

    @property
    def is_ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        return "the gateway is shutting down" if self._is_draining else self._members.why_not_ready

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
            counts=self.statistics,
            summary=self._window.summary(now),
        )

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
        return worker_body(await self._members.change_home(incarnation, role))

    def generate(self, request: GenerationRequest) -> _Stay:
        return _Stay(self, request)

    async def enter(self, request: GenerationRequest) -> RequestShell:
        """Admit a request and dispatch it; ``leave`` follows, whatever comes of it."""
        if self._is_draining:
            raise ShuttingDown("this gateway is shutting down", retry_after_s=1.0)
        timeline = Timeline(
            request.arrived_at,
            request_id=request.request_id,
            prompt_tokens=len(request.token_ids),
            watchers=self._watchers,
            span=request.span,
        )
        try:
            await self._wait_for_place(request)
        except BaseException as failure:
            timeline.refused(failure if isinstance(failure, MeshError) else None)
            raise
        timeline.admitted()
        shell = RequestShell(
            request,
            self._members,
            timeline,
            self._delivery,
            max_attempts=self._config.max_attempts,
            pair_wait_s=self._config.max_wait_s,
            failover_wait_s=self._config.failover_wait_s,
        )
        self._shells[request.request_id] = shell
        await shell.dispatch()
        return shell

    async def _wait_for_place(self, request: GenerationRequest) -> None:
        loop = asyncio.get_running_loop()
        key = request.request_id
        self._idle.clear()
        if self._admission.arrive(key, loop.time(), request.deadline_at) is Admitted.NOW:
            return
        turn = self._turns[key] = asyncio.Event()
        try:
            async with asyncio.timeout_at(self._admission.give_up_at(key)):
                await turn.wait()
            if self._drain_error is not None:
                raise self._drain_error
        except TimeoutError:
            error = self._admission.expire(key, loop.time())
            if error is not None:
                raise error from None
        finally:
            del self._turns[key]

    def leave(self, key: bytes) -> None:
        """A request is over, or was not let in."""
        self._shells.pop(key, None)
        for admitted in self._admission.leave(key):
            turn = self._turns.get(admitted)
            if turn is not None:
                turn.set()
        counts = self._admission.statistics()
        if counts.num_running == 0 and counts.num_waiting == 0:
            self._idle.set()

    async def drain(self, limit_s: float) -> bool:
        """Take nothing new and wait for what runs or waits; False if the limit came first.

        What is left then fails with ShuttingDown.
        """
        self._is_draining = True
        self._members.usability.tell()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            error = ShuttingDown("this gateway is shutting down", code="drain_limit")
            self._drain_error = error
            for turn in self._turns.values():
                turn.set()
            for shell in list(self._shells.values()):
                shell.fail(error)
            self._members.usability.tell()  # who looks for a pair looks no longer
            return False
        return True
