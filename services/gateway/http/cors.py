"""Pages of other origins: which of them may ask this gateway from a browser.

A browser keeps a page from reading what another origin answers unless that says so (Fetch standard,
"CORS protocol"). Without ``--cors-origins`` nothing is said; our own page needs none.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.gateway.http.connection import HttpRequest
from services.gateway.http.messages import Response

_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
    "Access-Control-Max-Age": "600",
}
_EXPOSED = "Retry-After, x-request-id, x-request-label"


class AllowedOrigins:
    """Whose pages may ask; ``*`` = any."""

    def __init__(self, origins: frozenset[str]) -> None:
        self._origins = origins

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
