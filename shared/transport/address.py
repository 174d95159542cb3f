"""The envelope around a transport's address: what ``connect`` verifies before a library parses the
bytes.

UCX trusts the length fields inside an address and reads past the end of a cut one, so damaged bytes
must never reach it. The checksum is against damage and mix-ups, not against an attacker: addresses
come only over authenticated streams.

Layout, little-endian: magic 4 B, payload length u32, first 8 B of SHA-256 over the payload,
payload.
"""

from __future__ import annotations

import hashlib
import struct

from shared.errors import TransferFailed

MAX_ADDRESS_BYTES = 64 * 1024
"""UCX worker addresses take some hundred bytes; more than this is no address."""

_HEADER = struct.Struct("<4sI8s")


def seal(magic: bytes, payload: bytes) -> bytes:
    """Wrap an address. magic: 4 bytes that name the kind of transport."""
    return _HEADER.pack(magic, len(payload), hashlib.sha256(payload).digest()[:8]) + payload


def unseal(magic: bytes, address: bytes) -> bytes:
    """Return the payload.

    Raises TransferFailed: not an address of this kind of transport, or damaged.
    """
    if not _HEADER.size < len(address) <= MAX_ADDRESS_BYTES:
        raise TransferFailed(
            "the peer's transport address has an impossible length", code="address"
        )
    found_magic, length, digest = _HEADER.unpack_from(address)
    payload = bytes(address[_HEADER.size :])
    if found_magic != magic:
        raise TransferFailed("the peer uses another kind of transport", code="address")
    if length != len(payload) or digest != hashlib.sha256(payload).digest()[:8]:
        raise TransferFailed("the peer's transport address is damaged", code="address")
    return payload
