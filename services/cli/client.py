"""How commands speak to a running gateway: its address, the key, and what goes wrong in words."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import orjson
from cyclopts import Group, Parameter

from services.cli.flags import CannotRun, require
from shared.errors import MeshError

if TYPE_CHECKING:
    import aiohttp  # a third of a second: only commands that need it load it

DEFAULT_URL: Final = "http://127.0.0.1:8000"
CONNECT_WITHIN_S: Final = 10.0

_GATEWAY: Final = Group("Gateway", sort_key=2)

UrlFlag = Annotated[
    str,
    Parameter(
        group=_GATEWAY,
        help="The gateway; of a mesh that pdmesh up started, the URL that it printed.",
    ),
]
KeyFlag = Annotated[
    str,
    Parameter(
        group=_GATEWAY,
        help="API key of the gateway; better in PDMESH_API_KEY, where other users cannot see it.",
        show_default=False,
    ),
]


class Refused(MeshError):
    """The gateway answered with an error."""

    type = "refused"


def require_url(url: str, flag: str = "--url") -> None:
    """Raise InvalidRequest, naming the flag, unless it is an HTTP URL."""
    parts = urlsplit(url)
    is_url = parts.scheme in ("http", "https") and bool(parts.netloc)
    require(is_url, f"{flag} must be http://host:port", param=flag.removeprefix("--"))


def address(url: str, path: str) -> str:
    """Return the address of a path of the gateway; the URL may end as OpenAI's clients want it."""
    return url.rstrip("/").removesuffix("/v1") + path


def open_session(api_key: str, **options: Any) -> aiohttp.ClientSession:
    """Return a session whose requests carry the key; waits for answers without a limit."""
    import aiohttp

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S)
    return aiohttp.ClientSession(timeout=timeout, headers=headers, **options)


async def get_json(session: aiohttp.ClientSession, url: str, path: str, *, limit_s: float) -> Any:
    """Return what the gateway answers to a GET.

    Raises CannotRun: nothing listens there, or it is no gateway. Refused: the gateway's own words.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=limit_s)
    try:
        async with session.get(address(url, path), timeout=timeout) as response:
            body = await response.read()
            if response.status != 200:
                raise refusal(url, response.status, body)
            return orjson.loads(body)
    except ValueError:
        raise CannotRun(f"{url} is no pdmesh gateway: {path} is not JSON there") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise unreachable(url, error) from None


def refusal(url: str, status: int, body: bytes) -> MeshError:
    """Return the error that an answer with this status is."""
    try:
        error = orjson.loads(body)["error"]
        message, code = str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return CannotRun(f"{url} is no pdmesh gateway: it answered with HTTP status {status}")
    if status == 401:
        message += "; give it with --api-key or PDMESH_API_KEY"
    return Refused(message, code=code)


def unreachable(url: str, error: BaseException) -> CannotRun:
    """Return the error that a failed connection is."""
    import aiohttp

    if isinstance(error, (aiohttp.ClientConnectorError, TimeoutError)):
        return CannotRun(
            f"nothing answers at {url} ({_reason(error)}): start a mesh with `pdmesh up`, or say "
            "where one runs with --url"
        )
    return CannotRun(f"{url} does not answer as a gateway does ({_reason(error)})")


def _reason(error: BaseException) -> str:
    cause = getattr(error, "os_error", None)
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    return str(error) or "no answer in time"
