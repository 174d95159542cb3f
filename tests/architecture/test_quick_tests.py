"""`make test` looks into every room of the house."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.support.house import ROOT
from tests.support.tiers import COLLECTED, SLOW_FOLDERS, is_quick

PACKAGES = {
    ".".join(path.parent.relative_to(ROOT).parts)
    for top in ("services", "shared")
    for path in (ROOT / top).rglob("__init__.py")
    if "wire" not in path.parts  # generated
    and {one.name for one in path.parent.glob("*.py")} - {"__init__.py", "__main__.py"}
}
"""All but those that only start a process: tests start them by name."""
FEWEST = {"process": 20, "ucx": 20}
"""Quick tests that must be there, by mark: a handful each."""


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """What `make test` runs, whatever is run now."""
    # Not args_source: a worker of xdist is given the paths that the one in charge has found.
    if set(request.config.args) != set(request.config.getini("testpaths")):
        pytest.skip("only some files were looked at")
    return [one for one in request.config.stash[COLLECTED] if is_quick(one)]


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Packages of ours that a file of tests names in its imports, also by way of tests/support."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    found: set[str] = set()
    for name in names:
        if name.startswith("tests.support."):
            helper = ROOT / f"{name.replace('.', '/')}.py"
            found |= imports_of(helper) if helper.exists() else set()
        found.update({name, name.rpartition(".")[0]} & PACKAGES)
    return frozenset(found)


def packages_of(tests: Iterable[pytest.Item]) -> set[str]:
    """Packages that these tests name."""
    return set().union(*(imports_of(path) for path in {one.path for one in tests}))


def test_every_package_is_named_by_a_quick_test(quick: list[pytest.Item]) -> None:
    """In its imports or in those of what supports it: whoever breaks a room hears of it soon."""
    assert len(PACKAGES) > 20
    missing = PACKAGES - packages_of(quick)
    assert not missing


@pytest.mark.parametrize(("mark", "fewest"), FEWEST.items())
def test_real_processes_and_real_ucx_are_among_the_quick_tests(
    mark: str, fewest: int, quick: list[pytest.Item]
) -> None:
    """A handful of each, so that `make test` has seen a mesh."""
    assert sum(one.get_closest_marker(mark) is not None for one in quick) >= fewest


@pytest.mark.parametrize("folder", SLOW_FOLDERS)
def test_a_slow_folder_is_there(folder: str) -> None:
    """After a renaming its tests would all be quick."""
    assert list((ROOT / "tests" / folder).glob("test_*.py"))
