"""The mesh of compose.yaml on a real Docker engine, two of each service.

`make compose-test` prepares the engine and the images and says so in PDMESH_COMPOSE_TEST; without
it nothing here can run, so nothing is collected.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compose.project import Project, Scale

TWO = Scale(gateway=2, prefill=2, decode=2)
_LOG_LINES = 25

if not os.environ.get("PDMESH_COMPOSE_TEST"):
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.compose)
            item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Show the ends of the containers' logs with a failure."""
    report = (yield).get_result()
    used: Any = getattr(item, "funcargs", {})
    for project in used.values():
        if report.failed and isinstance(project, Project):
            for one in project.containers():
                lines = one.logs().splitlines()[-_LOG_LINES:]
                report.sections.append((f"log of {one.name}", "\n".join(lines)))


@pytest.fixture(scope="session")
def two_of_each() -> Iterator[Project]:
    """The project that all tests share, with KV below the pools, on a volume, too."""
    tiers = {"PDMESH_DRAM_CACHE": "16MB", "PDMESH_SSD_CACHE": "/kv"}
    project = Project("mesh", **tiers, PDMESH_SSD_CACHE_SIZE="64MB")
    try:
        project.up(TWO)
        yield project
    finally:
        project.down()


@pytest.fixture
async def mesh(two_of_each: Project) -> AsyncIterator[Project]:
    """It as `up` makes it, and after the test: all healthy again and nothing held."""
    await asyncio.to_thread(two_of_each.up, TWO)
    await asyncio.to_thread(two_of_each.wait_healthy, TWO)
    yield two_of_each
    await asyncio.to_thread(two_of_each.wait_healthy, TWO)
    await asyncio.to_thread(two_of_each.wait_idle)
    orphans = [one for one in two_of_each.segments() if one["nattch"] == 0]
    assert not orphans, "shared memory that nobody uses"
