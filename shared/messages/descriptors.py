"""The schema at run time: descriptors of every message and method, for reflection and for tests.

The messages themselves are betterproto2's (``wire_format.py``). Knows no transport.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from grpclib.health.v1 import health_pb2
from grpclib.reflection.v1 import reflection_pb2
from grpclib.reflection.v1alpha import reflection_pb2 as reflection_alpha_pb2


@cache
def schema() -> descriptor_pb2.FileDescriptorSet:
    """Return every file of proto/ with its imports, dependencies first."""
    data = files("shared.wire").joinpath("pdmesh.binpb").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data)


@cache
def descriptors() -> Any:
    """Return a pool with our files and those of the standard services: where reflection looks. Not
    protobuf's default one: a process may hold our server beside somebody's stubs of these files."""
    pool: Any = descriptor_pool.DescriptorPool()
    for file in schema().file:
        pool.Add(file)
    for module in (health_pb2, reflection_pb2, reflection_alpha_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    return pool
