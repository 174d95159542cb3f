"""``bench.startup`` starts whole workers: when one is ready, and what is said of one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.startup.run import READY_WITHIN_S, ROLES, seconds_to_ready
from shared.model_folder import DEMO_FOLDER

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.torch]


@pytest.mark.parametrize("role", ROLES)
def test_a_worker_is_timed_until_it_is_ready_and_then_ended(role: str) -> None:
    """No gateway is there; it waits for none."""
    assert 0 < seconds_to_ready(role, DEMO_FOLDER) < READY_WITHIN_S


def test_a_worker_that_cannot_start_has_no_time(tmp_path: Path) -> None:
    """Its folder holds no model."""
    with pytest.raises(RuntimeError, match="decode did not start"):
        seconds_to_ready("decode", tmp_path)
