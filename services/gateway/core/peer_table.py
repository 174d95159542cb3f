"""What the gateway believes about its workers: who is there, how they are, who may push to whom.

Soft state alone: it is rebuilt from the workers' own reports after a restart. Pure; a worker is
usable when it has joined, its session is up, it is not draining, and (for a pair) its canary has
crossed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shared.errors import IncompatiblePeer
from shared.ids import Incarnation
from shared.kv.layout import KvLayout


class Role(Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The one model that all workers of a mesh serve."""

    name: str
    fingerprint: bytes
    vocab_size: int
    max_model_len: int
    dtype: str
    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """The model whose tokenizer the gateway has. name: as the operator gave it.

    allow_mixed_engines: its workers may compute with different engines.
    """

    name: str
    vocab_size: int
    allow_mixed_engines: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A worker's latest report; tokens and blocks are counts, ``step_s`` a moving mean."""

    pending_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    free_blocks: int = 0
    reserved_blocks: int = 0
    quarantined_blocks: int = 0
    step_s: float = 0.0
    is_draining: bool = False
    paired: frozenset[Incarnation] = frozenset()


@dataclass(slots=True, kw_only=True)
class Worker:
    """One worker process."""

    role: Role
    incarnation: Incarnation
    host: str
    port: int
    model: ServedModel
    layout: KvLayout
    num_blocks: int
    block_size: int
    status: WorkerStatus = field(default_factory=WorkerStatus)
    has_session: bool = False
    is_suspect: bool = False
    own_tokens: int = 0
    """Tokens of this gateway's requests in their prefill here."""
    own_blocks: int = 0
    """Blocks that this gateway's requests need here."""

    @property
    def is_colocated(self) -> bool:
        """Whether this decode worker is its own prefill worker, too: it is paired with itself."""
        return self.incarnation in self.status.paired

    @property
    def is_usable(self) -> bool:
        """Whether new work may be sent here."""
        return self.has_session and not self.is_suspect and not self.status.is_draining

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens queued here. Reports lag behind dispatch, so the own count is a lower
        bound."""
        return max(self.status.pending_tokens, self.own_tokens)

    @property
    def reserved_blocks(self) -> int:
        """Blocks taken here; the own count is a lower bound."""
        return max(self.status.reserved_blocks, self.own_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens fills."""
        return -(-num_tokens // self.block_size)


class PeerTable:
    """All workers, by incarnation, in the order in which they joined.

    own_model: what the gateway was started with; None takes any model.
    """

    def __init__(self, own_model: OwnModel | None = None) -> None:
        self._own_model = own_model
        self._allow_mixed_engines = own_model is not None and own_model.allow_mixed_engines
        self._workers: dict[Incarnation, Worker] = {}

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
        if old is not None:
            worker.has_session = old.has_session
            worker.own_tokens, worker.own_blocks = old.own_tokens, old.own_blocks
        self._workers[worker.incarnation] = worker

    def leave(self, incarnation: Incarnation) -> Worker | None:
        """Remove a worker; None if it is not here."""
        return self._workers.pop(incarnation, None)

    def get(self, incarnation: Incarnation) -> Worker | None:
        """Return a worker, or None."""
        return self._workers.get(incarnation)

    def all(self, role: Role) -> list[Worker]:
        """Return the workers of one role in joining order."""
        return [worker for worker in self._workers.values() if worker.role is role]

    @property
    def model(self) -> ServedModel | None:
        """The model served, or None while no worker is here."""
        for worker in self._workers.values():
            return worker.model
        return None

    @property
    def max_model_len(self) -> int:
        """The longest sequence that every worker takes; 0 while no worker is here."""
        return min((w.model.max_model_len for w in self._workers.values()), default=0)

    def usable_pairs(self) -> list[tuple[Worker, Worker]]:
        """Return every (prefill, decode) pair that may take new work, in joining order; a
        colocated worker is both of one."""
        decodes = [worker for worker in self.all(Role.DECODE) if worker.is_usable]
        return [
            (prefill, decode)
            for prefill in self._workers.values()
            if prefill.is_usable
            for decode in decodes
            if decode.incarnation in prefill.status.paired
        ]

    def why_not_ready(self) -> str:
        """Return '' if a pair can take work, else one sentence that says what is missing."""
        if self.usable_pairs():
            return ""
        for role in (Role.PREFILL, Role.DECODE):
            workers = self.all(role)
            if role is Role.PREFILL:
                workers += [worker for worker in self.all(Role.DECODE) if worker.is_colocated]
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
    if theirs.engine != ours.engine and not may_differ:
        raise IncompatiblePeer(
            f"engine: {who} computes with {theirs.engine!r}, the mesh with {ours.engine!r}, and "
            "they round differently: start all with one [mesh] engine of one release (--engine, "
            "PDMESH_ENGINE), or say --allow-mixed-engines on the gateway and on all workers",
            param="engine",
            code="mesh_engine",
        )
    if theirs.dtype != ours.dtype:
        raise _mismatch("dtype", who, theirs.dtype, ours.dtype)
    if theirs.name != ours.name and theirs.fingerprint != ours.fingerprint:
        raise _mismatch("model", who, theirs.name, ours.name)
    if theirs.fingerprint != ours.fingerprint:
        if kinds[1] == "fake" and theirs.max_model_len != ours.max_model_len:
            raise _mismatch("max_model_len", who, theirs.max_model_len, ours.max_model_len)
        raise IncompatiblePeer(
            f"model: {who} has {theirs.name!r} with fingerprint {_short(theirs)}, the mesh has "
            f"{ours.name!r} with {_short(ours)}, which are other weights or another config.json of "
            f"one name: copy one folder to all machines and set [mesh] model (--model) to it",
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


def _short(model: ServedModel) -> str:
    return model.fingerprint.hex()[:12]
