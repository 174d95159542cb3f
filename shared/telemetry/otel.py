"""``tracing.py`` by OpenTelemetry: spans, sampling and OTLP over HTTP; the only user of that
library.

Everything is configured by its standard variables. Spans are handed to the SDK's own thread by a
bounded queue, which drops what it cannot hold: a collector that is slow or dead is told of in one
line and costs requests nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.telemetry.tracing import NO_SPAN, Attributes, Tracer, TraceSpan
from shared.version import VERSION

_log = structlog.get_logger(__name__)

FLUSH_S = 2.0
"""Longest wait, at the end of a service, for the collector to take what is left."""

_PROPAGATOR = TraceContextTextMapPropagator()


class _Span(TraceSpan):
    """A span that is recorded. One that is not is ``NO_SPAN``."""

    is_recording = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._inside = trace.set_span_in_context(span, Context())

    @property
    def context(self) -> str:
        own = self._span.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}"

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def begin(
        self,
        name: str,
        began_at: float,
        attributes: Attributes | None = None,
        *,
        is_call: bool = False,
    ) -> TraceSpan:
        kind = trace.SpanKind.CLIENT if is_call else trace.SpanKind.INTERNAL
        begun = self._tracer.start_span(
            name, self._inside, kind, attributes, start_time=_wall_ns(began_at)
        )
        return _Span(self._tracer, begun)

    def phase(
        self, name: str, began_at: float, attributes: Attributes | None = None, *, error: str = ""
    ) -> None:
        self.begin(name, began_at, attributes).end(error=error)

    def end(self, *, error: str = "") -> None:
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()


class _Tracer(Tracer):
    def __init__(self, provider: TracerProvider, exporter: OneWarning) -> None:
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("pdmesh", VERSION)

    def request(self, name: str, began_at: float, headers: Mapping[str, str]) -> TraceSpan:
        span = self._tracer.start_span(
            name,
            _PROPAGATOR.extract(headers, Context()),
            trace.SpanKind.SERVER,
            start_time=_wall_ns(began_at),
        )
        return _Span(self._tracer, span) if span.is_recording() else NO_SPAN

    def within(self, context: str) -> TraceSpan:
        if not context:
            return NO_SPAN
        _, trace_id, span_id, flags = context.split("-")
        remote = trace.SpanContext(
            int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16))
        )
        return _Span(self._tracer, trace.NonRecordingSpan(remote))

    async def close(self) -> None:
        """The SDK's own shutdown waits for a dead collector for half a minute."""
        loop, is_closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # nobody waits any more, nor is there a loop
                loop.call_soon_threadsafe(is_closed.set)

        threading.Thread(target=close, name="traces-flush", daemon=True).start()
        try:
            async with asyncio.timeout(FLUSH_S):
                await is_closed.wait()
        except TimeoutError:
            self._exporter.give_up()


class OneWarning(SpanExporter):
    """Says once that the collector is gone, and once that it is back. Runs on the SDK's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._has_failed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        self._note(has_failed=result is not SpanExportResult.SUCCESS)
        return result

    def give_up(self) -> None:
        """The service ends, and what is on its way will not arrive."""
        self._note(has_failed=True)

    def _note(self, *, has_failed: bool) -> None:
        if has_failed == self._has_failed:
            return
        self._has_failed = has_failed
        if has_failed:
            _log.warning("traces lost", reason="the collector does not take them")
        else:
            _log.info("traces are taken again")

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def open_tracer(service: str, instance_id: str) -> Tracer:
    """Return a tracer that exports as the environment says. Raises ValueError: it says nonsense."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, names)), "http/protobuf")
    if protocol != "http/protobuf":
        raise ValueError(f"the OTLP protocol is http/protobuf here, not {protocol}")
    # Each failed export would be a line, with what it was about.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    own = Resource.create(
        {
            "service.name": service,
            "service.instance.id": instance_id,
            "service.version": VERSION,
        }
    )
    provider = TracerProvider(
        resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
    )
    exporter = OneWarning(OTLPSpanExporter())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return _Tracer(provider, exporter)


def _wall_ns(at: float) -> int:
    """Loop time as unix time, in nanoseconds."""
    return time.time_ns() - int((asyncio.get_running_loop().time() - at) * 1e9)
