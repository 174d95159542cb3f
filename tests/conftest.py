"""What must be settled before the first test module is imported, and which tests are quick."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog

from tests.support.tiers import COLLECTED, mark_quick_ones

if not any(Path("/dev").glob("nvidia[0-9]*")):
    # Triton decides at its import whether kernels run in its interpreter, and transformers may
    # import it. Without a GPU the interpreter is the only place where they run; nothing but the
    # tests of our kernels uses it (tests/support/interpreted.py).
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What workers of tests measure of a machine that is busy with tests is not for the user's own.
os.environ.setdefault("PDMESH_PROFILE_FILE", str(Path(__file__).parents[1] / ".cache" / "profiles"))

# Tests provoke bugs, which are logged with their tracebacks; rich draws on one for seconds.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.hookimpl(tryfirst=True)  # before -m and -k choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the quick tests, and keep in mind what there was to choose from."""
    mark_quick_ones(items)
    config.stash[COLLECTED] = tuple(items)
