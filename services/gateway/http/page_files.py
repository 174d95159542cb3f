"""The web page at ``/``: its files, read once, and how they are served.

Everybody may load it, since it holds no data: what it shows it asks of the API, with the visitor's
key. It may load nothing from elsewhere and run no script but its own, which its Content Security
Policy says and the browser enforces. Knows nothing of what the page does.
"""

from __future__ import annotations

import hashlib
from importlib import resources

from services.gateway.front.calls import Call
from services.gateway.http.connection import HttpRequest
from services.gateway.http.messages import Response
from services.gateway.http.server import Policy, Route

_FOLDER = "page"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Kept, but asked for again each time: a new version must never run with parts of the old one.
    "Cache-Control": "no-cache",
}


def page_routes() -> tuple[Route, ...]:
    """Return the routes of the page: ``/``, and one for each of its other files under ``/page/``.

    Raises OSError: the installation lacks the page.
    """
    folder = resources.files("services.gateway.http") / _FOLDER
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    return tuple(_route(name, (folder / name).read_bytes()) for name in names)


def _route(name: str, body: bytes) -> Route:
    kind = _TYPES[name[name.rindex(".") :]]
    own = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": own}

    async def serve(request: HttpRequest, _: Call) -> Response:
        """Send a page to chat and to watch the mesh; 304 to who has this very one."""
        known = request.headers.get("If-None-Match", "").split(",")
        if any(tag.strip().removeprefix("W/") in (own, "*") for tag in known):
            return Response(304, b"", headers)
        return Response(200, body, {**headers, "Content-Type": kind})

    path = "/" if name == _INDEX else f"/{_FOLDER}/{name}"
    return Route("GET", path, Policy.ANYBODY, serve, "text/html")
