"""What a library below an engine raises, in words."""

from __future__ import annotations

import pytest

from shared.engine.failures import DeviceFailures, words_of
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


def test_a_missing_key_names_its_line() -> None:
    """What it says itself is the key: "'odd'" would be all of a refusal."""
    with pytest.raises(KeyError) as caught:
        _ = {"known": 1}["odd"]
    assert words_of(caught.value).startswith("KeyError: 'odd' (_ = {")
