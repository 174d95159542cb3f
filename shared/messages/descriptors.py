"""The schema at run time: descriptors of every message and method, for reflection and for tests.

The messages themselves are betterproto2's (``wire_format.py``). Knows no transport.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool


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
