"""Whether a service's traces go anywhere: the standard ``OTEL_*`` variables say it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

import structlog

from shared.telemetry.tracing import NO_TRACER, Tracer

_log = structlog.get_logger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Return whether the ``OTEL_*`` variables ask for traces: an OTLP endpoint is named, and
    nothing turns the SDK or its exporter off."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "").strip() not in ("", "otlp"):
        return False
    return any(environment.get(name, "").strip() for name in ENDPOINTS)


@asynccontextmanager
async def tracing(service: str, incarnation: int) -> AsyncGenerator[Tracer]:
    """Trace for the length of the block, if the environment asks for it; flush at its end.

    service: the name that traces show, unless the environment gives another. A service whose traces
    cannot be had says so once and serves without them.
    """
    tracer = _open(service, incarnation)
    try:
        yield tracer
    finally:
        await tracer.close()


def _open(service: str, incarnation: int) -> Tracer:
    if not is_wanted(os.environ):
        return NO_TRACER
    try:
        from shared.telemetry.otel import open_tracer
    except ImportError as error:
        reason = f"OpenTelemetry is not installed ({error}): pip install 'pdmesh[otel]'"
        _log.warning("no traces", reason=reason)
        return NO_TRACER
    try:
        return open_tracer(service, f"{incarnation:016x}")
    except Exception as error:
        _log.warning("no traces", reason=f"the OTEL_* variables are wrong: {error}")
        return NO_TRACER
