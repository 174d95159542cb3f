"""The decode end of a KV push: production's own ledger, and a step loop that only stamps.

Reservations, leases and block pool are the real ones. Made up are those around them: the gateway
reserves when prefill has asked; a sequence that has joined runs for a moment, in which its KV is
read twice; and the blocks of a transfer that failed go at once to a sequence that was waiting for
room: its step writes them, and reads them back a little later.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from shared.errors import MeshError
from shared.ids import Incarnation, LeaseToken, RequestId, StreamId
from shared.kv.pool import BlockPool
from shared.request import FinishReason, SamplingParams, WorkItem
from shared.schedule.plan import NewToken
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.worker import DecodeMetrics, PrefillMetrics
from shared.transfer.effects import HandOver
from shared.transfer.messages import TransferKey
from shared.transfer.orders import Order
from shared.worker.core.lease import LeasePolicy, LeaseState
from shared.worker.core.leases import Leases
from shared.worker.core.life import Task
from shared.worker.receiver import KvReceiver, LeaseTerms, NoTermsYet
from shared.worker.request import Request
from shared.worker.requests import Requests
from shared.worker.reservations import Reservations
from tests.support.stamped_kv import StampedKv

RUNNING = 1 << 29
"""Added to the number of a running sequence that got a request's blocks."""
READ_AGAIN_S = 0.002
STEP_S = 0.003
WAIT_S = 50.0


def num_tokens_of(request: int, most: int) -> int:
    """Length of a request's prompt: anything from 1 to ``most``, the same on both ends."""
    return 1 + random.Random(request).randrange(most)


def key_of(request: int) -> TransferKey:
    """Attempt 0 of the request with this number."""
    return TransferKey(RequestId(request.to_bytes(16, "little")), 0, LeaseToken(bytes(16)))


def request_of(key: TransferKey) -> int:
    """The number of a request made by ``key_of``."""
    return int.from_bytes(key.request_id, "little")


class WatchedBook:
    """Production's lease book, watched by its end."""

    def __init__(self, book: Reservations, end: DecodeEnd) -> None:
        self._book = book
        self._end = end
        self.num_quarantined = 0

    def attach(self, key: TransferKey, source: Incarnation) -> LeaseTerms | NoTermsYet:
        terms = self._book.attach(key, source)
        if terms is NoTermsYet.NOT_RESERVED:
            self._end.opened(key, source)
        elif isinstance(terms, LeaseTerms):
            return self._end.attached(key, terms)
        return terms

    def quarantined(self, key: TransferKey) -> None:
        self.num_quarantined += 1
        self._book.quarantined(key)

    def release(self, key: TransferKey) -> None:
        self._end.released(lambda: self._book.release(key))

    def source_lost(self, source: Incarnation, error: MeshError) -> None:
        self._book.source_lost(source, error)

    def placed(self, receive: HandOver) -> None:
        assert receive.first_token == request_of(receive.key) % 1000
        self._book.placed(receive)

    def failed(self, key: TransferKey, error: MeshError) -> None:
        self._book.failed(key, error)


class DecodeEnd:
    """The decode worker round its reservations: gateway and step loop.

    is_reserving: the gateway does so by itself. skip: leading tokens that are already here, per
    request. on_attach: prefill may push from now on.
    """

    def __init__(self, engine: StampedKv, *, most_tokens: int) -> None:
        self._engine = engine
        self._most_tokens = most_tokens
        self.is_reserving = True
        self.skip: Callable[[int], int] = lambda request: 0
        self.on_attach: Callable[[TransferKey], object] = lambda key: None
        self.pool = BlockPool(engine.num_blocks, engine.block_size)
        self.leases = Leases(self.pool, LeasePolicy())
        self.requests = Requests(
            tasks=frozenset({Task.ANSWER}),
            scheduler=self,  # type: ignore[arg-type]
            pool=self.pool,
            leases=self.leases,
            spec=engine.spec,  # type: ignore[arg-type]
            prompt_metrics=PrefillMetrics(),
            answer_metrics=DecodeMetrics(),
            max_prompts=1,
            max_answers=1 << 10,
        )
        self.book = WatchedBook(self.requests.reservations, self)
        self._requests: dict[TransferKey, Request | None] = {}
        self._num_runs = 0
        self.num_placed = 0
        self.took_s = 0.0
        """Of the transfer that was placed last."""
        self.num_released = 0
        self.num_foreign = 0
        self.failures: list[MeshError] = []
        self._news = asyncio.Event()

    def connect(self, receiver: KvReceiver) -> None:
        """Close the circle."""
        self.requests.connect(self, receiver=receiver)  # type: ignore[arg-type]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until an event here has made the condition true."""
        while not condition():
            self._news.clear()
            await self._news.wait()

    @property
    def is_home(self) -> bool:
        """Whether no request is left and every block is free."""
        return not self.requests.num_answers and not self.pool.num_held

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every block that was reserved is accounted for, once."""
        self.leases.check_integrity()
        self.pool.check_integrity([] if self.is_home else None)

    # --- the gateway -----------------------------------------------------------------------------

    def opened(self, key: TransferKey, prefill: Incarnation) -> None:
        """A source asks for what nobody has reserved."""
        if self.is_reserving and key not in self._requests:
            self._requests[key] = None
            asyncio.get_running_loop().call_soon(self.reserve, key, prefill)

    def attached(self, key: TransferKey, terms: LeaseTerms) -> LeaseTerms:
        """It got this, of which something may be here already."""
        request = request_of(key)
        skip_tokens = self.skip(request)
        for layer in range(self._engine.layout.num_layers):
            self._engine.stamp(terms.block_table, 0, skip_tokens, layer, request)
        self.on_attach(key)
        return replace(terms, skip_tokens=skip_tokens)

    def reserve(self, key: TransferKey, prefill: Incarnation) -> None:
        """Ask for room."""
        num_tokens = num_tokens_of(request_of(key), self._most_tokens)
        order = Order(
            stream_id=StreamId(request_of(key)),
            key=key,
            item=WorkItem(
                token_ids=(1,) * num_tokens,
                num_prompt_tokens=num_tokens,
                sampling=SamplingParams(max_tokens=2),
            ),
            peer=prefill,
            wait_s=WAIT_S,
        )
        self._requests[key] = self.requests.take(Task.ANSWER, order, self)

    def cancel(self, key: TransferKey) -> bool:
        """Cancel the request; False: it has no transfer any more."""
        request = self._requests[key]
        if request is None or request.lease.state is not LeaseState.OPEN:
            return False
        self.requests.cancel(request)
        return True

    def granted(self, stream_id: StreamId, *, cached_tokens: int, wait_s: float) -> None:
        """See ``AskingGateway``; so are the next four."""

    def joined(self, stream_id: StreamId, receive: HandOver, lane: str) -> None:
        self.num_placed += 1
        self.took_s = receive.receive_s

    def step_tokens(self, tokens: Sequence[tuple[StreamId, NewToken]]) -> None:
        pass

    def failed(self, stream_id: StreamId, error: MeshError) -> None:
        self.failures.append(error)

    def ended(self, stream_id: StreamId) -> None:
        self._news.set()

    # --- the step loop ---------------------------------------------------------------------------

    def add_ready(self, sequence: TokenSequence) -> None:
        """See ``Scheduler``; so is the next one."""
        self._read(sequence)
        # Ends a little later, so that late writes of others would be seen.
        asyncio.get_running_loop().call_later(READ_AGAIN_S, self._finish, sequence)

    def abort(self, sequence: TokenSequence) -> None:
        raise AssertionError("nobody cancels a sequence that runs")

    def changed(self) -> None:
        """See ``Stepper``; so is the next one."""

    def wake(self) -> None:
        pass

    def _read(self, sequence: TokenSequence) -> None:
        stream_id = self.requests._by_sequence[sequence].order.stream_id
        self.num_foreign += self._engine.num_foreign(
            sequence.block_table, 0, sequence.num_computed_tokens, stream_id
        )

    def _finish(self, sequence: TokenSequence) -> None:
        self._read(sequence)
        assert sequence.table is not None
        self.pool.release(sequence.table)
        sequence.finish_reason = FinishReason.STOP
        self.requests.step_done([NewToken(sequence, 1, 1, FinishReason.STOP, None, ())], (), None)

    def released(self, release: Callable[[], None]) -> None:
        """A lease's blocks come home, and what runs here needs all that is free."""
        self.num_released += 1
        self.pool.claim(self.pool.num_blocks)  # newcomers stand back
        release()
        self.pool.claim(0)
        num_tokens = self.pool.num_available * self.pool.block_size
        table = self.pool.acquire(self.pool.new_chain(), [], num_tokens, max_hit_tokens=0)
        assert table is not None
        self._num_runs += 1
        name = RUNNING + self._num_runs
        for layer in range(self._engine.layout.num_layers):
            self._engine.stamp(table.blocks, 0, num_tokens, layer, name)

        def end() -> None:
            self.num_foreign += self._engine.num_foreign(table.blocks, 0, num_tokens, name)
            self.pool.release(table)
            self.requests.step_done((), (), None)
            self._news.set()

        asyncio.get_running_loop().call_later(STEP_S, end)
