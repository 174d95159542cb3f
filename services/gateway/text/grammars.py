"""What an answer shall match, from a client's words to the one text that engines read: built,
checked and refused here, before any work.

A schema's own faults are found here (``schemas.py``); the library's verdict comes from a process
that may be ended (``grammar_process.py``), because compiling has no bound of its own. Knows no
endpoint: ``Structure.param`` names the field in errors.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import msgspec

from services.gateway.limits import checked_count, refusal
from services.gateway.text.bounded_work import WorkQueue
from services.gateway.text.calls.thoughts import THINK, ThoughtMarks
from services.gateway.text.grammar_process import (
    MAX_COMPILE_S,
    NOT_IN_TIME,
    TOO_SLOW,
    GrammarProcess,
    Verdict,
)
from services.gateway.text.schemas import (
    for_library,
    library_fault,
    parts_of,
    schema_fault,
    without_part,
)
from shared.grammar import MAX_GRAMMAR_BYTES, library

MAX_KNOWN = 256
"""Grammars whose verdict is remembered: those asked for last."""

MAX_CHOICES = 1024
"""Texts that an answer may have to choose from."""

MAX_SEARCH_S = 0.2
"""Longest search for the place of a fault."""

QUICK_S = 0.02
"""Processor time of nearly all grammars: what takes longer waits for its like alone."""

WHITESPACE = r"( |\n {0,24})"
"""Between the parts of JSON, where a client says nothing else: a space, or a line end and indent.
Bounded, for a model that is in doubt writes spaces without end."""

NO_MARKS: Mapping[str, str] = {}

_CONTROL = re.compile(r"\\u00(?:[01]|7f)|\\\\[xuU]")
"""What a schema's JSON has where a control character is meant: itself, or a pattern's escape."""

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")
Check = Callable[[str], Verdict]
Kind = Literal["json_schema", "regex", "choice", "grammar", "tags", "forms"]
Thought = Literal["", "may", "open"]
"""Whether an answer thinks first: no, it may begin to, or its prompt has begun it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What an answer shall match, in nobody's wire format.

    value: of json_schema a JSON value; of regex and grammar (Lark or GBNF) a text; of choice texts;
    of tags a list of {trigger, begin, schema, end}: free text, but from a trigger on what begins
    with it; one of them may be a {schema} alone: that, or tags and no other text; of forms a list
    of {begin, schema}, or {begin} of any text: one of them. param: the field that says so.
    whitespace: of json_schema, a regular expression; None = ``WHITESPACE``. places: of a value that
    was put together, where its parts come from: a path within the value, and the field. thought:
    what comes before it.
    """

    kind: Kind
    value: Any = field(repr=False)
    param: str
    whitespace: str | None = None
    places: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    thought: Thought = ""

    @property
    def digest(self) -> bytes:
        """The same for what has the same grammar."""
        about = f"{self.kind} {self.whitespace!r} {self.thought} ".encode()
        return hashlib.blake2b(about + msgspec.json.encode(self.value), digest_size=16).digest()

    @property
    def begins_free(self) -> bool:
        """Whether an answer begins with any text."""
        return self.kind == "tags" and all("trigger" in one for one in self.value)

    def place(self, path: str) -> str:
        """Return the field that a path within the value stands for."""
        for begin, own in self.places.items():
            rest = path.removeprefix(begin)
            if path.startswith(begin) and rest[:1] in ("", ".", "["):
                return own + rest
        return self.param + path


class Grammars:
    """Builds and checks grammars for one gateway. Close it at the end."""

    def __init__(self, check: Check | None = None) -> None:
        """check: in place and at once, of tests under virtual time."""
        self._check = check
        # A new process takes longer than a quick check.
        self._quick = WorkQueue(GrammarProcess(QUICK_S), "grammars", gives_up=False)
        self._slow = WorkQueue(GrammarProcess(MAX_COMPILE_S), "grammars", gives_up=True)
        self._known = _Newest[str, Verdict]()
        self._good = _Newest[bytes, str]()  # by what clients asked for
        self._first: dict[bytes, _First] = {}  # likewise, of what is being checked
        self.marks: dict[str, str] = {}
        """Texts that the model writes as one token of their own, and how a grammar names it; see
        ``text_of``."""
        self.thinking = THINK
        """What stands around what answers think first."""

    def close(self) -> None:
        """End the threads and their processes; checks in progress fail."""
        self._quick.close()
        self._slow.close()

    async def checked(self, structure: Structure) -> str:
        """Return the grammar of a structure: at once, if it has been checked before, and as soon as
        another client's is, if that is the same. Cancelled, it lets the next one be checked at
        once.

        Raises InvalidRequest: it is no structure of its kind, nothing matches it, or it is too
        large to follow. Overloaded: too many wait to be checked.
        """
        if self._check is not None:
            return self._checked(structure, self._check)
        key = structure.digest
        # Out, and in again below: forgotten is what was asked for longest ago.
        grammar = self._good.pop(key, None)
        while grammar is None:
            first = self._first.get(key)
            if first is None:
                with self._being_first(key):
                    grammar = await self._in_turn(structure)
                continue
            await first.is_over.wait()
            if first.is_refused:  # each by the name of its own field
                grammar = await self._in_turn(structure)
            else:  # it is good, or its client has left
                grammar = self._good.pop(key, None)
        self._good[key] = grammar
        return grammar

    @contextmanager
    def _being_first(self, key: bytes) -> Generator[None]:
        first = self._first[key] = _First()
        try:
            yield
        except Exception:
            first.is_refused = True
            raise
        finally:
            del self._first[key]
            first.is_over.set()

    async def _in_turn(self, structure: Structure) -> str:
        try:
            return await self._quick.run(
                lambda process: self._checked(structure, process.check, is_quick=True)
            )
        except _TakesLonger:
            return await self._slow.run(lambda process: self._checked(structure, process.check))

    def _checked(self, structure: Structure, check: Check, *, is_quick: bool = False) -> str:
        """Raises _TakesLonger: a quick check cannot say what becomes of it."""
        grammar = text_of(structure)
        told = self._told(structure, grammar)
        verdict = self._verdict(grammar, check, is_quick=is_quick)
        if fault := verdict.fault:
            path = ""
            if structure.kind in ("json_schema", "tags", "forms"):
                path, fault = library_fault(structure.value, fault)
            if structure.kind == "json_schema" and not path:
                if is_quick:
                    raise _TakesLonger
                path, fault = _innermost(structure, fault, check)
            raise refusal(structure.place(path), fault, code="invalid_grammar")
        return self._told(structure, verdict.lark) if verdict.lark else told

    def _told(self, structure: Structure, grammar: str) -> str:
        """Return a structure's grammar as workers get it. Raises InvalidRequest: it is too
        large."""
        told = grammar
        # The process that checks knows no tokens: of marks it has seen the spelling.
        if structure.kind in ("tags", "forms"):
            told = text_of(structure, self.marks)
        if structure.thought:
            told = _after_thought(told, structure, self.thinking, self.marks)
        if len(told.encode()) > MAX_GRAMMAR_BYTES:
            raise refusal(
                structure.param,
                f"as a grammar it must have at most {MAX_GRAMMAR_BYTES} bytes",
                code="grammar_too_large",
            )
        return told

    def _verdict(self, grammar: str, check: Check, *, is_quick: bool) -> Verdict:
        verdict = self._known.pop(grammar, None)
        if verdict is None:
            verdict = check(grammar)
            if is_quick and verdict in (TOO_SLOW, NOT_IN_TIME):
                raise _TakesLonger
        if verdict.is_lasting:
            self._known[grammar] = verdict
        return verdict


@dataclass(slots=True)
class _First:
    """A check that others with the same grammar wait for."""

    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    is_refused: bool = False


class _TakesLonger(Exception):
    """Than a quick check may."""


class _Newest(OrderedDict[KeyT, ValueT]):
    """What was set last, not more than ``MAX_KNOWN``."""

    def __setitem__(self, key: KeyT, value: ValueT) -> None:
        super().__setitem__(key, value)
        if len(self) > MAX_KNOWN:
            self.popitem(last=False)


def _innermost(structure: Structure, fault: str, check: Check) -> tuple[str, str]:
    """Return which part of a schema has a fault whose place the library does not say, and what is
    wrong with it: the innermost that is refused by itself, and without which the whole has no such
    fault. Looks for a moment only."""
    schema, stop_at = structure.value, time.monotonic() + MAX_SEARCH_S

    def fault_of(value: Any) -> str:
        return check(text_of(replace(structure, value=value))).fault

    for path, part in reversed([*parts_of(schema)]):
        if part is schema or time.monotonic() > stop_at:
            break
        if "$ref" in json.dumps(part):
            continue  # a reference is to the whole
        place, found = schema_fault(part) or ("", fault_of(part))
        if found and fault_of(without_part(schema, part)) != fault:
            return path + place, found
    return "", fault


def one_wish(wishes: Sequence[Structure]) -> Structure | None:
    """Return what an answer shall match; None = anything. Raises InvalidRequest: two structures are
    asked for, or one of too many choices."""
    for other in wishes[1:]:
        # Guidance says the same by vLLM's old and its new name.
        if replace(other, param=wishes[0].param) != wishes[0]:
            raise refusal(other.param, f"does not go with {wishes[0].param}: give one of them")
    if wishes and wishes[0].kind == "choice":
        wish = wishes[0]
        checked_count(len(wish.value), MAX_CHOICES, param=wish.param, what="choices", least=1)
        if not all(wish.value):
            raise refusal(wish.param, "a choice must have at least one character")
    return wishes[0] if wishes else None


def text_of(structure: Structure, marks: Mapping[str, str] = NO_MARKS) -> str:
    """Return a structure as the library reads it, not yet checked by it.

    marks: ``<tool_call>`` and such, where the tokenizer has a token for each, and what the grammar
    calls it. The library takes these for special tokens, which text does not allow: tags name them
    beside their spelling.
    Raises InvalidRequest: the value is none of its kind, or of a schema that no answer ends.
    """
    value, param = structure.value, structure.param
    write = library().LLMatcher
    match structure.kind:
        case "json_schema":
            return write.grammar_from_json_schema(
                schema := json.dumps(_schema(structure, value, "")),
                overrides=_json_options(structure.whitespace, schema),
            )
        case "regex":
            return write.grammar_from_regex(_text(value, param))
        case "choice":
            return write.grammar_from_lark("start: " + " | ".join(map(_literal, value)))
        case "grammar":
            text = _text(value, param)
            if text.lstrip().startswith("{"):  # the library's own form, which is not for clients
                raise refusal(param, "is neither Lark's nor GBNF", code="invalid_grammar")
            return text
        case "tags":
            return _tags(structure, marks)
        case "forms":
            return _forms(structure, marks)


def _schema(structure: Structure, schema: Any, path: str) -> dict[str, Any]:
    """A schema within a structure, as the library takes it."""
    fault = schema_fault(schema)
    if fault is not None:
        place = structure.place(path + fault.place)
        raise refusal(place, fault.rule, code="invalid_grammar")
    return {} if schema is True else for_library(schema)


def _json_options(whitespace: str | None, schema: str) -> dict[str, Any]:
    """whitespace: '' = none. schema: its JSON."""
    spaces: dict[str, Any] = {"whitespace_flexible": False, "whitespace_pattern": None}
    if whitespace != "":
        spaces["whitespace_pattern"] = whitespace or WHITESPACE
        del spaces["whitespace_flexible"]
    return {
        **spaces,
        # A schema may bring options of its own under a key of the library's: not those.
        "lenient": False,
        "coerce_one_of": False,
        # A character is written in one way, or a property by another name ("\\u0061") would escape
        # its schema; only those that can be written in no other way may be.
        "json_allowed_escapes": 'nrbtf\\"' + ("u" if _CONTROL.search(schema) else ""),
    }


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise refusal(param, "must be a text with at least one character")
    return value


def _literal(text: str) -> str:
    # Every control character is an escape to Lark; to JSON, DEL is none.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _tags(structure: Structure, marks: Mapping[str, str]) -> str:
    text = "TEXT" if structure.begins_free else "SPACE?"
    names: list[str] = []
    rules: list[str] = []
    start = ""
    for index, tag in enumerate(structure.value):
        json_rule = _json_rule(structure, tag["schema"], index)
        if "trigger" not in tag:
            start = "alone | "
            rules.append(f"alone: {json_rule}")
            continue
        trigger: str = tag["trigger"]
        begins = [f"begun_{index}"]
        lazy = "[lazy]" if structure.begins_free else ""
        rules.append(f"begun_{index}{lazy}: {text} {_literal(trigger)}")
        if trigger in marks:
            begins.append(f"{text} {marks[trigger]}")
        parts = [
            f"({' | '.join(begins)})",
            *_literals(tag["begin"].removeprefix(trigger), marks),
            json_rule,
            *_literals(tag["end"], marks),
        ]
        names.append(f"tag_{index}")
        rules.append(f"tag_{index}: {' '.join(parts)}")
    tags = f"({' | '.join(names)})"
    start = f"start: {start}{tags}+" if start else f"start: {tags}* TEXT"
    return "\n".join(["%llguidance {}", start, r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]{1,4}/", *rules])


def _forms(structure: Structure, marks: Mapping[str, str]) -> str:
    names: list[str] = []
    rules: list[str] = []
    for index, form in enumerate(structure.value):
        rest = _json_rule(structure, form["schema"], index) if "schema" in form else "TEXT"
        names.append(f"form_{index}")
        rules.append(f"form_{index}: {' '.join(_literals(form['begin'], marks))} {rest}")
    text = r"TEXT: /(.|\n)*/"
    return "\n".join(["%llguidance {}", f"start: {' | '.join(names)}", text, *rules])


def _json_rule(structure: Structure, value: Any, index: int) -> str:
    schema = _schema(structure, value, f"[{index}].schema")
    options = _json_options(structure.whitespace, json.dumps(schema))
    return f"%json {json.dumps(schema | {'x-guidance': options})}"


def _after_thought(
    grammar: str, structure: Structure, thinking: ThoughtMarks, marks: Mapping[str, str]
) -> str:
    """Return a grammar of thinking and then of what another says."""
    end = thinking.end
    begin, then = (" ".join(_literals(text, marks)) for text in (thinking.begin, thinking.then))
    answer = "@answer"
    if structure.kind != "forms":  # which say themselves what they begin with
        answer = " ".join([*_literals(thinking.answer, marks), answer])
    start = f"(SPACE {begin} thought {then})? {answer}"
    if structure.thought == "open":
        start = f"thought {then} {answer}"
    ends = f"(ended | TEXT {marks[end]})" if end in marks else "ended"
    thought = "\n".join(
        [
            f"start: {start}",
            f"thought: {ends} SPACE",
            f"ended[lazy]: TEXT {_literal(end)}",
            r"TEXT: /(.|\n)*/",
            r"SPACE: /[ \n]{0,4}/",
        ]
    )
    # Lark's text is as it is, all else JSON.
    own = json.loads(grammar)["grammars"][0] if grammar[0] == "{" else {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": thought}, {**own, "name": "answer"}]})


def _literals(text: str, marks: Mapping[str, str]) -> list[str]:
    """A text as parts of a rule, marks in both their forms."""
    known = "|".join(map(re.escape, sorted(marks)))
    parts = re.split(f"({known})", text) if known else [text]
    return [
        f"({_literal(part)} | {marks[part]})" if part in marks else _literal(part)
        for part in parts
        if part
    ]


def parsed_json(text: str, param: str) -> Any:
    """Return a JSON value that a client sent as text. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise refusal(param, "must be a JSON schema, as text") from None
