"""What only the in-memory twin does: modelled time and bad days (contract: see the other file)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from shared.errors import TransferFailed
from shared.transport.base import Outcome
from tests.support.loopback import LoopbackFabric, LoopbackSettings, LoopbackTransport
from tests.support.virtual_loop import run_virtual

BIG = 1_000_000
SETTLES_S = 30.0


class Trio:
    """Four transports on one fabric: a talks to b; c talks to d, to tell when time has passed."""

    def __init__(self, settings: LoopbackSettings) -> None:
        self.fabric = LoopbackFabric(settings)
        self.lost: list[str] = []
        self.transports: list[LoopbackTransport] = []

    async def open(self) -> Trio:
        self.a, self.b, self.c, self.d = [await self.fabric.open() for _ in range(4)]
        self.transports = [self.a, self.b, self.c, self.d]
        self.a_to_b = await self.a.connect(self.b.address, lambda: self.lost.append("b"))
        self.b_to_a = await self.b.connect(self.a.address, lambda: self.lost.append("a"))
        self.c_to_d = await self.c.connect(self.d.address, lambda: None)
        self.d_to_c = await self.d.connect(self.c.address, lambda: None)
        self._num_ticks = 0
        return self

    def message(self, num_bytes: int, tag: int) -> tuple[Any, Any, bytearray]:
        """Post a send of ones from a and its receive into zeros on b."""
        buffer = bytearray(num_bytes)
        receive = self.b.receive(self.b_to_a, buffer, num_bytes, tag)
        return self.a_to_b.send(b"\1" * num_bytes, num_bytes, tag), receive, buffer

    async def tick(self) -> None:
        """Wait as long as a message of BIG bytes takes between c and d."""
        self._num_ticks += 1
        receive = self.d.receive(self.d_to_c, bytearray(BIG), BIG, self._num_ticks)
        self.c_to_d.send(bytes(BIG), BIG, self._num_ticks)
        await within(receive)


async def within(*operations: Any) -> list[Outcome]:
    """Wait for all of them."""
    async with asyncio.timeout(SETTLES_S):
        return [await operation.settled() for operation in operations]


SLOW = LoopbackSettings(
    latency_s=0.01, bytes_per_s=50 * BIG, num_slices=4, detect_s=0.01, max_unexpected=2
)
"""10 ms latency, 20 ms for BIG bytes, in four slices."""


@pytest.fixture
async def slow() -> AsyncIterator[Trio]:
    trio = await Trio(SLOW).open()
    yield trio
    for transport in trio.transports:
        await transport.close()


def in_virtual_time(scenario: Callable[[Trio], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario where time passes only by timers."""

    async def run() -> None:
        await scenario(await Trio(SLOW).open())

    run_virtual(run())


def test_time_is_latency_plus_bytes_over_bandwidth() -> None:
    """A rendezvous takes three latencies and its bytes' time; the next one queues behind it."""

    async def scenario(slow: Trio) -> None:
        loop = asyncio.get_running_loop()
        _, first, _ = slow.message(BIG, 1)
        _, second, _ = slow.message(BIG, 2)
        await within(first)
        assert loop.time() == pytest.approx(3 * 0.01 + 0.02)
        assert second.outcome is None
        await within(second)
        assert loop.time() == pytest.approx(3 * 0.01 + 2 * 0.02)

    in_virtual_time(scenario)


def test_a_cancelled_receive_goes_on_writing_until_it_settles() -> None:
    """Cancelled amid a rendezvous, the buffer still changes; only settling is the end."""

    async def scenario(slow: Trio) -> None:
        _, receive, buffer = slow.message(BIG, 1)
        while not buffer[0]:
            await asyncio.sleep(0.001)
        receive.cancel()
        assert receive.outcome is None
        assert not buffer[-1]
        assert await within(receive) == [Outcome.DONE]
        assert buffer[-1]

    in_virtual_time(scenario)


def test_what_is_abandoned_is_written_after_it_settled() -> None:
    """The bad day that the switch is for: closing settles the operations, and the buffers go on
    being read and written."""

    async def scenario(slow: Trio) -> None:
        slow.fabric.settings = replace(SLOW, settles_on_close=False)
        send, receive, buffer = slow.message(BIG, 1)
        unmatched = slow.b.receive(slow.b_to_a, bytearray(8), 8, 2)
        while not buffer[0]:
            await asyncio.sleep(0.001)
        await slow.b_to_a.close()
        await slow.a_to_b.close()
        assert [send.outcome, receive.outcome] == [Outcome.ABANDONED] * 2
        assert unmatched.outcome is Outcome.CANCELLED
        assert not buffer[-1]
        await slow.tick()
        assert buffer[-1]
        assert slow.a.num_in_flight == slow.b.num_in_flight == 0

    in_virtual_time(scenario)


async def test_a_dead_peer_is_reported_once_and_fails_everything(slow: Trio) -> None:
    """After a ``kill`` every operation fails and on_lost is called once."""
    send, receive, _ = slow.message(BIG, 1)
    unmatched = slow.b.receive(slow.b_to_a, bytearray(8), 8, 2)
    slow.fabric.kill(slow.a.address)
    assert await within(receive, unmatched) == [Outcome.FAILED, Outcome.FAILED]
    assert slow.lost == ["a"]
    assert not slow.b_to_a.alive
    assert await within(send) == [Outcome.FAILED]  # the dead one's own code does not hang either
    assert await within(slow.b_to_a.send(b"x", 1, 3)) == [Outcome.FAILED]
    await slow.tick()
    slow.fabric.kill(slow.a.address)
    await slow.tick()
    assert slow.lost == ["a"]
    with pytest.raises(TransferFailed):
        await slow.b.connect(slow.a.address, lambda: None)


async def test_a_frozen_peer_looks_alive_until_it_thaws(slow: Trio) -> None:
    """Nothing moves and nothing fails while a peer is stopped; then everything arrives."""
    slow.fabric.freeze(slow.a.address)
    _, eager, eager_buffer = slow.message(8, 1)
    _, rendezvous, buffer = slow.message(BIG, 2)
    for _ in range(3):
        await slow.tick()
    assert eager.outcome is None
    assert rendezvous.outcome is None
    assert slow.b_to_a.alive
    slow.fabric.thaw(slow.a.address)
    assert await within(eager, rendezvous) == [Outcome.DONE, Outcome.DONE]
    assert all(eager_buffer)
    assert all(buffer)
    assert not slow.lost


async def test_closing_towards_a_frozen_peer_does_not_wait(slow: Trio) -> None:
    """Abort is local: it needs nothing from the peer."""
    send, receive, buffer = slow.message(BIG, 1)
    slow.fabric.freeze(slow.a.address)
    async with asyncio.timeout(SETTLES_S):
        await slow.b_to_a.close()
    assert receive.outcome is Outcome.CANCELLED
    slow.fabric.thaw(slow.a.address)
    await slow.tick()
    assert not any(buffer)
    assert send.outcome is None  # nobody told the sender: only closing its own endpoint ends it
    await slow.a_to_b.close()
    assert send.outcome is Outcome.CANCELLED


async def test_unexpected_messages_are_bounded(slow: Trio) -> None:
    """A receiver keeps ``max_unexpected`` messages without receive; a further rendezvous fails."""
    kept = [slow.a_to_b.send(bytes(BIG), BIG, tag) for tag in range(2)]
    refused = slow.a_to_b.send(bytes(BIG), BIG, 9)
    assert await within(refused) == [Outcome.FAILED]
    assert [send.outcome for send in kept] == [None, None]
