"""KV of prompts' beginnings from one worker's cache to another's, where sending is quicker than
computing it again: performs what ``core/prefixes.py`` decides.

Spans, credit, acknowledgements and fences are those of any transfer. A hint that is out of date
costs a round trip, a source that dies or is slow at most ``wait_s``.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shared.errors import MeshError
from shared.ids import RandomBytes, StreamId
from shared.kv.pool import BlockPool, BlockTable
from shared.runtime.loops import loop_time
from shared.schedule.scheduler import Scheduler
from shared.transfer.effects import HandOver
from shared.transfer.messages import Pull
from shared.transfer.orders import Order
from shared.worker.core.prefixes import ComingPrefixes, PrefixFetch
from shared.worker.link import PairLink
from shared.worker.pusher import Pusher, PushHandle
from shared.worker.receiver import KvReceiver
from shared.worker.request import AskingGateway, Request

_log = structlog.get_logger(__name__)


class _Asker(AskingGateway):
    """Of the request that brings a prefix, which has no tokens and is pushed nowhere.

    on_end: it has come, or no more will: tokens and bytes; called once or more.
    """

    def __init__(self, ask: Callable[[], None], on_end: Callable[[int, int], None]) -> None:
        self._ask = ask
        self._on_end = on_end
        self._cached_tokens = 0

    def granted(self, stream_id: StreamId, *, cached_tokens: int, wait_s: float) -> None:
        self._cached_tokens = cached_tokens
        self._ask()

    def joined(self, stream_id: StreamId, receive: HandOver, lane: str) -> None:
        self._on_end(max(0, receive.num_tokens - self._cached_tokens), receive.num_bytes)

    def failed(self, stream_id: StreamId, error: MeshError) -> None:
        self._on_end(0, 0)  # the prompt is computed

    def ended(self, stream_id: StreamId) -> None:
        self._on_end(0, 0)


class PrefixFetches:
    """All prefixes on their way here.

    take: ``Requests.take_prefix``. cancel: ``Requests.cancel``. on_end: a prompt waits no longer.
    """

    def __init__(
        self,
        take: Callable[[Order, _Asker], Request | None],
        cancel: Callable[[Request], None],
        scheduler: Scheduler,
        receiver: KvReceiver,
        random_bytes: RandomBytes,
        on_end: Callable[[], None],
    ) -> None:
        self._take = take
        self._cancel = cancel
        self._receiver = receiver
        self._on_end = on_end
        self._requests: dict[PrefixFetch[Request], Request] = {}
        self._core = ComingPrefixes[Request](
            scheduler,
            random_bytes,
            is_linked=receiver.is_linked,
            start=self._start,
            give_up=self._give_up,
        )

    def begin(self, prompt: Request) -> None:
        self._core.begin(prompt, loop_time())

    def leave(self, prompt: Request) -> None:
        self._core.leave(prompt)

    def _start(self, fetch: PrefixFetch[Request]) -> None:
        # It waits for no room (``wait_s``): what has none now is computed.
        order = Order(
            StreamId(0),
            fetch.pull.key,
            fetch.item,
            fetch.source,
            deadline_s=fetch.wait_s,
            trace_context=fetch.prompts[0].order.trace_context,
        )
        asker = _Asker(
            lambda: self._receiver.pull(fetch.source, fetch.pull),
            lambda num_tokens, num_bytes: self._ended(fetch, num_tokens, num_bytes),
        )
        request = self._take(order, asker)
        if request is not None:
            self._requests[fetch] = request

    def _give_up(self, fetch: PrefixFetch[Request]) -> None:
        request = self._requests.pop(fetch, None)
        if request is not None:
            self._cancel(request)

    def _ended(self, fetch: PrefixFetch[Request], num_tokens: int, num_bytes: int) -> None:
        if self._core.ended(fetch, loop_time(), num_tokens, num_bytes):
            self._requests.pop(fetch, None)
            self._on_end()


class PrefixSource:
    """Sends what other workers pull: the ``on_pull`` of the pusher. Blocks are held while they are
    read, and no longer: no clock has to free them.

    shares: False = it is asked all the same, for gateways know no such setting, and has nothing.
    """

    def __init__(
        self, pool: BlockPool, pusher: Pusher, on_release: Callable[[], None], *, shares: bool
    ) -> None:
        self._pool = pool
        self._shares = shares
        self._pusher = pusher
        self._on_release = on_release
        self._tables: dict[PushHandle, BlockTable] = {}

    def pulled(self, link: PairLink, pull: Pull) -> None:
        """A sink asks for the KV of these tokens: send what there is, if only the word that there
        is nothing."""
        chain = self._pool.new_chain(pull.salt)
        table = self._pool.pin(chain, pull.token_ids if self._shares else ())
        try:
            handle = self._pusher.begin(
                pull.key,
                link.peer,
                num_tokens=len(pull.token_ids),
                block_table=lambda: table.blocks,
                is_prefix=True,
            )
        except MeshError as error:
            self._pool.release(table)
            _log.info("prefix not sent", error=error.message, code=error.code)
            return
        self._tables[handle] = table
        handle.when_ended(self._ended)
        if table.num_hit_tokens:
            handle.cached(table.num_hit_tokens)
            # No token follows a prefix: the sink looks at none.
            handle.commit(0)
        else:
            handle.abort()  # the sink lets its blocks go

    def _ended(self, handle: PushHandle) -> None:
        self._pool.release(self._tables.pop(handle))
        self._on_release()

    def tables(self) -> list[BlockTable]:
        """Every block table that is held here, for ``BlockPool.check_integrity``."""
        return list(self._tables.values())
