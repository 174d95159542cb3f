"""One worker as the gateway sees it: what it said at its join, its latest report, its session.

Pure; a worker is usable when it has joined, its session is up and it does not drain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

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
    bit: int = 0
    """This worker in ``partners`` of others; the peer table gives it."""
    partners: int = 0
    """The bits of the decode workers that this one may push to, usable or not."""

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

    @property
    def reserved_share(self) -> float:
        """The share of the blocks that is taken."""
        return self.reserved_blocks / max(1, self.num_blocks)

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits here while nothing else is."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of this many tokens fills."""
        return -(-num_tokens // self.block_size)
