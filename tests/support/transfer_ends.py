"""Both ends of a KV push: production shells with the smallest step loop and lease book.

``PrefillEnd`` stamps KV as a step loop would compute it; ``DecodeEnd`` reserves blocks on demand
and compares every placed sequence with what its request must have. Used in one process (loopback,
memory) and in two (UCX, tcp).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.address import Address
from shared.errors import MeshError, TransferFailed
from shared.ids import Incarnation, LeaseToken, MeshPeer, RequestId
from shared.profile.machine import UNMEASURED, MachineProfile
from shared.transfer.effects import HandOver
from shared.transfer.messages import TransferKey
from shared.transport.base import Transport
from shared.worker.pairs import PairTable
from shared.worker.pusher import Pusher, PushHandle
from shared.worker.receiver import KvReceiver, LeaseTerms, NoTermsYet
from tests.support.memory_network import MemoryFabric, MemoryNetwork
from tests.support.stamped_kv import Blocks, StampedKv
from tests.support.virtual_loop import run_virtual

ADDRESS = Address("decode", 1)
COPY_S = 0.0005
RUNNING = 1 << 29
"""Added to a request's number: the running sequence that got its blocks."""


class VirtualCopies:
    """Copies one after the other, each after a random piece of (virtual) time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._turn = asyncio.Lock()

    async def copy(self, work: Callable[[], Any]) -> Any:
        async with self._turn:
            await asyncio.sleep(self._rng.random() * COPY_S)
            return work()

    async def step(self, rows: Any, on_layers_done: Any = None) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class CountingNetwork(MemoryNetwork):
    """Counts how often somebody is dialled."""

    num_dials = 0

    def channel(self, address: Address) -> Any:
        self.num_dials += 1
        return super().channel(address)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test under virtual time: the same events in the same order, every time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run


def num_tokens_of(request: int, most: int) -> int:
    """Length of a request's prompt: anything from 1 to ``most``, the same on both ends."""
    return 1 + random.Random(request).randrange(most)


def key_of(request: int) -> TransferKey:
    """Attempt 0 of the request with this number."""
    return TransferKey(RequestId(request.to_bytes(16, "little")), 0, LeaseToken(bytes(16)))


def request_of(key: TransferKey) -> int:
    """The number of a request made by ``key_of``."""
    return int.from_bytes(key.request_id, "little")


@dataclass
class Lease:
    """One request's room on decode. state: waiting, attached, placed, released."""

    blocks: list[int] | None
    num_tokens: int
    state: str = "waiting"


@dataclass
class DecodeEnd:
    """A lease book that reserves when asked, checks what was placed, and frees it after a while.

    skip: leading tokens that are already here, per request. hold: whether placed sequences keep
    their blocks until ``finish``. grow: blocks that come home from a transfer that failed go at
    once to a running sequence, whose step writes them, and which reads them a little later.
    """

    engine: StampedKv
    most_tokens: int = 16
    is_reserving: bool = True
    hold: bool = False
    grow: bool = False
    skip: Callable[[int], int] = lambda request: 0
    on_attach: Callable[[TransferKey], None] = lambda key: None
    leases: dict[TransferKey, Lease] = field(default_factory=dict)
    waiting: deque[TransferKey] = field(default_factory=deque)
    num_placed: int = 0
    num_released: int = 0
    num_quarantined: int = 0
    num_foreign: int = 0
    failures: list[MeshError] = field(default_factory=list)
    events: list[tuple[str, TransferKey]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.blocks = Blocks(self.engine.num_blocks)
        self.receiver: KvReceiver | None = None

    # --- LeaseBook ---

    def attach(self, key: TransferKey, prefill: Incarnation) -> LeaseTerms | NoTermsYet:
        if key not in self.leases:
            if not self.is_reserving:
                return NoTermsYet.NOT_RESERVED
            self.reserve(key)
        lease = self.leases[key]
        if lease.state != "waiting":
            raise TransferFailed("attached before")
        if lease.blocks is None:
            return NoTermsYet.NO_ROOM
        lease.state = "attached"
        self.on_attach(key)
        skip = self.skip(request_of(key))
        return LeaseTerms(num_tokens=lease.num_tokens, skip_tokens=skip, block_table=lease.blocks)

    def source_lost(self, source: Incarnation, error: MeshError) -> None:
        for key in [key for key, lease in self.leases.items() if lease.state == "waiting"]:
            self._note("lost", key)
            self.cancel(key)

    def placed(self, receive: HandOver) -> None:
        key = receive.key
        lease = self.leases[key]
        assert lease.state == "attached"
        assert lease.blocks is not None
        assert receive.first_token == request_of(key) % 1000
        lease.state = "placed"
        self.num_placed += 1
        self._note("placed", key)
        self._read(key)
        if not self.hold:
            # Freed a little later, so that late writes of others would be seen.
            asyncio.get_running_loop().call_later(0.002, self.finish, key)

    def failed(self, key: TransferKey, error: MeshError) -> None:
        assert self.leases[key].state == "attached"
        self.failures.append(error)
        self._note("failed", key)

    def quarantined(self, key: TransferKey) -> None:
        self.num_quarantined += 1
        self._note("quarantined", key)

    def release(self, key: TransferKey) -> None:
        assert self.leases[key].state == "attached"
        self.num_released += 1
        self._note("released", key)
        blocks = self.leases[key].blocks
        if self.grow and blocks is not None:
            self._run_in(blocks, request_of(key) + RUNNING)
            self.leases[key].state = "grown over"
            asyncio.get_running_loop().call_later(0.003, self._end_run, key)
        else:
            self._free(key, "released")

    # --- the rest of a decode worker ---

    def reserve(self, key: TransferKey) -> None:
        num_tokens = num_tokens_of(request_of(key), self.most_tokens)
        blocks = self.blocks.take(-(-num_tokens // self.engine.block_size))
        self.leases[key] = Lease(blocks, num_tokens)
        if blocks is None:
            self.waiting.append(key)
            return
        for layer in range(self.engine.layout.num_layers):
            skip = self.skip(request_of(key))
            self.engine.stamp(blocks, 0, skip, layer, request_of(key))

    def finish(self, key: TransferKey) -> None:
        if self.leases[key].state == "placed":
            self._read(key)
            self._free(key, "finished")

    def cancel(self, key: TransferKey) -> None:
        """The request is cancelled, wherever it stands."""
        assert self.receiver is not None
        lease = self.leases.get(key)
        match lease.state if lease is not None else "":
            case "attached":
                self.receiver.abort(key, TransferFailed("cancelled"))
            case "placed":
                self.finish(key)
            case "waiting":
                assert lease is not None
                self.receiver.abort(key, TransferFailed("cancelled"))  # its open is refused
                if lease.blocks is None:
                    self.waiting.remove(key)
                    self.leases.pop(key)
                else:
                    self._free(key, "released")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until an event here has made the condition true."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def _run_in(self, blocks: list[int], request: int) -> None:
        for layer in range(self.engine.layout.num_layers):
            num_tokens = len(blocks) * self.engine.block_size
            self.engine.stamp(blocks, 0, num_tokens, layer, request)

    def _end_run(self, key: TransferKey) -> None:
        blocks = self.leases[key].blocks
        assert blocks is not None
        self.num_foreign += self.engine.num_foreign(
            blocks, 0, len(blocks) * self.engine.block_size, request_of(key) + RUNNING
        )
        self._free(key, "released")

    def _read(self, key: TransferKey) -> None:
        lease = self.leases[key]
        assert lease.blocks is not None
        self.num_foreign += self.engine.num_foreign(
            lease.blocks, 0, lease.num_tokens, request_of(key)
        )

    def _free(self, key: TransferKey, state: str) -> None:
        lease = self.leases[key]
        assert lease.blocks is not None
        self.blocks.give_back(lease.blocks)
        lease.blocks, lease.state = None, state
        self.changed.set()
        while self.waiting:
            key = self.waiting[0]
            num_blocks = -(-self.leases[key].num_tokens // self.engine.block_size)
            blocks = self.blocks.take(num_blocks)
            if blocks is None:
                return
            self.waiting.popleft()
            self.leases[key].blocks = blocks
            assert self.receiver is not None
            self.receiver.lease_changed(key)
            if self.leases[key].state == "waiting":
                # Its prefill worker is gone, and so is the open: a gateway would cancel it.
                del self.leases[key]
                self.blocks.give_back(blocks)

    def _note(self, what: str, key: TransferKey) -> None:
        self.events.append((what, key))
        self.changed.set()


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
            handle.span(start, stop)
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
            or not self.decode.blocks.is_full
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
        assert self.decode.blocks.is_full
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
        leases=decode_end,
        random_bytes=rng.randbytes,
        num_slots=num_slots,
        max_frame_bytes=max_frame_bytes,
        **receiver_options,
    )
    decode_end.receiver = receiver
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
        paired.set() if pairs.paired else paired.clear()

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
