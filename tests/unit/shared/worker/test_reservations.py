"""The clock of a worker's reservations, on the loop that services run on."""

from __future__ import annotations

import asyncio

import pytest

from shared.ids import Incarnation, LeaseToken, RequestId
from shared.kv.pool import BlockPool
from shared.runtime.service import EXIT_OK, Process, run_service
from shared.telemetry.worker import DecodeMetrics
from shared.transfer.messages import TransferKey
from shared.worker.core.lease import LeasePolicy
from shared.worker.core.leases import Leases
from shared.worker.reservations import Reservations
from tests.support.cores import an_item


def test_rest_when_a_wait_is_over_this_very_moment() -> None:
    """A timer within half a millisecond is another thing to uvloop, and what a worker does with it
    is the same: once it ended the worker, with all answers."""
    pytest.importorskip("uvloop")
    pool = BlockPool(2, 4)
    leases = Leases(pool, LeasePolicy())
    refused: list[TransferKey] = []

    class Answers(dict[TransferKey, TransferKey]):
        def __missing__(self, key: TransferKey) -> TransferKey:
            return key

    async def main(process: Process) -> bool:
        reservations = Reservations(
            leases,
            Answers(),
            vocab_size=1000,
            metrics=DecodeMetrics(),
            handle=lambda key, *_: refused.append(key),
            joined=lambda *_: None,
            on_change=lambda: None,
        )
        for number in range(2):
            key = TransferKey(RequestId(bytes([number] * 16)), 0, LeaseToken(bytes(16)))
            now = asyncio.get_running_loop().time()
            leases.reserve(key, an_item(tuple(range(1, 8))), Incarnation(1), now=now, wait_s=1e-4)
        reservations.rests()
        reservations.rests()
        while not refused:
            await asyncio.sleep(0.001)
        process.stop.set()
        return True

    assert run_service("test", main) == EXIT_OK
    assert len(refused) == 1
