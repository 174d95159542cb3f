"""What the gateway believes about its workers: who is there, how they are, who may push to whom.

Soft state alone: it is rebuilt from the workers' own reports after a restart. Pure. The two sides
that routing chooses from are kept, too: made again at the first decision after a worker came, went,
or became usable or not, and never for a change of load.

Workers that are at home on opposite sides are standing partners: they pair up by themselves. Any
other pair is made when a decision wants it first (``reach``, ``ask_for``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from services.gateway.core.routing.sides import Sides, sides_of
from services.gateway.core.worker import Role, Worker, WorkerStatus, WorkerView
from shared.errors import IncompatiblePeer
from shared.ids import Incarnation
from shared.model_spec import ModelSpec

if TYPE_CHECKING:
    from services.gateway.core.routing.columns import Columns

ASK_AGAIN_S = 1.0
"""Between two words to a worker about a pair that it has not made yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """The model whose tokenizer the gateway has. name: as the operator gave it.

    allow_mixed_engines: its workers may compute with different engines.
    """

    name: str
    vocab_size: int
    allow_mixed_engines: bool = False


class PeerTable:
    """All workers, by incarnation, in the order in which they joined.

    own_model: what the gateway was started with; None takes any model.
    """

    def __init__(self, own_model: OwnModel | None = None) -> None:
        self._own_model = own_model
        self._allow_mixed_engines = own_model is not None and own_model.allow_mixed_engines
        self._workers: dict[Incarnation, Worker] = {}
        self._at: dict[int, Worker] = {}
        self._changed: dict[int, Worker] = {}
        self._views: list[WorkerView | None] = []
        self._columns: Columns | None = None
        self._sides: Sides | None = None
        self._reach: Sides | None = None
        self._max_model_len = 0
        self.at_home_with_tokens: tuple[Worker, ...] = ()
        """Whom those at home with prompts pair up with by themselves; the same object until it
        changes."""

    def __len__(self) -> int:
        return len(self._workers)

    def join(self, worker: Worker) -> None:
        """Add a worker; a rejoin with the same incarnation replaces the old entry but keeps its
        session.

        Raises IncompatiblePeer: it serves another model, dtype or KV layout than the workers that
        are here, or a model that the gateway's tokenizer does not fit. The message names the
        setting, both values and the side to change.
        """
        if self._own_model is not None:
            _require_tokenizer(worker, self._own_model)
        for other in self._workers.values():
            if other.incarnation != worker.incarnation:
                _require_compatible(worker, other, allow_mixed_engines=self._allow_mixed_engines)
        old = self._workers.get(worker.incarnation)
        worker.changed = self._changed
        if old is not None:
            worker.take_over(old)
        else:
            # The lowest place that is free: masks and columns stay about as wide as the mesh.
            worker.bit = 1 << next(place for place in count() if place not in self._at)
            self._changed[worker.bit] = worker
            for other in self.serving(Role.PREFILL):
                # Their reports may have named it before it was here.
                if worker.incarnation in other.status.paired:
                    other.partners |= worker.bit
        self._workers[worker.incarnation] = self._at[worker.place] = worker
        worker.partners = self._bits_of(worker)
        self._count()

    def leave(self, incarnation: Incarnation) -> Worker | None:
        """Remove a worker; None if it is not here."""
        worker = self._workers.pop(incarnation, None)
        if worker is not None:
            del self._at[worker.place]
            # It may still be told of ended orders, and its bit may be another's by then.
            worker.changed = {}
            self._changed.pop(worker.bit, None)
            for other in self._workers.values():
                other.partners &= ~worker.bit
                other.asked.pop(incarnation, None)
            self._count()
        return worker

    def report(self, worker: Worker, status: WorkerStatus, now: float | None = None) -> bool:
        """Take a worker's report; returns whether it changes who may be chosen, load apart. now:
        see ``Worker.report``."""
        before = worker.status
        worker.report(status, now)
        partners = worker.partners
        if status.paired is not before.paired and status.paired != before.paired:
            worker.partners = self._bits_of(worker)  # who takes no prompts from elsewhere has none
        is_same = worker.partners == partners and status.is_draining is before.is_draining
        if is_same and (status.home, status.home_epoch) == (before.home, before.home_epoch):
            return False
        self._note_homes()
        self.note_usability()
        return True

    def pair_failed(self, prefill: Incarnation, decode: Incarnation) -> bool:
        """One of the two says that the other failed it: nothing is sent there until the next report
        of the prefill worker names the pair again. Returns whether that changes anything."""
        worker = self._workers.get(prefill)
        if worker is None:
            return False
        return self.report(worker, replace(worker.status, paired=worker.status.paired - {decode}))

    def drains(self, incarnation: Incarnation) -> bool:
        """It refuses what is new, and has not reported that it drains. Returns whether that changes
        anything."""
        worker = self._workers.get(incarnation)
        if worker is None:
            return False
        return self.report(worker, replace(worker.status, is_draining=True))

    def note_usability(self) -> None:
        """A worker's session came, went, fell silent or speaks again."""
        self._sides = self._reach = None

    def _bits_of(self, worker: Worker) -> int:
        if Role.PREFILL not in worker.serves:
            return worker.bit if worker.is_colocated else 0
        partners = filter(None, map(self._workers.get, worker.status.paired))
        return sum(partner.bit for partner in partners)

    def _count(self) -> None:
        lengths = (worker.model.max_model_len for worker in self._workers.values())
        self._max_model_len = min(lengths, default=0)
        self._note_homes()
        self.note_usability()

    def _note_homes(self) -> None:
        at_home = tuple(it for it in self.serving(Role.DECODE) if it.is_home_on(Role.DECODE))
        # By identity: a rejoin replaces the entry, and may bring another address.
        if [*map(id, at_home)] != [*map(id, self.at_home_with_tokens)]:
            self.at_home_with_tokens = at_home

    def get(self, incarnation: Incarnation) -> Worker | None:
        """Return a worker, or None."""
        return self._workers.get(incarnation)

    def at(self, place: int) -> Worker | None:
        """Return the worker of a place, or None."""
        return self._at.get(place)

    @property
    def workers(self) -> list[Worker]:
        """Everybody, in joining order."""
        return list(self._workers.values())

    def all(self, role: Role) -> list[Worker]:
        """Return the workers that joined with one role, in joining order."""
        return [worker for worker in self._workers.values() if worker.role is role]

    def serving(self, role: Role) -> list[Worker]:
        """Return the workers that take orders for a role, in joining order."""
        return [worker for worker in self._workers.values() if role in worker.serves]

    @property
    def model(self) -> ModelSpec | None:
        """The model served, or None while no worker is here."""
        for worker in self._workers.values():
            return worker.model
        return None

    @property
    def max_model_len(self) -> int:
        """The longest sequence that every worker takes; 0 while no worker is here."""
        return self._max_model_len

    @property
    def sides(self) -> Sides:
        """Who may take new work; a colocated worker stands on both sides."""
        if self._sides is None:
            usable = [worker for worker in self._workers.values() if worker.is_usable]
            # Everybody: who may push to nobody has no partners, and ``sides_of`` leaves it out.
            prefills = [(worker, worker.partners) for worker in usable]
            decodes = [worker for worker in usable if Role.DECODE in worker.serves]
            self._sides = self._reach = sides_of(prefills, decodes, self)
            if any(len(worker.serves) > 1 for worker in usable):
                # As if everybody who may push were paired with everybody else.
                others = sum(worker.bit for worker in decodes)
                reaching = [
                    (it, mask | others & ~it.bit if Role.PREFILL in it.serves else mask)
                    for it, mask in prefills
                ]
                self._reach = sides_of(reaching, decodes, self)
                self._reach.at_home = self._sides.at_home = sides_of(
                    [side for side in prefills if side[0].is_home_on(Role.PREFILL)],
                    [worker for worker in decodes if worker.is_home_on(Role.DECODE)],
                    self,
                )
        return self._sides

    @property
    def reach(self) -> Sides:
        """The same with every pair that could be made; ``sides`` itself if nobody may be
        borrowed."""
        sides = self.sides
        return sides if self._reach is None else self._reach

    def views(self) -> Sequence[WorkerView | None]:
        """Return all workers as they are now, by their places; never changed, but made anew."""
        if self._changed:
            self._views = self._views.copy()
            for worker in self._changed.values():
                place = worker.place
                self._views += [None] * (place + 1 - len(self._views))
                self._views[place] = worker.view
            if self._columns is not None:
                self._columns.update(self._changed.values())
            self._changed.clear()
        return self._views

    def columns(self) -> Columns:
        """Return what policies that compare seconds read of them, as they are now."""
        self.views()
        if self._columns is None:
            from services.gateway.core.routing.columns import Columns

            self._columns = Columns()
            self._columns.update(self._workers.values())
        return self._columns

    def is_paired(self, prefill: Incarnation, decode: Incarnation) -> bool:
        """Whether KV may go from one to the other now."""
        source, sink = self._workers.get(prefill), self._workers.get(decode)
        return source is not None and sink is not None and bool(source.partners & sink.bit)

    def ask_for(self, prefill: Incarnation, decode: Incarnation, now: float) -> bool:
        """A decision wants a pair that is not made yet: return whether to tell the prefill worker,
        which is not told again and again while it is at it."""
        source = self._workers.get(prefill)
        if source is None or now < source.asked.get(decode, -ASK_AGAIN_S) + ASK_AGAIN_S:
            return False
        source.asked[decode] = now
        return True

    def standing_partners(self, worker: Worker) -> tuple[Worker, ...]:
        """Return whom a worker pairs up with by itself, to push to: nobody unless it is at home
        with prompts."""
        if not (Role.PREFILL in worker.serves and worker.is_home_on(Role.PREFILL)):
            return ()
        return self.at_home_with_tokens

    def why_not_ready(self) -> str:
        """Return '' if a pair can take work, else one sentence that says what is missing."""
        if self.sides:
            return ""
        for role in (Role.PREFILL, Role.DECODE):
            workers = self.serving(role)
            if role is Role.PREFILL:
                workers += [it for it in self.workers if it.is_colocated and it not in workers]
            if not workers:
                return f"no {role.value} worker has joined"
            if not any(worker.is_usable for worker in workers):
                return f"no {role.value} worker is usable: all are draining, silent or unreachable"
        return "no prefill worker has reached a decode worker yet"


def _require_tokenizer(worker: Worker, own: OwnModel) -> None:
    theirs = worker.model
    if theirs.vocab_size != own.vocab_size:
        raise IncompatiblePeer(
            f"model: this {worker.role.value} worker has {theirs.name!r} with {theirs.vocab_size} "
            f"tokens, the gateway has the tokenizer of {own.name!r} with {own.vocab_size}: set "
            "[mesh] model (--model, PDMESH_MODEL) to the same on the gateway and on all workers",
            param="model",
            code="model_tokenizer",
        )


def _require_compatible(worker: Worker, other: Worker, *, allow_mixed_engines: bool) -> None:
    ours, theirs = other.model, worker.model
    who = f"this {worker.role.value} worker"
    kinds = theirs.engine.partition(" ")[0], ours.engine.partition(" ")[0]
    may_differ = allow_mixed_engines and "fake" not in kinds
    if kinds[0] != kinds[1] and "fake" in kinds:
        raise _mismatch("engine", who, *kinds)
    if theirs.dtype != ours.dtype:
        raise _mismatch("dtype", who, theirs.dtype, ours.dtype)
    if theirs.engine != ours.engine and not may_differ:
        raise IncompatiblePeer(
            f"engine: {who} computes with {theirs.engine!r}, the mesh with {ours.engine!r}, and "
            "they round differently: start all with one [mesh] engine of one release (--engine, "
            "PDMESH_ENGINE; where some CPUs have AMX and others not, --kernels avx512, or of "
            "vllm --dtype float32), or say --allow-mixed-engines on the gateway and on all workers",
            param="engine",
            code="mesh_engine",
        )
    if theirs.name != ours.name and theirs.fingerprint != ours.fingerprint:
        raise _mismatch("model", who, theirs.name, ours.name)
    if theirs.fingerprint != ours.fingerprint:
        if kinds[1] == "fake" and theirs.max_model_len != ours.max_model_len:
            raise _mismatch("max_model_len", who, theirs.max_model_len, ours.max_model_len)
        others = " (or other --max-model-len, --vllm-args)" if "vllm" in kinds else ""
        raise IncompatiblePeer(
            f"model: {who} has {theirs.name!r} with fingerprint {_short(theirs)}, the mesh has "
            f"{ours.name!r} with {_short(ours)}, which are other weights or another config.json of "
            f"one name{others}: copy one folder to all machines and set [mesh] model (--model) "
            "to it",
            param="model",
            code="model_fingerprint",
        )
    other.layout.require_same(worker.layout, who=f"the {worker.role.value} worker")


def _mismatch(setting: str, who: str, theirs: object, ours: object) -> IncompatiblePeer:
    return IncompatiblePeer(
        f"{setting}: {who} has {theirs!r}, the mesh has {ours!r}: set [mesh] {setting} = {ours!r} "
        f"here (--{setting.replace('_', '-')}, PDMESH_{setting.upper()}), or end the workers that "
        "have the other first",
        param=setting,
        code=f"mesh_{setting}",
    )


def _short(model: ModelSpec) -> str:
    return model.fingerprint.hex()[:12]
