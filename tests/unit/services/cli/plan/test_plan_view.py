"""How plans are shown: how far a long search has come."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from services.cli.plan import view


def test_what_a_long_search_still_takes_is_told_by_what_has_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no bar shows it: in few lines, whatever the first trial let expect."""
    now = 0.0
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: now))
    with view.progress("map", 10) as one_more:
        for took_s in (20.0, 30.0, 30.0, 30.0, 7000.0, 1.0):
            now += took_s
            one_more()
    assert capsys.readouterr().err.splitlines() == [
        "map: 2 of 10, about 3 min more",
        "map: 4 of 10, about 3 min more",
        "map: 5 of 10, about 2.0 hours more",
    ]
