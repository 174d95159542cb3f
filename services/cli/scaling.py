"""Workers of a local mesh that come and go as its planner wants them (``pdmesh up --planner
act``)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from services.local import LocalMesh, Phase, Service, last_word

RETRY_S: Final = 60.0
"""After a worker that could not start."""


class LocalScaler:
    """Starts and ends workers of one mesh.

    new_worker: makes one of a role, prefill, decode or colocated. max_workers: of all roles
    together. say: prints a line that stays.
    """

    def __init__(
        self,
        new_worker: Callable[[str], Service],
        max_workers: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_worker = new_worker
        self._max_workers = max_workers
        self._say = say
        self._clock = clock
        self._added: dict[str, Service] = {}
        self._roles: dict[str, str] = {}
        self._again_at = 0.0

    def wish(self, mesh: LocalMesh, wish: dict[str, Any]) -> None:
        """Take what is wanted: workers by role, those that are there, and ports of those that are
        to end. It comes again until it is so."""
        self._note_failures(mesh)
        wanted, present = wish["wanted"], wish["present"]
        live = [worker for worker in mesh.workers if not worker.is_retired]
        total = min(sum(wanted.values()), self._max_workers)
        for worker in live[:]:
            is_named = worker.facts.get("grpc_port") in wish["drain"]
            if is_named and worker.phase is Phase.READY and len(live) > total:
                live.remove(worker)
                self._say(f"planner: {worker.name} ends when it has finished what it holds")
                mesh.retire(worker)
        if self._clock() < self._again_at:
            return
        # Who starts has not joined: the gateway does not count it among those that are present.
        starting = Counter(
            self._roles[worker.name]
            for worker in live
            if worker.phase is not Phase.READY and worker.name in self._roles
        )
        for _ in range(total - len(live)):
            role = max(wanted, key=lambda it: wanted[it] - present.get(it, 0) - starting[it])
            starting[role] += 1
            worker = self._new_worker(role)
            self._added[worker.name], self._roles[worker.name] = worker, role
            self._say(f"planner: {worker.name} starts")
            mesh.add(worker)

    def _note_failures(self, mesh: LocalMesh) -> None:
        for name, worker in list(self._added.items()):
            if worker.ready.is_set():
                del self._added[name]
            elif worker.phase is Phase.CRASHED:
                del self._added[name]
                mesh.forget(worker)
                self._again_at = self._clock() + RETRY_S
                self._say(f"planner: {name} could not start: {last_word(worker)}")
