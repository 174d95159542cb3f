"""An answer as a person sees it come: the text to stdout, and, on a terminal alone, a sign of life
until it begins and the model's thinking, dimly."""

from __future__ import annotations

import sys
import unicodedata
from types import TracebackType

from services.cli.words import plain_console

ONLY_THOUGHT = "the answer ended while the model was thinking: --max-tokens allows more"


class SpokenAnswer:
    """One answer; leaving the block ends its last line. What is no part of it goes to stderr, so
    that a file has the text alone."""

    def __init__(self) -> None:
        self._aside = plain_console(stderr=True)
        self._is_watched = sys.stdout.isatty() and self._aside.is_interactive
        self._waiting = self._aside.status("waiting", spinner_style="dim")
        self._is_mid_line = False
        self._is_thinking = False

    def __enter__(self) -> SpokenAnswer:
        if self._is_watched:
            self._waiting.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._waiting.stop()
        self._end_line()

    def think(self, piece: str) -> None:
        """Show a piece of thinking."""
        if self._is_watched:
            self._waiting.stop()
            if not self._is_thinking:  # some models think again amid an answer
                self._end_line()
                self._is_thinking = True
            self._aside.out(printable(piece), style="dim", highlight=False, end="")
            self._is_mid_line = not piece.endswith("\n")

    def say(self, piece: str) -> None:
        """Show a piece of text."""
        self._waiting.stop()
        if self._is_thinking:
            self._is_thinking = False
            self._end_line()
            print()
        print_piece(piece)
        self._is_mid_line = not piece.endswith("\n")

    def _end_line(self) -> None:
        if self._is_mid_line:
            print(flush=True)
        self._is_mid_line = False


def print_piece(piece: str) -> None:
    """Print a piece of an answer as it is, or for a terminal ``printable``."""
    print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)


def printable(piece: str) -> str:
    """Return the piece without control characters: no answer moves the cursor or speaks to the
    terminal."""
    # Spaces other than ours, and what joins the parts of a character, are printable enough.
    return "".join(c for c in piece if unicodedata.category(c) != "Cc" or c in "\n\t")
