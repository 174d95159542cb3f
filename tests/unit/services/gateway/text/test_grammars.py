"""Grammars that clients send: what is taken, what is refused and where, in bounded time."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import signal
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import AddedToken

from services.gateway.text import bounded_work, grammar_process
from services.gateway.text.bounded_work import GIVE_UP_S, WorkProcess, WorkQueue
from services.gateway.text.grammar_process import GrammarProcess
from services.gateway.text.grammars import Grammars, Kind, Structure, Thought
from services.gateway.text.schemas import for_library, library_fault, schema_fault
from shared.errors import InvalidRequest, Overloaded
from shared.grammar import MAX_GRAMMAR_BYTES, library, matcher
from tests.support.grammars import (
    PERSON,
    a_grammar,
    byte_tokenizer_once,
    check_in_place,
    needs_library,
)
from tests.support.tiny_tokenizer import EOS, VOCAB_SIZE, tiny_tokenizer

NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}},
    "required": ["next"],
    "additionalProperties": False,
}
A, B, A_B = ".properties.a", ".properties.b", ".properties.a.properties.b"
PATTERNS = {"allOf": [{"type": "string", "pattern": f"^.*[a-f]{{{i}}}.*$"} for i in range(1, 60)]}
"""Compiles for ever."""


def an_object(**properties: Any) -> dict[str, Any]:
    """All of its properties are there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def asked(value: Any, kind: Kind = "json_schema") -> Structure:
    return Structure(kind=kind, value=value, param="field")


async def refused(value: Any, kind: Kind = "json_schema", by: Grammars | None = None) -> Any:
    with pytest.raises(InvalidRequest) as error:
        await (by or Grammars(check_in_place)).checked(asked(value, kind))
    return error.value


# --- schemas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
        {"anyOf": [{"$ref": "#"}, False]},
        {"allOf": [{"type": "string"}, {"$ref": "#"}]},
        {"type": "object", "properties": {"default": {"$ref": "#"}}, "required": ["default"]},
        {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["a"]},
        False,
    ],
)
def test_a_schema_whose_answers_never_end_is_refused(schema: Any) -> None:
    """Recursion that nothing ends, whatever it goes through; a property may be called as a keyword
    that holds values is."""
    fault = schema_fault(schema)
    assert fault is not None
    assert "no answer ends" in fault.rule


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        PERSON,
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]},
        {"$ref": "#/$defs/node", "$defs": {"node": {**NODE, "required": ["v"]}}},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object", "additionalProperties": {"$ref": "#"}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
        {"$ref": "#/$defs/nowhere"},
    ],
)
def test_recursion_that_can_end_is_let_through(schema: Any) -> None:
    """So is a reference to nowhere: the library says that."""
    assert schema_fault(schema) is None


def test_the_place_of_endless_recursion() -> None:
    """The definition that asks for itself."""
    fault = schema_fault({"$ref": "#/$defs/node", "$defs": {"node": NODE}})
    assert fault is not None
    assert fault.place == ".$defs.node"


def test_a_schema_is_looked_at_in_bounded_time() -> None:
    """A long chain of references, in the order that takes longest; one nested without end."""
    chain = {f"d{i:05}": {"$ref": f"#/$defs/d{i + 1:05}"} for i in range(2000)}
    began_at = time.process_time()
    assert schema_fault({"$ref": "#/$defs/d00000", "$defs": chain}) is not None
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"not": deep}
    fault = schema_fault(deep)
    assert fault is not None
    assert "64" in fault.rule
    assert time.process_time() - began_at < 2
    while deep:  # a destructor that recurses would take the interpreter with it
        deep = deep.pop("not")


def test_remarks_go() -> None:
    """A number's width is no rule of a text, nor is a description, and what need not be unique may
    be; values and names are left."""
    schema = {"type": "integer", "format": "int32", "enum": [{"format": "int32"}]}
    assert for_library(schema) == {"type": "integer", "enum": [{"format": "int32"}]}
    assert for_library({"items": {}, "uniqueItems": False}) == {"items": {}}
    kept = {"properties": {"format": {"type": "string", "format": "date"}, "title": {}}}
    assert for_library(kept) == kept
    told = {"title": "A", "description": "b" * 200_000, "default": 1, "$comment": "", **kept}
    assert for_library(told) == kept
    named = {"properties": {"default": {"format": "int32"}, "title": "string", "enum": {}}}
    assert for_library(named) == {"properties": {"default": {}, "title": "string", "enum": {}}}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 2**53 + 1}, ".const"),
        ({"enum": [1, {"a": [1234567890123456789]}]}, ".enum[1].a[0]"),
        ({"const": 123456789012345.67}, ".const"),
        (an_object(a={"type": "integer", "minimum": 10**30, "maximum": 10**31}), f"{A}.minimum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, ".exclusiveMinimum"),
        ({"type": "integer", "maximum": -(2**60)}, ".maximum"),
    ],
)
def test_numbers_that_would_come_out_as_others_are_refused(schema: Any, place: str) -> None:
    """The library rounds them."""
    fault = schema_fault(schema)
    assert fault is not None
    assert fault.place == place


@needs_library
@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "7", "7.5"),
        ({"type": "integer", "maximum": 10**18 - 1}, "9" * 15 + "0" * 3, "1" + "0" * 18),
        ({"type": "integer", "exclusiveMinimum": -(2**60)}, "-5", str(-(2**60))),
        ({"type": "integer", "exclusiveMaximum": 2**60}, "5", str(2**60)),
        (an_object(minimum={"type": "integer"}), '{"minimum":5}', '{"minimum":"5"}'),
        (an_object(a={"type": "integer"}), '{"a":1,"b":"x"}', '{"a":1,"\\u0061":"x"}'),
        ({"enum": ["a\x01", "a\x7f"]}, r'"a\u0001"', '"a"'),
        ({"type": "string", "pattern": r"^a\x01$"}, r'"a\u0001"', '"a"'),
    ],
)
def test_answers_are_never_wider_than_their_schema(schema: Any, taken: str, refused: str) -> None:
    """Bounds near 64 bits, and characters that JSON writes in two ways, in names or values."""
    for text, is_taken in ((taken, True), (refused, False)):
        state = matcher(byte_tokenizer_once(), a_grammar(schema))
        is_followed = state.try_consume_tokens(list(text.encode())) == len(text)
        assert (is_followed and state.is_accepting()) is is_taken


def test_the_place_of_a_keyword() -> None:
    """The first one that the message names, by its path."""
    deep = {"anyOf": [{"const": {"uniqueItems": 1}}, {"uniqueItems": True}]}
    schema = {"properties": {"uniqueItems": {"type": "string"}, "a": deep}, "uniqueItems": False}
    fault = library_fault(schema, 'keys: ["uniqueItems"]')
    assert fault.place == ".properties.a.anyOf[1].uniqueItems"
    assert library_fault(schema, "nothing is quoted") == ("", "nothing is quoted")
    refs = {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "b.json"}], "$defs": {"a": {}}}
    told = library_fault(refs, "Resource 'http://localhost/b.json' is not present")
    assert told == (".allOf[1].$ref", "leads out of the schema: nothing is fetched")


@pytest.mark.parametrize(
    ("naming", "ref"),
    [
        ({"$anchor": "a"}, "#a"),
        ({"$id": "http://x/y"}, "http://x/y"),
        ({"$id": "http://x/y"}, "y"),
        ({"$id": "http://x/y", "$anchor": "a"}, "y#a"),
        ({}, "#/$defs/%61"),
    ],
)
def test_names_lead_where_they_lead(naming: dict[str, Any], ref: str) -> None:
    """By $anchor and $id as by pointer: a node that asks for itself never ends, and a leaf does."""
    node = {"type": "object", "properties": {"b": {"$ref": ref}}, "required": ["b"]}
    if not ref.startswith("#/"):
        assert schema_fault({**naming, **node}) is not None
    leaf = {"$defs": {"a": {**naming, "type": "integer"}}, **node}
    assert schema_fault({"$id": "http://x/", **leaf}) is None


# --- the library's verdict ----------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (PERSON, "json_schema"),
        (True, "json_schema"),
        ({"type": "string", "format": "password"}, "json_schema"),
        ("[a-z]+@[a-z]+", "regex"),
        (["yes", 'no "quoted"\n\x00\x7f', "é"], "choice"),
        ('root ::= "a" | "b" root', "grammar"),
        ('start: "a" NUMBER\nNUMBER: /[0-9]+/', "grammar"),
        ([{"trigger": "<f", "begin": "<f>", "schema": {}, "end": "</f>"}], "tags"),
    ],
)
async def test_what_is_served(value: Any, kind: Kind) -> None:
    """Every kind of structure becomes a grammar."""
    assert await Grammars(check_in_place).checked(asked(value, kind))


@needs_library
@pytest.mark.parametrize(
    ("value", "kind", "place", "words"),
    [
        ({"properties": {"a": {"not": {}}}}, "json_schema", ".properties.a.not", "not"),
        ({"enum": []}, "json_schema", "", "nsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "json_schema", "", "nsatisfiable"),
        ({"$ref": "http://elsewhere/x"}, "json_schema", ".$ref", "nothing is fetched"),
        ({"$ref": "#/$defs/nowhere"}, "json_schema", ".$ref", "leads to nothing"),
        ({"properties": 3}, "json_schema", "", "properties"),
        ({"items": {"$id": "#"}}, "json_schema", ".items.$id", "called #"),
        ({"properties": {"$id": ""}}, "json_schema", "", "called"),
        ({"items": {"$id": "a" * 513}}, "json_schema", ".items.$id", "more than 512"),
        (
            {"$id": "a" * 300 + "/", "items": {"$id": "b" * 300}},
            "json_schema",
            ".items.$id",
            "more than 512",
        ),
        ({"type": [[]]}, "json_schema", "", "no answer"),
        (an_object(a={"type": "objekt"}), "json_schema", ".properties.a.type", "one of"),
        ({"properties": {"a": {"type": "flt"}}}, "json_schema", A + ".type", "one of"),
        (an_object(a=an_object(b={"enum": []})), "json_schema", A_B, "nsatisfiable"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "json_schema", A, "unclosed"),
        (
            an_object(a={"type": "null"}, b={"const": 10**400}),
            "json_schema",
            B + ".const",
            "double",
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": an_object(b={"enum": []}), "c": {"enum": []}}},
            "json_schema",
            ".$defs.a.properties.b",
            "nsatisfiable",
        ),
        ("text", "json_schema", "", "must be a JSON schema"),
        ("(a", "regex", "", "unclosed"),
        (r"(a)\1", "regex", "", "backreferences"),
        ("(?=a)b", "regex", "", "look-a"),
        (r"[^\s\S]", "regex", "", "no text matches"),
        ("", "regex", "", "at least one"),
        ("start: start", "grammar", "", "no text matches"),
        ("start: nobody", "grammar", "", "nobody"),
        ("???", "grammar", "", "neither Lark's nor GBNF"),
        ('{"grammars": [{"json_schema": {}}]}', "grammar", "", "neither Lark's nor GBNF"),
        ("\n" * 1_000_000, "grammar", "", "bytes"),
        ("x" * MAX_GRAMMAR_BYTES, "regex", "", "bytes"),
    ],
)
async def test_what_is_refused(value: Any, kind: Kind, place: str, words: str) -> None:
    """One typed error that says where, and why."""
    error = await refused(value, kind)
    assert error.param == f"field{place}"
    assert words in error.message


class Names(list[str]):
    """Counts how often it is read."""

    num_reads = 0

    def __iter__(self) -> Iterator[str]:
        self.num_reads += 1
        return super().__iter__()


@pytest.mark.parametrize("keyword", ["type", "required"])
def test_a_part_that_has_many_names_is_not_read_for_each(keyword: str) -> None:
    """An escape makes another name of a reference, and a body has room for a million words in a
    list: what is read counts, not what is visited."""
    names = Names(["object"] * 10_000)
    part = {"type": "object", "properties": {"object": False}, keyword: names}
    escaped = (
        "".join(pair)
        for pair in itertools.product(*((one, f"%{ord(one):x}") for one in "abcdefgh"))
    )
    refs = {str(idx): {"$ref": f"#/$defs/{name}"} for idx, name in enumerate(escaped)}
    schema_fault({"type": "object", "$defs": {"abcdefgh": part}, "properties": refs})
    assert 0 < names.num_reads < 100 < len(refs)


def test_a_long_reference_is_kept_by_nobody() -> None:
    """Python keeps what it has split, and a body has room for four million characters."""
    schema = {"$id": "http://a/", "$ref": "http://a/" + "b" * 1_000_000}
    schema_fault(schema)  # whatever else is made once
    tracemalloc.start()
    for number in range(8):
        schema_fault(schema | {"$ref": f"{schema['$ref']}{number}"})
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 1_000_000


A_CALL = {"trigger": "<f>", "begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}


@needs_library
@pytest.mark.parametrize(
    ("kind", "value", "answer"),
    [
        ("json_schema", {"type": "null"}, "null"),
        ("regex", "ab+", "abb"),
        ("choice", ["a", "b"], "b"),
        ("grammar", 'root ::= "x" [0-9]+', "x12"),
        ("tags", [A_CALL], "text <f>null</f>"),
    ],
)
@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")])
async def test_thinking_before_what_must_match(
    kind: Kind, value: Any, answer: str, marks: tuple[str, ...]
) -> None:
    """Whether a model has tokens for its marks or spells them; each way it may begin."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(mark) for mark in marks])
    read = library().LLTokenizer(tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=[EOS])
    grammars = Grammars(check_in_place)
    grammars.marks = {mark: mark for mark in marks}

    async def takes(thought: Thought, text: str) -> bool:
        grammar = await grammars.checked(replace(asked(value, kind), thought=thought))
        state = matcher(read, grammar)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()

    assert await takes("", answer)
    assert await takes("may", answer)
    assert await takes("may", f"<think>\na < b</think>\n\n{answer}")
    assert await takes("open", f"a < b\n</think>\n\n{answer}")
    assert not await takes("open", answer)
    if kind != "tags":
        assert not await takes("may", "<think>a")
        assert not await takes("", f"<think>a</think>{answer}")
        assert not await takes("may", f"a</think>{answer}")
        assert not await takes("open", "a</think>neither")


@needs_library
async def test_a_verdict_is_remembered() -> None:
    """Agents send the same schema again and again."""
    checks: list[str] = []

    def check(grammar: str) -> grammar_process.Verdict:
        checks.append(grammar)
        return check_in_place(grammar)

    grammars = Grammars(check)
    for _ in range(3):
        await grammars.checked(asked(PERSON))
        await refused("(a", "regex", grammars)
    assert len(checks) == 2


@needs_library
async def test_what_was_checked_before_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """While others' grammars take their time, as many as may wait."""
    monkeypatch.setattr("services.gateway.text.bounded_work.MAX_WAITING", 1)
    with closing(Grammars()) as grammars:
        wanted = asked({"type": "integer", "maximum": 10**30})
        known = await grammars.checked(wanted)
        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(refused(PATTERNS, by=grammars))
            await asyncio.sleep(0)
            assert await grammars.checked(wanted) == known
            assert not slow.done()
            with pytest.raises(Overloaded):
                await grammars.checked(asked(PERSON))


@pytest.mark.slow
@needs_library
async def test_a_flood_of_slow_grammars_delays_none_that_is_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each gets its moment; what takes longer waits for its like, and too many are refused."""
    monkeypatch.setattr("services.gateway.text.bounded_work.MAX_WAITING", 4)
    with closing(Grammars()) as grammars:
        await grammars.checked(asked(PERSON))  # the process is there
        flood = [{"anyOf": [PATTERNS, {"const": index}]} for index in range(4)]
        async with asyncio.TaskGroup() as tasks:
            slow = [tasks.create_task(refused(one, by=grammars)) for one in flood]
            await asyncio.sleep(0.5)  # all of them had their moment
            for index in range(8):
                assert await grammars.checked(asked({"const": index}))
            assert not any(one.done() for one in slow[1:])
            with pytest.raises(Overloaded):
                await grammars.checked(asked(PATTERNS))
    assert all("too long" in one.result().message for one in slow)


@needs_library
@pytest.mark.parametrize(("limit_s", "give_up_s"), [(0.5, 60), (60, 0.5)])
def test_a_check_ends_by_its_own_processor_time(limit_s: float, give_up_s: float) -> None:
    """A machine with nothing else to do is not kept busy for as long as a busy one may need."""
    with closing(GrammarProcess(limit_s, give_up_s=give_up_s)) as process:
        began_at = time.monotonic()
        assert "too long" in process.check(a_grammar(PATTERNS)).fault
        assert time.monotonic() - began_at < 30
        assert not process.check(a_grammar(PERSON)).fault


@needs_library
async def test_a_machine_that_stood_still_is_no_grammars_fault() -> None:
    """Nobody may ever have looked at it: it is checked when it is asked for again."""
    with closing(Grammars()) as grammars:
        await grammars.checked(asked({"type": "null"}))
        queues: Any = grammars._quick, grammars._slow  # pyright: ignore[reportPrivateUsage]
        for queue in queues:
            assert not await queue.run(lambda process: process.check(a_grammar({})).fault)
            queue._process._give_up_s = 0.1
            os.kill(queue._process._child.pid, signal.SIGSTOP)
        assert "too long" in (await refused(PERSON, by=grammars)).message
        assert await grammars.checked(asked(PERSON))


CHAIN = "".join(f"r{number} ::= r{number + 1}\n" for number in range(8000))


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize(
    "text", ["\n" * 100_000, f'root ::= r0\n{CHAIN}r8000 ::= "a"'], ids=["lines", "rules"]
)
async def test_what_is_translated_for_ever_is_ended(text: str) -> None:
    """Beside the gateway, whose loop would stand still for a minute and more."""
    with closing(Grammars()) as grammars:
        assert "too long" in (await refused(text, "grammar", by=grammars)).message


@pytest.mark.slow
@needs_library
async def test_what_compiles_for_ever_is_ended() -> None:
    """It is refused in time, and the next grammar is checked."""
    with closing(Grammars()) as grammars:
        await grammars.checked(asked(PERSON))
        began_at = time.monotonic()
        error = await refused(PATTERNS, by=grammars)
        assert "too long" in error.message
        assert time.monotonic() - began_at < 10
        await grammars.checked(asked({"type": "null"}))
        assert "too long" in (await refused(PATTERNS, by=grammars)).message  # remembered


@needs_library
@pytest.mark.parametrize("is_first", [True, False], ids=["checked", "waiting"])
async def test_a_client_that_leaves_takes_its_check_along(is_first: bool) -> None:
    """Whether it was being checked or waited to be: who comes next is answered at once, and the
    grammar is not called bad for it."""
    with closing(Grammars()) as grammars:
        await grammars.checked(asked(PERSON))  # the process is there
        async with asyncio.TaskGroup() as tasks:
            first, second = (tasks.create_task(refused(PATTERNS, by=grammars)) for _ in range(2))
            await asyncio.sleep(0.2)
            first.cancel()
            if is_first:
                second.cancel()
                began_at = time.monotonic()
                assert await grammars.checked(asked({"type": "null"}))
                assert time.monotonic() - began_at < GIVE_UP_S / 2
        assert first.cancelled()
        assert is_first or "too long" in second.result().message


async def test_a_client_that_leaves_as_its_check_ends_takes_no_other_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the next one has begun between the look at whose it is and the end of its process."""
    begun = {name: threading.Event() for name in (b"first", b"second")}
    may_end = {name: threading.Event() for name in begun}
    killed: list[Any] = []
    monkeypatch.setattr(bounded_work, "_kill", killed.append)

    class Steered(WorkProcess):
        def _started(self) -> Any:
            self._child = child = cast("Any", self)
            return child

        def _outcome(self, child: Any, work: bytes) -> bytes:
            begun[work].set()
            assert may_end[work].wait(10)
            return work

        def give_up(self, client: object = None) -> None:
            may_end[b"first"].set()
            assert begun[b"second"].wait(10)
            super().give_up(client)

    queue = WorkQueue(Steered("none", 1.0), "checks", gives_up=True)
    async with asyncio.TaskGroup() as tasks:
        first, second = (
            tasks.create_task(queue.run(partial(WorkProcess.outcome, work=name))) for name in begun
        )
        await asyncio.to_thread(begun[b"first"].wait, 10)
        first.cancel()
        await asyncio.wait([first])
        may_end[b"second"].set()
    assert (second.result(), killed) == (b"second", [])


@needs_library
async def test_clients_that_leave_at_once_cost_the_next_no_new_process() -> None:
    """Their check ends by itself sooner than a process starts."""
    with closing(Grammars()) as grammars:
        await grammars.checked(asked(PERSON))  # the process is there
        quick: Any = grammars._quick  # pyright: ignore[reportPrivateUsage]
        child = quick._process._child
        async with asyncio.TaskGroup() as tasks:
            leaves = tasks.create_task(grammars.checked(asked(PATTERNS)))
            await asyncio.sleep(0.005)
            leaves.cancel()
        assert await grammars.checked(asked({"type": "null"}))
        assert quick._process._child is child


@needs_library
def test_giving_up_what_is_not_checked_ends_nothing() -> None:
    """A check that is over cannot be given up any more: its process stays."""
    with closing(GrammarProcess()) as process:
        assert not process.check(a_grammar(PERSON)).fault
        process.give_up()
        assert not process.check(a_grammar({"type": "null"})).fault


@needs_library
async def test_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one takes its time others are told to come again."""
    monkeypatch.setattr("services.gateway.text.bounded_work.MAX_WAITING", 1)
    with closing(Grammars()) as grammars:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(grammars.checked(asked(PERSON)))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await grammars.checked(asked({"type": "null"}))
        assert first.result()


@needs_library
async def test_many_with_one_grammar_wait_for_one_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a batch that begins; none takes another's place. The first one's client may
    leave, and a bad grammar is told to each by the name of its own field."""
    monkeypatch.setattr("services.gateway.text.bounded_work.MAX_WAITING", 1)
    with closing(Grammars()) as grammars:
        async with asyncio.TaskGroup() as tasks:
            good = [tasks.create_task(grammars.checked(asked(PERSON))) for _ in range(100)]
            await asyncio.sleep(0)
            good[0].cancel()
        assert len({one.result() for one in good[1:]}) == 1
        bad = Structure(kind="regex", value="(", param="")
        told: list[str] = []

        async def ask(param: str) -> None:
            with pytest.raises(InvalidRequest) as error:
                await grammars.checked(replace(bad, param=param))
            told.append(error.value.param)

        async with asyncio.TaskGroup() as tasks:
            for param in ("regex", "guided_regex"):
                tasks.create_task(ask(param))
        assert told == ["regex", "guided_regex"]


@needs_library
async def test_a_check_that_dies_ends_no_other() -> None:
    """As the library does where memory ends."""
    with closing(GrammarProcess(limit_s=60, give_up_s=60)) as process:
        assert not process.check(a_grammar(PERSON)).fault
        child: Any = process._child  # pyright: ignore[reportPrivateUsage]
        forks = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        async with asyncio.TaskGroup() as tasks:
            dies = tasks.create_task(asyncio.to_thread(process.check, a_grammar(PATTERNS)))
            while not (fork := forks.read_text()):
                await asyncio.sleep(0.01)
            os.kill(int(fork), signal.SIGKILL)
        assert "memory" in dies.result().fault
        assert not process.check(a_grammar({"type": "null"})).fault
        assert process._child is child  # pyright: ignore[reportPrivateUsage]


def test_modules_of_our_names_in_the_working_directory_are_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway may be started where somebody keeps a package ``shared``."""
    (tmp_path / "shared").mkdir()
    for name in ("__init__", "grammar"):
        (tmp_path / "shared" / f"{name}.py").touch()
    monkeypatch.chdir(tmp_path)
    with closing(GrammarProcess()) as process:
        assert process.check('start: "a"').fault == ""


@needs_library
def test_grammars_are_checked_beside_a_thousand_connections() -> None:
    """The process may start when all low descriptors are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ExitStack() as files:
            while files.enter_context(open(os.devnull)).fileno() < 1024:
                pass
            with closing(GrammarProcess()) as process:
                assert not process.check(a_grammar(PERSON)).fault
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_library
def test_a_process_that_dies_is_started_again() -> None:
    """Whoever asked is told; a closed one checks nothing."""
    process = GrammarProcess()
    grammar = a_grammar(PERSON)
    assert not process.check(grammar).fault
    child: Any = process._child  # pyright: ignore[reportPrivateUsage]
    child.kill()
    child.wait()
    assert not process.check(grammar).is_lasting
    assert not process.check(grammar).fault
    process.close()
    verdict = process.check(grammar)
    assert verdict.fault
    assert not verdict.is_lasting


@needs_library
def test_a_process_that_starts_late_gives_nobody_anothers_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it says when it is there at last is no outcome, and it is not waited for any more."""
    with closing(GrammarProcess(limit_s=60, give_up_s=60)) as process:
        with monkeypatch.context() as patch:
            patch.setattr(bounded_work, "STARTS_WITHIN_S", 0.0)
            verdict = process.check(a_grammar(PERSON))
        assert verdict.fault
        assert not verdict.is_lasting
        assert not process.check(a_grammar(PERSON)).fault


@needs_library
async def test_a_machine_without_room_for_the_process_is_no_fault_of_the_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is served when there is room again."""

    def refused(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    grammars = Grammars()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", refused)
            with pytest.raises(Overloaded, match="no process can be started"):
                await grammars.checked(asked("[ab]", "regex"))
        assert await grammars.checked(asked("[ab]", "regex"))
    finally:
        grammars.close()
