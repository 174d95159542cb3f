"""Frames that prefill writes into decode's staging by itself: who may write, and until when."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from shared.errors import TransferFailed
from shared.ids import Incarnation
from tests.support.loopback import LoopbackFabric, LoopbackSettings
from tests.support.transfer_ends import Ends, num_tokens_of, running_ends
from tests.support.virtual_loop import virtual_time

LONG = next(n for n in range(1000) if num_tokens_of(n, 16) == 16)
SLOW_WORD = LoopbackSettings(latency_s=0.02, eager_bytes=0, has_windows=True)


def windows_of(ends: Ends) -> dict[int, np.ndarray]:
    """What prefill has mapped."""
    (link,) = ends.pairs._links.values()
    return dict(link.windows._windows)


class CountingTransport:
    """Counts the bytes of messages, and may change what a window's key leads to."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.num_sent = 0
        self.address, self.close = transport.address, transport.close
        self.new_window, self.receive = transport.new_window, transport.receive

    async def connect(self, address: bytes, on_lost: Any) -> Any:
        endpoint = await self._transport.connect(address, on_lost)
        send = endpoint.send

        def counted(buffer: Any, num_bytes: int, tag: int) -> Any:
            self.num_sent += num_bytes
            return send(buffer, num_bytes, tag)

        endpoint.send = counted
        endpoint.map_window = self.map_window
        return endpoint

    async def map_window(self, key: bytes) -> Any:
        return self._transport.find_window(key[-8:])


class AnotherNamespace(CountingTransport):
    """Where the peer's memory cannot be reached."""

    async def map_window(self, key: bytes) -> Any:
        return None


@pytest.mark.parametrize(
    ("kind", "is_whole"), [(CountingTransport, False), (AnotherNamespace, True)]
)
@virtual_time
async def test_only_headers_travel_where_windows_are_mapped(kind: Any, is_whole: bool):
    """A frame is 64 bytes of message then; where the memory cannot be mapped, or is not decode's,
    it is all of it."""
    fabric = LoopbackFabric(LoopbackSettings(has_windows=True))
    transports: list[CountingTransport] = []

    async def open_transport() -> Any:
        transports.append(kind(await fabric.open()))
        return transports[-1]

    async with running_ends(open_transport) as ends:
        before = transports[0].num_sent
        stats = await ends.prefill.push(LONG)
        await ends.settled()
        sent = transports[0].num_sent - before
        assert sent == (stats.num_bytes if is_whole else 64 * stats.num_frames)
        assert stats.num_bytes > 64 * stats.num_frames
        ends.check_all_home()


@virtual_time
async def test_windows_of_a_lost_writer_are_given_up_for_new_ones():
    """It may go on writing, as a stopped process does when it wakes: that meets nobody."""
    async with running_ends(LoopbackFabric(SLOW_WORD).open) as ends:
        old = windows_of(ends)
        await ends.cut_amid_frames(LONG)
        new = windows_of(ends)
        replaced = [slot for slot in old if not np.shares_memory(old[slot], new[slot])]
        assert replaced
        async with asyncio.TaskGroup() as tasks:
            for request in range(6):
                tasks.create_task(ends.prefill.push(request))
            for _ in range(1000):
                for slot in replaced:
                    old[slot][:] = 0xEE
                await asyncio.sleep(0.001)
        await ends.settled()
        ends.check_all_home()


@virtual_time
async def test_another_pair_hears_of_new_memory_before_it_is_credited():
    """Two pairs share decode's slots: what one loses, the other must not go on writing."""
    async with running_ends(LoopbackFabric(SLOW_WORD).open) as ends:
        (link,) = ends.pairs._links.values()
        await ends.prefill.push(LONG)
        (decode_link,) = ends.receiver._links.values()
        old = windows_of(ends)
        for slot in old:  # as if another prefill worker had been lost amid frames into all of them
            offer = await ends.receiver._slots.replace(slot, is_abandoned=False)
            assert offer is not None
            decode_link.offer([offer])
        for request in range(6):
            await ends.prefill.push(request)
        await ends.settled()
        assert ends.decode.num_placed == 7
        new = windows_of(ends)
        used = [slot for slot in new if not np.shares_memory(old[slot], new[slot])]
        assert used
        assert link.windows
        ends.check_all_home()


@virtual_time
async def test_a_slot_that_was_never_offered_is_refused():
    """A decode worker that names nonsense loses the transfer, and prefill no memory."""
    async with running_ends(LoopbackFabric(LoopbackSettings(has_windows=True)).open) as ends:
        (link,) = ends.pairs._links.values()
        with pytest.raises(TransferFailed, match="never offered"):
            await link.windows.at(99)
        assert [*ends.pairs.speeds] == [Incarnation(2)]
