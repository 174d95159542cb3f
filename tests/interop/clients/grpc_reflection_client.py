"""A grpcio client without any generated code: what it knows of the API it has from reflection, as
grpcurl does. ``grpc_reflection_client.py ADDRESS TASK`` prints what it got as one line of JSON."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SERVICE = "pdmesh.v1.Inference"
LIMIT_S = 60.0


def health(channel: grpc.Channel, name: str) -> str:
    """The serving status of a service, or the code of the refusal."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=LIMIT_S)
    except grpc.RpcError as error:
        return error.code().name
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def first_health(channel: grpc.Channel) -> str:
    """The status that Watch begins with."""
    call = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE), timeout=LIMIT_S
    )
    status = next(call).status
    call.cancel()
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def main() -> dict[str, Any]:
    """Look around, and ask."""
    address, task_file = sys.argv[1:]
    task = json.loads(Path(task_file).read_text())
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
        reply_class = message_factory.GetMessageClass(method.output_type)
        request = message_factory.GetMessageClass(method.input_type)()
        request.messages.add(role="user", content=task["prompts"][0])
        request.params.temperature = 0
        request.params.max_tokens = task["max_tokens"]
        call = channel.unary_stream(
            f"/{SERVICE}/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=reply_class.FromString,
        )(request, timeout=LIMIT_S)
        replies = list(call)
        ids = [struct.unpack(f"<{len(it.token_ids) // 4}I", it.token_ids) for it in replies]
        return {
            "services": sorted(database.get_services()),
            "health": {name: health(channel, name) for name in ("", SERVICE, "no.Such")},
            "watched": first_health(channel),
            "text": "".join(reply.text for reply in replies),
            "num_ids": sum(map(len, ids)),
            "usage": replies[-1].usage.completion_tokens,
            "receipt": json.loads(dict(call.trailing_metadata())["pdmesh-receipt"]),
        }


if __name__ == "__main__":
    print(json.dumps(main()))
