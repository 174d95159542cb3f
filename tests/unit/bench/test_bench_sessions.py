"""How runs of conversations become rows."""

from __future__ import annotations

import pytest

from bench.sessions.run import row_of
from services.cli.bench.records import Run
from services.cli.bench.workload import Workload


def test_a_run_without_a_request_says_what_to_do() -> None:
    """A second at a request a second may bring none."""
    workload = Workload(name="conversations", asks=())
    with pytest.raises(SystemExit, match="--seconds"):
        row_of(Run(workload), workload)
