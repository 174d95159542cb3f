"""The fast way between our messages and bytes gives what betterproto2's own way gives."""

from __future__ import annotations

from typing import Any

import betterproto2
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.rpc.descriptors import message_class
from shared.rpc.message_bridge import decoder, encoded

MESSAGE_TYPES = [
    kind
    for name in sorted(dir(wire))
    if isinstance(kind := getattr(wire, name), type) and issubclass(kind, betterproto2.Message)
]

_UNSIGNED = {FieldDescriptor.CPPTYPE_UINT32: 32, FieldDescriptor.CPPTYPE_UINT64: 64}


def values_of(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values of one entry of a field; of enums also numbers that nobody knows."""
    if field.message_type is not None:
        return contents_of(field.message_type)
    if field.enum_type is not None:
        return st.integers(0, 9)
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


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_messages_are_what_betterproto_reads_and_writes(kind: Any, data: st.DataObject) -> None:
    """Reading gives an equal message with values of the same types; writing gives bytes that mean
    the same."""
    foreign = message_class(kind.__name__)
    sent = foreign(**data.draw(contents_of(foreign.DESCRIPTOR)))
    theirs = kind.parse(sent.SerializeToString())
    ours = decoder(kind)(sent.SerializeToString())
    assert ours == theirs
    assert _types(ours) == _types(theirs)
    assert kind.parse(encoded(ours)) == theirs


def _types(message: Any) -> Any:
    return {
        name: _types(value) if isinstance(value, betterproto2.Message) else type(value)
        for name, value in message.__dict__.items()
    }
