"""A collector of traces that listens on a real socket and speaks OTLP over HTTP, as an operator's
would; and what tests ask of the traces that it got."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

ARRIVES_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class CollectedSpan:
    """One span. Times: unix nanoseconds. error: its ``error.type`` if its status says error."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, object]
    error: str


@dataclass
class Collector:
    """Made by ``otlp_collector``. endpoint: for ``OTEL_EXPORTER_OTLP_ENDPOINT``. received: every
    byte of every request, one after the other. is_silent: it takes requests and never answers."""

    endpoint: str = ""
    is_silent: bool = False
    spans: list[CollectedSpan] = field(default_factory=list)
    received: bytearray = field(default_factory=bytearray)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, request: web.Request) -> web.Response:
        """POST /v1/traces."""
        assert request.content_type == "application/x-protobuf"
        body = await request.read()
        if self.is_silent:
            await asyncio.get_running_loop().create_future()
        self.received += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {item.key: _value(item.value) for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {item.key: _value(item.value) for item in span.attributes}
                    is_error = span.status.code == Status.STATUS_CODE_ERROR
                    self.spans.append(
                        CollectedSpan(
                            service=str(about["service.name"]),
                            instance=str(about["service.instance.id"]),
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            began_ns=span.start_time_unix_nano,
                            ended_ns=span.end_time_unix_nano,
                            attributes=attributes,
                            error=str(attributes["error.type"]) if is_error else "",
                        )
                    )
        self.changed.set()
        self.changed = asyncio.Event()
        return web.Response()

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        """The spans of one trace, in the order in which they began."""
        found = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(found, key=lambda span: span.began_ns)

    def named(self, trace_id: str) -> dict[str, CollectedSpan]:
        """The spans of one trace by their names; of several the last."""
        return {span.name: span for span in self.trace(trace_id)}

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until what has arrived meets a condition."""
        async with asyncio.timeout(ARRIVES_WITHIN_S):
            while not is_so():
                await self.changed.wait()


def _value(value: object) -> object:
    kind = value.WhichOneof("value")  # type: ignore[attr-defined]
    found = getattr(value, kind)
    return tuple(_value(item) for item in found.values) if kind == "array_value" else found


@contextlib.asynccontextmanager
async def otlp_collector() -> AsyncGenerator[Collector]:
    """Listen for the length of the block."""
    collector = Collector()
    app = web.Application(client_max_size=64 << 20)
    app.add_routes([web.post("/v1/traces", collector.take)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        collector.endpoint = f"http://127.0.0.1:{port}"
        yield collector
    finally:
        await runner.cleanup()
