"""An answer as a list of items (text, thinking, calls), of which one is open at a time: what
OpenAI's responses and Anthropic's messages have in common, whole and as a stream.

The text goes through the same parsers as a chat's. What an event looks like is the two formats' own
matter: each says how an item begins, grows and ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from services.gateway.front.answers import TextDelta, TokenCounts
from services.gateway.front.chats import Teller, new_call_id
from services.gateway.http.openai_answers import AnswerHead
from services.gateway.text.calls.parser import Said, TextParser
from services.gateway.text.text_model import TextModel
from shared.errors import MeshError
from shared.request import FinishReason

encode = msgspec.json.Encoder().encode


Event = dict[str, Any]
"""What one event of a stream says; of all that it has, ``/openapi.json`` tells of a few fields."""


class NamedEvent(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    type: str


@dataclass(slots=True)
class Item:
    """One item. call: how many calls came before it, of a call; name, id: likewise, its own."""

    kind: Literal["text", "thought", "call"]
    index: int
    call: int = -1
    name: str = ""
    id: str = ""
    parts: list[str] = field(default_factory=lambda: [])

    @property
    def text(self) -> str:
        """All that it says; of a call, its arguments."""
        return "".join(self.parts)


class ItemFormat(ABC):
    """Base of the two formats. ends_with: the answer's last delta, once it is here."""

    continuous_usage = False

    def __init__(
        self, head: AnswerHead, text: TextModel, new_teller: Callable[[], Teller] | None
    ) -> None:
        self._head = head
        self._text = text
        self._teller = Teller(TextParser({}), text) if new_teller is None else new_teller()
        self._blank: list[str] = []
        self._has_begun = False
        self.items: list[Item] = []
        self.finish_reason = FinishReason.NONE
        self.stop_reason: str | int | None = None

    # --- the four of a format -------------------------------------------------------------------

    def chunks(self, delta: TextDelta, usage: TokenCounts | None) -> bytes:
        """Return the events of a delta, b'' if it shows nothing yet."""
        events: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            events += self.opening(usage)
        events += self._taken(delta)
        return b"".join([self._event(event) for event in events])

    def closing(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> bytes:
        """Return the last events of a stream that went well."""
        return b"".join([self._event(event) for event in self.ending(usage, receipts)])

    def failed(self, error: MeshError) -> bytes:
        """Return the last event of a stream that broke."""
        return self._event(self.breaking(error))

    def body(
        self,
        deltas: Sequence[TextDelta],
        usage: TokenCounts,
        receipts: Sequence[dict[str, Any]],
    ) -> bytes:
        """Return the whole answer, from all of its deltas."""
        for delta in deltas:
            self._taken(delta)
        return self.whole(usage, receipts)

    # --- where the two differ -------------------------------------------------------------------

    @abstractmethod
    def opening(self, usage: TokenCounts | None) -> Iterable[Event]:
        """The first events of a stream."""
        ...

    @abstractmethod
    def began(self, item: Item) -> Iterable[Event]:
        """Events that tell of a new item."""
        ...

    @abstractmethod
    def grew(self, item: Item, text: str) -> Event:
        """The event that tells of an item's next part."""
        ...

    @abstractmethod
    def ended(self, item: Item, *, is_cut: bool) -> Iterable[Event]:
        """Events that tell of an item's end. is_cut: for want of tokens, or by a
        stop string within a call."""
        ...

    @abstractmethod
    def ending(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> Iterable[Event]:
        """The last events of a stream, after all items."""
        ...

    @abstractmethod
    def breaking(self, error: MeshError) -> Event:
        """The last event of a stream that broke."""
        ...

    @abstractmethod
    def whole(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> bytes:
        """The whole answer, JSON."""
        ...

    # --- items ----------------------------------------------------------------------------------

    def _taken(self, delta: TextDelta) -> list[Event]:
        """Take a delta and return what it changes."""
        events: list[Event] = []
        for said in self._teller.take(delta):
            events += self._said(said)
        if delta.finish_reason:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            if self._blank and not self._teller.num_calls:
                events += self._grown("text", Said("".join(self._blank)))
            is_cut = delta.finish_reason is FinishReason.LENGTH or self._teller.is_within_call
            events += self._closed(is_cut=is_cut)
        return events

    def _said(self, said: Said) -> Iterator[Event]:
        if said.call >= 0:
            self._blank.clear()  # between calls, or before them: it says nothing
            yield from self._grown("call", said)
        elif said.is_thought:
            yield from self._grown("thought", said)
        elif self._is_open("text", -1):
            yield from self._grown("text", said)
        else:
            self._blank.append(said.text)
            if said.text.strip():
                text = "".join(self._blank)
                self._blank.clear()
                yield from self._grown("text", Said(text))

    def _is_open(self, kind: str, call: int) -> bool:
        return bool(self.items) and (self.items[-1].kind, self.items[-1].call) == (kind, call)

    def _grown(self, kind: Literal["text", "thought", "call"], said: Said) -> Iterator[Event]:
        if not self._is_open(kind, said.call):
            yield from self._closed(is_cut=False)
            item = Item(kind, len(self.items), said.call, said.name)
            if kind == "call":
                item.id = new_call_id(self._head.id, 0, said.call)
            self.items.append(item)
            yield from self.began(item)
        if said.text:
            item = self.items[-1]
            item.parts.append(said.text)
            yield self.grew(item, said.text)

    def _closed(self, *, is_cut: bool) -> Iterable[Event]:
        return self.ended(self.items[-1], is_cut=is_cut) if self.items else ()

    def _event(self, event: Event) -> bytes:
        """One event of a stream, named as its data says."""
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event))
