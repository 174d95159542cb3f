"""betterproto2 messages <-> protobuf's own C messages, field by field: the fast way through the
codec.

betterproto2 walks the bytes of every message in Python. Here protobuf's C parser and writer do, and
Python only moves those fields that are set (figures: docs/adr/0002-messages.md). A function a
message type is put together once, from its descriptor. What comes out is equal to what betterproto2
makes of the same bytes; where this cannot be (unknown fields kept, values that protobuf refuses),
its own way is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import betterproto2
from google.protobuf.descriptor import FieldDescriptor

from shared.rpc.descriptors import gate, message_class

Convert = Callable[[Any], Any]


def encoded(message: betterproto2.Message) -> bytes:
    """Return the bytes of one of our messages."""
    try:
        return _writer(type(message))(message).SerializeToString()
    except (TypeError, ValueError, _Unbridged):
        return bytes(message)


@cache
def decoder(message_type: type[betterproto2.Message]) -> Callable[[bytes], Any]:
    """Return a function from bytes to one of our messages, without unknown fields.

    It raises RemoteProtocolError, TooLarge, InvalidRequest: see ``descriptors.gate``.
    """
    checked = gate(message_type.__name__)
    try:
        read = _reader(message_type)
    except _Unbridged:
        return lambda data: _parsed_by_itself(message_type, checked(data))
    return lambda data: read(checked(data))


def _parsed_by_itself(message_type: type[betterproto2.Message], parsed: Any) -> Any:
    parsed.DiscardUnknownFields()
    return message_type.parse(parsed.SerializeToString())


class _Unbridged(Exception):
    """This message is left to betterproto2."""


def _meta(message_type: type[betterproto2.Message]) -> Any:
    return message_type._betterproto  # pyright: ignore[reportPrivateUsage]


def _fields(message_type: type[betterproto2.Message]) -> list[tuple[str, FieldDescriptor, Any]]:
    """Return (our name, protobuf's field, our class for its values) of every field."""
    meta = _meta(message_type)
    by_number = message_class(message_type.__name__).DESCRIPTOR.fields_by_number
    fields: list[tuple[str, FieldDescriptor, Any]] = []
    for name, field in meta.meta_by_field_name.items():
        if field.map_meta is not None or field.unwrap is not None:
            raise _Unbridged
        fields.append((name, by_number[field.number], meta.cls_by_field[name]))
    return fields


@cache
def _writer(message_type: type[betterproto2.Message]) -> Convert:
    foreign = message_class(message_type.__name__)
    fields: list[tuple[str, str, Convert | None, Any]] = []
    for name, field, kind in _fields(message_type):
        convert: Convert | None = _writer(kind) if field.message_type is not None else None
        if convert is not None and field.is_repeated:
            convert = _each(convert)
        # A set optional field counts even if it is 0; None never does.
        default: Any = None
        if not field.has_presence:
            default = [] if field.is_repeated else field.default_value
        fields.append((name, field.name, convert, default))

    def write(message: Any) -> Any:
        values = message.__dict__
        if values["_unknown_fields"]:
            raise _Unbridged
        found: dict[str, Any] = {}
        for name, foreign_name, convert, default in fields:
            value = values[name]
            if value != default and value is not None:
                found[foreign_name] = value if convert is None else convert(value)
        return foreign(**found)

    return write


@cache
def _reader(message_type: type[betterproto2.Message]) -> Convert:
    converts: dict[int, tuple[str, Convert | None]] = {}
    lists: list[str] = []
    for name, field, kind in _fields(message_type):
        convert: Convert | None = None
        if field.message_type is not None:
            convert = _reader(kind)
        elif field.enum_type is not None:
            convert = kind
        if field.is_repeated:
            convert = list if convert is None else _each(convert)
            lists.append(name)
        converts[field.number] = name, convert
    unset = dict(message_type().__dict__)

    def read(parsed: Any) -> Any:
        message: Any = object.__new__(message_type)
        values = unset.copy()
        for name in lists:
            values[name] = []
        for field, value in parsed.ListFields():
            name, convert = converts[field.number]
            values[name] = value if convert is None else convert(value)
        message.__dict__ = values
        return message

    return read


def _each(convert: Convert) -> Convert:
    return lambda values: [convert(value) for value in values]
