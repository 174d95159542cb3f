"""The tables of shared/rpc: statuses, methods, and the generated wire package."""

from __future__ import annotations

import inspect

import betterproto2
import pytest
from grpclib.const import Cardinality, Status
from hypothesis import given
from hypothesis import strategies as st

from shared import errors, wire
from shared.errors import (
    ERROR_TYPES,
    DeadlinePassed,
    InvalidRequest,
    InvariantViolated,
    MeshError,
    Overloaded,
    RemoteProtocolError,
    WorkerLost,
)
from shared.messages.descriptors import descriptors, schema
from shared.messages.message_codec import MessageCodec
from shared.rpc.status import (
    MAX_TRAILER_BYTES,
    STATUS_TABLE,
    error_from_grpc,
    error_from_json,
    error_to_json,
    openai_error_body,
    row_of,
)
from tests.support.calls import ALL_METHODS


def test_every_error_has_a_row() -> None:
    """Every error class that can be raised has a row of the table."""
    classes = [
        cls
        for _, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, MeshError) and cls not in (MeshError, errors.PeerError)
    ]
    assert len(classes) > 15
    for cls in classes:
        assert cls.type in STATUS_TABLE, cls


@pytest.mark.parametrize(
    ("kind", "http", "grpc"),
    [
        ("invalid_request", 400, Status.INVALID_ARGUMENT),
        ("unauthorized", 401, Status.UNAUTHENTICATED),
        ("forbidden", 403, Status.PERMISSION_DENIED),
        ("too_large", 413, Status.RESOURCE_EXHAUSTED),
        ("tenant_quota", 429, Status.RESOURCE_EXHAUSTED),
        ("overloaded", 503, Status.UNAVAILABLE),
        ("no_capacity", 400, Status.FAILED_PRECONDITION),
        ("deadline", 504, Status.DEADLINE_EXCEEDED),
        ("worker_lost", 503, Status.UNAVAILABLE),
        ("kv_transfer_failed", 503, Status.UNAVAILABLE),
        ("shutting_down", 503, Status.UNAVAILABLE),
    ],
)
def test_published_rows(kind: str, http: int, grpc: Status) -> None:
    """The rows that clients rely on do not move."""
    assert (STATUS_TABLE[kind].http, STATUS_TABLE[kind].grpc) == (http, grpc)


@given(st.sampled_from(sorted(ERROR_TYPES)), st.text(), st.text(max_size=20), st.floats(0, 1000))
def test_errors_survive_the_trailer(
    kind: str, message: str, param: str, retry_after_s: float
) -> None:
    """An error comes back from its JSON as the same class; the JSON is short printable ASCII."""
    sent = ERROR_TYPES[kind](message, param=param, code="c", retry_after_s=retry_after_s)
    text = error_to_json(sent)
    assert len(text) <= MAX_TRAILER_BYTES
    assert text.isascii()
    assert text.isprintable()
    got = error_from_grpc(row_of(sent).grpc, "", text)
    assert type(got) is type(sent)
    assert (got.param, got.code, got.retry_after_s) == (param, "c", retry_after_s)
    assert sent.message.startswith(got.message)


def test_huge_message_is_cut_to_fit_the_trailer() -> None:
    """An error whose text would burst the header limits is shortened."""
    text = error_to_json(InvalidRequest("\U0001f600" * 5000))
    assert len(text) <= MAX_TRAILER_BYTES
    error = error_from_json(text)
    assert isinstance(error, InvalidRequest)
    assert set(error.message) == {"\U0001f600"}


@given(st.text())
def test_strange_trailers_are_no_errors_of_ours(text: str) -> None:
    """A trailer that is not ours is ignored, and the status speaks."""
    assert isinstance(error_from_grpc(Status.DEADLINE_EXCEEDED, "m", text), DeadlinePassed)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"type":1,"message":"x"}', '{"type":"overloaded"}', "[" * 5000]
)
def test_malformed_trailers_are_ignored(text: str) -> None:
    """JSON of another shape is no error of ours."""
    assert error_from_json(text) is None


def test_error_of_a_later_release_breaks_a_rule() -> None:
    """An unknown error name is still a failure that another pair may not have."""
    assert type(error_from_json('{"type":"new","message":"m"}')) is RemoteProtocolError
    internal = error_from_json('{"type":"internal","message":"m"}')
    assert type(internal) is InvariantViolated


def test_bare_statuses_have_a_meaning() -> None:
    """Statuses of proxies and of other gRPC stacks map to the nearest error."""
    assert type(error_from_grpc(Status.UNAVAILABLE, "", None)) is WorkerLost
    assert type(error_from_grpc(Status.INVALID_ARGUMENT, "", None)) is InvalidRequest
    for status in Status:
        if status is not Status.OK:
            assert isinstance(error_from_grpc(status, "x", None), MeshError)


def test_openai_body_has_the_four_fields_and_the_hint() -> None:
    """The HTTP error body is OpenAI's; when to come back stands in it, too, for streams."""
    error = Overloaded("later", retry_after_s=1)
    assert row_of(error).http == 503
    assert openai_error_body(error) == {
        "error": {
            "message": "later",
            "type": "overloaded_error",
            "param": None,
            "code": "overloaded",
            "retry_after_s": 1,
        }
    }


def test_methods_are_those_of_the_schema() -> None:
    """The hand-written table has every method of proto/ with its exact shape."""
    declared = {
        f"/{file.package}.{service.name}/{method.name}": (
            Cardinality((method.client_streaming, method.server_streaming)),
            method.input_type.rpartition(".")[2],
            method.output_type.rpartition(".")[2],
        )
        for file in schema().file
        if file.package == "pdmesh.v1"
        for service in file.service
        for method in service.method
    }
    assert {
        method.path: (method.cardinality, method.request_type.__name__, method.reply_type.__name__)
        for method in ALL_METHODS
    } == declared


def test_every_message_has_a_descriptor() -> None:
    """Reflection knows every generated message class under its name, and each has a reader."""
    messages = [
        cls
        for _, cls in inspect.getmembers(wire, inspect.isclass)
        if issubclass(cls, betterproto2.Message)
    ]
    assert len(messages) > 40
    for cls in messages:
        assert MessageCodec().decode(bytes(cls()), cls) == cls()
        assert descriptors().FindMessageTypeByName(f"pdmesh.v1.{cls.__name__}")
