"""Bytes <-> betterproto2 messages: a reader and a writer, put together once for each type.

betterproto2's own take ten times as long, and accept what no protobuf parser should: wrong wire
types, cut fields, field number 0, overflowing integers. So the text of two functions is made from
the fields that betterproto2 has generated, as ``dataclasses`` makes ``__init__``: straight code
from bytes to the values of the message and back, with no other object between (figures:
docs/adr/0002-messages.md). They read what protobuf's parser reads, which a property test holds
against it, but for two things: groups are refused (proto3 has none), and of repeated entries and
unknown fields a message may have MAX_ELEMENTS, because each is a turn of Python.

Knows no transport, and no message of ours by its name.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NoReturn

import betterproto2

from shared.errors import InvalidRequest, LocalProtocolError, TooLarge

MAX_ELEMENTS = 1 << 16
"""Repeated entries, map entries and unknown fields in one message."""

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
"""Wire types. Those of groups, 3 and 4, are not read."""

_FIXED = {
    "double": ("<d", _FIXED64),
    "fixed64": ("<Q", _FIXED64),
    "float": ("<f", _FIXED32),
    "fixed32": ("<I", _FIXED32),
}
_VARINTS = {
    "uint32": ("value & 0xFFFFFFFF", "unsigned(value, 32)"),
    "uint64": ("value", "unsigned(value, 64)"),
    "sint32": ("unzigzag(value)", "zigzag(value)"),
    "bool": ("value != 0", "unsigned(value, 1)"),
    # One below 0 travels with its sign, in 64 bits.
    "enum": ("{kind}(signed(value))", "unsigned(value & 0xFFFFFFFFFFFFFFFF, 64)"),
}
"""What makes a value of the number ``value``, and what writes a ``value``."""

Reader = Callable[[bytes, int, int, Any, "Room"], Any]
Writer = Callable[[Any], bytearray]


class Malformed(ValueError):
    """These bytes are no such message."""


class Room:
    """What a message may still hold. is_of_client: nothing that is not known."""

    __slots__ = ("is_of_client", "left")

    def __init__(self, *, is_of_client: bool = False) -> None:
        self.left = MAX_ELEMENTS
        self.is_of_client = is_of_client

    def take(self) -> None:
        """Count an entry. Raises TooLarge."""
        self.left -= 1
        if self.left < 0:
            raise TooLarge(f"a message may hold at most {MAX_ELEMENTS} repeated entries")


# --- what the made functions call -----------------------------------------------------------------


def varint(data: bytes, at: int, first: int) -> tuple[int, int]:
    """Read a number on after a byte that says that more follow; return it, and where it ends."""
    value = first & 0x7F
    for shift in range(7, 63, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    # Nine bytes hold 63 bits, so the tenth has one.
    if data[at] > 1:
        raise Malformed("a number of more than 64 bits")
    return value | data[at] << 63, at + 1


def unsigned(value: int, bits: int) -> bytes:
    """Return a number's bytes. Raises LocalProtocolError: it has a sign, or more bits."""
    if value < 0 or value >> bits:
        raise LocalProtocolError(f"{value} does not fit into {bits} bits without a sign")
    written = bytearray()
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def signed(value: int) -> int:
    """Return an enum's number: 32 bits with a sign."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def unzigzag(value: int) -> int:
    """Return a sint32, which travels as twice its size, and one less if it is below 0."""
    value &= 0xFFFFFFFF
    return value >> 1 ^ -(value & 1)


def zigzag(value: int) -> bytes:
    """Return a sint32's bytes. Raises LocalProtocolError: it does not fit."""
    return unsigned(value << 1 if value >= 0 else ~(value << 1), 32)


def cut() -> NoReturn:
    """Refuse what ends too early."""
    raise Malformed("a field that is cut short")


def pass_over(data: bytes, at: int, end: int, tag: int, name: str, room: Room) -> int:
    """Return where a field ends that is not known, or of another wire type than it should be.

    Raises Malformed, TooLarge. InvalidRequest: a client asks for it; dropped, it might be a wish
    that the answer does not fulfil.
    """
    number, kind = tag >> 3, tag & 7
    if not number or tag >> 32:
        raise Malformed("a field that has no number")
    size = 0
    if kind in (_VARINT, _SIZED):
        size, at = data[at], at + 1
        if size & 0x80:
            size, at = varint(data, at, size)
    if kind == _VARINT:
        size = 0
    elif kind in (_FIXED64, _FIXED32):
        size = 8 if kind == _FIXED64 else 4
    elif kind != _SIZED:
        raise Malformed("a field of a type that proto3 does not have")
    if at + size > end:
        cut()
    if room.is_of_client:
        raise InvalidRequest(
            f"{name} has no field {number} of wire type {kind} in this release: what it asks for "
            "would be left out",
            param=str(number),
            code="unsupported",
        )
    room.take()
    return at + size


_TOOLS: dict[str, Any] = {
    **{tool.__name__: tool for tool in (varint, unsigned, signed, unzigzag, zigzag, cut)},
    "pass_over": pass_over,
    **{f"get_{kind}": struct.Struct(form).unpack_from for kind, (form, _) in _FIXED.items()},
    **{f"put_{kind}": struct.Struct(form).pack for kind, (form, _) in _FIXED.items()},
}


# --- fields ---------------------------------------------------------------------------------------


class _Entry:
    """An entry of a map on its way, which travels as a message of two fields."""

    def __init__(self, key: Any, value: Any) -> None:
        self.key = key
        self.value = value


class _Fields:
    """The fields of a message type, as betterproto2 describes them, in order of their numbers."""

    def __init__(self, kind: Any) -> None:
        meta = kind._betterproto
        self.kind = kind
        self.unset: dict[str, Any] = dict(kind().__dict__)
        self.all = sorted(meta.meta_by_field_name.items(), key=lambda item: item[1].number)
        self._classes = meta.cls_by_field

    def inner(self, name: str) -> Any:
        """Return the class of a field's values, if it is a message or an enum."""
        return self._classes[name]

    def others(self, name: str, group: str | None) -> list[str]:
        """Return the fields of which this one, when it is set, leaves none: of its oneof."""
        return [
            other
            for other, field in self.all
            if group is not None and field.group == group and other != name
        ]


class _EntryFields(_Fields):
    """Those of a map's entry."""

    def __init__(self, key: Any, value: Any) -> None:
        self.kind = _Entry
        self.unset = {"key": 0, "value": 0}
        self.all = [("key", key), ("value", value)]


def _wire_type(field: Any) -> int:
    if field.proto_type in _FIXED:
        return _FIXED[field.proto_type][1]
    return _VARINT if field.proto_type in _VARINTS else _SIZED


def _made(name: str, fields: _Fields, lines: Iterable[str], scope: dict[str, Any]) -> Any:
    """Return the function of this name that the lines define. All of them are made here, of field
    names that a compiler has checked."""
    scope |= {**_TOOLS, "Message": fields.kind, "new": object.__new__, "unset": fields.unset}
    text = "\n".join(lines)
    exec(compile(text, f"<{name} {fields.kind.__name__}>", "exec"), scope)
    return scope[name]


def _indented(depth: int, lines: Iterable[str]) -> list[str]:
    return [f"{'    ' * depth}{line}" for line in lines]


# --- reading --------------------------------------------------------------------------------------


@cache
def reader(kind: type[betterproto2.Message]) -> Reader:
    """Return ``read(data, at, end, message, room)``, which returns the message in ``data[at:end]``;
    what is there is added to ``message`` unless that is None.

    It raises Malformed, IndexError and UnicodeDecodeError for bytes that are no such message, and
    TooLarge and InvalidRequest.
    """
    return _reader(_Fields(kind))


def _reader(fields: _Fields) -> Reader:
    scope: dict[str, Any] = {}
    branches: list[str] = []
    for name, field in fields.all:
        lines = _reading(fields, name, field, scope)
        # Of a oneof the last one that came counts, and the others are as if they had not come.
        lines += [f"values[{other!r}] = None" for other in fields.others(name, field.group)]
        tags = {field.number << 3 | _wire_type(field): lines}
        # Numbers may come one by one or packed, whichever the schema says: a parser takes both.
        if field.repeated and _wire_type(field) == _VARINT:
            one_by_one = ["end_of_all = stop", "while at < end_of_all:", *_indented(1, lines)]
            packed = [*_SIZED_LINES, *one_by_one, "if at != end_of_all: cut()"]
            tags[field.number << 3 | _SIZED] = packed
        for tag, reading in tags.items():
            branches += [f"{'elif' if branches else 'if'} tag == {tag}:", *_indented(1, reading)]
    lists = [
        f"values[{name!r}] = {'{}' if field.proto_type == 'map' else '[]'}"
        for name, field in fields.all
        if field.repeated or field.proto_type == "map"
    ]
    other = f"at = pass_over(data, at, end, tag, {fields.kind.__name__!r}, room)"
    lines = [
        "def read(data, at, end, message, room):",
        "    if message is None:",
        "        message = new(Message)",
        "        values = message.__dict__ = unset.copy()",
        *_indented(2, lists),
        "    else:",
        "        values = message.__dict__",
        "    while at < end:",
        "        tag = data[at]; at += 1",
        "        if tag > 127: tag, at = varint(data, at, tag)",
        *_indented(2, branches),
        *_indented(2, ["else:", f"    {other}"] if branches else [other]),
        "    if at != end: cut()",
        "    return message",
    ]
    return _made("read", fields, lines, scope)


def _number(name: str) -> list[str]:
    """Return the lines that read a varint; of two bytes, which most are, without a call."""
    return [
        f"{name} = data[at]; at += 1",
        f"if {name} > 127:",
        "    more = data[at]",
        f"    if more > 127: {name}, at = varint(data, at, {name})",
        # Less 128: the first byte's mark that another one follows.
        f"    else: {name} += (more << 7) - 128; at += 1",
    ]


_SIZED_LINES = [*_number("size"), "stop = at + size", "if stop > end: cut()"]


def _reading(fields: _Fields, name: str, field: Any, scope: dict[str, Any]) -> list[str]:
    """Return the lines that read a field's value after its tag."""
    kind, place = field.proto_type, f"values[{name!r}]"
    take = ["room.take()", f"{place}.append({{}})"] if field.repeated else [f"{place} = {{}}"]
    if kind == "map":
        scope[f"read_{name}"] = _reader(_EntryFields(*field.map_meta))
        entry = f"entry = read_{name}(data, at, stop, None, room)"
        store = f"{place}[entry.key] = entry.value"
        return [*_SIZED_LINES, "room.take()", entry, store, "at = stop"]
    if kind == "message":
        scope[f"read_{name}"] = reader(fields.inner(name))
        # A message field that comes twice is one message: the second adds to the first.
        old = "None" if field.repeated else place
        value = f"read_{name}(data, at, stop, {old}, room)"
        return [*_SIZED_LINES, *take[:-1], take[-1].format(value), "at = stop"]
    if kind in ("bytes", "string"):
        value = "data[at:stop]" if kind == "bytes" else "data[at:stop].decode()"
        return [*_SIZED_LINES, *take[:-1], take[-1].format(value), "at = stop"]
    if kind in _FIXED:
        stop = f"stop = at + {8 if _FIXED[kind][1] == _FIXED64 else 4}"
        value = f"get_{kind}(data, at)[0]"
        return [stop, "if stop > end: cut()", *take[:-1], take[-1].format(value), "at = stop"]
    if kind == "enum":
        scope[f"kind_{name}"] = fields.inner(name)
    value = _VARINTS[kind][0].format(kind=f"kind_{name}")
    return [
        *_number("value"),
        *take[:-1],
        take[-1].format(value),
    ]


# --- writing --------------------------------------------------------------------------------------


@cache
def writer(kind: type[betterproto2.Message]) -> Writer:
    """Return a function from a message to its bytes.

    It raises LocalProtocolError, TypeError and OverflowError for a value that its field cannot
    have.
    """
    return _writer(_Fields(kind))


def _writer(fields: _Fields) -> Writer:
    scope: dict[str, Any] = {}
    body: list[str] = []
    for name, field in fields.all:
        lines = _writing(fields, name, field, scope)
        is_many = field.repeated or field.proto_type == "map"
        # A set optional field counts even if it is 0; None never does.
        has_presence = field.optional or field.group is not None
        items = f"values[{name!r}]" + (".items()" if field.proto_type == "map" else "")
        if is_many:
            body += [f"for value in {items}:", *_indented(1, lines)]
        else:
            condition = "value is not None" if has_presence else "value"
            body += [f"value = {items}", f"if {condition}:", *_indented(1, lines)]
    lines = [
        "def write(message):",
        "    values = message.__dict__",
        "    out = bytearray()",
        *_indented(1, body),
        "    return out",
    ]
    return _made("write", fields, lines, scope)


def _writing(fields: _Fields, name: str, field: Any, scope: dict[str, Any]) -> list[str]:
    """Return the lines that append a field's tag and ``value``."""
    kind = field.proto_type
    tag = f"out += {unsigned(field.number << 3 | _wire_type(field), 32)!r}"
    if kind in _FIXED:
        return [tag, f"out += put_{kind}(value)"]
    if kind == "sint32":
        return [tag, "out += zigzag(value)"]
    if kind in _VARINTS:
        return [tag, *_number_of("value", _VARINTS[kind][1])]
    make: list[str] = []
    if kind == "map":
        scope |= {f"write_{name}": _writer(_EntryFields(*field.map_meta)), "Entry": _Entry}
        make = [f"value = write_{name}(Entry(*value))"]
    elif kind == "message":
        scope[f"write_{name}"] = writer(fields.inner(name))
        make = [f"value = write_{name}(value)"]
    elif kind == "string":
        make = ["value = value.encode()"]
    return [
        *make,
        tag,
        "size = len(value)",
        *_number_of("size", "unsigned(size, 64)"),
        "out += value",
    ]


def _number_of(name: str, otherwise: str) -> list[str]:
    """Return the lines that append a varint; of up to two bytes, as most are, without a call."""
    return [
        f"if 0 <= {name} < 128: out.append({name})",
        f"elif 128 <= {name} < 16384: out.append({name} & 127 | 128); out.append({name} >> 7)",
        f"else: out += {otherwise}",
    ]
