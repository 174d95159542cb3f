"""What blocks tell: which prefix became findable, and which is gone. Pure records.

A prefix becomes findable when the step, or the verified transfer, that wrote its last block is over
(``BlockPool.publish``), so no event is ever ahead of the bytes. Events come in the order in which
things happened, within the call that made them happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class BlockStored(NamedTuple):
    """KV of the prefix that ``key`` names (``prefix_hash.py``) can be found here, the end of it in
    ``block``. end: tokens of the prefix. parent: the prefix that it continues by a block, empty if
    it is the first."""

    key: bytes
    block: int
    end: int
    parent: bytes = b""


class BlockRemoved(NamedTuple):
    """It cannot be found here any more: its block went to somebody else."""

    key: bytes
    block: int


KvEvent = BlockStored | BlockRemoved

KvListener = Callable[[KvEvent], None]
"""Returns at once and changes nothing of the pool."""

OnIdle = Callable[[int], None]
"""Told of a cached block that nobody holds any more; likewise."""
