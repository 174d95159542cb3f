"""One table: how each error of the mesh looks over HTTP, over gRPC and in an OpenAI error body.

Both directions. Rows are keyed by ``MeshError.type``. See docs/protocol.md for the reader's
version.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec
from grpclib.const import Status
from grpclib.metadata import encode_grpc_message

from shared.errors import (
    ERROR_TYPES,
    DeadlinePassed,
    Forbidden,
    IncompatiblePeer,
    InvalidRequest,
    MeshError,
    NotFound,
    RemoteProtocolError,
    TooLarge,
    Unauthorized,
    WorkerLost,
)

ERROR_TRAILER = "pdmesh-error"
"""JSON of the error, in the trailers of a failed call."""

RECEIPT_TRAILER = "pdmesh-receipt"
"""JSON of the TTFT receipt, in the trailers of ``Inference.Generate``."""

MAX_TRAILER_BYTES = 4096
"""Of the error JSON: clients refuse large header lists (grpcio: 8 KiB)."""

MAX_STATUS_BYTES = 3072
"""Of the message beside it, as it travels. Some messages quote what a client sent."""

_MAX_MESSAGE_CHARS = 1024


class StatusRow(NamedTuple):
    """http: status code. grpc: status. openai_type: ``error.type`` of an OpenAI error body.
    may_retry: whether a client may send the same request again."""

    http: int
    grpc: Status
    openai_type: str
    may_retry: bool


STATUS_TABLE: dict[str, StatusRow] = {
    "invalid_request": StatusRow(400, Status.INVALID_ARGUMENT, "invalid_request_error", False),
    "unauthorized": StatusRow(401, Status.UNAUTHENTICATED, "authentication_error", False),
    "forbidden": StatusRow(403, Status.PERMISSION_DENIED, "permission_error", False),
    "not_found": StatusRow(404, Status.NOT_FOUND, "not_found_error", False),
    "too_large": StatusRow(413, Status.RESOURCE_EXHAUSTED, "invalid_request_error", False),
    "tenant_quota": StatusRow(429, Status.RESOURCE_EXHAUSTED, "rate_limit_error", True),
    "no_capacity": StatusRow(400, Status.FAILED_PRECONDITION, "invalid_request_error", False),
    "deadline": StatusRow(504, Status.DEADLINE_EXCEEDED, "timeout_error", False),
    "overloaded": StatusRow(503, Status.UNAVAILABLE, "overloaded_error", True),
    "would_be_late": StatusRow(429, Status.RESOURCE_EXHAUSTED, "rate_limit_error", True),
    "shutting_down": StatusRow(503, Status.UNAVAILABLE, "overloaded_error", True),
    "worker_lost": StatusRow(503, Status.UNAVAILABLE, "server_error", True),
    "kv_transfer_failed": StatusRow(503, Status.UNAVAILABLE, "server_error", True),
    "lease_lost": StatusRow(503, Status.UNAVAILABLE, "server_error", True),
    "no_blocks": StatusRow(503, Status.UNAVAILABLE, "overloaded_error", True),
    "protocol_error": StatusRow(503, Status.UNAVAILABLE, "server_error", True),
    "incompatible_peer": StatusRow(503, Status.FAILED_PRECONDITION, "server_error", False),
    "not_of_this_mesh": StatusRow(503, Status.UNAUTHENTICATED, "server_error", False),
    "engine_failed": StatusRow(503, Status.UNAVAILABLE, "server_error", True),
    "model_error": StatusRow(500, Status.FAILED_PRECONDITION, "server_error", False),
    "internal": StatusRow(500, Status.INTERNAL, "server_error", False),
}

_BY_GRPC_STATUS: dict[Status, type[MeshError]] = {
    Status.INVALID_ARGUMENT: InvalidRequest,
    Status.OUT_OF_RANGE: InvalidRequest,
    Status.NOT_FOUND: NotFound,
    Status.UNAUTHENTICATED: Unauthorized,
    Status.PERMISSION_DENIED: Forbidden,
    Status.RESOURCE_EXHAUSTED: TooLarge,
    Status.DEADLINE_EXCEEDED: DeadlinePassed,
    Status.FAILED_PRECONDITION: IncompatiblePeer,
    Status.UNIMPLEMENTED: IncompatiblePeer,
    Status.UNAVAILABLE: WorkerLost,
    Status.CANCELLED: WorkerLost,
    Status.ABORTED: WorkerLost,
}
"""For a status without our trailer: a proxy, or grpclib itself, spoke. All others break a rule."""


def row_of(error: MeshError) -> StatusRow:
    """Return the error's row of the table."""
    return STATUS_TABLE[error.type]


def openai_error_body(error: MeshError) -> dict[str, Any]:
    """Return the OpenAI error object; also what goes out as an SSE error event."""
    body: dict[str, Any] = {
        "message": error.message,
        "type": row_of(error).openai_type,
        "param": error.param or None,
        "code": error.code or error.type,
    }
    if error.retry_after_s > 0:
        body["retry_after_s"] = error.retry_after_s  # a stream that has begun has no header for it
    return {"error": body}


def status_message(error: MeshError) -> str:
    """Return the error's message, or the beginning of it that fits ``grpc-message``."""
    message = error.message[:_MAX_MESSAGE_CHARS]
    while len(encode_grpc_message(message)) > MAX_STATUS_BYTES:
        message = message[: len(message) // 2]
    return message


class _ErrorRecord(msgspec.Struct):
    """The trailer."""

    type: str
    message: str
    param: str = ""
    code: str = ""
    retry_after_s: float = 0.0


def error_to_json(error: MeshError) -> str:
    """Return the error as printable ASCII JSON of at most MAX_TRAILER_BYTES."""
    message, param, code = error.message[:_MAX_MESSAGE_CHARS], error.param[:128], error.code[:128]
    record = _ErrorRecord(error.type, message, param, code, error.retry_after_s)
    # Cut in the message, not in the JSON: what is left must still be read by a program.
    while len(text := json.dumps(msgspec.structs.asdict(record))) > MAX_TRAILER_BYTES:
        record.message = record.message[: len(record.message) // 2]  # escapes: up to 12 bytes each
    return text


def error_from_json(text: str) -> MeshError | None:
    """Return the error of a ``pdmesh-error`` trailer, or None if it is not one."""
    try:
        it = msgspec.json.decode(text, type=_ErrorRecord)
    except (ValueError, RecursionError):
        return None
    # A newer version may know errors that we do not.
    cls = ERROR_TYPES.get(it.type, RemoteProtocolError)
    retry_after_s = it.retry_after_s if 0 <= it.retry_after_s < 86400 else 0.0
    return cls(it.message, param=it.param, code=it.code, retry_after_s=retry_after_s)


def error_from_grpc(status: Status, message: str, trailer: str | None) -> MeshError:
    """Return the typed error of a failed call: the trailer's, else the one its status suggests."""
    if trailer is not None:
        error = error_from_json(trailer)
        if error is not None:
            return error
    cls = _BY_GRPC_STATUS.get(status, RemoteProtocolError)
    return cls(message or f"the call failed with {status.name}", code=status.name.lower())
