"""How commands speak to a running gateway: its address, the key, and what goes wrong in words."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import orjson
from cyclopts import Group, Parameter

from services.cli.flags import CannotRun, require
from shared.errors import MeshError
from shared.rpc.tls import client_context
from shared.version import VERSION

if TYPE_CHECKING:
    import aiohttp  # a third of a second: only commands that need it load it

DEFAULT_URL: Final = "http://127.0.0.1:8000"
CONNECT_WITHIN_S: Final = 10.0
ANSWERS_WITHIN_S: Final = 10.0

_FIELDS: Final = {"/v1/models": "data", "/cluster": "workers"}
"""A list that the answer at a path has, whoever asks."""

_GATEWAY: Final = Group("Gateway", sort_key=2)


def require_url(url: str, flag: str = "--url") -> None:
    """Raise InvalidRequest, naming the flag, unless it is an HTTP URL."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # half an IPv6 address, or a port that is none
        is_url = False
    require(is_url, f"{flag} must be http://host:port")


def _is_url(_: Any, url: str) -> None:
    require_url(url)


_url: Final = Parameter(group=_GATEWAY, validator=_is_url, show_env_var=True)
_quiet: Final = Parameter(group=_GATEWAY, show_default=False, show_env_var=True)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Access:
    """What a client shows, and whom it trusts."""

    api_key: Annotated[str, _quiet] = ""
    """API key; better in PDMESH_API_KEY, where other users cannot see it."""

    tls_ca: Annotated[Path | None, _quiet] = None
    """Of an https:// gateway: PEM file of the authority that signed its certificate; default: those
    that this machine trusts."""

    tls_client_cert: Annotated[Path | None, _quiet] = None
    """PEM file of the certificate to show, where the gateway wants one."""

    tls_client_key: Annotated[Path | None, _quiet] = None
    """PEM file of its private key."""

    def session(
        self, *, connector: Mapping[str, Any] | None = None, **options: Any
    ) -> aiohttp.ClientSession:
        """Return a session whose requests carry the key; waits for answers without a limit.

        connector: options of aiohttp's. Raises InvalidRequest: the key or a file is unusable.
        """
        import aiohttp

        require(
            re.fullmatch(r"[!-~]*", self.api_key) is not None,
            "--api-key (PDMESH_API_KEY) must be visible ASCII characters, without an end of a line",
        )
        files = (self.tls_ca, self.tls_client_cert, self.tls_client_key)
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WITHIN_S),
            headers={"Authorization": f"Bearer {self.api_key}"} if self.api_key else {},
            connector=aiohttp.TCPConnector(
                ssl=client_context(*files) if any(files) else True, **(connector or {})
            ),
            **options,
        )


NO_ACCESS: Final = Access()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunningGateway:
    """A running gateway, as a command is told of it."""

    url: Annotated[str, _url] = DEFAULT_URL
    """The gateway; of a mesh that pdmesh up started, the URL that it printed."""

    access: Access = NO_ACCESS

    def address(self, path: str) -> str:
        """Return the address of a path; the URL may end as OpenAI's clients want it."""
        return self.url.rstrip("/").removesuffix("/v1") + path

    async def call(
        self,
        session: aiohttp.ClientSession,
        path: str,
        *,
        limit_s: float = ANSWERS_WITHIN_S,
        sent: Any = None,
    ) -> Any:
        """Return what it answers to a GET, or to a POST of what is ``sent``.

        Raises CannotRun: nothing listens there, or it is no gateway. GatewayRefused: its own words.
        """
        import aiohttp

        method, timeout = "GET" if sent is None else "POST", aiohttp.ClientTimeout(total=limit_s)
        try:
            async with session.request(
                method, self.address(path), json=sent, timeout=timeout
            ) as response:
                body = await response.read()
                if response.status != 200:
                    raise refusal(self.url, response.status, body)
                return _told(path, orjson.loads(body))
        except (aiohttp.ClientError, TimeoutError) as error:  # some are a ValueError as well
            raise unreachable(self.url, error) from None
        except ValueError:
            raise CannotRun(
                f"{self.url} is no pdmesh gateway: {path} says something else there"
            ) from None

    async def ask(self, path: str, *, limit_s: float = ANSWERS_WITHIN_S) -> Any:
        """``call`` over a session of its own."""
        async with self.access.session() as session:
            return await self.call(session, path, limit_s=limit_s)


LOCAL_GATEWAY: Final = RunningGateway()


def _told(path: str, answer: Any) -> Any:
    """Return the answer. Raises ValueError: another server's."""
    if field := _FIELDS.get(path):
        try:
            listed: object = answer[field]
        except (LookupError, TypeError):
            listed = None
        if not isinstance(listed, list):
            raise ValueError(field)
    return answer


class GatewayRefused(MeshError):
    type = "refused"


def refusal(url: str, status: int, body: bytes) -> MeshError:
    """Return the error that an answer with this status is."""
    try:
        error = orjson.loads(body)["error"]
        message, code = str(error["message"]), str(error.get("code") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return CannotRun(f"{url} is no pdmesh gateway: it answered with HTTP status {status}")
    if status == 401:
        message += "; give it with --api-key or PDMESH_API_KEY"
    return GatewayRefused(message, code=code)


def told_otherwise(url: str, view: Any) -> CannotRun:
    """Return the error that a gateway's word is which lacks what we look for."""
    try:
        version = view["version"]
    except (LookupError, TypeError):
        version = None
    if version is None or version == VERSION:
        return CannotRun(f"{url} is no pdmesh gateway: it tells of its mesh in another form")
    return CannotRun(
        f"{url} runs release {version} and this is {VERSION}: what it tells of its mesh has "
        "another form; use the command of its release"
    )


def unreachable(url: str, error: BaseException) -> CannotRun:
    """Return the error that a failed connection is."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = getattr(error.certificate_error, "verify_message", "") or str(error)
        return CannotRun(
            f"the certificate of {url} is not trusted ({reason}): name the authority that signed "
            "it with --tls-ca"
        )
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return CannotRun(f"{url} speaks no TLS that we know ({_reason(error)}): is it http://?")
    # TLS 1.3 refuses a client only after its handshake, and the reason may be lost on the way.
    if "CERTIFICATE_REQUIRED" in str(error) or isinstance(error, aiohttp.ServerDisconnectedError):
        is_tls = url.startswith("https:")
        hint = (
            "does it want a certificate of yours (--tls-client-cert)"
            if is_tls
            else "is it https://"
        )
        return CannotRun(f"{url} hangs up: {hint}?")
    if isinstance(error, (aiohttp.ClientConnectorError, TimeoutError)):
        return CannotRun(
            f"nothing answers at {url} ({_reason(error)}): start a mesh with `pdmesh up`, or "
            "give the address of one that runs"
        )
    return CannotRun(f"{url} does not answer as a gateway does ({_reason(error)})")


def _reason(error: BaseException) -> str:
    cause = getattr(error, "os_error", None)
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    return str(error) or "no answer in time"
