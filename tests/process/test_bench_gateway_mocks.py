"""The workers of bench/gateway are C programs that speak the mesh's sessions, by its protocol."""

from __future__ import annotations

import shutil

import pytest

from bench.gateway.run import Client, Load
from bench.gateway.subjects import our_gateway, tools

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]


async def test_our_gateway_answers_by_the_mock_pair() -> None:
    """Every byte is checked by the client, which ends with an error else."""
    load = Load("a few", "stream", 2, 8, False, 0.5, ())
    with tools() as kit:
        async with our_gateway(kit) as gateway:
            figures = await Client(kit).run(gateway, load, warm_s=0.0, window_s=load.window_s)
    assert figures["answers"] > 0
    assert figures["failed"] == 0
