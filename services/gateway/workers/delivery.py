"""The fast room of the token path: one delivery an answer and step, however many tokens came.

A decode worker's message brings one token for each of its answers. Nearly all of them are in turn
and end nothing, so they skip the effects of the lifecycle core (``Lifecycle.take_next``), wake no
task, and are told to metrics together: of the answers of a batch all had their last token at the
same instant. At the end of the loop's turn each answer that got tokens is delivered once; what has
arrived by then leaves in one write.

Knows no request: who gets what is the recipients' affair. Figures: bench/gateway/README.md.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from services.gateway.workers.timeline import AnswerWatcher

DELIVERIES_A_TURN = 64
"""Then the loop looks at everything else: at about 10 us each that is well below a millisecond."""


class Recipient(Protocol):
    """An answer that gets tokens.

    is_due: whether it will be delivered at the end of this turn; ``Delivery`` sets it, ``deliver``
    clears it. stepped: see ``Timeline.stepped``.
    """

    is_due: bool
    stepped: Callable[[float], float]

    def deliver(self) -> None:
        """Hand on what has arrived; returns at once and never raises."""
        ...


class Delivery:
    """All answers of one gateway.

    watchers: hear of the gaps between tokens.
    """

    def __init__(self, watchers: tuple[AnswerWatcher, ...] = ()) -> None:
        self._watchers = watchers
        self._recipients: deque[Recipient] = deque()
        self._num_tokens: dict[float, int] = {}  # by when the token before was there
        self._is_due = False
        self._now = 0.0

    def took(self, recipient: Recipient) -> None:
        """A token of this turn came for this answer: count it, and deliver at the turn's end."""
        if not self._is_due:
            self._is_due = True
            loop = asyncio.get_running_loop()
            self._now = loop.time()  # one reading for all tokens of the turn
            loop.call_soon(self._run)
        last_at = recipient.stepped(self._now)
        self._num_tokens[last_at] = self._num_tokens.get(last_at, 0) + 1
        if not recipient.is_due:
            recipient.is_due = True
            self._recipients.append(recipient)

    def _run(self) -> None:
        counts, self._num_tokens = self._num_tokens, {}
        for last_at, num_tokens in counts.items():
            for watcher in self._watchers:
                watcher.later_tokens(self._now, num_tokens, num_tokens * (self._now - last_at))
        recipients = self._recipients
        for _ in range(min(len(recipients), DELIVERIES_A_TURN)):
            recipients.popleft().deliver()
        self._is_due = bool(recipients)
        if recipients:
            loop = asyncio.get_running_loop()
            self._now = loop.time()
            loop.call_soon(self._run)
