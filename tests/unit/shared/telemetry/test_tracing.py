"""The seam of tracing: what it costs when nobody asked for it, and what turns it on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import structlog
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from shared.telemetry.otel import OneWarning
from shared.telemetry.trace_export import is_wanted, tracing
from shared.telemetry.tracing import CANCELLED, NO_SPAN, Attributes, Phases, TraceSpan

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}


CONTEXT = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


class RecordedSpan(TraceSpan):
    """Writes its phases down."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float, Attributes | None, str]] = []

    def phase(
        self, name: str, began_at: float, attributes: Attributes | None = None, *, error: str = ""
    ) -> None:
        self.phases.append((name, began_at, attributes, error))


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "false"}, True),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "otlp"}, True),
    ],
)
def test_the_standard_variables_turn_it_on(environment: dict[str, str], wanted: bool) -> None:
    """An endpoint is the wish; the standard switches take it back."""
    assert is_wanted(environment) is wanted


def test_nothing_is_imported_unless_it_is_wanted() -> None:
    """A service without an endpoint never loads the library, installed or not."""
    code = """
import asyncio, sys
import services.gateway.app, services.gateway.process
from shared.telemetry.trace_export import tracing
from shared.telemetry.tracing import NO_TRACER

async def main():
    async with tracing("x", 1) as tracer:
        assert tracer is NO_TRACER
asyncio.run(main())
loaded = [name for name in sys.modules if name.startswith("opentelemetry")]
assert not loaded, loaded
"""
    clean = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=clean)


async def test_a_service_without_the_library_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked to trace and cannot: one line that says what to install, and it serves."""
    monkeypatch.setenv(*next(iter(ENDPOINT.items())))

    monkeypatch.setitem(sys.modules, "shared.telemetry.otel", None)
    with structlog.testing.capture_logs() as lines:
        async with tracing("x", 1) as tracer:
            assert tracer.within(CONTEXT) is NO_SPAN
            assert tracer.request("x", 0.0, {}) is NO_SPAN
    (line,) = lines
    assert "pip install 'pdmesh[otel]'" in line["reason"]


def test_phases_follow_each_other() -> None:
    """Each one ends where the next begins, with what is known of it by then."""
    span = RecordedSpan()
    phases = Phases(span, "queue", 1.0)
    phases.turn("compute", 2.5, {"a": 1})
    phases.end({"b": 2}, error="no_capacity")
    phases.end(error="late")
    assert span.phases == [("queue", 1.0, {"a": 1}, ""), ("compute", 2.5, {"b": 2}, "no_capacity")]


def test_a_phase_that_was_cancelled_is_no_error() -> None:
    """A worker cannot know whether its gateway had enough or its client gave up."""
    span = RecordedSpan()
    Phases(span, "steps", 1.0).end({"a": 1}, error=CANCELLED)
    assert span.phases == [("steps", 1.0, {"a": 1, "pdmesh.cancelled": True}, "")]


def test_what_is_not_recorded_does_nothing() -> None:
    """The span of those who do not trace: itself all the way down, and no context to send."""
    assert NO_SPAN.begin("a", 0.0).begin("b", 0.0) is NO_SPAN
    assert NO_SPAN.context == ""
    NO_SPAN.phase("a", 0.0)
    NO_SPAN.set({"a": 1})
    NO_SPAN.end(error="x")


class FakeExporter(SpanExporter):
    """Fails or not as it is told; an exception is a failure, too."""

    def __init__(self, *results: SpanExportResult | Exception) -> None:
        self._results = list(results)

    def export(self, spans: object) -> SpanExportResult:
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


def test_a_collector_that_is_gone_is_told_once() -> None:
    """However many exports fail, by whatever; and once more when it was back and is gone again."""
    ok, failure = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    exporter = OneWarning(FakeExporter(ok, failure, failure, OSError("no route"), ok, failure))
    with structlog.testing.capture_logs() as lines:
        results = [exporter.export([]) for _ in range(6)]
        exporter.give_up()
    assert results == [ok, failure, failure, failure, ok, failure]
    assert [line["event"] for line in lines] == [
        "traces lost", "traces are taken again", "traces lost"
    ]  # fmt: skip
