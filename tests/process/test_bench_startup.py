"""``bench.startup`` starts whole workers: when one is ready, and what is said of one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.startup import run
from bench.startup.run import MEMORY, READY_WITHIN_S, ROLES, WHAT, seconds_to, seconds_to_ready
from shared.model_folder import DEMO_FOLDER
from tests.support.native import needs_native

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.torch]


@pytest.mark.parametrize("role", ROLES)
def test_a_worker_is_timed_until_it_is_ready_and_then_ended(role: str) -> None:
    """No gateway is there; it waits for none."""
    assert 0 < seconds_to_ready(role, DEMO_FOLDER) < READY_WITHIN_S


def test_a_worker_that_cannot_start_has_no_time(tmp_path: Path) -> None:
    """Its folder holds no model."""
    with pytest.raises(RuntimeError, match="decode did not start"):
        seconds_to_ready("decode", tmp_path)


@pytest.mark.parametrize("what", WHAT)
def test_reading_and_loading_are_timed_in_both_kinds_of_memory(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever kernels this machine has for the checkpoint's numbers."""
    if what == "native":
        needs_native()
    monkeypatch.setattr(run, "SETTLES_AFTER_S", 0.0)
    assert all(seconds_to(what, memory, DEMO_FOLDER) > 0 for memory in MEMORY)
