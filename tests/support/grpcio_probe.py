"""A foreign client in a process of its own: grpcio's health and reflection packages, whose
generated code cannot be imported beside grpclib's. Prints one JSON object.

    python -m tests.support.grpcio_probe HOST:PORT SERVICE...
"""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

LIMIT_S = 30.0


def health_of(channel: grpc.Channel, name: str) -> str:
    """Return the serving status of a service, or the code of the refusal."""
    request = health_pb2.HealthCheckRequest(service=name)
    try:
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=LIMIT_S)
    except grpc.RpcError as error:
        refusal: Any = error
        return refusal.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def reflected_call(channel: grpc.Channel, services: list[str]) -> str:
    """Make a call with nothing but what reflection tells, as grpcurl does."""
    database = ProtoReflectionDescriptorDatabase(channel)
    services += database.get_services()
    pool = descriptor_pool.DescriptorPool(database)
    method = pool.FindServiceByName("pdmesh.v1.Inference").FindMethodByName("Tokenize")
    request = message_factory.GetMessageClass(method.input_type)(text="abc")
    reply_class = message_factory.GetMessageClass(method.output_type)
    call = channel.unary_unary(
        "/pdmesh.v1.Inference/Tokenize",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=reply_class.FromString,
    )
    return call(request, timeout=LIMIT_S).token_ids.decode()


def main() -> None:
    """Probe once."""
    target, *names = sys.argv[1:]
    services: list[str] = []
    with grpc.insecure_channel(target) as channel:
        result = {
            "health": {name: health_of(channel, name) for name in ["", *names]},
            "reflected": reflected_call(channel, services),
            "services": services,
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
