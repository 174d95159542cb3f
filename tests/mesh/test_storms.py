"""Whole meshes of every kind in storms of faults: no token is wrong, none is missing, and after the
storm everybody is served. One that fails replays from its seed: ``-k 'either and 7-'``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.storm import KINDS, storm
from tests.support.tiers import few


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", few(range(4), 0))
def test_every_answer_is_exact_or_a_typed_error(seed: int, kind: str, tmp_path: Path) -> None:
    """Kills, drains, moves, partitions, hang-ups and slow links at random times."""
    storm(seed, kind, tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_of_them(kind: str, tmp_path: Path) -> None:
    for seed in range(4, 100):
        (folder := tmp_path / str(seed)).mkdir()
        storm(seed, kind, folder)


@pytest.mark.slow
def test_the_same_seed_has_the_same_history(tmp_path: Path) -> None:
    """Else what failed could not be replayed."""
    histories = set[str]()
    for run in ("first", "second"):
        (folder := tmp_path / run).mkdir()
        histories.add(storm(0, "mixed", folder))
    assert len(histories) == 1
