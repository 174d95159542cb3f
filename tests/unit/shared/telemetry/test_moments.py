"""Moments of a request: told only at debug level, with fields that logs let through."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from services.cli.tour import happenings
from services.cli.tour_stops import STOPS
from shared.errors import InvariantViolated
from shared.log import configure_logs, is_debugging
from shared.telemetry.moments import Moment, note

ID = bytes(range(16))


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    configure_logs(service="test", level="info", form="json", stream=io.StringIO())
    structlog.configure(**before)


async def told(level: str) -> list[dict[str, Any]]:
    """What is logged of one moment."""
    out = io.StringIO()
    configure_logs(service="prefill", level=level, form="json", stream=out)
    note(Moment.FRAME_SENT, ID, frame_idx=3, first_layer=0, last_layer=2, num_bytes=10)
    return [json.loads(line) for line in out.getvalue().splitlines()]


async def test_a_moment_is_one_line_with_id_and_time() -> None:
    """Every fact passes the allow-list."""
    (line,) = await told("debug")
    assert is_debugging()
    assert line["event"] == "frame sent"
    assert line["request_id"] == ID.hex()
    assert line["at_s"] > 0
    assert (line["frame_idx"], line["last_layer"], line["num_bytes"]) == (3, 2, 10)
    assert "refused_fields" not in line


async def test_at_any_other_level_nothing_is_told() -> None:
    """Not even collected."""
    assert await told("info") == []
    assert not is_debugging()


def a_line(moment: Moment, at_s: float, request_id: str = "a", **facts: Any) -> dict[str, Any]:
    return {
        "event": moment.value,
        "at_s": at_s,
        "request_id": request_id,
        "service": "gateway",
        **facts,
    }


def test_only_the_last_request_is_told_in_order_of_time() -> None:
    """Lines of an earlier request, and of none, are left out; times count from its arrival."""
    lines: list[dict[str, Any]] = [
        a_line(Moment.ARRIVED, 1.0, "early", route="/"),
        a_line(Moment.ENDED, 12.0, finish_reason="stop"),
        a_line(Moment.EMITTED, 11.0, index=0),
        a_line(Moment.EMITTED, 11.5, index=1),
        a_line(Moment.ARRIVED, 10.0, route="/"),
        {"event": "ready", "service": "gateway"},
    ]
    found = happenings(lines)
    assert [(h.stop.moment, h.at_s, h.number, h.count) for h in found] == [
        (Moment.ARRIVED, 0.0, 1, 1),
        (Moment.EMITTED, 1.0, 1, 2),
        (Moment.EMITTED, 1.5, 2, 2),
        (Moment.ENDED, 2.0, 1, 1),
    ]
    assert found[2].facts == "token 1 leaves"


def test_logs_without_a_request_are_an_error() -> None:
    """Rather than an empty tour."""
    with pytest.raises(InvariantViolated):
        happenings([{"event": "ready"}])


def test_each_stop_has_one_sentence_of_its_own() -> None:
    """No two stops say the same."""
    assert len({stop.text for stop in STOPS}) == len(STOPS)
    assert all(stop.text.endswith(".") for stop in STOPS)
