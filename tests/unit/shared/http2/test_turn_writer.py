"""A transport that joins what is written in one turn of the loop."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.http2.turn_writer import WAITING_BYTES, TurnWriter


class Wire(asyncio.Transport):
    """Keeps every write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_shut = False

    def write(self, data: Any) -> None:
        assert not self.is_shut
        self.writes.append(data)

    def close(self) -> None:
        self.is_shut = True

    def abort(self) -> None:
        self.is_shut = True

    def is_closing(self) -> bool:
        return self.is_shut


async def test_the_first_write_leaves_at_once_and_the_rest_together() -> None:
    """In order, and the next turn begins anew."""
    wire = Wire()
    writer = TurnWriter(wire)
    for data in (b"a", b"b", b"c"):
        writer.write(data)
    assert wire.writes == [b"a"]
    await asyncio.sleep(0)
    assert wire.writes == [b"a", b"bc"]
    writer.write(b"d")
    assert wire.writes == [b"a", b"bc", b"d"]


async def test_much_does_not_wait() -> None:
    """The transport hears of it while it can still say that it is full."""
    wire = Wire()
    writer = TurnWriter(wire)
    writer.write(b"a")
    for _ in range(3):
        writer.write(bytes(WAITING_BYTES // 2))
    assert sum(map(len, wire.writes)) == 1 + 3 * (WAITING_BYTES // 2)


async def test_close_sends_what_waits_and_abort_does_not() -> None:
    """The last word of a connection is not lost; nothing is written to one that is gone."""
    for close in (True, False):
        wire = Wire()
        writer = TurnWriter(wire)
        writer.write(b"a")
        writer.write(b"bye")
        (writer.close if close else writer.abort)()
        await asyncio.sleep(0)
        assert wire.is_shut
        assert wire.writes == ([b"a", b"bye"] if close else [b"a"])
