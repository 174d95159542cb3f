"""What ``shared/transport/base.py`` promises, asserted for both transports in one process."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from shared.errors import LocalProtocolError, TransferFailed
from shared.transport.base import Endpoint, Outcome, Transport, TransportFactory
from shared.transport.settings import UcxSettings
from tests.support.loopback import LoopbackFabric, LoopbackSettings
from tests.support.ucx_peer import pattern

RENDEZVOUS = 1 << 20
EAGER = 1024
MAX_IN_FLIGHT = 3000
SETTLES_S = 30.0


@dataclass
class Pair:
    """Two connected transports."""

    left: Transport
    right: Transport
    to_right: Endpoint
    to_left: Endpoint
    lost: list[str]

    def receive(self, num_bytes: int, tag: int) -> tuple[Any, np.ndarray]:
        """Post a receive into zeros on the right."""
        buffer = np.zeros(num_bytes, np.uint8)
        return self.right.receive(self.to_left, buffer, num_bytes, tag), buffer

    def send(self, num_bytes: int, tag: int) -> Any:
        """Post a send of the tag's pattern from the left."""
        return self.to_right.send(pattern(tag, num_bytes), num_bytes, tag)


@pytest.fixture(params=["loopback", pytest.param("ucxx", marks=pytest.mark.ucx)])
async def factory(request: pytest.FixtureRequest) -> TransportFactory:
    """Make transports of one kind that can reach each other."""
    if request.param == "loopback":
        settings = LoopbackSettings(num_slices=4, max_in_flight=MAX_IN_FLIGHT, has_windows=True)
        return LoopbackFabric(settings).open
    from shared.transport.ucxx import open_ucx

    return lambda: open_ucx(UcxSettings(max_in_flight=MAX_IN_FLIGHT))


@pytest.fixture
async def pair(factory: TransportFactory) -> AsyncIterator[Pair]:
    """Two transports, connected both ways, closed at the end."""
    left, right = await factory(), await factory()
    lost: list[str] = []
    to_right = await left.connect(right.address, lambda: lost.append("right"))
    to_left = await right.connect(left.address, lambda: lost.append("left"))
    yield Pair(left, right, to_right, to_left, lost)
    await left.close()
    await right.close()
    assert not any(thread.name == "ucx-pump" for thread in threading.enumerate())


async def settled(*operations: Any) -> list[Outcome]:
    """Wait for all of them."""
    async with asyncio.timeout(SETTLES_S):
        return [await operation.settled() for operation in operations]


# --- windows --------------------------------------------------------------------------------------


async def a_window(pair: Pair, num_bytes: int = RENDEZVOUS) -> tuple[np.ndarray, np.ndarray]:
    """A window of the right, as each side sees it: (right's own, left's mapping)."""
    window = await pair.right.new_window(num_bytes)
    assert window is not None
    mapped = await pair.to_right.map_window(window.key)
    assert mapped is not None
    return np.frombuffer(window.memory, np.uint8), np.frombuffer(mapped, np.uint8)


async def test_what_is_written_into_a_window_is_there_with_the_word(pair: Pair) -> None:
    """The peer's word is a message as any other; the bytes are there when it has come."""
    own, mapped = await a_window(pair)
    assert len(mapped) == len(own) == RENDEZVOUS
    word = pair.right.receive(pair.to_left, own, 64, 7)
    mapped[64:] = pattern(7, RENDEZVOUS)[64:]
    assert await settled(pair.send(64, 7), word) == [Outcome.DONE, Outcome.DONE]
    assert (own[64:] == pattern(7, RENDEZVOUS)[64:]).all()
    assert (own[:64] == pattern(7, 64)).all()


async def test_a_window_outlives_its_owners_interest(pair: Pair) -> None:
    """The owner gave its memory up and has another; the peer still writes the old one."""
    own, mapped = await a_window(pair)
    del own
    other, other_mapped = await a_window(pair)
    other[:] = 3
    mapped[:] = 9
    assert (other == 3).all()
    other_mapped[:5] = 4
    assert list(other[:6]) == [4, 4, 4, 4, 4, 3]


async def test_damaged_keys_of_windows_are_refused(pair: Pair) -> None:
    """They never reach a library that would believe them."""
    window = await pair.right.new_window(100)
    assert window is not None
    damaged = window.key[:-1] + bytes([window.key[-1] ^ 1])
    for bad in (b"", b"short", window.key[:-1], damaged, pair.right.address):
        with pytest.raises(TransferFailed):
            await pair.to_right.map_window(bad)


async def test_a_closed_endpoint_maps_nothing(pair: Pair) -> None:
    """It is said, and not waited for."""
    window = await pair.right.new_window(100)
    assert window is not None
    await pair.to_right.close()
    with pytest.raises(TransferFailed, match="closed"):
        await pair.to_right.map_window(window.key)


# --- matching -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, 8191, 8192, 8193, RENDEZVOUS, 64 << 20])
async def test_bytes_arrive_as_sent(pair: Pair, num_bytes: int) -> None:
    """A message of any size arrives whole."""
    receive, buffer = pair.receive(num_bytes, 7)
    assert await settled(pair.send(num_bytes, 7), receive) == [Outcome.DONE, Outcome.DONE]
    assert (buffer == pattern(7, num_bytes)).all()


@pytest.mark.parametrize("num_bytes", [EAGER, 100_000])
async def test_tag_decides_not_order(pair: Pair, num_bytes: int) -> None:
    """Messages go to the receive with their tag, whatever the order of receives and sends."""
    tags = [random.Random(3).getrandbits(64) for _ in range(40)]
    receives = {tag: pair.receive(num_bytes, tag) for tag in tags}
    sends = [pair.send(num_bytes, tag) for tag in random.Random(4).sample(tags, len(tags))]
    await settled(*sends, *(receive for receive, _ in receives.values()))
    for tag, (receive, buffer) in receives.items():
        assert receive.outcome is Outcome.DONE
        assert (buffer == pattern(tag, num_bytes)).all()


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
async def test_all_64_bits_of_a_tag_count(pair: Pair, bit: int) -> None:
    """A message does not go to a receive whose tag differs in one bit."""
    wrong, wrong_buffer = pair.receive(EAGER, 5 ^ (1 << bit))
    right, _ = pair.receive(EAGER, 5)
    await settled(pair.send(EAGER, 5), right)
    assert wrong.outcome is None
    assert not wrong_buffer.any()


@pytest.mark.parametrize("num_bytes", [EAGER, RENDEZVOUS])
async def test_a_message_waits_for_its_receive(pair: Pair, num_bytes: int) -> None:
    """A message that comes first is kept until its receive is posted."""
    send = pair.send(num_bytes, 1)
    marker, _ = pair.receive(EAGER, 2)
    await settled(pair.send(EAGER, 2), marker)
    receive, buffer = pair.receive(num_bytes, 1)
    assert await settled(receive, send) == [Outcome.DONE, Outcome.DONE]
    assert (buffer == pattern(1, num_bytes)).all()


async def test_both_directions_at_once(pair: Pair) -> None:
    """Traffic of the two directions does not disturb each other."""
    to_left = np.zeros(RENDEZVOUS, np.uint8)
    back = pair.left.receive(pair.to_right, to_left, RENDEZVOUS, 9)
    forth, to_right = pair.receive(RENDEZVOUS, 9)
    answer = pair.to_left.send(pattern(8, RENDEZVOUS), RENDEZVOUS, 9)
    await settled(pair.send(RENDEZVOUS, 9), answer, back, forth)
    assert (to_left == pattern(8, RENDEZVOUS)).all()
    assert (to_right == pattern(9, RENDEZVOUS)).all()


@pytest.mark.parametrize(
    ("sent", "due"), [(EAGER, EAGER * 2), (EAGER * 2, EAGER), (50_000, 80_000)]
)
async def test_a_wrong_length_fails_the_receive(pair: Pair, sent: int, due: int) -> None:
    """A message shorter or longer than its receive is not a success."""
    receive, _ = pair.receive(due, 1)
    send = pair.send(sent, 1)
    await settled(receive, send)
    assert receive.outcome is Outcome.FAILED
    assert receive.error


async def test_a_sent_message_is_not_a_receipt(pair: Pair) -> None:
    """A small send is done though nobody received it."""
    assert await settled(pair.send(EAGER, 1)) == [Outcome.DONE]


async def test_thousands_in_flight_arrive_and_more_are_refused(pair: Pair) -> None:
    """Many small messages at once all arrive; the bound on their number is enforced."""
    num_messages = MAX_IN_FLIGHT
    receives = [pair.receive(64, tag) for tag in range(num_messages)]
    with pytest.raises(LocalProtocolError):
        pair.receive(64, num_messages)
    sends = [pair.send(64, tag) for tag in range(num_messages)]
    await settled(*sends, *(receive for receive, _ in receives))
    for tag, (receive, buffer) in enumerate(receives):
        assert receive.outcome is Outcome.DONE
        assert (buffer == pattern(tag, 64)).all()
    assert await settled(pair.send(64, 1 << 20)) == [Outcome.DONE]  # room again


# --- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [EAGER, RENDEZVOUS])
async def test_the_message_of_a_cancelled_receive_is_swallowed(pair: Pair, num_bytes: int) -> None:
    """It lands neither in the old buffer nor in the next receive, and its send settles."""
    receive, buffer = pair.receive(num_bytes, 1)
    receive.cancel()
    assert await settled(receive) == [Outcome.CANCELLED]
    neighbour, other = pair.receive(num_bytes, 2)
    assert await settled(pair.send(num_bytes, 1)) == [Outcome.DONE]
    await settled(pair.send(num_bytes, 2), neighbour)
    assert not buffer.any()
    assert (other == pattern(2, num_bytes)).all()


async def test_a_cancelled_buffer_is_left_alone_once_settled(pair: Pair) -> None:
    """Whatever the moment of a cancel, nothing is written after the operation settled."""
    num_bytes = 16 << 20
    for num_turns in (0, 1, 2, 5, 10, 50):
        receive, buffer = pair.receive(num_bytes, num_turns)
        send = pair.send(num_bytes, num_turns)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        receive.cancel()
        assert receive.outcome is None or receive.outcome is Outcome.DONE
        (outcome,) = await settled(receive)
        if outcome is Outcome.DONE:
            assert (buffer == pattern(num_turns, num_bytes)).all()
        else:
            assert outcome is Outcome.CANCELLED
        buffer[:] = 0xEE
        await settled(send)
        marker, _ = pair.receive(RENDEZVOUS, 1000 + num_turns)
        await settled(pair.send(RENDEZVOUS, 1000 + num_turns), marker)
        assert (buffer == 0xEE).all()


async def test_cancelling_the_wait_is_not_cancelling(pair: Pair) -> None:
    """An operation goes on when one task that awaits it is cancelled; others get their answer."""
    receive, _ = pair.receive(EAGER, 1)
    async with asyncio.TaskGroup() as group:
        impatient = group.create_task(receive.settled())
        patient = group.create_task(receive.settled())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert receive.outcome is None
        pair.send(EAGER, 1)
    assert patient.result() is Outcome.DONE


async def test_cancel_after_the_end_and_twice_is_nothing(pair: Pair) -> None:
    """Cancelling a settled operation changes nothing."""
    receive, buffer = pair.receive(EAGER, 1)
    send = pair.send(EAGER, 1)
    await settled(send, receive)
    for operation in (send, receive):
        operation.cancel()
        operation.cancel()
        assert await operation.settled() is Outcome.DONE
    again, _ = pair.receive(EAGER, 2)
    again.cancel()
    again.cancel()
    assert await settled(again) == [Outcome.CANCELLED]
    assert (buffer == pattern(1, EAGER)).all()


# --- ends -----------------------------------------------------------------------------------------


async def test_closing_an_endpoint_settles_everything(pair: Pair) -> None:
    """After ``close`` no operation of the endpoint is open, and new ones fail."""
    sends = [pair.send(RENDEZVOUS, tag) for tag in range(5)]
    await asyncio.sleep(0)
    receives = [
        pair.left.receive(pair.to_right, bytearray(EAGER), EAGER, 50 + tag) for tag in range(5)
    ]
    await pair.to_right.close()
    assert all(operation.outcome is not None for operation in (*sends, *receives))
    assert not pair.to_right.alive
    assert await settled(pair.send(EAGER, 90)) == [Outcome.FAILED]
    late = pair.left.receive(pair.to_right, bytearray(EAGER), EAGER, 91)
    assert await settled(late) == [Outcome.FAILED]
    await pair.to_right.close()
    assert "right" not in pair.lost


async def test_a_closed_endpoint_can_be_made_anew(pair: Pair) -> None:
    """Two transports meet again after both closed their endpoints."""
    await pair.to_right.close()
    await pair.to_left.close()
    pair.to_right = await pair.left.connect(pair.right.address, lambda: None)
    pair.to_left = await pair.right.connect(pair.left.address, lambda: None)
    receive, buffer = pair.receive(RENDEZVOUS, 3)
    await settled(pair.send(RENDEZVOUS, 3), receive)
    assert (buffer == pattern(3, RENDEZVOUS)).all()


async def test_endpoints_are_counted_until_they_are_closed(pair: Pair) -> None:
    """A count that stays up shows a leak."""
    assert pair.left.num_endpoints == 1
    second = await pair.left.connect(pair.right.address, lambda: None)
    assert pair.left.num_endpoints == 2
    await second.close()
    await pair.to_right.close()
    assert pair.left.num_endpoints == 0


async def test_closing_a_transport_settles_everything(pair: Pair) -> None:
    """After ``close`` nothing is open and nobody can be reached; closing again is nothing."""
    receive, _ = pair.receive(EAGER, 1)
    unborn = pair.to_left.send(bytes(RENDEZVOUS), RENDEZVOUS, 2)
    await pair.right.close()
    assert receive.outcome is not None
    assert unborn.outcome is not None
    assert await settled(pair.to_left.send(b"x", 1, 3)) == [Outcome.FAILED]
    receive.cancel()
    await pair.to_left.close()
    with pytest.raises(TransferFailed):
        await pair.right.connect(pair.left.address, lambda: None)
    await pair.right.close()


async def test_damaged_addresses_are_refused(pair: Pair) -> None:
    """Random, cut, stretched or flipped address bytes raise TransferFailed and harm nobody."""
    good = pair.right.address
    rng = random.Random(5)
    bad = [b"", b"\0", good[:-1], good + b"\0", good[1:], bytes(len(good)), good[:16]]
    bad += [rng.randbytes(rng.randrange(1, 400)) for _ in range(50)]
    bad += [good[: rng.randrange(len(good))] for _ in range(20)]
    for _ in range(50):
        flipped = bytearray(good)
        flipped[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        bad.append(bytes(flipped))
    for address in bad:
        with pytest.raises(TransferFailed):
            await pair.left.connect(address, lambda: None)
    receive, _ = pair.receive(EAGER, 1)
    assert await settled(pair.send(EAGER, 1), receive) == [Outcome.DONE, Outcome.DONE]


@pytest.mark.ucx
async def test_ucx_says_what_it_has_abandoned() -> None:
    """A receive that does not settle after its endpoint was closed is no plain failure: its owner
    must know that the memory is not its own again."""
    from shared.transport.ucxx import open_ucx

    left, right = await open_ucx(), await open_ucx()
    to_left = await right.connect(left.address, lambda: None)
    pump = right._pump
    cancel, withheld = pump._tags.cancel, list[int]()
    pump._tags.cancel = withheld.append  # UCX would settle it at once
    receive = right.receive(to_left, np.zeros(EAGER, np.uint8), EAGER, 1)
    await to_left.close()
    assert receive.outcome is Outcome.ABANDONED
    for request in withheld:
        pump.order(cancel, request)
    await left.close()
    await right.close()


# --- buffers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "num_bytes"),
    [
        (np.zeros((64, 64), np.uint8)[:, ::2], 16),
        (np.zeros(64, np.uint8)[::-1], 16),
        (bytearray(15), 16),
        (bytearray(15), -1),
        (object(), 0),
        ("text", 4),
    ],
)
async def test_unusable_buffers_are_refused(pair: Pair, buffer: Any, num_bytes: int) -> None:
    """A strided or short buffer, or none at all, raises before anything is posted."""
    with pytest.raises(LocalProtocolError):
        pair.to_right.send(buffer, num_bytes, 1)
    with pytest.raises(LocalProtocolError):
        pair.right.receive(pair.to_left, buffer, num_bytes, 1)


async def test_constants_can_be_sent_but_not_received_into(pair: Pair) -> None:
    """``bytes`` are good for a send only."""
    with pytest.raises(LocalProtocolError):
        pair.right.receive(pair.to_left, bytes(16), 16, 1)
    receive, _ = pair.receive(16, 1)
    await settled(pair.to_right.send(bytes(16), 16, 1), receive)


@pytest.mark.parametrize("tag", [-1, 1 << 64])
async def test_a_tag_has_64_bits(pair: Pair, tag: int) -> None:
    """Other numbers are refused, not cut."""
    with pytest.raises(LocalProtocolError):
        pair.to_right.send(b"x", 1, tag)


async def test_a_buffer_may_be_longer_than_its_message(pair: Pair) -> None:
    """Only the first ``num_bytes`` are sent and written; any shape and item size will do."""
    source = np.arange(64, dtype=np.float32).reshape(8, 8)
    target = np.zeros((10, 20), np.uint16)
    receive = pair.right.receive(pair.to_left, target, 100, 1)
    assert await settled(pair.to_right.send(source, 100, 1), receive) == [Outcome.DONE] * 2
    assert target.tobytes() == source.tobytes()[:100] + bytes(300)


async def test_a_buffer_in_flight_is_pinned(pair: Pair) -> None:
    """A bytearray cannot be resized while the transport may write into it."""
    buffer = bytearray(EAGER)
    receive = pair.right.receive(pair.to_left, buffer, EAGER, 1)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    await settled(pair.send(EAGER, 1), receive)
    buffer.extend(b"more")
