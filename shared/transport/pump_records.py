"""What the loop's side (``ucxx.py``) and the thread (``pump.py``) both hold of a message and of a
peer. The loop's side subclasses them; the thread knows no more than what stands here."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any

from shared.transport.operation import PendingOperation


class PumpEndpoint:
    """One peer. The attributes belong to the thread."""

    def __init__(self) -> None:
        self.ucx: Any = None
        self.handle = 0
        self.is_open = True
        self.is_lost = False
        self.sinks: set[int] = set()
        self.settle_by = 0.0
        self.waiting_close: asyncio.Future[None] | None = None

    @abstractmethod
    def report_lost(self, _unused: object, _also_unused: object) -> None:
        """Tell the owner; called on the loop."""


class PumpOperation(PendingOperation):
    """A tag message in flight. ``buffer`` keeps the memory alive, and a bytearray from being
    resized. request: UCX's own, the thread's."""

    __slots__ = (
        "buffer", "is_cancelled", "is_receive", "num_bytes", "peer", "pointer", "request", "tag",
    )  # fmt: skip

    buffer: Any
    pointer: int
    peer: PumpEndpoint
    is_receive: bool
    num_bytes: int
    tag: int

    def __init__(self) -> None:
        super().__init__()
        self.request = 0
        self.is_cancelled = False
