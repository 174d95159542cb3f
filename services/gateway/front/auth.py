"""API keys: who may call, how much, and whose prefix cache a caller uses.

The key file holds one key a line: ``name:sha256hex[:cache_salt]``, then if need be its limits,
``requests_per_minute=60 concurrent_requests=4``, and what it may beyond asking, ``may=roles``;
``#`` begins a comment. It keeps digests alone: a key is shown once, when ``pdmesh hash-key`` makes
it. Two names with one salt are two live keys of
one tenant (rotation). A file that has changed counts from the next call on; one with a broken line
changes nothing.
Knows no transport: the caller hands over the value of ``authorization``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.gateway.front.quota import KeyLimits, Quota
from shared.errors import Forbidden, InvalidRequest, Unauthorized
from shared.watched_files import WatchedFiles

MAX_KEYS = 10_000
MAX_KEY_CHARS = 512

PLAIN_KEY_NAME = "api-key"
"""Of the key that ``--api-key`` gives."""

ROLES = "roles"
"""The right to change workers' homes."""

_KEY = re.compile(rf"[!-~](?:[ -~]{{0,{MAX_KEY_CHARS - 2}}}[!-~])?")
_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]{1,64}):(?P<digest>[0-9a-fA-F]{64})(:(?P<salt>[!-~]{1,128}))?"
    r"(?P<words>(\s+((requests_per_minute|concurrent_requests)=\d{1,9}|may=roles))*)"
)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A known key. name: for logs and metrics. cache_salt: the tenant; keys without one of their
    own use their name, so that two keys never share KV unless the file says so. may: its rights,
    '' = to ask, as every key."""

    name: str
    digest: bytes = field(repr=False)
    cache_salt: bytes = field(repr=False)
    quota: Quota = field(repr=False, compare=False)
    may: str = ""

    def require(self, right: str) -> None:
        """Raise Forbidden, with the remedy, unless the key has this right."""
        if right and self.may != right:
            raise Forbidden(
                f"the API key {self.name!r} may ask, but has no right to change {right}: use one "
                f"that has (`pdmesh hash-key NAME --may {right}` makes its line of --api-keys)",
                param="authorization",
                code="missing_right",
            )


NOBODY = ApiKey(name="-", digest=b"", cache_salt=b"", quota=Quota(KeyLimits()), may=ROLES)
"""The caller of a gateway without keys: may whatever may be asked."""


class KeyRing:
    """All keys of a gateway. An empty ring lets everybody in, as ``NOBODY``.

    path: of the key file. plain_key: one key more, as clients send it. limits: of keys whose line
    says nothing else.
    Raises InvalidRequest: see ``read_keys``.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        plain_key: str = "",
        limits: KeyLimits = KeyLimits(),  # noqa: B008
    ) -> None:
        self._path, self._limits = path, limits
        self._plain = [_plain_key(plain_key, limits)] if plain_key else []
        self._watched = WatchedFiles(path)
        self._keys = self._all_keys()

    def _all_keys(self) -> Sequence[ApiKey]:
        if self._path is None:
            return self._plain
        return *self._plain, *read_keys(self._path, self._limits)

    def _reload(self) -> None:
        """Take the file's keys; a key that was there before keeps what it has used up."""
        try:
            found = self._all_keys()
        except InvalidRequest as error:
            _log.error("the old API keys stay in use", error=error.message, param=error.param)
            return
        quotas = {key.name: key.quota for key in self._keys}
        for key in found:
            if (old := quotas.get(key.name)) is not None:
                # Calls in progress hold the old quota: it stays, with all that they have taken.
                old.limits = key.quota.limits
        self._keys = tuple(
            dataclasses.replace(key, quota=quotas.get(key.name, key.quota)) for key in found
        )
        _log.info("took new API keys", count=len(self._keys))

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._keys

    @property
    def names(self) -> frozenset[str]:
        """Of all keys: who may be a tenant."""
        return frozenset(key.name for key in self._keys)

    def check(self, authorization: str | None) -> ApiKey:
        """Return the key of an ``authorization`` value (``Bearer <key>``).

        Compares with every key in constant time each, so that timing tells neither names nor
        digests.
        Raises Unauthorized.
        """
        if self._path is not None and self._watched.have_changed():
            self._reload()
        if not self._keys:
            return NOBODY
        scheme, _, token = (authorization or "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthorized(
                "an API key is needed: send 'Authorization: Bearer <key>'",
                param="authorization",
                code="missing_api_key",
            )
        # Header values may hold any byte, as surrogates; none of those is in a key.
        digest = hashlib.sha256(token[:MAX_KEY_CHARS].encode("utf-8", "replace")).digest()
        found: ApiKey | None = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise Unauthorized(
                "this API key is not known", param="authorization", code="invalid_api_key"
            )
        return found


def read_keys(path: Path, limits: KeyLimits) -> list[ApiKey]:
    """Return the keys of a file. limits: of keys whose line says nothing else.

    Raises InvalidRequest: it cannot be read, is no text, a line is malformed, a name occurs twice,
    or it holds no key (an empty ring would let everybody in); the message gives file and line
    number, never the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise _unusable(
            f"cannot read the API keys in {path} ({reason}): `pdmesh hash-key` makes its lines"
        ) from None
    except UnicodeDecodeError:
        raise _unusable(f"{path} is not a text file of API keys") from None
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise _unusable(
                f"{path}, line {number}: expected name:sha256hex[:cache_salt], then "
                "requests_per_minute=N, concurrent_requests=N and may=roles if need be (`pdmesh "
                "hash-key` makes such lines)"
            )
        name = match["name"]
        if name in keys or name == PLAIN_KEY_NAME or len(keys) == MAX_KEYS:
            raise _unusable(f"{path}, line {number}: a second key of this name, or too many keys")
        own = dict(word.split("=") for word in match["words"].split())
        may = own.pop("may", "")
        keys[name] = ApiKey(
            name=name,
            digest=bytes.fromhex(match["digest"]),
            cache_salt=(match["salt"] or name).encode("ascii"),
            quota=Quota(
                dataclasses.replace(limits, **{what: int(most) for what, most in own.items()})
            ),
            may=may,
        )
    if not keys:
        raise _unusable(f"{path} holds no key: leave --api-keys away to serve everybody")
    return list(keys.values())


def _plain_key(key: str, limits: KeyLimits) -> ApiKey:
    name = PLAIN_KEY_NAME
    digest = hashlib.sha256(key.encode()).digest()
    return ApiKey(name=name, digest=digest, cache_salt=name.encode(), quota=Quota(limits))


def _unusable(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="api_keys")


def tenant_salt(key: ApiKey, client_salt: bytes, salt_key: bytes) -> bytes:
    """Return what keys the prefix cache: the tenant's salt, narrowed (never widened) by the
    client's own, as 32 bytes; or nothing, where neither has one.

    salt_key: from the mesh's secret, so that who sees what workers are told cannot tell, or try,
    whose it is. The same for every gateway of a mesh: their tenants share its caches."""
    if not (key.cache_salt or client_salt):
        return b""
    # Its length is in it, or another split of the same bytes would be the same tenant.
    told = len(key.cache_salt).to_bytes(4, "little") + key.cache_salt + client_salt
    return hmac.digest(salt_key, told, "sha256")


def new_key() -> str:
    """Return a fresh API key with 256 random bits."""
    return f"pdm-{secrets.token_urlsafe(32)}"


def hash_key(
    name: str,
    key: str,
    cache_salt: str = "",
    limits: KeyLimits = KeyLimits(),  # noqa: B008
    may: str = "",
) -> str:
    """Return the line of a key file for this key; a limit of 0 is left to the gateway's flag.

    Raises InvalidRequest: the name or the salt has characters that the file cannot hold, or the key
    is none that a header holds.
    """
    digest = hashlib.sha256(key.encode()).hexdigest()
    line = f"{name}:{digest}" + (f":{cache_salt}" if cache_salt else "")
    line += "".join(f" {what}={most}" for what, most in dataclasses.asdict(limits).items() if most)
    line += f" may={may}" if may else ""
    if _KEY.fullmatch(key) is None or _LINE.fullmatch(line) is None or "#" in line:
        raise InvalidRequest(
            "a key's name is 1 to 64 characters of A-Z a-z 0-9 . _ -, its salt 1 to 128 visible "
            "ASCII characters without #, its limits at most 9 digits, its one right is roles, and "
            f"the key itself is 1 to {MAX_KEY_CHARS} visible ASCII characters, spaces only between "
            "them"
        )
    return line
