"""The 64 bytes in front of every frame: whose KV this is, and how to know that it arrived whole.

Little-endian, in this order (bytes): magic 4, version 2, flags 2, transfer id 16, epoch 8, frame
index 4, zero 4, payload length 8, digest 8, zero 8. The digest is computed by the shells (xxh3_64
of the payload); this module packs and compares numbers and never sees a payload.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shared.errors import TransferFailed
from shared.ids import TransferId

HEADER_BYTES = 64
MAGIC = 0x56_4B_44_50  # "PDKV" on the wire
VERSION = 1
_HAS_DIGEST = 1
_FORMAT = struct.Struct("<IHH16sQI4xQQ8x")
assert _FORMAT.size == HEADER_BYTES


class Header(NamedTuple):
    """digest: of the payload, or None where the sender computed none."""

    transfer_id: TransferId
    epoch: int
    frame_idx: int
    payload_bytes: int
    digest: int | None


def pack_header(header: Header) -> bytes:
    """Return the 64 bytes."""
    return _FORMAT.pack(
        MAGIC,
        VERSION,
        0 if header.digest is None else _HAS_DIGEST,
        header.transfer_id,
        header.epoch,
        header.frame_idx,
        header.payload_bytes,
        header.digest or 0,
    )


def unpack_header(raw: bytes) -> Header:
    """Parse 64 bytes.

    Raises TransferFailed: not a header of this version.
    """
    if len(raw) != HEADER_BYTES:
        raise TransferFailed("a frame arrived without a whole header", code="frame_header")
    magic, version, flags, transfer_id, epoch, frame_idx, payload_bytes, digest = _FORMAT.unpack(
        raw
    )
    if magic != MAGIC or version != VERSION or flags & ~_HAS_DIGEST:
        raise TransferFailed("a frame arrived with a damaged header", code="frame_header")
    return Header(
        TransferId(transfer_id),
        epoch,
        frame_idx,
        payload_bytes,
        digest if flags & _HAS_DIGEST else None,
    )


def check_header(
    raw: bytes, *, transfer_id: TransferId, epoch: int, frame_idx: int, payload_bytes: int
) -> int | None:
    """Return the digest the payload must have (None = the sender computed none).

    Raises TransferFailed: this is not the frame that was waited for. Then nothing of it may be
    used: a slot that holds another transfer's bytes is the failure that fencing exists to prevent.
    """
    header = unpack_header(raw)
    wanted = (transfer_id, epoch, frame_idx, payload_bytes)
    if header[:4] != wanted:
        names = ("transfer_id", "epoch", "frame_idx", "payload_bytes")
        wrong = [name for name, a, b in zip(names, header[:4], wanted, strict=True) if a != b]
        raise TransferFailed(
            f"a frame of something else arrived: {', '.join(wrong)} differ", code="frame_header"
        )
    return header.digest


def check_digest(expected: int | None, actual: int) -> None:
    """Compare the digest of the bytes that arrived. Raises TransferFailed: they differ."""
    if expected is not None and expected != actual:
        raise TransferFailed("a frame arrived damaged: its digest differs", code="frame_digest")
