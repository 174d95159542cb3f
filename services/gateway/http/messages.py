"""HTTP responses as they leave: a status line and headers in one piece with what follows.

Requests are ``connection.py``'s. Knows no route and no endpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from services.gateway import limits
from services.gateway.http.bodies import ErrorBody
from shared.errors import InvalidRequest, MeshError, ShuttingDown, TooLarge
from shared.rpc.status import row_of

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus
}


class Response(NamedTuple):
    """A whole response. headers: without those of its framing."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def head_of(status: int, headers: Mapping[str, str]) -> bytes:
    """Return status line and headers. Raises ValueError: a header holds a line's end."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    text = "".join([_STATUS_LINES[status], *lines, _date_line(), "\r\n"])
    # The status line, the date and the empty line end, too.
    if text.count("\n") != len(lines) + 3 or text.count("\r") != len(lines) + 3:
        raise ValueError("a header holds a line's end")
    return text.encode("utf-8", "surrogateescape")


_date = 0, ""


def _date_line() -> str:
    global _date
    now = int(time.time())
    if now != _date[0]:
        _date = now, f"Date: {formatdate(now, usegmt=True)}\r\n"
    return _date[1]


def json_response(
    value: Any, *, headers: Mapping[str, str] | None = None, status: int = 200
) -> Response:
    """Return a JSON response; bytes are taken as JSON already."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    own = {"Content-Type": "application/json"}
    return Response(status, body, {**headers, **own} if headers else own)


def error_response(
    error: MeshError,
    *,
    headers: Mapping[str, str] | None = None,
    status: int = 0,
    error_body: Callable[[MeshError], Any] = ErrorBody.of,
) -> Response:
    """Return an error, in the one shape of nearly all. status: 0 = that of the table."""
    own = dict(headers or {})
    if error.retry_after_s > 0:
        own["Retry-After"] = str(math.ceil(error.retry_after_s))
    row = row_of(error)
    status = status or row.http
    if status >= 500 and not row.may_retry:
        own["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients would, and look for this
    if isinstance(error, ShuttingDown):
        own["Connection"] = "close"  # a client's next one may lead to a gateway that stays
    if status == 401:
        own["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), headers=own, status=status)


def too_large() -> TooLarge:
    """The error for a body over its limit; agents know by its first words that it is their turn to
    shorten the conversation."""
    return TooLarge(
        f"prompt is too long: the body is larger than {limits.MAX_BODY_BYTES} bytes",
        code="body_too_large",
    )


def bad_http() -> InvalidRequest:
    """The error for what no HTTP parser takes; it echoes nothing."""
    return InvalidRequest("this is not valid HTTP, or its headers are too large", code="bad_http")
