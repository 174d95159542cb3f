"""API keys: who may call, and whose prefix cache a caller uses.

The key file holds one key a line, ``name:sha256hex[:cache_salt]``; ``#`` begins a comment. It keeps
digests alone: a key is shown once, when ``pdmesh hash-key`` makes it. Two names with one salt are
two live keys of one tenant (rotation).
Knows no transport: the caller hands over the value of ``authorization``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import InvalidRequest, Unauthorized

MAX_KEYS = 10_000
MAX_KEY_CHARS = 512

_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9._-]{1,64}):(?P<digest>[0-9a-fA-F]{64})(:(?P<salt>[!-~]{1,128}))?"
)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A known key. name: for logs and metrics. cache_salt: the tenant; keys without one of their
    own use their name, so that two keys never share KV unless the file says so."""

    name: str
    digest: bytes = field(repr=False)
    cache_salt: bytes = field(repr=False)


NOBODY = ApiKey(name="-", digest=b"", cache_salt=b"")
"""The caller of a gateway without keys."""


class KeyRing:
    """All keys of a gateway. An empty ring lets everybody in, as ``NOBODY``."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    @classmethod
    def read(cls, path: Path) -> KeyRing:
        """Read a key file.

        Raises InvalidRequest: it is no text, a line is malformed, a name occurs twice, or it holds
        no key (an empty ring would let everybody in); the message gives the line number, never the
        line.
        OSError: the file cannot be read.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest(f"{path} is not a text file of API keys") from None
        keys: dict[str, ApiKey] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            match = _LINE.fullmatch(entry)
            if match is None:
                raise InvalidRequest(
                    f"{path}, line {number}: expected name:sha256hex[:cache_salt] "
                    "(see `pdmesh hash-key`)"
                )
            name = match["name"]
            if name in keys or len(keys) == MAX_KEYS:
                raise InvalidRequest(
                    f"{path}, line {number}: a second key of this name, or too many keys"
                )
            keys[name] = ApiKey(
                name=name,
                digest=bytes.fromhex(match["digest"]),
                cache_salt=(match["salt"] or name).encode("ascii"),
            )
        if not keys:
            raise InvalidRequest(f"{path} holds no key: leave --api-keys away to serve everybody")
        return cls(tuple(keys.values()))

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._keys

    def check(self, authorization: str | None) -> ApiKey:
        """Return the key of an ``authorization`` value (``Bearer <key>``).

        Compares with every key in constant time each, so that timing tells neither names nor
        digests.
        Raises Unauthorized.
        """
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


def tenant_salt(key: ApiKey, client_salt: bytes, salt_key: bytes) -> bytes:
    """Return what keys the prefix cache: the tenant's salt, narrowed (never widened) by the
    client's own, as 32 bytes; or nothing, where neither has one.

    salt_key: from the mesh's secret, so that who sees what workers are told cannot tell, or try,
    whose it is. The same for every gateway of a mesh: their tenants share its caches."""
    if not (key.cache_salt or client_salt):
        return b""
    told = len(key.cache_salt).to_bytes(4, "little") + key.cache_salt + client_salt
    return hmac.digest(salt_key, told, "sha256")


def new_key() -> str:
    """Return a fresh API key with 256 random bits."""
    return f"pdm-{secrets.token_urlsafe(32)}"


def hash_key(name: str, key: str, cache_salt: str = "") -> str:
    """Return the line of a key file for this key.

    Raises InvalidRequest: the name or the salt has characters that the file cannot hold.
    """
    digest = hashlib.sha256(key.encode()).hexdigest()
    line = f"{name}:{digest}" + (f":{cache_salt}" if cache_salt else "")
    if not key or _LINE.fullmatch(line) is None or "#" in line:
        raise InvalidRequest(
            "a key's name is 1 to 64 characters of A-Z a-z 0-9 . _ -, its salt 1 to 128 visible "
            "ASCII characters without #, and the key itself is not empty"
        )
    return line
