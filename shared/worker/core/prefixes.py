"""Prefixes on their way from other workers' caches to this one's: which prompt waits for which, and
when one is asked for (Mooncake, FAST'25, Algorithm 1). Pure.

A gateway names the source with the prompt. The sink leads: it takes blocks (a lease, as for any
transfer), asks the source (``Pull``), and gets what that really has by an ordinary transfer. Then
the prompt, which has kept its place in the queue, finds the blocks in the prefix cache. Whatever
goes wrong, it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from shared.ids import ID_BYTES, Incarnation, LeaseToken, RandomBytes
from shared.kv.prefix_hash import UNIT
from shared.request import SamplingParams, WorkItem
from shared.schedule.scheduler import Scheduler
from shared.schedule.sequence import Sequence
from shared.transfer.messages import Pull
from shared.transfer.orders import Order, PrefixAt

_ONE_TOKEN = SamplingParams(max_tokens=1)
"""A prefix has no answer: it takes no room to grow."""


class Fetched(NamedTuple):
    """What came of a prefix that another worker has: so many tokens of it, and how long the prompt
    waited for them."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


class QueuedPrompt(Protocol):
    """A prompt that is queued. prefix: what it waits for; fetched: what came."""

    sequence: Sequence | None
    prefix: Any
    fetched: Fetched

    @property
    def order(self) -> Order: ...


PromptT = TypeVar("PromptT", bound=QueuedPrompt)


class PrefixFetch(Generic[PromptT]):
    """One prefix on its way here, and the prompts that wait for it. pull: what the source is asked;
    source, wait_s: by the first one's gateway."""

    def __init__(self, pull: Pull, source: Incarnation, wait_s: float, now: float) -> None:
        self.pull = pull
        self.source = source
        self.wait_s = wait_s
        self.began_at = now
        self.prompts: list[PromptT] = []

    @property
    def item(self) -> WorkItem:
        """What this worker takes a lease for."""
        tokens = self.pull.token_ids
        return WorkItem(
            token_ids=tuple(tokens),
            num_prompt_tokens=len(tokens),
            sampling=_ONE_TOKEN,
            cache_salt=self.pull.salt,
        )

    def brings(self, prompt: PromptT) -> int:
        """Return how many of these tokens the prompt begins with; 0 if the pool has as many.

        Tried without the last granule, too: a gateway asks for one more than it knows of, which
        may be another prompt's."""
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

    def is_from_elsewhere(self, prompt: PromptT) -> bool:
        """Whether this prompt's gateway named another source."""
        prefix = prompt.order.prefix
        return prefix is not None and prefix.worker != self.source


class ComingPrefixes(Generic[PromptT]):
    """All prefixes on their way here.

    is_linked: whether a source can push to this worker now. start: take a lease for it, and ask the
    source when it is granted; all may be over when that returns. give_up: nobody waits for it any
    more.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        random_bytes: RandomBytes,
        *,
        is_linked: Callable[[Incarnation], bool],
        start: Callable[[PrefixFetch[PromptT]], None],
        give_up: Callable[[PrefixFetch[PromptT]], None],
    ) -> None:
        self._scheduler = scheduler
        self._random_bytes = random_bytes
        self._is_linked = is_linked
        self._start = start
        self._give_up = give_up
        self._fetches: list[PrefixFetch[PromptT]] = []

    def begin(self, prompt: PromptT, now: float) -> None:
        """Have a queued prompt wait for what is on its way to another one that begins alike, or
        fetch what its gateway says another worker has; unless it is here, too, or that worker
        cannot be asked now."""
        prefix, sequence = prompt.order.prefix, prompt.sequence
        assert sequence is not None
        fetch = next((it for it in self._fetches if it.brings(prompt)), None)
        is_new = False
        if fetch is None and prefix is not None:
            num_tokens = min(prefix.num_tokens, sequence.most_cached_tokens)
            is_new = num_tokens > sequence.num_expected_tokens and self._is_linked(prefix.worker)
            if is_new:
                fetch = self._new(prompt, prefix, num_tokens, now)
        if fetch is not None:
            fetch.prompts.append(prompt)
            prompt.prefix = fetch
            self._scheduler.await_prefix(sequence, fetch.brings(prompt))
            if is_new:
                self._start(fetch)

    def _new(
        self, prompt: PromptT, prefix: PrefixAt, num_tokens: int, now: float
    ) -> PrefixFetch[PromptT]:
        order = prompt.order
        # A token of its own: the prompt's opens its lease on decode, which the source is not to
        # know, and a whole request holds a place under the prompt's key already.
        key = order.key._replace(token=LeaseToken(self._random_bytes(ID_BYTES)))
        pull = Pull(key, order.item.token_ids[:num_tokens], order.item.cache_salt)
        fetch = PrefixFetch[PromptT](pull, prefix.worker, prefix.wait_s, now)
        self._fetches.append(fetch)
        return fetch

    def leave(self, prompt: PromptT) -> None:
        """A prompt has ended; what nobody waits for any more is given up."""
        fetch = prompt.prefix
        if fetch is None or fetch not in self._fetches:
            return
        fetch.prompts.remove(prompt)
        if not fetch.prompts:
            self._fetches.remove(fetch)  # it may be long in being taken down: nobody joins it
            self._give_up(fetch)

    def ended(
        self, fetch: PrefixFetch[PromptT], now: float, num_tokens: int = 0, num_bytes: int = 0
    ) -> bool:
        """It has come, or no more will: its prompts wait no longer. Allowed twice; returns whether
        it was the first time."""
        if fetch not in self._fetches:
            return False
        self._fetches.remove(fetch)
        seconds = now - fetch.began_at
        # It was sent once, for the first of them. A gateway that named another source would take it
        # for a transfer from there: whoever ordered it may have left.
        first = min(fetch.prompts, key=fetch.is_from_elsewhere, default=None)
        for prompt in fetch.prompts:
            is_sent = prompt is first
            is_its_own = is_sent and not fetch.is_from_elsewhere(prompt)
            prompt.fetched = Fetched(
                num_tokens if is_sent else 0, seconds, num_bytes if is_its_own else 0
            )
            assert prompt.sequence is not None
            self._scheduler.prefix_ended(prompt.sequence)
        return True
