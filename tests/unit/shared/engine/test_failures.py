"""What a library below an engine raises, in words."""

from __future__ import annotations

import pytest

from shared.engine.failures import DeviceFailures
from shared.errors import EngineFailed

pytestmark = pytest.mark.torch


def test_an_error_without_words_names_its_line() -> None:
    """A bare assertion's text is empty; what others say is left as it is."""
    said = r"starting failed: AssertionError \(raise AssertionError\)$"
    with pytest.raises(EngineFailed, match=said), DeviceFailures("starting"):
        raise AssertionError
    with (
        pytest.raises(EngineFailed, match=r"loading failed: no device$"),
        DeviceFailures("loading"),
    ):
        raise RuntimeError("no device")
