"""With how many threads a worker computes."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from shared.engine import load


@pytest.mark.parametrize(("asked", "taken"), [(0, 3), (2, 2), (3, 3), (4, 4)])
def test_one_for_each_core_that_is_granted(
    asked: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another number is asked for; what is more than cores is told."""
    monkeypatch.setattr(load, "num_cores", lambda: 3)
    monkeypatch.setattr(load, "granted_cores", lambda: 3.5)
    with capture_logs() as logs:
        assert load._num_threads(asked) == taken
    assert [line["reason"] for line in logs] == (
        ["4 threads, 3.5 cores: they wait for each other"] if asked > 3 else []
    )
