"""The envelope around transport addresses."""

from __future__ import annotations

import pytest

from shared.errors import TransferFailed
from shared.transport.address import MAX_ADDRESS_BYTES, seal, unseal


def test_what_is_sealed_comes_out_again() -> None:
    """The payload survives."""
    assert unseal(b"TEST", seal(b"TEST", b"payload")) == b"payload"


@pytest.mark.parametrize(
    "address",
    [
        b"",
        seal(b"TEST", b""),
        seal(b"ELSE", b"payload"),
        seal(b"TEST", b"payload")[:-1],
        seal(b"TEST", b"payload") + b"x",
        seal(b"TEST", bytes(MAX_ADDRESS_BYTES)),
    ],
)
def test_what_is_not_sealed_so_is_refused(address: bytes) -> None:
    """Empty, foreign, cut, stretched and oversized addresses raise."""
    with pytest.raises(TransferFailed):
        unseal(b"TEST", address)
