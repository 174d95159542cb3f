"""What must be settled before the first test module is imported, and which tests are quick."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.fork_server import executed_starts, forked_starts
from tests.support.tiers import COLLECTED, mark_quick_ones, place_in_order

if not any(Path("/dev").glob("nvidia[0-9]*")):
    # Triton decides at its import whether kernels run in its interpreter, and transformers may
    # import it. Without a GPU the interpreter is the only place where they run; nothing but the
    # tests of our kernels uses it (tests/support/interpreted.py).
    os.environ.setdefault("TRITON_INTERPRET", "1")

# grpcio, a client in some tests, starts threads of its own in whatever is forked, and one of them
# may write into the new program's stderr before exec ends it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# What workers of tests measure of a machine that is busy with tests is not for the user's own.
os.environ.setdefault("PDMESH_PROFILE_FILE", str(Path(__file__).parents[1] / ".cache" / "profiles"))

# Processes beside each other (-n) are told a width of 80; terminals of tests have their own.
os.environ.pop("COLUMNS", None)

# Tests provoke bugs, which are logged with their tracebacks; rich draws on one for seconds.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


# ``HYPOTHESIS_PROFILE=thorough make test-all`` searches longer.
_SEARCH = settings(
    deadline=None,  # tests never depend on speed
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.register_profile("default", _SEARCH, max_examples=120, stateful_step_count=40)
settings.register_profile("thorough", _SEARCH, max_examples=600, stateful_step_count=80)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--budget-s``: CI has an end, and machines are of different speed."""
    parser.addoption(
        "--budget-s",
        type=float,
        metavar="SECONDS",
        help="begin no test after so long: the rest is skipped, and said to be. The order is drawn "
        "anew each time, so it is another rest",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin too late."""
    budget_s = item.config.getoption("budget_s")
    if budget_s is None:
        return
    now = time.monotonic()
    if now - item.config.stash.setdefault(BEGAN, now) > budget_s:
        pytest.skip(f"not run: the {budget_s:g} s of --budget-s are over")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mark the quick tests, and keep in mind what there was to choose from. Files that take long
    for their few tests come first, that no process of -n is left with one at the end."""
    mark_quick_ones(items)
    config.stash[COLLECTED] = tuple(items)
    yield  # -m and -k choose, and an order is drawn
    items.sort(key=place_in_order)


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """Who configures logs, as commands do, does so for its own test alone."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session", autouse=True)
def starts_are_forked() -> Iterator[None]:
    """Without their imports processes of ours start in a tenth of the time."""
    with forked_starts():
        yield


@pytest.fixture
def starts_are_executed() -> Iterator[None]:
    """Processes of ours start as users start them."""
    with executed_starts():
        yield


@pytest.fixture
def hears_hangup() -> Iterator[None]:
    """What a test starts hears SIGHUP, also where the tests run under ``nohup``."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)
