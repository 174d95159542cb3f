"""The schema at run time: descriptors for reflection, and a strict gate in front of the parser.

betterproto2 accepts what no protobuf parser should (wrong wire types, cut fields, field number 0,
overflowing integers) and is slow at it: 900 kB of unknown fields would hold the event loop for
seconds. So every message first passes protobuf's own C parser, which refuses damage, drops unknown
fields and has the values that betterproto2's messages are then made of (``message_bridge.py``).
Only in what clients ask for an unknown field is refused: dropped, it might be a wish that the
answer does not fulfil.
This module knows no transport.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from shared.errors import InvalidRequest, RemoteProtocolError, TooLarge

MAX_ELEMENTS = 1 << 16
"""Repeated and map entries in one message; each is a Python object to the message library."""

_OF_CLIENTS = frozenset({"GenerateRequest", "TokenizeRequest"})


@cache
def schema() -> descriptor_pb2.FileDescriptorSet:
    """Return every file of proto/ with its imports, dependencies first."""
    data = files("shared.wire").joinpath("pdmesh.binpb").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data)


@cache
def descriptors() -> Any:
    """Return protobuf's default pool with our files in it: where reflection looks."""
    pool: Any = descriptor_pool.Default()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    for file in schema().file:
        pool.AddSerializedFile(_as_generated(file).SerializeToString())
    return pool


def _as_generated(file: descriptor_pb2.FileDescriptorProto) -> descriptor_pb2.FileDescriptorProto:
    """Return the file byte for byte as protoc's Python stubs register it: without derived JSON
    names.

    The pool takes a file twice only if both are equal, and a process may hold our server beside
    somebody's stubs of the same files.
    """
    copy = descriptor_pb2.FileDescriptorProto()
    copy.CopyFrom(file)
    messages = list(copy.message_type)
    while messages:
        message = messages.pop()
        messages += message.nested_type
        for field in message.field:
            field.ClearField("json_name")
    return copy


def _count_elements(descriptor: Descriptor) -> Callable[[Any], int]:
    """Return a function that counts repeated entries of a message, made for its type once."""
    repeated: list[str] = []
    nested: list[tuple[str, bool, Callable[[Any], int]]] = []
    for field in descriptor.fields:
        is_repeated = bool(field.is_repeated)
        if is_repeated:
            repeated.append(field.name)
        is_map = is_repeated and field.message_type is not None and _is_map(field.message_type)
        if field.message_type is not None and not is_map and _has_repeated(field.message_type):
            nested.append((field.name, is_repeated, _count_elements(field.message_type)))

    def count(message: Any) -> int:
        total = sum(len(getattr(message, name)) for name in repeated)
        for name, is_repeated, count_inner in nested:
            if total > MAX_ELEMENTS:
                break
            if is_repeated:
                total += sum(map(count_inner, getattr(message, name)))
            elif message.HasField(name):
                total += count_inner(getattr(message, name))
        return total

    return count


def _refuse_unknown(message: Any) -> None:
    for field in UnknownFieldSet(message):
        raise InvalidRequest(
            f"{message.DESCRIPTOR.name} has no field {field.field_number} in this release: what it "
            "asks for would be left out",
            param=str(field.field_number),
            code="unsupported",
        )
    for field, value in message.ListFields():
        if field.message_type is not None and not _is_map(field.message_type):
            for inner in value if field.is_repeated else (value,):
                _refuse_unknown(inner)


def _is_map(descriptor: Descriptor) -> bool:
    return bool(descriptor.GetOptions().map_entry)


def _has_repeated(descriptor: Descriptor) -> bool:
    return any(
        field.is_repeated or (field.message_type is not None and _has_repeated(field.message_type))
        for field in descriptor.fields
        if field.type != FieldDescriptor.TYPE_GROUP
    )


@cache
def message_class(name: str) -> Any:
    """Return protobuf's class of the message ``pdmesh.v1.<name>``."""
    return message_factory.GetMessageClass(descriptors().FindMessageTypeByName(f"pdmesh.v1.{name}"))


@cache
def gate(name: str) -> Callable[[bytes], Any]:
    """Return a function from bytes to the message ``pdmesh.v1.<name>`` as protobuf's parser reads
    it; unknown fields are still in it, but among no fields it lists.

    It raises RemoteProtocolError: these bytes are no such message. TooLarge: over MAX_ELEMENTS
    entries. InvalidRequest: a client asks for something that we do not know.
    """
    parse = message_class(name).FromString
    descriptor: Descriptor = message_class(name).DESCRIPTOR
    count_elements = _count_elements(descriptor) if _has_repeated(descriptor) else None

    def checked(data: bytes) -> Any:
        try:
            message = parse(data)
        except (DecodeError, ValueError) as error:
            raise RemoteProtocolError(
                f"the bytes are not a {name}: {error}", code="malformed_message"
            ) from error
        if count_elements is not None and count_elements(message) > MAX_ELEMENTS:
            raise TooLarge(f"a {name} may hold at most {MAX_ELEMENTS} repeated entries")
        if name in _OF_CLIENTS:
            _refuse_unknown(message)
        return message

    return checked
