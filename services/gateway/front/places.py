"""Where the fields of a chat stood in the request of another protocol that it was made from.

Such a request is checked as the chat that it becomes. What is wrong with it must still be told by
the names that its client wrote.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

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
