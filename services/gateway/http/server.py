"""Routes: who may call which, one guard around every handler, and one error shape for everything.

The guard is the only way to a handler: it gives the call its id, checks the key unless the route's
policy says that anybody may come, and turns every failure into the same JSON. Knows no endpoint
(those are in ``door.py``) and no socket (``connection.py``).
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from services.gateway import limits
from services.gateway.front.auth import ROLES
from services.gateway.front.calls import Call, RecordedCall, typed
from services.gateway.front.frontdoor import FrontDoor
from services.gateway.http.anthropic_answers import AnthropicError
from services.gateway.http.bodies import ErrorBody
from services.gateway.http.connection import HttpRequest
from services.gateway.http.json_body import Body, parse_body, plain
from services.gateway.http.messages import Response, error_response
from shared.address import ip_of
from shared.errors import DeadlinePassed, Forbidden, InvalidRequest, NotFound
from shared.telemetry.moments import Moment, note

BODY_TIMEOUT_S = 30.0
"""For a whole body: the largest one crosses in time at 1.2 Mbit/s."""

_PLAIN_PATH = re.compile(r"[\w./-]{1,64}", re.ASCII)
_PART = re.compile(r"\{(\w+)(?::(.+?))?\}")
_FOR_CLIENTS = (
    "OpenAI's API is POST /v1/chat/completions, POST /v1/completions and GET /v1/models, "
    "GET /openapi.json describes all there is, and / is a page for a browser"
)
_AT_ONCE = (
    "POST /v1/responses and POST /v1/messages answer at once: there are no batches, nothing runs "
    "in the background, and what was sent is not listed"
)
_TEXT_ALONE = (
    "this mesh answers text with text (POST /v1/chat/completions): ask a server of such a model"
)
_INSTEAD = (
    (re.compile(r"/v1/(responses|messages)\b"), _AT_ONCE),
    (
        re.compile(
            r"(/v[12])?/(embeddings|images|audio|videos|moderations|rerank|score|pooling|classify)\b"
        ),
        _TEXT_ALONE,
    ),
)
"""What is asked for elsewhere, and what there is here."""


class Policy(Enum):
    """Who may call a route."""

    ANYBODY = "anybody"  # even where keys are needed: only whether this process is well, and files
    KEY = "key"  # needs an API key, if the gateway has keys
    METERED = "metered"  # likewise, and counts against the limits of that key
    ROLES = "roles"  # likewise, and that key needs the right to change workers' homes


RouteHandler = Callable[[HttpRequest, Call], Awaitable[Response | None]]
"""None = it has streamed its response."""


class Route(NamedTuple):
    """One line of the route table and of what describes it (``openapi.py``); what it does, the
    handler's docstring says there.

    path: ``{name}`` stands for a part of it, ``{name:.+}`` for several. answer: a struct for JSON,
    else a media type. body: what parses it. event: of a stream, if the body may ask for one.
    needs_workers: no answer without the model or the worker that it names, as of all that have a
    body. refusal: what a 503 says, if not an error. error: the
    shape of its errors. is_polled: asked every second by who watches.
    """

    method: str
    path: str
    policy: Policy
    handler: RouteHandler
    answer: type[msgspec.Struct] | str
    body: msgspec.json.Decoder[Any] | None = None
    event: type[msgspec.Struct] | None = None
    needs_workers: bool = False
    refusal: type[msgspec.Struct] | None = None
    error: type[ErrorBody | AnthropicError] = ErrorBody
    is_polled: bool = False


_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST",
    "Access-Control-Max-Age": "600",
}
_EXPOSED = "Retry-After, x-should-retry, x-request-id, request-id, x-request-label"
_ANTHROPIC_IDS = ("x-request-id", "request-id")
"""Anthropic's clients read the second."""


class AllowedOrigins:
    """Pages of other origins that may ask from a browser; ``*`` = any.

    A browser keeps a page from reading what another origin answers unless that says so (Fetch
    standard, "CORS protocol"). Without ``--cors-origins`` nothing is said; our own page needs none.
    only_here: nobody but this machine reaches us, and no key is needed.
    """

    def __init__(self, origins: frozenset[str] = frozenset(), *, only_here: bool = False) -> None:
        self._origins = origins
        self._only_here = only_here

    def check(self, request: HttpRequest) -> None:
        """Refuse a page that asks in its visitor's name (cross-site request forgery).

        A browser sends a page's plain-text POST to any address that it reaches, also to a gateway
        without keys on the visitor's own machine, and keeps the page from the answer alone. What
        is no browser says neither header. (W3C Fetch Metadata; RFC 6454, section 7.)

        Nor may a page of a name that somebody lets point to this machine (DNS rebinding), for then
        its origin is ours. No such page comes by https, for which nobody has our certificate.

        Raises Forbidden.
        """
        if request.method != "POST":
            return
        origin, site = request.headers.get("Origin"), request.headers.get("Sec-Fetch-Site")
        if (origin is None and site is None) or self._may_ask(request):
            return
        scheme, _, host = str(origin).partition("://")
        if site is not None:
            is_ours = site in ("same-origin", "none")
        else:  # an old browser, or plain HTTP to another machine
            is_ours = host == request.headers.get("Host")
        if not is_ours or (self._only_here and scheme == "http" and not _is_of_here(host)):
            raise Forbidden(
                "a page of another origin, or of a name that others may own, may not ask: the "
                "gateway's --cors-origins says which may",
                code="cross_origin",
            )

    def headers_for(self, request: HttpRequest) -> Mapping[str, str]:
        """Return what every response to this request says to its browser."""
        if not self._may_ask(request):
            return {"Vary": "Origin"}
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": request.headers["Origin"],
            "Access-Control-Expose-Headers": _EXPOSED,
        }

    def preflight(self, request: HttpRequest) -> Response | None:
        """Return the answer to a browser that asks beforehand; None = this is no such request, or
        of a page that may not."""
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or not self._may_ask(request):
            return None
        # Also what we do not read: OpenAI's client sends a dozen headers about itself.
        names = request.headers.get("Access-Control-Request-Headers", "")
        return Response(204, b"", {**_PREFLIGHT, "Access-Control-Allow-Headers": names})

    def _may_ask(self, request: HttpRequest) -> bool:
        origin = request.headers.get("Origin")
        return origin is not None and ("*" in self._origins or origin in self._origins)


class Routes:
    """The route table at work: each route behind the guard, and nothing else.

    pages: whose pages may ask, besides the gateway's own.
    """

    def __init__(self, front: FrontDoor, routes: Sequence[Route], pages: AllowedOrigins) -> None:
        self._front = front
        self._pages = pages
        self._known = {route.path: route.method for route in routes}
        self._plain: dict[str, dict[str, Route]] = {}
        self._patterns: dict[re.Pattern[str], dict[str, Route]] = {}
        for route in routes:
            methods = {route.method: route}
            if route.method == "GET":
                methods["HEAD"] = route  # which load balancers ask
            if "{" in route.path:
                self._patterns.setdefault(_pattern(route.path), {}).update(methods)
            else:
                self._plain.setdefault(route.path, {}).update(methods)

    async def handle(self, request: HttpRequest) -> Response | None:
        """Answer one request: the ``Handler`` of a listener."""
        if (answer := self._pages.preflight(request)) is not None:
            return answer
        methods = self._plain.get(request.path) or self._match(request)
        route = methods.get(request.method)
        if route is None:
            return self._refused(request, methods)
        # What comes every second is counted, not logged.
        is_probe = route.is_polled or route.policy is Policy.ANYBODY
        span_name = f"POST {route.path}" if route.method == "POST" else ""
        with RecordedCall(
            self._front, route.path, request.headers, span_name=span_name, is_probe=is_probe
        ) as call:
            if route.error is AnthropicError:
                call.id_headers = _ANTHROPIC_IDS
            response = await self._guarded(route, request, call)
            call.status = 200 if response is None else response.status
        if response is None:  # its stream has said of itself what every response says
            return None
        return Response(response.status, response.body, {**call.headers, **response.headers})

    def _match(self, request: HttpRequest) -> dict[str, Route]:
        for pattern, methods in self._patterns.items():
            if (found := pattern.fullmatch(request.path)) is not None:
                request.parameters = found.groupdict()
                return methods
        return {}

    async def _guarded(self, route: Route, request: HttpRequest, call: Call) -> Response | None:
        front, headers, caller = self._front, request.headers, call.caller
        try:
            self._pages.check(request)
            if route.policy is not Policy.ANYBODY:
                caller = call.caller = front.authenticate(
                    caller,
                    authorization=_authorization(headers),
                    is_metered=route.policy is Policy.METERED,
                    right=ROLES if route.policy is Policy.ROLES else "",
                )
            label = limits.label_or_none(headers.get("X-Request-Id", ""))
            deadline_at = front.deadline_at(caller, headers.get("X-Request-Timeout"))
            if label or deadline_at != caller.deadline_at:
                call.caller = replace(caller, label=label, deadline_at=deadline_at)
            response = await route.handler(request, call)
        except ConnectionError:  # the client has gone
            raise
        except Exception as failure:
            return error_response(typed(failure, call), error_body=route.error.of)
        # A stream that broke has its error's type already: its 200 was on the way.
        if call.outcome == "cancelled":
            call.outcome = "ok"
        return response

    def _refused(self, request: HttpRequest, methods: dict[str, Route]) -> Response:
        """Where there is no such route, or none for the method, in our shape."""
        if not methods:
            asks_anthropic = (
                request.path.startswith("/v1/messages/") or "anthropic-version" in request.headers
            )
            shape = AnthropicError if asks_anthropic else ErrorBody
            return error_response(self._no_route(request), error_body=shape.of)
        named = ", ".join(sorted(methods))
        error = InvalidRequest(f"this route takes {named}", code="method_not_allowed")
        shape = next(iter(methods.values())).error
        return error_response(error, headers={"Allow": named}, status=405, error_body=shape.of)

    def _no_route(self, request: HttpRequest) -> NotFound:
        """The error that names the route, if it looks like one, and what there is instead."""
        path = request.path if _PLAIN_PATH.fullmatch(request.path) else ""
        is_for_clients = "/openapi.json" in self._known
        found = (text for pattern, text in _INSTEAD if is_for_clients and pattern.match(path))
        near = difflib.get_close_matches(path, self._known, n=1, cutoff=0.7)
        if said := next(found, ""):
            instead = said
        elif near:
            instead = f"did you mean {self._known[near[0]]} {near[0]}?"
        elif is_for_clients:
            instead = _FOR_CLIENTS
        else:
            instead = f"here are {', '.join(self._known)}; clients have another port"
        named = f"route {request.method} {path}" if path else "such route"
        return NotFound(f"there is no {named}: {instead}", code="route_not_found")


def _authorization(headers: Mapping[str, str]) -> str | None:
    """Return what names the key; Anthropic's clients send it bare, in a header of their own."""
    own = headers.get("Authorization")
    if own is None and (bare := headers.get("X-Api-Key")) is not None:
        return f"Bearer {bare}"
    return own


def _is_of_here(host: str) -> bool:
    """Whether nobody else can let it point here: an address, or a name that every machine keeps for
    itself (RFC 6761, section 6.3)."""
    name = re.sub(r":\d+$", "", host)
    return ip_of(name.strip("[]")) is not None or f".{name}".endswith(".localhost")


def _pattern(path: str) -> re.Pattern[str]:
    parts = _PART.split(path)  # text, name, what it may be, text ...
    pattern = re.escape(parts[0])
    for name, rule, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        pattern += f"(?P<{name}>{rule or '[^/]+'}){re.escape(text)}"
    return re.compile(pattern, re.DOTALL)


async def read_body(request: HttpRequest, call: Call, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Read and parse a JSON body.

    Raises TooLarge, InvalidRequest, Overloaded (too many large ones are in hand), DeadlinePassed
    (it did not arrive in BODY_TIMEOUT_S).
    """
    if request.has_arrived:  # whole, as short ones do: no need of a timer
        data = await request.read()
    else:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                data = await request.read()
        except TimeoutError:
            raise DeadlinePassed(
                f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="body_timeout"
            ) from None
    if (encoding := request.headers.get("Content-Encoding")) is not None:
        packed, data = data, plain(data, encoding)
        request.keep(len(data) - len(packed))
    body = parse_body(data, decoder)
    note(Moment.PARSED, call.caller.request_id, num_bytes=len(data))
    return body
