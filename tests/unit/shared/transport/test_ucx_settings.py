"""What a process asks of UCX, and what it does not let anybody ask."""

from __future__ import annotations

import pytest

from shared.errors import TransferFailed
from shared.transport.settings import UcxSettings


def test_what_is_in_the_environment_wins() -> None:
    """And what is not there is added."""
    environment = {"UCX_TLS": "tcp", "UCX_RNDV_THRESH": "1g"}
    UcxSettings().apply_to(environment)
    assert (environment["UCX_TLS"], environment["UCX_RNDV_THRESH"]) == ("tcp", "1g")
    assert environment["UCX_TCP_RX_SEG_SIZE"] == str(256 << 10)


@pytest.mark.parametrize("threshold", ["inf", "INF", "intra:8192,inter:inf"])
def test_a_threshold_that_ends_the_process_is_refused(threshold: str) -> None:
    """UCX would fail when a peer with another one sends its first large message."""
    with pytest.raises(TransferFailed, match="give a size"):
        UcxSettings().apply_to({"UCX_RNDV_THRESH": threshold})
