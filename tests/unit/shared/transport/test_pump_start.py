"""What is said where UCX cannot start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from shared.errors import TransferFailed
from shared.transport.pump import Pump
from shared.transport.settings import UcxSettings


async def test_that_ucx_needs_tmp_is_said() -> None:
    """It asks the C library for files there, which looks at no TMPDIR."""

    def refuse(**_: Any) -> None:
        raise RuntimeError("tmpfile() failed: iostream error")

    lib = SimpleNamespace(UCXContext=refuse, Feature=SimpleNamespace(TAG=1, WAKEUP=2))
    loop = asyncio.get_running_loop()
    pump = Pump(loop, UcxSettings(), lib, None)
    started: asyncio.Future[bytes] = loop.create_future()
    pump.start(started)
    with pytest.raises(TransferFailed, match="a /tmp that can be written"):
        await started
    pump.thread.join()
