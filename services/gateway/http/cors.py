"""Pages of other origins: which of them may ask this gateway from a browser.

A browser keeps a page from reading what another origin answers unless that says so (Fetch standard,
"CORS protocol"). Without ``--cors-origins`` nothing is said; our own page needs none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

_PREFLIGHT = {"Access-Control-Allow-Methods": "GET, HEAD, POST", "Access-Control-Max-Age": "600"}
_EXPOSED = "Retry-After, x-request-id, x-request-label"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def allow_origins(app: web.Application, origins: frozenset[str]) -> None:
    """Let pages of these origins ask; ``*`` = of any. Nothing is changed for empty ``origins``."""
    if not origins:
        return

    def is_allowed(request: web.BaseRequest) -> bool:
        return "Origin" in request.headers and (
            "*" in origins or request.headers["Origin"] in origins
        )

    async def say(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Vary"] = "Origin"
        if is_allowed(request):
            response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = "Access-Control-Request-Method" in request.headers
        if request.method == "OPTIONS" and asks and is_allowed(request):
            # Also what we do not read: OpenAI's client sends a dozen headers about itself.
            names = request.headers.get("Access-Control-Request-Headers", "")
            allowed = {**_PREFLIGHT, "Access-Control-Allow-Headers": names}
            return web.Response(status=204, headers=allowed)
        return await handler(request)

    app.on_response_prepare.append(say)
    app.middlewares.insert(0, answer_preflight)
