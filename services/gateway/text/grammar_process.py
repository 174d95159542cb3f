"""Grammars compiled in a process that may be ended (``bounded_work.py``): the library takes 0.3 ms
for nearly all of them and for ever for some, and a hundred characters are enough.

This module is both ends: ``GrammarProcess`` in the gateway, ``main`` in the child.
"""

from __future__ import annotations

import msgspec

from services.gateway.text.bounded_work import GIVE_UP_S, Unfinished, WorkProcess, answer_all
from shared.grammar import library, matcher

MAX_COMPILE_S = 0.5
"""Most processor time of one grammar: workers compile it once more, beside their steps."""


class Verdict(msgspec.Struct, frozen=True):
    """fault: what is wrong, '' = nothing. is_lasting: it would be the same again. lark: the
    grammar in Lark's words, if it was in others."""

    fault: str
    is_lasting: bool = True
    lark: str = ""


TOO_SLOW = Verdict("it takes too long to compile: make it simpler")
NOT_IN_TIME = Verdict(TOO_SLOW.fault, is_lasting=False)
"""The machine may have been busy with something else."""

_UNFINISHED = {
    "slow": TOO_SLOW,
    "large": Verdict("it takes too much memory to compile: make it simpler"),
    "late": NOT_IN_TIME,
    "lost": Verdict("the process that checks it ended", is_lasting=False),
}


class GrammarProcess(WorkProcess):
    """The gateway's end."""

    def __init__(self, limit_s: float = MAX_COMPILE_S, *, give_up_s: float = GIVE_UP_S) -> None:
        """limit_s: most processor time of one grammar."""
        super().__init__(__name__, limit_s, give_up_s=give_up_s)

    def check(self, grammar: str) -> Verdict:
        """Return the verdict on a grammar.

        Raises InvalidRequest: the library is not installed. Overloaded: no process can be started.
        """
        library()
        try:
            outcome = self.outcome(msgspec.json.encode(grammar))
        except Unfinished as error:
            return _UNFINISHED[error.why]
        return msgspec.json.decode(outcome, type=Verdict)


def verdict_of(grammar: str, tokenizer: object) -> Verdict:
    """Compile a grammar over the 256 bytes, and look at its first token."""
    lark = grammar
    if not grammar.startswith("{"):
        try:
            # GBNF (of llama.cpp, and xgrammar's EBNF) is translated. Here, for that takes the
            # square of its length, and of empty lines with nobody else running.
            lark = library().gbnf_to_lark.any_to_lark(grammar)
        except Exception as error:  # a plain parser: ValueError, IndexError, ...
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            return Verdict(f"is neither Lark's nor GBNF: {reason}")
    state = matcher(tokenizer, lark)
    if not state.is_error():
        mask = state.compute_bitmask()
        if not any(mask) or (state.is_error() and not state.is_accepting()):
            return Verdict("no text matches it")
    if state.is_error():
        return Verdict(_sentence(state.get_error()))
    return Verdict("", lark="" if lark == grammar else lark)


def _sentence(message: str) -> str:
    """The library's message, of a regular expression only what comes after its drawing."""
    _, _, reason = message.rpartition("error: ")
    line = (reason.strip().splitlines() or ["it is not valid"])[0]
    return "".join(char for char in line if char.isprintable())[:300]


def byte_tokenizer() -> object:
    """A tokenizer of which every token is a byte: what matches does not depend on the model's."""
    return library().LLTokenizer("byte")


def main() -> None:
    tokenizer = byte_tokenizer()

    def outcome(work: bytes) -> bytes:
        return msgspec.json.encode(verdict_of(msgspec.json.decode(work, type=str), tokenizer))

    answer_all(outcome)


if __name__ == "__main__":
    main()
