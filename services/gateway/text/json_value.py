"""Where a JSON value ends that comes in pieces."""

from __future__ import annotations


class JsonValue:
    """Finds where a JSON value ends that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._has_begun = False

    def take(self, text: str) -> int | None:
        """Return how much of ``text`` belongs to the value, None = all, and it goes on."""
        for index, char in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._in_string = False
                    if not self._depth:
                        return index + 1
            elif char == '"':
                self._in_string = self._has_begun = True
            elif char in "{[":
                self._depth += 1
                self._has_begun = True
            elif char in "}]":
                if not self._depth:
                    return index  # of a number, at the end of what it stands in
                self._depth -= 1
                if not self._depth:
                    return index + 1
            elif not self._depth:
                if char in ", \n" and self._has_begun:
                    return index
                self._has_begun = self._has_begun or not char.isspace()
        return None
