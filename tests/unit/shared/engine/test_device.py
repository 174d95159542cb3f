"""What an engine asks of its device, without one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
import torch

from shared.engine import device
from shared.engine.fake import FakeEngine
from shared.engine.worker import ThreadCompute
from shared.worker.arenas import DramArena


@pytest.mark.parametrize(("code", "is_said"), [(0, False), (712, True)])
def test_memory_is_page_locked_or_it_is_said(
    code: int, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is given to the driver; its refusal costs speed alone."""
    locked: list[tuple[int, int, int]] = []

    def register(*arguments: int) -> int:
        locked.append((arguments[0], arguments[1], arguments[2]))
        return code

    cudart = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(device, "current", lambda _: nullcontext())
    memory = np.empty((3, 4096), np.uint8)
    with structlog.testing.capture_logs() as logs:
        device.page_lock(memory, torch.device("cuda:0"))
    assert locked == [(memory.ctypes.data, 3 * 4096, 0)]
    assert [log["code"] for log in logs] == ([code] if is_said else [])


def test_on_a_cpu_nothing_is_page_locked() -> None:
    """A build of torch without CUDA has no such call."""
    device.page_lock(np.empty(4096, np.uint8), torch.device("cpu"))


def test_a_tier_in_host_memory_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of it, once."""
    engine = FakeEngine(num_blocks=4)
    locked: list[np.ndarray] = []
    monkeypatch.setattr(engine, "page_lock", locked.append)
    arena = DramArena(engine, ThreadCompute(engine), 1 << 20)
    assert [one is arena.bytes for one in locked] == [True]
