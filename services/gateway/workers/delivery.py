"""The way of a token out of the mesh: one delivery an answer and turn, however many tokens came.

A decode worker's message brings one token for each of its answers. At the end of the loop's turn
each answer that got tokens is delivered once: what has arrived by then leaves in one write, wakes
nobody where its consumer takes it at once, and is told to metrics together: of the answers of a
batch all had their last token at the same instant.

Knows no request: who gets what is the recipients' affair. Figures: bench/gateway/README.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import Protocol

from services.gateway.workers.timeline import AnswerWatcher

DELIVERIES_A_TURN = 64
"""Then the loop looks at everything else: at about 10 us each that is well below a millisecond."""


class Recipient(Protocol):
    """An answer that gets tokens. is_due: whether it will be delivered at the end of this turn;
    ``Delivery`` sets it, ``deliver`` clears it."""

    is_due: bool

    def deliver(self, now: float) -> tuple[float, int]:
        """Hand on what has arrived; returns at once and never raises.

        Returns (when the token before was handed on, how many followed it): see
        ``Timeline.emitted``.
        """
        ...


class Delivery:
    """All answers of one gateway.

    watchers: hear of the gaps between tokens.
    """

    def __init__(self, watchers: tuple[AnswerWatcher, ...] = ()) -> None:
        self._watchers = watchers
        self._recipients: deque[Recipient] = deque()
        self._is_running = False

    def due(self, recipient: Recipient) -> None:
        """Tokens came for this answer: deliver it at the turn's end."""
        if not recipient.is_due:
            recipient.is_due = True
            self._recipients.append(recipient)
            if not self._is_running:
                self._is_running = True
                asyncio.get_running_loop().call_soon(self._run)

    def deliver(self, recipient: Recipient) -> None:
        """Deliver an answer now, because it is over."""
        # It stays in the queue: ``_run`` passes over what is not due any more.
        if recipient.is_due:
            now = asyncio.get_running_loop().time()
            self._tell(now, {recipient.deliver(now): 1})

    def _run(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        recipients = self._recipients
        first = [recipients.popleft() for _ in range(min(len(recipients), DELIVERIES_A_TURN))]
        self._tell(now, Counter([one.deliver(now) for one in first if one.is_due]))
        self._is_running = bool(recipients)
        if recipients:
            loop.call_soon(self._run)

    def _tell(self, now: float, followed: dict[tuple[float, int], int]) -> None:
        for (last_at, num_tokens), num_answers in followed.items():
            if num_tokens:
                gaps_s = num_answers * (now - last_at)
                for watcher in self._watchers:
                    watcher.later_tokens(now, num_answers * num_tokens, gaps_s)
