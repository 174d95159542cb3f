"""Every RPC of the mesh, by hand: path, shape and message types in one table.

A test compares this table with the descriptor set, so it cannot drift from proto/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from grpclib.const import Cardinality

from shared import wire

Request = TypeVar("Request")
Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True)
class Method(Generic[Request, Reply]):
    """One RPC: ``/package.Service/Name``."""

    path: str
    cardinality: Cardinality
    request_type: type[Request]
    reply_type: type[Reply]

    @property
    def service(self) -> str:
        """Full name of its service, e.g. ``pdmesh.v1.Worker``."""
        return self.path.split("/")[1]


WORKER_SESSION = Method(
    "/pdmesh.v1.Worker/Session", Cardinality.STREAM_STREAM, wire.WorkerCommand, wire.WorkerEvent
)
TRANSFER_PAIR = Method(
    "/pdmesh.v1.Transfer/Pair", Cardinality.STREAM_STREAM, wire.PairMessage, wire.PairMessage
)
REGISTRY_JOIN = Method(
    "/pdmesh.v1.Registry/Join",
    Cardinality.STREAM_STREAM,
    wire.WorkerReport,
    wire.GatewayDirective,
)
MESH_PROVE = Method("/pdmesh.v1.Mesh/Prove", Cardinality.STREAM_STREAM, wire.Proof, wire.Proof)
GENERATE = Method(
    "/pdmesh.v1.Inference/Generate",
    Cardinality.UNARY_STREAM,
    wire.GenerateRequest,
    wire.GenerateResponse,
)
TOKENIZE = Method(
    "/pdmesh.v1.Inference/Tokenize",
    Cardinality.UNARY_UNARY,
    wire.TokenizeRequest,
    wire.TokenizeResponse,
)
LIST_MODELS = Method(
    "/pdmesh.v1.Inference/ListModels",
    Cardinality.UNARY_UNARY,
    wire.ListModelsRequest,
    wire.ListModelsResponse,
)

CHANGE_ROLE = Method(
    "/pdmesh.v1.Inference/ChangeRole",
    Cardinality.UNARY_UNARY,
    wire.ChangeRoleRequest,
    wire.ChangeRoleResponse,
)
