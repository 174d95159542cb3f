"""The memory of ``transfer_pair.py``: pools and slots whose every cell says whose KV it
holds, and what is under way.

A write that comes too late lands here as in real memory, and shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from shared.errors import InvariantViolated, MeshError
from shared.transfer.effects import GatherAndSend, PostReceive
from shared.transfer.messages import TransferKey

Cell: TypeAlias = tuple[TransferKey, int, int]
"""Whose KV it is: (request, token, layer)."""


class SlotBytes(NamedTuple):
    """What a staging slot holds: header, payload, and the digest in the header."""

    transfer_id: bytes
    epoch: int
    frame_idx: int
    cells: tuple[Cell | None, ...]
    digest: int


@dataclass
class Job:
    """One request's step loop and lease, naive and independent of the cores."""

    num_tokens: int
    hit: int = 0
    skip: int = 0
    prefill_table: list[int] | None = None
    decode_table: list[int] | None = None
    num_planned: int = 0
    span_start: int = 0
    num_layers_done: int = 0
    is_committed: bool = False
    is_reserved: bool = False
    prefill_end: list[MeshError | None] = field(default_factory=list[MeshError | None])
    decode_end: list[str] = field(default_factory=list[str])


@dataclass
class Send:
    """A frame of prefill's."""

    order: GatherAndSend
    memory: int  # of decode's slot, as prefill has it mapped
    is_gathered: bool = False
    has_left: bool = False  # the receiver's end has taken it, or it fell into the sink


@dataclass
class Receive:
    """A receive of decode's."""

    order: PostReceive
    is_cancelled: bool = False
    has_landed: bool = False


class CellPool:
    """Blocks of one worker; freed blocks are handed out again first, so that reuse is quick."""

    def __init__(self, num_blocks: int, block_size: int, num_layers: int) -> None:
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._cells: list[Cell | None] = [None] * (num_blocks * block_size * num_layers)
        self._num_layers = num_layers

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def take(self, num_tokens: int) -> list[int] | None:
        """Return a block table for so many tokens, or None."""
        num_blocks = -(-num_tokens // self.block_size)
        if num_blocks > len(self._free):
            return None
        return [self._free.pop() for _ in range(num_blocks)]

    def give_back(self, blocks: list[int]) -> None:
        """Free a block table. Raises InvariantViolated: a block of it is free already."""
        if set(blocks) & set(self._free) or len(set(blocks)) != len(blocks):
            raise InvariantViolated("a block came home twice")
        self._free += reversed(blocks)

    def _at(self, table: list[int], token: int, layer: int) -> int:
        slot = table[token // self.block_size] * self.block_size + token % self.block_size
        return slot * self._num_layers + layer

    def read(self, table: list[int], token: int, layer: int) -> Cell | None:
        """Return what the cell of this token and layer holds."""
        return self._cells[self._at(table, token, layer)]

    def write(self, table: list[int], token: int, layer: int, cell: Cell | None) -> None:
        """Overwrite the cell of this token and layer, whoever owns it."""
        self._cells[self._at(table, token, layer)] = cell
