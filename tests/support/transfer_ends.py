"""Both ends of a KV push: production shells with the smallest step loop.

``PrefillEnd`` stamps KV as a step loop would compute it; ``DecodeEnd`` reserves blocks on demand
and compares every placed sequence with what its request must have. Here both are in one process
(loopback, memory), in ``kv_push_peer.py`` each in its own (UCX, tcp).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shared.address import Address
from shared.errors import MeshError, TransferFailed
from shared.ids import Incarnation, MeshPeer
from shared.profile.machine import UNMEASURED, MachineProfile
from shared.transport.base import Transport
from shared.worker.pairs import PairTable
from shared.worker.pusher import Pusher, PushHandle
from shared.worker.receiver import KvReceiver
from tests.support.decode_end import DecodeEnd, key_of, num_tokens_of
from tests.support.loopback import LoopbackSettings
from tests.support.memory_network import MemoryFabric, MemoryNetwork
from tests.support.stamped_kv import Blocks, StampedKv

ADDRESS = Address("decode", 1)
COPY_S = 0.0005
SLOW_WIRE = LoopbackSettings(latency_s=0.0005, bytes_per_s=2e6, eager_bytes=0, num_slices=8)
"""Frames of a few hundred bytes take a fraction of a millisecond, in eight parts."""


class VirtualCopies:
    """Copies one after the other, each after a random piece of (virtual) time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._turn = asyncio.Lock()

    async def copy(self, work: Callable[[], Any]) -> Any:
        async with self._turn:
            await asyncio.sleep(self._rng.random() * COPY_S)
            return work()

    async def close(self) -> None:
        pass


class CountingNetwork(MemoryNetwork):
    """Counts how often somebody is dialled."""

    num_dials = 0

    def channel(self, address: Address) -> Any:
        self.num_dials += 1
        return super().channel(address)


@dataclass
class PrefillEnd:
    """A step loop that computes prompts chunk by chunk, by stamping."""

    engine: StampedKv
    pusher: Pusher
    decode: Incarnation
    most_tokens: int = 16
    chunk: int = 6

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.engine.num_blocks)
        self.room = asyncio.Event()

    async def take(self, request: int) -> list[int]:
        """Wait for blocks for the request's prompt."""
        num_tokens = num_tokens_of(request, self.most_tokens)
        while (table := self.blocks.take(-(-num_tokens // self.engine.block_size))) is None:
            self.room.clear()
            await self.room.wait()
        return table

    def give_back(self, table: Sequence[int]) -> None:
        self.blocks.give_back(table)
        self.room.set()

    def begin(self, request: int, table: list[int]) -> PushHandle:
        return self.pusher.begin(
            key_of(request),
            self.decode,
            num_tokens=num_tokens_of(request, self.most_tokens),
            block_table=lambda: table,
        )

    def compute_all(self, request: int, table: list[int], handle: PushHandle) -> None:
        """The whole prompt at once, and the commit."""
        for _ in self.steps(request, table, handle):
            pass

    def steps(self, request: int, table: list[int], handle: PushHandle) -> Any:
        """A generator that yields after each piece of work: span, layer, commit."""
        num_tokens = num_tokens_of(request, self.most_tokens)
        for start in range(0, num_tokens, self.chunk):
            stop = min(start + self.chunk, num_tokens)
            self.pusher.step_planned([(handle, start, stop)], 0.0)
            yield
            for layer in range(self.engine.layout.num_layers):
                self.engine.stamp(table, start, stop, layer, request)
                handle.layers_ready(layer + 1)
                yield
            handle.span_computed()
        handle.commit(request % 1000)

    async def push(self, request: int) -> Any:
        """One whole request; returns its stats."""
        table = await self.take(request)
        handle = self.begin(request, table)
        self.compute_all(request, table, handle)
        try:
            return await handle.wait()
        finally:
            self.give_back(table)


@dataclass
class Ends:
    """A running pair in this process."""

    prefill: PrefillEnd
    decode: DecodeEnd
    pairs: PairTable
    pusher: Pusher
    receiver: KvReceiver
    network: CountingNetwork
    paired: asyncio.Event

    async def settled(self) -> None:
        """Wait until every transfer has ended on both ends. Only under virtual time."""
        while (
            self.pusher.core.statistics().num_transfers
            or self.receiver.core.statistics().num_settling
            or self.receiver.core.statistics().num_live
            or not self.decode.is_home
        ):
            await asyncio.sleep(0.001)

    async def cut_amid_frames(self, request: int) -> None:
        """Close the pair while frames of this request travel; wait until it is made anew."""
        table = await self.prefill.take(request)
        handle = self.prefill.begin(request, table)
        self.prefill.compute_all(request, table, handle)
        while handle.num_frames < 2:
            await asyncio.sleep(0.001)
        (link,) = self.pairs._links.values()
        link.close("the test wants it")
        with contextlib.suppress(TransferFailed):
            await handle.wait()
            raise AssertionError("the transfer outlived its pair")
        self.prefill.give_back(table)
        await self.settled()
        await self.paired.wait()

    def check_all_home(self) -> None:
        """Every block and slot is home; nothing foreign was ever read."""
        assert self.decode.num_foreign == 0
        assert self.decode.is_home
        self.decode.check_integrity()
        assert self.prefill.blocks.is_full
        assert self.pusher.core.statistics().num_transfers == 0
        self.receiver.core.check_integrity()
        assert self.receiver.core.statistics().num_live == 0
        assert self.receiver.core.statistics().num_settling == 0


@contextlib.asynccontextmanager
async def running_ends(
    open_transport: Callable[[], Any],
    *,
    prefill_blocks: int = 64,
    decode_blocks: int = 64,
    most_tokens: int = 16,
    max_frame_bytes: int = 64 + 512,
    group_bytes: int = 256,
    num_slots: int = 4,
    seed: int = 1,
    decode_fingerprint: bytes = b"f" * 32,
    profile: MachineProfile = UNMEASURED,
    kv: type[StampedKv] = StampedKv,
    **receiver_options: Any,
) -> AsyncIterator[Ends]:
    """Start both ends in this process and wait until they are paired."""
    rng = random.Random(seed)
    prefill_kv = kv(num_blocks=prefill_blocks)
    decode_kv = kv(num_blocks=decode_blocks, block_size=2, fingerprint=decode_fingerprint)
    compute = [VirtualCopies(rng), VirtualCopies(rng)]
    transports: list[Transport] = [await open_transport(), await open_transport()]
    fabric = MemoryFabric()
    network = CountingNetwork(fabric, host="prefill")
    decode_end = DecodeEnd(decode_kv, most_tokens=most_tokens)
    receiver = KvReceiver(
        engine=decode_kv,
        compute=compute[1],
        transport=transports[1],
        leases=decode_end.book,
        random_bytes=rng.randbytes,
        num_slots=num_slots,
        max_frame_bytes=max_frame_bytes,
        **receiver_options,
    )
    decode_end.connect(receiver)
    await receiver.open()
    pusher = Pusher(
        engine=prefill_kv,
        compute=compute[0],
        num_slots=num_slots,
        max_frame_bytes=max_frame_bytes,
        profile=profile,
    )
    paired = asyncio.Event()

    def note_pairs() -> None:
        paired.set() if pairs.speeds else paired.clear()

    pairs = PairTable(
        incarnation=Incarnation(1),
        engine=prefill_kv,
        compute=compute[0],
        transport=transports[0],
        network=network,
        source=pusher,
        random_bytes=rng.randbytes,
        on_change=note_pairs,
        group_bytes=group_bytes,
        max_frame_bytes=max_frame_bytes,
    )
    decode_pairs = PairTable(
        incarnation=Incarnation(2),
        engine=decode_kv,
        compute=compute[1],
        transport=transports[1],
        network=MemoryNetwork(fabric, host="decode"),
        sink=receiver,
        random_bytes=rng.randbytes,
        group_bytes=group_bytes,
        max_frame_bytes=max_frame_bytes,
    )
    prefill_end = PrefillEnd(prefill_kv, pusher, Incarnation(2), most_tokens=most_tokens)
    try:
        async with (
            MemoryNetwork(fabric, host="decode").serve(ADDRESS, [decode_pairs.servicer]),
            asyncio.TaskGroup() as tasks,
        ):
            jobs = (decode_pairs, receiver, pusher, pairs)
            running = [tasks.create_task(job.run()) for job in jobs]
            pairs.set_peers([MeshPeer(Incarnation(2), ADDRESS)])
            if decode_fingerprint == prefill_kv.spec.fingerprint:
                await paired.wait()
            yield Ends(prefill_end, decode_end, pairs, pusher, receiver, network, paired)
            for task in reversed(running):
                task.cancel()
    finally:
        receiver.close()
        for transport in transports:
            await transport.close()


async def storm(ends: Ends, *, count: int, seed: int) -> None:
    """Transfers cancelled by either side at random moments, with blocks for a few of them."""
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()

    def plan_cancel(key: Any) -> None:
        if rng.random() < 0.5:
            loop.call_later(rng.random() * 0.01, ends.decode.cancel, key)

    ends.decode.on_attach = plan_cancel

    async def worker(requests: list[int]) -> None:
        while requests:
            with contextlib.suppress(MeshError):
                await ends.prefill.push(requests.pop())

    requests = list(range(count))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(worker(requests))
    await ends.settled()
