"""The HTTP listener: connections with limits, one guard around every route, and one error shape for
everything.

The guard is the only way to a handler: it gives the call its id, checks the key unless the route's
policy says that anybody may come, and turns every failure into the same JSON. Knows no endpoint;
those are in ``door.py``.
"""

from __future__ import annotations

import asyncio
import difflib
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
import structlog
from aiohttp import web

from services.gateway import limits
from services.gateway.front.calls import Call, recorded, typed
from services.gateway.front.frontdoor import FrontDoor, checked_timeout
from services.gateway.http.bodies import ErrorBody
from services.gateway.http.json_body import Body, parse_body
from services.gateway.http.sse import BUFFER_BYTES
from services.gateway.http.stalls import keep_little_in_kernel, unless_stalled
from shared.errors import (
    DeadlinePassed,
    InvalidRequest,
    InvariantViolated,
    MeshError,
    NotFound,
    TooLarge,
)
from shared.rpc.network import Address
from shared.rpc.status import http_status_of
from shared.rpc.tls import HANDSHAKE_WITHIN_S, HTTP, ServerTls

BODY_TIMEOUT_S = 30.0
HEADER_TIMEOUT_S = 30.0
KEEPALIVE_S = 75.0
LINGER_S = 2.0
"""How long an unread body is drained after an early answer, so that its client can read that."""

_PLAIN_PATH = re.compile(r"[\w./-]{1,64}", re.ASCII)
_FOR_CLIENTS = (
    "OpenAI's API is POST /v1/chat/completions, POST /v1/completions and GET /v1/models, "
    "GET /openapi.json describes all there is, and / is a page for a browser"
)

log: Any = structlog.get_logger("gateway.http")


class Policy(Enum):
    """Who may call a route."""

    ANYBODY = "anybody"  # even where keys are needed: only whether this process is well, and files
    KEY = "key"  # needs an API key, if the gateway has keys
    METERED = "metered"  # likewise, and counts against the limits of that key


Handler = Callable[[web.Request, Call], Awaitable[web.StreamResponse]]


class Route(NamedTuple):
    """One line of the route table. is_polled: asked every second by who watches."""

    method: str
    path: str
    policy: Policy
    handler: Handler
    is_polled: bool = False


def build_app(front: FrontDoor, routes: Sequence[Route]) -> web.Application:
    """Return the application: the routes, each behind the guard, and nothing else."""
    app = web.Application(client_max_size=limits.MAX_BODY_BYTES)
    for route in routes:
        guarded = _guarded(front, route)
        if route.method == "GET":
            app.router.add_get(route.path, guarded)  # and HEAD, which load balancers ask
        else:
            app.router.add_route(route.method, route.path, guarded)
    # Last, so that it gets what no other route takes.
    app.router.add_route("*", "/{path:.*}", _refusing(tuple(routes)))
    return app


def _guarded(
    front: FrontDoor, route: Route
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def guarded(request: web.Request) -> web.StreamResponse:
        connection = request.protocol
        if isinstance(connection, _ClientConnection):
            connection.has_asked = True
        # What comes every second is counted, not logged.
        is_probe = route.is_polled or route.policy is Policy.ANYBODY
        span_name = f"POST {route.path}" if route.method == "POST" else ""
        with recorded(
            front, route.path, request.headers, span_name=span_name, is_probe=is_probe
        ) as call:
            response = await _handle(front, route, request, call)
            call.status = response.status
        if isinstance(response, web.Response) and (response.content_length or 0) > BUFFER_BYTES:
            await _send_large(request, response)
        return response

    return guarded


async def _send_large(request: web.Request, response: web.Response) -> None:
    """Send what may not fit into the socket's buffers; a client that reads none of it for STALL_S
    is cut."""

    async def send() -> None:
        await response.prepare(request)
        await response.write_eof()

    if (transport := request.transport) is not None:
        keep_little_in_kernel(transport, BUFFER_BYTES)
        try:
            await unless_stalled(send(), transport, limits.STALL_S)
        except TimeoutError:
            transport.abort()


async def _handle(
    front: FrontDoor, route: Route, request: web.Request, call: Call
) -> web.StreamResponse:
    try:
        headers = request.headers
        if route.policy is not Policy.ANYBODY:
            call.caller = front.authenticate(
                call.caller,
                authorization=headers.get("Authorization"),
                is_metered=route.policy is Policy.METERED,
            )
        timeout_s = checked_timeout(headers.get("X-Request-Timeout"), param="x-request-timeout")
        label = limits.label_or_none(headers.get("X-Request-Id", ""))
        deadline_at = front.deadline_at(call.caller, timeout_s)
        if label or deadline_at != call.caller.deadline_at:
            call.caller = replace(call.caller, label=label, deadline_at=deadline_at)
        response = await route.handler(request, call)
    except web.HTTPRequestEntityTooLarge:
        error: MeshError = too_large()
    except ConnectionError:  # the client has gone
        raise
    except Exception as failure:
        error = typed(failure, call)
    else:
        if call.outcome == "cancelled":
            call.outcome = "ok"
        return response
    call.outcome = error.type
    return error_response(error, headers=call.headers)


# --- bodies -------------------------------------------------------------------------------------


async def read_body(request: web.Request, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Read and parse a JSON body.

    Raises TooLarge, InvalidRequest, DeadlinePassed (it did not arrive in BODY_TIMEOUT_S).
    """
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise limits.refusal("content-encoding", "send the body without compression")
    if (request.content_length or 0) > limits.MAX_BODY_BYTES:
        raise too_large()
    if request.content.is_eof():  # it has arrived whole, as short ones do: no need of a timer
        return parse_body(await request.read(), decoder)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await request.read()
    except TimeoutError:
        raise DeadlinePassed(
            f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="body_timeout"
        ) from None
    return parse_body(data, decoder)


def json_response(
    value: Any, *, headers: dict[str, str] | None = None, status: int = 200
) -> web.Response:
    """Return a JSON response; bytes are taken as JSON already."""
    body = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


# --- errors -------------------------------------------------------------------------------------


def too_large() -> TooLarge:
    """The error for a body over its limit."""
    return TooLarge(f"the body is larger than {limits.MAX_BODY_BYTES} bytes", code="body_too_large")


def error_response(
    error: MeshError, *, headers: dict[str, str] | None = None, status: int = 0
) -> web.Response:
    """Return the one shape of errors. status: 0 = that of the table."""
    own = dict(headers or {})
    if error.retry_after_s > 0:
        own["Retry-After"] = str(math.ceil(error.retry_after_s))
    status = status or http_status_of(error)
    if status == 401:
        own["WWW-Authenticate"] = "Bearer"
    return json_response(ErrorBody.of(error), headers=own, status=status)


def _refusing(routes: Sequence[Route]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return what answers where there is no such route, or none for the method, in our shape."""
    known = {route.path: route.method for route in routes}

    async def refuse(request: web.Request) -> web.StreamResponse:
        allowed: set[str] = set()
        *others, _ = request.app.router.resources()
        for resource in others:
            _, methods = await resource.resolve(request)
            allowed |= methods
        if not allowed:
            return error_response(_no_route(request, known))
        named = ", ".join(sorted(allowed))
        error = InvalidRequest(f"this route takes {named}", code="method_not_allowed")
        return error_response(error, headers={"Allow": named}, status=405)

    return refuse


def _no_route(request: web.Request, routes: Mapping[str, str]) -> NotFound:
    """The error that names the route, if it looks like one, and what there is instead."""
    path = request.path if _PLAIN_PATH.fullmatch(request.path) else ""
    near = difflib.get_close_matches(path, routes, n=1, cutoff=0.7)
    if near:
        instead = f"did you mean {routes[near[0]]} {near[0]}?"
    elif "/openapi.json" in routes:
        instead = _FOR_CLIENTS
    else:
        instead = f"here are {', '.join(routes)}; clients have another port"
    named = f"route {request.method} {path}" if path else "such route"
    return NotFound(f"there is no {named}: {instead}", code="route_not_found")


# --- the listener -------------------------------------------------------------------------------


class _ClientConnection(web.RequestHandler):
    """A connection whose own complaints (malformed HTTP, oversized headers) have our shape and echo
    nothing."""

    has_asked = False

    def __init__(self, manager: Any, *, is_full: Callable[[], bool], **options: Any) -> None:
        super().__init__(manager, **options)
        self._is_full = is_full

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._is_full():
            # Before any byte is read: an answer would cost what the limit is there to save.
            cast("asyncio.Transport", transport).abort()
            return
        super().connection_made(transport)
        # A client that never finishes its first headers is not served for ever.
        asyncio.get_running_loop().call_later(HEADER_TIMEOUT_S, self._drop_if_silent)

    def _drop_if_silent(self) -> None:
        if not self.has_asked and self.transport is not None:
            self.transport.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        if status < 500:
            error: MeshError = InvalidRequest(
                "this is not valid HTTP, or its headers are too large", code="bad_http"
            )
        else:
            log.error("internal error outside a route", exc_info=exc)
            error = InvariantViolated("internal error")
        response = error_response(error, status=status)
        response.force_close()
        return response


@asynccontextmanager
async def listen(
    app: web.Application,
    address: Address,
    *,
    own_port: int = 0,
    drain_s: float = 30.0,
    reuse_port: bool = False,
    tls: ServerTls | None = None,
) -> AsyncGenerator[Address]:
    """Serve until the block ends, then wait at most ``drain_s`` for running requests and cancel the
    rest.

    Yields the address, with the real port if 0 was asked for. reuse_port: other processes may
    listen there, too; the kernel deals connections out. own_port: a second port, which stays this
    process's own, 0 = none. A client that disconnects cancels its
    handler at once. Raises OSError: the port is in use. InvalidRequest: a file of ``tls`` is
    unusable.
    """
    loop = asyncio.get_running_loop()
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=drain_s
    )
    await runner.setup()
    manager = runner.server
    if manager is None:
        raise InvariantViolated("aiohttp's runner has no server after its setup")

    def is_full() -> bool:
        return len(manager.connections) >= limits.MAX_CONNECTIONS

    def connection() -> _ClientConnection:
        return _ClientConnection(
            manager,
            is_full=is_full,
            loop=loop,
            access_log=cast("Any", None),  # the guard writes our one line a request
            auto_decompress=False,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
            max_headers=limits.MAX_HEADERS,
            max_line_size=limits.MAX_HEADER_LINE_BYTES,
            max_field_size=limits.MAX_HEADER_LINE_BYTES,
        )

    try:
        create_server = partial(
            loop.create_server,
            connection,
            address.host,
            backlog=1024,
            ssl=tls and tls.context(HTTP),
            ssl_handshake_timeout=tls and HANDSHAKE_WITHIN_S,
        )
        server = await create_server(address.port, reuse_port=reuse_port or None)
        servers = [server]
        try:
            if own_port:
                servers.append(await create_server(own_port))
            yield Address(address.host, server.sockets[0].getsockname()[1])
        finally:
            for server in servers:
                server.close()
    finally:
        await runner.cleanup()
