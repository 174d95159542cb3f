"""The secret of a mesh: who knows it belongs to it. Where it is from, and when it must be there.

    pdmesh secret > /etc/pdmesh/secret          # once; then the same on every host:
    pdmesh gateway --mesh-secret-file /etc/pdmesh/secret …

32 random bytes as 64 hex digits, in a file or in ``PDMESH_MESH_SECRET``; never a flag, for other
users see those. What is sent to prove it stands in ``shared/membership/proof.py``.
"""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Mapping

from shared.config import GatewayConfig, WorkerConfig
from shared.errors import InvalidRequest
from shared.ids import RandomBytes

SECRET_VARIABLE = "PDMESH_MESH_SECRET"
SECRET_BYTES = 32
_TEXT = re.compile(f"[0-9a-fA-F]{{{2 * SECRET_BYTES}}}")


class MeshSecret:
    """The secret itself; whatever it is needed for gets a key of its own."""

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        """Raises ValueError: not what ``new_secret`` makes."""
        if _TEXT.fullmatch(text) is None:
            raise ValueError(f"a mesh secret has {2 * SECRET_BYTES} hex digits")
        self._key = bytes.fromhex(text)

    def derived(self, purpose: str, context: bytes = b"") -> bytes:
        """Return 32 bytes for one purpose, which tell nothing of the secret or of other purposes:
        HKDF-SHA256 (RFC 5869) with ``context`` as salt and ``purpose`` as info."""
        extracted = hmac.digest(context, self._key, "sha256")
        return hmac.digest(extracted, b"pdmesh/" + purpose.encode() + b"\x01", "sha256")


def new_secret(random_bytes: RandomBytes) -> str:
    """Return a fresh secret as text."""
    return random_bytes(SECRET_BYTES).hex()


def mesh_secret(
    config: GatewayConfig | WorkerConfig, environment: Mapping[str, str]
) -> MeshSecret | None:
    """Return the secret that a service is given; None = none, where it needs none.

    Raises InvalidRequest, saying what to do: it needs one (``why_secret``) and has none, or what it
    has cannot be read or is none.
    """
    path, text = config.mesh_secret_file, environment.get(SECRET_VARIABLE, "").strip()
    if path is not None and text:
        raise InvalidRequest(
            f"--mesh-secret-file and {SECRET_VARIABLE} are both set: keep one of them",
            param="mesh_secret_file",
        )
    where = SECRET_VARIABLE
    if path is not None:
        where = str(path)
        try:
            text = path.read_bytes()[:4096].decode("utf-8-sig", "replace").strip()
        except OSError as error:
            reason = os.strerror(error.errno or 0).lower()
            raise InvalidRequest(
                f"cannot read the mesh secret in {path} ({reason}): `pdmesh secret` makes one",
                param="mesh_secret_file",
            ) from None
    elif not text:
        if not (reason := config.why_secret):
            return None
        raise InvalidRequest(
            f"{reason}, so the mesh needs a secret: make one with `pdmesh secret`, and give the "
            f"same to the gateway and to all workers, with --mesh-secret-file or {SECRET_VARIABLE}",
            param="mesh_secret_file",
        )
    try:
        return MeshSecret(text)
    except ValueError as error:
        raise InvalidRequest(
            f"{where} holds no mesh secret ({error}): `pdmesh secret` makes one",
            param="mesh_secret_file",
        ) from None
