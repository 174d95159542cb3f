"""KV of prompts' beginnings from one worker's cache to another's, where sending is quicker than
computing it again (Mooncake, FAST'25, Algorithm 1).

A gateway names the source with the prompt. The sink leads: it takes blocks (a lease, as for any
transfer), asks the source (``Pull``), and gets what that really has by an ordinary transfer: spans,
credit, acknowledgements and fences are the same. Then the prompt, which has kept its place in the
queue, finds the blocks in the prefix cache. Whatever goes wrong, it is computed: a hint that is out
of date costs a round trip, a source that dies or is slow at most ``wait_s``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from shared.errors import MeshError
from shared.ids import RandomBytes, StreamId, new_lease_token
from shared.kv.pool import BlockPool, BlockTable
from shared.kv.prefix_hash import UNIT
from shared.messages.codec import Order, PrefixAt
from shared.request import SamplingParams, WorkItem
from shared.schedule.plan import NewToken, PromptTimes
from shared.schedule.scheduler import Scheduler
from shared.transfer.messages import Pull
from shared.worker.link import PairLink
from shared.worker.pusher import Pusher, PushHandle, PushStats
from shared.worker.receiver import KvReceiver, ReceiveStats
from shared.worker.request import Fetched, Request

_log = structlog.get_logger(__name__)

_ONE_TOKEN = SamplingParams(max_tokens=1)
"""A prefix has no answer: it takes no room to grow."""


class PrefixFetch:
    """One prefix on its way here, and the prompts that wait for it; the ``AskingGateway`` of the
    request that brings it.

    pull: what the source is asked. on_end: it has come, or no more will; called once or more.
    """

    def __init__(
        self,
        pull: Pull,
        ask: Callable[[Pull], None],
        on_end: Callable[[PrefixFetch, Fetched], None],
    ) -> None:
        self.pull = pull
        self.prompts: list[Request] = []
        """The first one's gateway has named the source."""
        self.request: Request | None = None
        self._ask = ask
        self._on_end = on_end
        self._began_at = _now()
        self._cached_tokens = 0

    def brings(self, prompt: Request) -> int:
        """Return how many tokens this prompt begins with of those, 0 if no more than it has. The
        last granule may be another's: the gateway asks for one more than it knows of."""
        item, sequence = prompt.order.item, prompt.sequence
        assert sequence is not None
        if item.cache_salt != self.pull.salt:
            return 0
        most = min(len(self.pull.token_ids), sequence.most_cached_tokens)
        for num_tokens in (most, most // UNIT * UNIT, (most // UNIT - 1) * UNIT):
            if num_tokens <= sequence.num_expected_tokens:
                return 0
            if item.token_ids[:num_tokens] == self.pull.token_ids[:num_tokens]:
                return num_tokens
        return 0

    def _end(self, num_tokens: int = 0, num_bytes: int = 0) -> None:
        self._on_end(self, Fetched(num_tokens, _now() - self._began_at, num_bytes))

    def granted(self, stream_id: StreamId, *, cached_tokens: int, wait_s: float) -> None:
        """See ``AskingGateway``."""
        self._cached_tokens = cached_tokens
        self._ask(self.pull)

    def joined(self, stream_id: StreamId, stats: ReceiveStats, lane: str) -> None:
        """See ``AskingGateway``."""
        self._end(max(0, stats.num_tokens - self._cached_tokens), stats.num_bytes)

    def failed(self, stream_id: StreamId, error: MeshError) -> None:
        """See ``AskingGateway``: the prompt is computed."""
        self._end()

    def ended(self, stream_id: StreamId) -> None:
        """See ``AskingGateway``."""
        self._end()

    def first_token(self, stream_id: StreamId, token: NewToken, times: PromptTimes) -> None:
        """A prefix has no tokens of an answer."""

    def step_tokens(self, tokens: Sequence[tuple[StreamId, NewToken]]) -> None:
        """Nor these."""

    def pushed(self, stream_id: StreamId, stats: PushStats) -> None:
        """Nor is it pushed from here."""


class PrefixFetches:
    """All prefixes on their way here.

    take: ``Requests.take_prefix``. cancel: ``Requests.cancel``. on_end: a prompt waits no longer.
    """

    def __init__(
        self,
        take: Callable[[Order, PrefixFetch], Request],
        cancel: Callable[[Request], None],
        scheduler: Scheduler,
        receiver: KvReceiver,
        random_bytes: RandomBytes,
        on_end: Callable[[], None],
    ) -> None:
        self._take = take
        self._cancel = cancel
        self._scheduler = scheduler
        self._receiver = receiver
        self._random_bytes = random_bytes
        self._on_end = on_end
        self._fetches: list[PrefixFetch] = []

    def begin(self, prompt: Request) -> None:
        """Have a queued prompt wait for what is on its way to another one that begins alike, or
        fetch what its gateway says another worker has; unless it is here, too, or that worker
        cannot be asked now."""
        prefix, sequence = prompt.order.prefix, prompt.sequence
        assert sequence is not None
        fetch = next((it for it in self._fetches if it.brings(prompt)), None)
        if fetch is None and prefix is not None:
            num_tokens = min(prefix.num_tokens, sequence.most_cached_tokens)
            is_new = num_tokens > sequence.num_expected_tokens
            if is_new and self._receiver.is_linked(prefix.worker):
                fetch = self._fetch(prompt, prefix, num_tokens)
        if fetch is not None:
            fetch.prompts.append(prompt)
            prompt.prefix = fetch
            self._scheduler.await_prefix(sequence, fetch.brings(prompt))
            if fetch.request is None:
                self._start(fetch, prompt)

    def _fetch(self, prompt: Request, prefix: PrefixAt, num_tokens: int) -> PrefixFetch:
        order = prompt.order
        key = order.key._replace(token=new_lease_token(self._random_bytes))
        pull = Pull(key, order.item.token_ids[:num_tokens], order.item.cache_salt)
        fetch = PrefixFetch(pull, lambda it: self._receiver.pull(prefix.worker, it), self._ended)
        self._fetches.append(fetch)
        return fetch

    def _start(self, fetch: PrefixFetch, prompt: Request) -> None:
        """Order this worker to take the prefix; all may be over when this returns."""
        prefix, tokens = prompt.order.prefix, fetch.pull.token_ids
        assert prefix is not None
        item = WorkItem(
            token_ids=tuple(tokens),
            num_prompt_tokens=len(tokens),
            sampling=_ONE_TOKEN,
            cache_salt=fetch.pull.salt,
        )
        order = Order(
            StreamId(0),
            fetch.pull.key,
            item,
            prefix.worker,
            deadline_s=prefix.wait_s,
            trace_context=prompt.order.trace_context,
        )
        fetch.request = self._take(order, fetch)

    def leave(self, prompt: Request) -> None:
        """A prompt has ended; what nobody waits for any more is given up."""
        fetch = prompt.prefix
        if fetch is None or fetch not in self._fetches:
            return
        fetch.prompts.remove(prompt)
        if not fetch.prompts and fetch.request is not None:
            self._cancel(fetch.request)

    def _ended(self, fetch: PrefixFetch, fetched: Fetched) -> None:
        if fetch not in self._fetches:
            return
        self._fetches.remove(fetch)
        for prompt in fetch.prompts:
            # It was sent once, for the first of them.
            prompt.fetched = fetched
            fetched = Fetched(0, fetched.seconds, 0)
            assert prompt.sequence is not None
            self._scheduler.prefix_ended(prompt.sequence)
        self._on_end()


class PrefixSource:
    """Sends what other workers pull: the ``on_pull`` of the pusher. Blocks are held while they are
    read, and no longer: no clock has to free them."""

    def __init__(self, pool: BlockPool, pusher: Pusher, on_release: Callable[[], None]) -> None:
        self._pool = pool
        self._pusher = pusher
        self._on_release = on_release
        self._tables: dict[PushHandle, BlockTable] = {}

    def pulled(self, link: PairLink, pull: Pull) -> None:
        """A sink asks for the KV of these tokens: send what there is, if only the word that there
        is nothing."""
        chain = self._pool.new_chain(pull.salt)
        table = self._pool.pin(chain, pull.token_ids)
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
            handle.span(0, table.num_hit_tokens, is_cached=True)
            handle.commit(0)
        else:
            handle.abort()  # the sink lets its blocks go

    def _ended(self, handle: PushHandle) -> None:
        self._pool.release(self._tables.pop(handle))
        self._on_release()

    def tables(self) -> list[BlockTable]:
        """Every block table that is held here, for ``BlockPool.check_integrity``."""
        return list(self._tables.values())


def _now() -> float:
    return asyncio.get_running_loop().time()
