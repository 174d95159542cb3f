"""What one answer said piece by piece (thinking, text, calls) is one message of a chat, as
templates expect it."""

from __future__ import annotations

from services.gateway.front.places import Places
from services.gateway.http.openai_forms import Message


class ChatPieces:
    """Messages so far. places: learns where each stood. num_before: messages that come before
    them. call_id: what the protocol calls the id in a result of a call."""

    def __init__(self, places: Places, *, num_before: int, call_id: str) -> None:
        self._places = places
        self._num_before = num_before
        self._call_id = call_id
        self.messages: list[Message] = []

    def add(self, piece: Message, place: str) -> None:
        """Add the next piece, which stood at ``place``; an answer's that says nothing, as thinking
        that cannot be read, is no turn of the chat."""
        says_something = piece.content is not None or piece.reasoning_content or piece.tool_calls
        if piece.role == "assistant" and not says_something:
            return
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
        said.tool_calls = said.tool_calls or []
        said.tool_calls += more.tool_calls  # a new list each time costs the square of their number
    elif said.tool_calls or more.reasoning_content or said.content:
        return False
    else:
        said.content = more.content
    return True
