"""One end of a KV push in a process of its own: real UCX, real tcp for control, real threads.

Run by ``tests.support.ucx_peer.a_peer`` with ``PEER_PROGRAM``; one JSON line in for an order, one
out for its answer. The decode end cancels leases at random moments, the prefill end transfers;
every random choice comes from the seed, the moments come from the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import sys
from collections import Counter
from typing import Any

import pytest
import structlog

from shared.address import Address
from shared.engine.worker import ThreadCompute
from shared.errors import MeshError, TransferFailed
from shared.ids import Incarnation, MeshPeer
from shared.rpc.tcp import TcpNetwork
from shared.transfer.effects import SenderTiming
from shared.transfer.messages import TransferKey
from shared.transport.ucxx import open_ucx
from shared.worker.pairs import PairTable
from shared.worker.pusher import Pusher
from shared.worker.receiver import KvReceiver
from tests.support.decode_end import DecodeEnd
from tests.support.no_fence import take_fence_away
from tests.support.stamped_kv import StampedKv
from tests.support.transfer_ends import PrefillEnd

BLOCK_TOKENS = 4
MOST_TOKENS = 32


def _kv(num_blocks: int, words: int) -> StampedKv:
    return StampedKv(num_blocks=num_blocks, block_size=BLOCK_TOKENS, words=words)


class Decode:
    """The decode process. ``start`` answers with the port."""

    async def start(self, **config: Any) -> int:
        self.rng = random.Random(config["seed"])
        if not config["has_fence"]:
            take_fence_away(pytest.MonkeyPatch())
        self.cancel_share = config["cancel_share"]
        self.kv = _kv(config["num_blocks"], config["words"])
        self.compute = ThreadCompute(self.kv, name="decode")
        self.transport = await open_ucx()
        self.end = DecodeEnd(self.kv, most_tokens=MOST_TOKENS)
        self.end.on_attach = self._plan_cancel
        self.receiver = KvReceiver(
            engine=self.kv,
            compute=self.compute,
            transport=self.transport,
            leases=self.end.book,
            random_bytes=self.rng.randbytes,
            num_slots=config["num_slots"],
            max_frame_bytes=config["max_frame_bytes"],
        )
        pairs = PairTable(
            incarnation=Incarnation(2),
            engine=self.kv,
            compute=self.compute,
            transport=self.transport,
            network=TcpNetwork(),
            sink=self.receiver,
            random_bytes=self.rng.randbytes,
            group_bytes=config["group_bytes"],
            max_frame_bytes=config["max_frame_bytes"],
        )
        self.end.connect(self.receiver)
        self.num_cancelled = 0
        await self.receiver.open()
        loop = asyncio.get_running_loop()
        self.running = [loop.create_task(job.run()) for job in (pairs, self.receiver)]
        self.serving = contextlib.AsyncExitStack()
        server = await self.serving.enter_async_context(
            TcpNetwork().serve(Address("127.0.0.1", 0), [pairs.servicer])
        )
        return server.address.port

    def _plan_cancel(self, key: TransferKey) -> None:
        if self.rng.random() < self.cancel_share:
            # Amid its frames, however quick this machine is just now.
            delay_s = self.rng.random() * self.end.took_s
            asyncio.get_running_loop().call_later(delay_s, self._cancel, key)

    def _cancel(self, key: TransferKey) -> None:
        self.num_cancelled += self.end.cancel(key)

    async def count_foreign_words(self) -> int:
        """How many words were not what their reader had written or been sent."""
        return self.end.num_foreign

    async def wait_busy(self) -> int:
        """Wait until leases are attached and something was placed."""
        placed = self.end.num_placed
        await self.end.until(lambda: self.end.num_placed > placed + 20)
        return self.end.num_placed

    async def wait_home(self) -> dict[str, Any]:
        """Wait until every lease has ended, and say what happened so far."""
        end = self.end
        await end.until(lambda: end.is_home)
        statistics, ledger = self.receiver.core.statistics(), end.leases.statistics()
        self.receiver.core.check_integrity()
        end.check_integrity()
        return {
            "placed": end.num_placed,
            "released": end.num_released,
            "cancelled": self.num_cancelled,
            "quarantined": end.book.num_quarantined,
            "foreign_words": end.num_foreign,
            "failures": Counter(error.code or error.type for error in end.failures),
            "blocks_home": end.pool.num_available == end.pool.num_blocks,
            "reserved_blocks": ledger.num_reserved_blocks,
            "ended_blocks": ledger.num_freed_blocks + ledger.num_joined_blocks,
            "free_slots": statistics.num_free_slots,
            "unsettled": statistics.num_settling + statistics.num_live,
        }

    async def finish(self) -> dict[str, Any]:
        """Wait until every lease has ended; close everything; say what happened."""
        report = await self.wait_home()
        for task in self.running:
            task.cancel()
        await asyncio.wait(self.running)
        await self.serving.aclose()
        self.receiver.close()
        await self.transport.close()
        await self.compute.close()
        return report


class Prefill:
    """The prefill process. ``start`` pairs and answers with the lane; ``push`` runs transfers."""

    async def start(self, **config: Any) -> str:
        self.rng = random.Random(config["seed"])
        self.cancel_share = config["cancel_share"]
        self.kv = _kv(config["num_blocks"], config["words"])
        self.compute = ThreadCompute(self.kv, name="prefill")
        self.transport = await open_ucx()
        self.pusher = Pusher(
            engine=self.kv,
            compute=self.compute,
            num_slots=config["num_slots"],
            max_frame_bytes=config["max_frame_bytes"],
            timing=SenderTiming(stall_s=60.0),
        )
        self.paired = paired = asyncio.Event()
        self.pairs = PairTable(
            incarnation=Incarnation(1),
            engine=self.kv,
            compute=self.compute,
            transport=self.transport,
            network=TcpNetwork(),
            source=self.pusher,
            random_bytes=self.rng.randbytes,
            on_change=lambda: paired.set() if self.pairs.speeds else paired.clear(),
            group_bytes=config["group_bytes"],
            max_frame_bytes=config["max_frame_bytes"],
        )
        self.end = PrefillEnd(self.kv, self.pusher, Incarnation(2), most_tokens=MOST_TOKENS)
        loop = asyncio.get_running_loop()
        self.running = [loop.create_task(job.run()) for job in (self.pusher, self.pairs)]
        address = Address("127.0.0.1", config["port"])
        self.pairs.set_peers([MeshPeer(Incarnation(2), address)])
        await paired.wait()
        self.outcomes: Counter[str] = Counter()
        self.next_request = 0
        self.num_bytes = 0
        return self.pairs.statistics()[0].lane

    async def push(self, count: int, at_once: int) -> dict[str, Any]:
        """Run ``count`` transfers, ``at_once`` of them side by side; say how they ended."""
        last = self.next_request + count

        async def work() -> None:
            while self.next_request < last:
                self.next_request += 1
                await self._one(self.next_request - 1)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(work())
        return {
            "outcomes": self.outcomes,
            "bytes": self.num_bytes,
            "blocks_home": self.end.blocks.is_full,
            "links": self.pairs._next_link,
        }

    async def _one(self, request: int) -> None:
        table = await self.end.take(request)
        stop_after = self.rng.randrange(40) if self.rng.random() < self.cancel_share else None
        await self.paired.wait()
        handle = self.end.begin(request, table)
        try:
            for num_done, _ in enumerate(self.end.steps(request, table, handle)):
                if num_done % 3 == 2:
                    await asyncio.sleep(0)
                if num_done == stop_after:
                    handle.abort(self.rng.choice([None, TransferFailed("x", code="cancelled")]))
                    break
                if handle.is_ended:
                    break
            stats = await handle.wait()
            self.outcomes["done" if stats.num_frames else "not_needed"] += 1
            self.num_bytes += stats.num_bytes
        except MeshError as error:
            self.outcomes[error.code or error.type] += 1
        # What the next owner's steps would do at once: overwrite.
        for layer in range(self.kv.layout.num_layers):
            self.kv.stamp(table, 0, len(table) * BLOCK_TOKENS, layer, (1 << 30) + request)
        self.end.give_back(table)

    async def finish(self) -> dict[str, Any]:
        """Close everything."""
        statistics = self.pusher.core.statistics()
        for task in reversed(self.running):
            task.cancel()
        await asyncio.wait(self.running)
        await self.transport.close()
        await self.compute.close()
        return {"transfers": statistics.num_transfers, "free_slots": statistics.num_free_slots}


async def _serve(session: Any) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        order = json.loads(line)
        answer = await getattr(session, order.pop("order"))(**order)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main(role: str) -> None:
    """Serve orders until standard input ends."""
    # Standard output belongs to the answers, and a refused frame is news to the report alone.
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(_serve({"decode": Decode, "prefill": Prefill}[role]()))
