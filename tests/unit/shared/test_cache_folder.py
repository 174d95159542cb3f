"""Where what can be made again is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.cache_folder import cache_folder


def test_a_user_without_a_home_has_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is it a folder named ~ where the process was started: a container may run as any number,
    without a variable HOME."""

    def nobody(_: int) -> None:
        raise KeyError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert cache_folder("native") == Path("/nonexistent/pdmesh/native")
