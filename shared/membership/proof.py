"""The proof at the beginning of a connection that both ends know the mesh's secret. Pure.

    dialler  -> hello, nonce
             <- hello, nonce         listener
             -> proof
             <- proof

Three values come out of the secret and both openings (HKDF, RFC 5869): a proof for each end and a
key for this connection. A nonce is fresh, so no proof is worth anything on another connection, and
no clock is asked; the two proofs differ, so none can be sent back to its maker; each end proves
what it has said of itself, version and role included. Every later call on the connection bears a
stamp made with its key: a proxy may carry the streams of several callers on one connection.

It proves who speaks, and hides nothing: what travels can be read, and changed by who sits on the
wire, unless TLS carries it (docs/security.md).
"""

from __future__ import annotations

import hmac
from typing import NamedTuple

from shared import wire
from shared.mesh_secret import MeshSecret

NONCE_BYTES = 32
STAMP_KEY = "pdmesh-stamp"
"""Metadata key of a call's stamp."""


class Opening(NamedTuple):
    """What one end says first."""

    hello: wire.Hello
    nonce: bytes

    def packed(self) -> bytes:
        """Return it as bytes, no two alike."""
        hello, version = self.hello, self.hello.version.encode()
        numbers = (hello.protocol_version, hello.role, hello.incarnation, len(version))
        return b"".join(n.to_bytes(8, "little") for n in numbers) + version + self.nonce


class Agreement(NamedTuple):
    """What both ends know after their openings, if they know the same secret."""

    of_dialler: bytes
    of_listener: bytes
    key: bytes


def agreement(secret: MeshSecret, dialler: Opening, listener: Opening) -> Agreement:
    """Return both proofs and the connection's key."""
    first = dialler.packed()
    # With its length in front: no two pairs of openings make the same bytes.
    context = len(first).to_bytes(8, "little") + first + listener.packed()
    return Agreement(
        secret.derived("proof of the dialler", context),
        secret.derived("proof of the listener", context),
        secret.derived("key of the connection", context),
    )


def stamp(key: bytes, number: int, path: str) -> str:
    """Return the stamp of a connection's call ``number`` (1, 2, ...) to the method ``path``."""
    return f"{number}-{hmac.digest(key, f'{number} {path}'.encode(), 'sha256').hex()}"


def stamped_number(key: bytes, text: str, path: str) -> int | None:
    """Return the number of a call with this stamp; None: the key did not make it for ``path``."""
    digits = text.partition("-")[0]
    # int() takes other scripts' digits, and as many as anybody likes to send.
    if not (digits.isascii() and digits.isdigit() and len(digits) < 16):
        return None
    number = int(digits)
    made = stamp(key, number, path)
    return number if hmac.compare_digest(made.encode(), text.encode()) else None
