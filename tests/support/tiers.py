"""Which tests `make test` runs: those that are `quick`.

A test is quick, unless it, its class or its module is marked `slow`, or it stands in one of the
SLOW_FOLDERS. There and in slow modules, those marked `quick` stand for the others in `make test`.
`nightly` ones are in `make test-all` alone, and CI does not run them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.support.house import ROOT

TESTS = ROOT / "tests"

COLLECTED = pytest.StashKey[tuple[pytest.Item, ...]]()
"""In the configuration: every test that was found, before ``-m`` and ``-k``."""

SLOW_FOLDERS = {
    "compose": "runs containers",
    "exactness": "whole meshes beside transformers, for every family of models",
    "interop": "starts `pdmesh up` and clients of other people",
    "page": "drives Chromium",
    "process": "starts real processes",
    "vllm": "asks engines over vLLM",
}
"""By name; why."""

LONG_FOLDERS = ("deploy", "engine", "mesh")
"""Whose files take longer than others, quick as their tests are."""


def few(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values for ``parametrize``, of which all but ``quick`` are slow: they repeat the path."""
    return in_turn(values, *quick, of=1)


def in_turn(values: Iterable[Any], *quick: Any, of: int, turn: int = 0) -> list[Any]:
    """Likewise, and of the slow ones CI runs one in ``of``, the others are nightly. Tests that take
    turns meet all values between them, without trying each on each."""
    values = list(values)
    assert set(quick) <= set(values), "a quick value that is not among the values"

    def mark(place: int) -> pytest.MarkDecorator:
        if values[place] in quick:
            return pytest.mark.quick
        return pytest.mark.slow if place % of == turn else pytest.mark.nightly

    return [pytest.param(value, marks=mark(place)) for place, value in enumerate(values)]


def is_quick(item: pytest.Item) -> bool:
    """What its closest mark says, else what its folder says."""
    if item.get_closest_marker("nightly") is not None:
        return False
    for mark in item.iter_markers():
        if mark.name in ("quick", "slow"):
            return mark.name == "quick"
    return not is_in_slow_folder(item)


def is_in_slow_folder(item: pytest.Item) -> bool:
    """Whether its folder starts processes, browsers or whole models."""
    return folder_of(item) in SLOW_FOLDERS


def folder_of(item: pytest.Item) -> str:
    """The folder below ``tests``."""
    return item.path.relative_to(TESTS).parts[0]


def place_in_order(item: pytest.Item) -> int:
    """The files of slow folders take longest and come first, those that take seconds come last."""
    return 0 if is_in_slow_folder(item) else 1 if folder_of(item) in LONG_FOLDERS else 2


def mark_quick_ones(items: Iterable[pytest.Item]) -> None:
    """Mark `quick` what is, so that ``-m quick`` selects it."""
    for item in items:
        if is_quick(item):
            item.add_marker(pytest.mark.quick)
        elif item.get_closest_marker("quick") and not item.get_closest_marker("nightly"):
            raise pytest.UsageError(f"{item.nodeid}: it is quick as a whole and slow within")
