"""HTTP requests as handlers see them, and responses as they leave: a status line and headers in
one piece with what follows.

Parsing is aiohttp's (``connection.py``). Knows no route and no endpoint.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader

from services.gateway import limits
from services.gateway.http.bodies import ErrorBody
from shared.errors import InvalidRequest, MeshError, TooLarge
from shared.rpc.status import http_status_of

if TYPE_CHECKING:
    from services.gateway.http.connection import Connection

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus
}


class BrokenBody(Exception):
    """The body is framed wrongly; raised where it is read."""


class HttpRequest:
    """One request. path: decoded, without the query. parameters: of its route's pattern.

    is_last: the connection ends with its response.
    """

    __slots__ = (
        "_body",
        "connection",
        "headers",
        "is_answered",
        "is_http11",
        "is_last",
        "method",
        "parameters",
        "path",
    )

    def __init__(
        self, connection: Connection, message: RawRequestMessage, body: StreamReader
    ) -> None:
        self.connection = connection
        self.method = message.method
        self.path = message.url.path
        self.headers = message.headers
        self.parameters: Mapping[str, str] = {}
        self.is_http11 = message.version >= HttpVersion11
        self.is_last = message.should_close
        self.is_answered = False
        self._body = body

    @property
    def content_length(self) -> int:
        """Length of the body as the client says it; 0 = there is none, or it does not say."""
        return int(self.headers.get("Content-Length", "0"))

    @property
    def has_arrived(self) -> bool:
        """Whether the whole body is here."""
        return self._body.is_eof()

    async def read(self) -> bytes:
        """Return the body; a client that waits to be asked for it is asked.

        Raises TooLarge, InvalidRequest (its framing is wrong).
        """
        body = self._body
        if body.is_eof():
            return body.read_nowait()  # one read's worth at most: the connection pauses beyond
        if self.content_length > limits.MAX_BODY_BYTES:
            raise too_large()
        if self.is_http11 and self.headers.get("Expect", "").lower() == "100-continue":
            self.connection.write(_CONTINUE)
        data = bytearray()
        try:
            while part := await body.readany():
                data += part
                if len(data) > limits.MAX_BODY_BYTES:
                    raise too_large()
        except BrokenBody:
            raise bad_http() from None
        return bytes(data)

    async def drop_body(self) -> None:
        """Read what is left of the body, for nobody."""
        while await self._body.readany():
            pass


class Response(NamedTuple):
    """A whole response. headers: without those of its framing."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def head_of(status: int, headers: Mapping[str, str]) -> bytes:
    """Return status line and headers. Raises ValueError: a header holds a line's end."""
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    text = "".join([_STATUS_LINES[status], *lines, _date_line(), "\r\n"])
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
    status = status or http_status_of(error)
    if status == 401:
        own["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), headers=own, status=status)


def too_large() -> TooLarge:
    """The error for a body over its limit."""
    return TooLarge(f"the body is larger than {limits.MAX_BODY_BYTES} bytes", code="body_too_large")


def bad_http() -> InvalidRequest:
    """The error for what no HTTP parser takes; it echoes nothing."""
    return InvalidRequest("this is not valid HTTP, or its headers are too large", code="bad_http")
