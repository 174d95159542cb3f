"""What is typed in ``pdmesh chat``: an editor of lines with history, completion and multi-line
texts. Knows no gateway."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

MAX_HISTORY_BYTES: Final = 4 << 20
"""A longer one begins anew: it is read as a whole at every start."""


def typed_lines(commands: Mapping[str, str], *, is_history_kept: bool) -> Iterator[str]:
    """Yield what the user sends until they leave. commands: with their meanings, offered as
    completions."""
    session: PromptSession[str] = PromptSession(
        history=_history(is_history_kept),
        completer=WordCompleter(list(commands), meta_dict=dict(commands), sentence=True),
        complete_while_typing=Condition(lambda: session.default_buffer.text.startswith("/")),
        key_bindings=_keys(),
        multiline=True,
        prompt_continuation="· ",
    )
    while True:
        before = signal.signal(signal.SIGTERM, _end)
        try:
            text = session.prompt("> ")
        except (EOFError, KeyboardInterrupt):
            return
        finally:
            signal.signal(signal.SIGTERM, before)
        yield text


def _history(is_kept: bool) -> History:
    """Kept in the user's state folder, as the XDG rules have it."""
    if not is_kept:
        return InMemoryHistory()
    try:
        state = os.environ.get("XDG_STATE_HOME", "")
        folder = Path(state) if state else Path.home() / ".local" / "state"
        path = folder / "pdmesh" / "chat_history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        if path.exists() and path.stat().st_size > MAX_HISTORY_BYTES:
            flags |= os.O_TRUNC
        os.close(os.open(path, flags, mode=0o600))
        path.chmod(0o600)
    except (OSError, RuntimeError):  # no home, or not ours to write: this time only
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        event.current_buffer.newline(copy_margin=False)

    @keys.add("c-c", eager=True)
    def clear_or_leave(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    return keys


def _end(number: int, _: FrameType | None) -> Any:
    """Leave through the editor, which gives the terminal back as it was."""
    sys.exit(128 + number)
