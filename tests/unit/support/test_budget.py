"""``--budget-s`` of the test runner."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.house import ROOT


@pytest.mark.slow
def test_what_would_begin_too_late_is_skipped_and_said_to_be() -> None:
    """The first test of a file always runs; with no time left the others do not."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:randomly", "-k", "hot_prefixes",
         "tests/unit/services/gateway/core/index/test_gateway_hot_prefixes.py", "--budget-s", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )  # fmt: skip
    assert "1 passed, 3 skipped" in done.stdout
    assert "not run: the 0 s of --budget-s are over" in done.stdout
