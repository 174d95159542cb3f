"""The errors of the mesh: one type per kind of failure, and whose fault each one is.

A ``MeshError`` carries what a client must be told (``type``, ``message``, ``param``, ``code``,
``retry_after_s``) and how the gateway should react (``retry``). How each one looks over HTTP and
gRPC is one table in ``shared/rpc/status.py``. Libraries' exceptions are mapped once, at the edge
where they appear.

This module knows no transport: no HTTP or gRPC number stands here.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, TypeVar


class Retry(Enum):
    """What the gateway does with a request whose attempt failed so."""

    NEVER = "never"  # the client's own fault, or it would fail again
    OTHER_PAIR = "other_pair"  # another prefill/decode pair may serve it
    LATER = "later"  # the same mesh may serve it after a while


class MeshError(Exception):
    """Base of all typed failures; never raised itself.

    message: one sentence that helps the reader mend it. Ids travel as fields of the log record, not
    in it. param: the request field at fault. code: finer machine-readable code.
    retry_after_s: hint for the client, 0 = none.
    """

    type: ClassVar[str] = "internal"
    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(
        self, message: str, *, param: str = "", code: str = "", retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, param={self.param!r}, code={self.code!r})"


# The client's side.


class InvalidRequest(MeshError):
    """The request breaks a rule; it will never work as it is."""

    type = "invalid_request"


class NotFound(MeshError):
    """No such model or route."""

    type = "not_found"


class Unauthorized(MeshError):
    """No API key, or an unknown one."""

    type = "unauthorized"


class Forbidden(MeshError):
    """The caller may not ask for this: its API key lacks the right, or it is a foreign page."""

    type = "forbidden"


class QuotaExceeded(MeshError):
    """The caller's API key has used up what it may."""

    type = "tenant_quota"


class TooLarge(MeshError):
    """A body, header or message over its limit."""

    type = "too_large"


class NoCapacity(MeshError):
    """The request needs more KV than any decode worker has."""

    type = "no_capacity"


class DeadlinePassed(MeshError):
    """The request's own deadline came first."""

    type = "deadline"


# The mesh's side.


class Overloaded(MeshError):
    """Refused at admission, before any work."""

    type = "overloaded"
    retry = Retry.LATER


class WouldBeLate(MeshError):
    """The request has a limit (time to its first token, time between tokens) that the mesh cannot
    keep now: refused before it is computed, or at the latest before its first token."""

    type = "would_be_late"
    retry = Retry.LATER


class ShuttingDown(MeshError):
    """This process drains and takes nothing new."""

    type = "shutting_down"
    retry = Retry.OTHER_PAIR


class PeerError(MeshError):
    """A peer failed us; base, never raised itself."""

    retry = Retry.OTHER_PAIR


class WorkerLost(PeerError):
    """A worker died, went silent, or cannot be reached."""

    type = "worker_lost"


class RemoteProtocolError(PeerError):
    """A peer broke the rules of the protocol."""

    type = "protocol_error"


class LeaseLost(PeerError):
    """A reservation expired, was released, or belongs to an older epoch."""

    type = "lease_lost"


class TransferFailed(PeerError):
    """KV could not be moved, or arrived damaged."""

    type = "kv_transfer_failed"


class NoBlocks(PeerError):
    """This decode worker has no room now; another may have."""

    type = "no_blocks"


class IncompatiblePeer(MeshError):
    """Model, dtype, layout or protocol version differ: these two must not work together."""

    type = "incompatible_peer"


class NotOfThisMesh(IncompatiblePeer):
    """The other end has no proof that it knows this mesh's secret, or asks for none."""

    type = "not_of_this_mesh"


# Our own bugs.


class LocalProtocolError(MeshError):
    """Our own code called a core in a state where that is not allowed."""

    type = "internal"


class InvariantViolated(MeshError):
    """A count that must hold does not hold."""

    type = "internal"


class EngineFailed(MeshError):
    """The engine raised (device lost, out of memory): the process must end."""

    type = "engine_failed"
    retry = Retry.OTHER_PAIR


class ModelError(MeshError):
    """A model folder is missing, unsupported or damaged."""

    type = "model_error"


ERROR_TYPES: dict[str, type[MeshError]] = {
    cls.type: cls
    for cls in (
        InvalidRequest, NotFound, Unauthorized, Forbidden, QuotaExceeded, TooLarge, NoCapacity,
        DeadlinePassed, Overloaded, WouldBeLate, ShuttingDown, WorkerLost, RemoteProtocolError,
        LeaseLost, TransferFailed, NoBlocks,
        IncompatiblePeer, NotOfThisMesh, InvariantViolated, EngineFailed, ModelError,
    )
}  # fmt: skip
"""Wire name -> class: how an error that crossed a stream becomes an exception again."""

ErrorT = TypeVar("ErrorT", bound=BaseException)


def without_frames(error: ErrorT) -> ErrorT:
    """Take from an error, and from those that led to it, the frames that they came through.

    For who keeps an error, and who has dealt with one: frames keep what their names say, a whole
    request with its prompt, and often the error itself or the task that it ended. That circle only
    the garbage collector would free, which comes late.
    """
    errors: list[BaseException] = [error]
    for one in errors:
        one.__traceback__ = None
        led_to_it = (one.__cause__, one.__context__)
        errors += [it for it in led_to_it if it is not None and it not in errors]
    return error
