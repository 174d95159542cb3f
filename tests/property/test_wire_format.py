"""The readers and writers of messages say what protobuf's own parser and betterproto2 say."""

from __future__ import annotations

import re
from typing import Any

import betterproto2
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import wire
from shared.errors import LocalProtocolError, RemoteProtocolError
from shared.messages.descriptors import descriptors
from shared.messages.message_codec import MessageCodec
from shared.messages.wire_format import Malformed, Room, reader

MESSAGE_TYPES = [
    kind
    for name in sorted(dir(wire))
    if isinstance(kind := getattr(wire, name), type) and issubclass(kind, betterproto2.Message)
]

CODEC = MessageCodec()

OF_EACH = settings(max_examples=settings().max_examples // 10)
"""There are many message types of few kinds of fields."""

_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}


def values_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values of one entry of a field; of enums also numbers that nobody knows."""
    if field.message_type is not None:
        return contents_of(field.message_type)
    if field.enum_type is not None:
        return st.integers(-1, 9)
    if field.cpp_type in _UNSIGNED:
        return st.integers(0, (1 << _UNSIGNED[field.cpp_type]) - 1)
    if field.type == FieldDescriptor.TYPE_SINT32:
        return st.integers(-(1 << 31), (1 << 31) - 1)
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return st.floats(width=32)
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return st.floats()
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=9)
    assert field.type == FieldDescriptor.TYPE_STRING, field.full_name
    return st.text(max_size=5)


def contents_of(descriptor: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments for protobuf's own class of a message; of a oneof at most one."""
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        values = values_of(field) if not _is_map(field) else st.just({})
        if _is_map(field):
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            # Two dictionaries with a NaN are never equal.
            entries = values_of(value).filter(lambda one: one == one)
            values = st.dictionaries(values_of(key), entries, max_size=2)
        elif field.is_repeated:
            values = st.lists(values, max_size=3)
        optional[field.name] = values
    return st.fixed_dictionaries({}, optional=optional).map(
        lambda found: _one_of(descriptor, found)
    )


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def _one_of(descriptor: Any, found: dict[str, Any]) -> dict[str, Any]:
    for group in descriptor.oneofs:
        for name in [field.name for field in group.fields if field.name in found][1:]:
            del found[name]
    return found


def protobufs_own(kind: Any) -> Any:
    """Return protobuf's class of a message."""
    descriptor = descriptors().FindMessageTypeByName(f"pdmesh.v1.{kind.__name__}")
    return message_factory.GetMessageClass(descriptor)


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
@OF_EACH
@given(data=st.data())
def test_messages_are_what_betterproto_reads_and_writes(kind: Any, data: st.DataObject) -> None:
    """Reading gives an equal message with values of the same types; writing gives bytes that mean
    the same."""
    foreign = protobufs_own(kind)
    sent = foreign(**data.draw(contents_of(foreign.DESCRIPTOR)))
    theirs = kind.parse(sent.SerializeToString())
    ours = CODEC.decode(sent.SerializeToString(), kind)
    assert ours == theirs
    assert _types(ours) == _types(theirs)
    assert kind.parse(bytes(CODEC.encode(ours, kind))) == theirs


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
@OF_EACH
@given(data=st.data())
def test_damaged_messages_are_read_as_protobuf_reads_them(kind: Any, data: st.DataObject) -> None:
    """What protobuf's parser refuses is refused; what it takes means the same, unknown fields
    aside. Two messages, one after the other, are one."""
    foreign = protobufs_own(kind)
    contents = contents_of(foreign.DESCRIPTOR)
    sent = b"".join(foreign(**data.draw(contents)).SerializeToString() for _ in range(2))
    at = data.draw(st.integers(0, len(sent)))
    until = data.draw(st.integers(at, min(len(sent), at + 3)))
    damaged = sent[:at] + data.draw(st.binary(max_size=6)) + sent[until:]
    try:
        theirs = foreign.FromString(damaged)
    except DecodeError:
        with pytest.raises((ValueError, IndexError)):
            _read(damaged, kind)
        return
    theirs.DiscardUnknownFields()
    try:
        ours = _read(damaged, kind)
    except Malformed as error:
        # Of groups and of fields without a number protobuf keeps what it does not know, of long
        # numbers 64 bits; we refuse them.
        refused = "proto3 does not have|more than 64 bits|that has no number"
        assert re.search(refused, str(error))  # noqa: PT017
        return
    assert ours == kind.parse(theirs.SerializeToString())


def _read(data: bytes, kind: Any) -> Any:
    """Read a message as one that no client sends, in which unknown fields are passed over."""
    return reader(kind)(data, 0, len(data), None, Room())


@pytest.mark.parametrize("value", [-1, 1 << 32])
def test_a_number_that_does_not_fit_is_not_sent(value: int) -> None:
    """It would arrive as another one."""
    with pytest.raises(LocalProtocolError):
        CODEC.encode(wire.Granted(stream_id=value), wire.Granted)


def _types(message: Any) -> Any:
    return {
        name: _types(value) if isinstance(value, betterproto2.Message) else type(value)
        for name, value in message.__dict__.items()
    }


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x0a", "they end in the middle of it"),
        (b"\x0a\x05ab", "a field that is cut short"),
        (b"\x0a\x01\xff", "a text in it is not UTF-8"),
        (b"\x08" + b"\xff" * 10, "a number of more than 64 bits"),
    ],
)
def test_a_client_reads_what_is_wrong_with_its_bytes(data: bytes, why: str) -> None:
    """In words of the wire: Python's ("IndexError") tell a client in another language nothing."""
    with pytest.raises(RemoteProtocolError, match=f"are not a TokenizeRequest: {why}"):
        CODEC.decode(data, wire.TokenizeRequest)
