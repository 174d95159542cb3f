"""Where the fields of a chat stood in the request of another protocol that it was made from.

Such a request is checked as the chat that it becomes. What is wrong with it must still be told by
the names that its client wrote. What one answer said piece by piece (thinking, text, calls) is one
message there, as templates expect it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

from services.gateway.http.openai_forms import Message
from shared.errors import InvalidRequest


class Places:
    """Names of a chat's fields and what they are called in the request; the longest that fits
    counts, and what has none keeps its name."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def put(self, chat: str, own: str) -> None:
        """Note that a field of the chat stood at another place of the request."""
        self._names[chat] = own

    def own(self, chat: str) -> str:
        """Return the place in the request of a field of the chat."""
        end = len(chat)
        while end > 0:
            if (own := self._names.get(chat[:end])) is not None:
                return own + chat[end:]
            end = max(chat.rfind(".", 0, end), chat.rfind("[", 0, end))
        return chat

    @contextmanager
    def told(self) -> Generator[None]:
        """Have errors of the block name the request's own fields."""
        try:
            yield
        except InvalidRequest as error:
            own = self.own(error.param)
            if own == error.param:
                raise
            rule = error.message.removeprefix(f"{error.param}: ")
            message = error.message if rule == error.message else f"{own}: {rule}"
            raise InvalidRequest(
                message, param=own, code=error.code, retry_after_s=error.retry_after_s
            ) from None


class ChatPieces:
    """Messages so far. places: learns where each stood. num_before: messages that come before
    them. call_id: what the protocol calls the id in a result of a call."""

    def __init__(self, places: Places, *, num_before: int, call_id: str) -> None:
        self._places = places
        self._num_before = num_before
        self._call_id = call_id
        self.messages: list[Message] = []

    def add(self, piece: Message, place: str) -> None:
        """Add the next piece, which stood at ``place``."""
        made = self.messages
        last = made[-1] if made and made[-1].role == piece.role == "assistant" else None
        if last is not None and _joined(last, piece):
            return
        chat = f"messages[{self._num_before + len(made)}]"
        made.append(piece)
        self._places.put(chat, place)
        self._places.put(f"{chat}.tool_call_id", f"{place}.{self._call_id}")


def _joined(said: Message, more: Message) -> bool:
    """Add what an answer said next to its message, unless that would change its order."""
    if more.tool_calls:
        said.tool_calls = [*(said.tool_calls or ()), *more.tool_calls]
    elif said.tool_calls or more.reasoning_content or said.content:
        return False
    else:
        said.content = more.content
    return True
