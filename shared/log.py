"""Logs: one line an event, JSON for machines or pretty for people, on stderr.

Only fields on the allow-list leave the process, so that no prompt, output, key or header can slip
into a log by a careless call; control characters are escaped, so that a client cannot forge lines.
Use ``structlog.get_logger(__name__)`` everywhere; this module only sets it up. The one exception is
``log_often``, for the line that every request writes. No line waits for who reads the log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO, cast

import orjson
import structlog

from shared.unblocked import UnblockedText

Event = MutableMapping[str, Any]

MAX_TEXT = 2000
"""Longest text of one field; tracebacks are cut from the front, their end says more."""

_RECORD_FIELDS = frozenset({"event", "level", "timestamp", "logger", "exception", "stack"})

ALLOWED_FIELDS = frozenset({
    # who (``key``: the name of an API key)
    "service", "version", "pid", "incarnation", "peer", "gateway", "worker", "prefill", "decode",
    "role", "address", "host", "port", "http_port", "grpc_port", "mesh_port", "mesh_ports",
    "metrics_port", "metrics_address", "addresses", "key", "number",
    # which request
    "request_id", "label", "attempt", "stream_id", "transfer_id", "epoch", "route", "method",
    "status", "model", "endpoint",
    # what and why
    "error", "error_type", "reason", "code", "param", "phase", "state", "signal", "failpoint",
    "finish_reason", "policy", "decision", "outcome", "type", "device", "dtype", "engine",
    "lane", "mode", "transport", "is_cancelled", "is_streaming", "ok", "stored",
    "kernels", "answers", "task", "home", "asked", "tier", "order", "compose",
    # how many, how long
    "prompt_tokens", "completion_tokens", "output_tokens", "cached_tokens", "num_requests",
    "num_running", "num_waiting", "num_blocks", "free_blocks", "block_size", "num_peers", "part",
    "num_workers", "num_frames", "num_layers", "num_restarts", "num_bytes", "body_bytes", "count",
    "limit", "lag_s", "seconds", "limit_s", "wait_s", "queue_s", "silence_s", "step_s", "drain_s",
    "uptime_s", "retry_after_s", "ttft_s", "gb_per_s", "mbytes_per_s",
    # what a machine can do
    "file", "other", "saturating_tokens", "tokens_per_s", "message_us", "interference",
    # a GPU's memory, and the steps recorded on it
    "total", "free", "held", "step", "graphs", "staging", "num_rows", "done", "of", "sizes",
    # the one line of a request
    "receipts", "trace_id",
    # predictions that do not come true
    "error_p50", "more_than", "for_s",
    # a moment of a request (telemetry/moments.py): when, and which tokens, layers and frame
    "at_s", "start", "stop", "index", "num_tokens", "frame_idx", "slot", "first_layer",
    "last_layer",
})  # fmt: skip
"""Fields that may be logged. A new one is added here on purpose; none may hold a client's text."""


_is_debugging = False
_is_informing = True
_often: _OftenLines | None = None


def is_debugging() -> bool:
    """Whether debug lines are logged: ask before collecting what only they need."""
    return _is_debugging


def is_informing() -> bool:
    """Whether info lines are logged: ask before collecting what only they need."""
    return _is_informing


def _allow_only(_logger: Any, _name: str, event: Event) -> Event:
    refused = [name for name in event if name not in ALLOWED_FIELDS and name not in _RECORD_FIELDS]
    for name in refused:
        del event[name]
    if refused:
        event["refused_fields"] = ",".join(sorted(refused))
    return event


def _safe(value: Any) -> Any:
    if isinstance(value, str):
        text = value if len(value) <= MAX_TEXT else f"…{value[-MAX_TEXT:]}"
        if text.isprintable():  # nearly all, and a receipt has a thousand characters
            return text
        return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    if isinstance(value, Mapping):
        return {str(_safe(str(key))): _safe(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, (list, tuple)):
        return [_safe(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(1 << 53) < value < (1 << 53) else f"{value:016x}"
    if isinstance(value, bytes):
        return value.hex()[:64]
    return _safe(str(value))


def _escape(_logger: Any, _name: str, event: Event) -> Event:
    for name, value in event.items():
        event[name] = _safe(value)
    return event


def _dump(value: Any, **_options: Any) -> str:
    return orjson.dumps(value, default=str).decode()


class _OftenLines:
    """Renders the JSON of ``log_often``. processors: the chain of structlog whose work is done
    here."""

    def __init__(self, service: str, out: UnblockedText, processors: list[Any]) -> None:
        self._service = service
        self._out = out
        self._processors = processors
        self._renderer = processors[-1]

    @property
    def is_current(self) -> bool:
        """Whether structlog would still render lines as this does: tests put other chains there."""
        chain = structlog.get_config()["processors"]
        return chain is self._processors and chain[-1] is self._renderer

    def add(self, event: str, fields: dict[str, Any]) -> bool:
        """Take a line; False: it has a character that must be escaped."""
        at = f"{datetime.now(UTC).isoformat()[:-6]}Z"
        record = {"event": event, "level": "info", "service": self._service, "timestamp": at}
        line = _dump({**record, **fields})
        if not line.isprintable():
            return False
        self._out.gather(line)
        return True


def _tell_lost(num_lines: int) -> None:
    structlog.get_logger(__name__).warning("log lines lost", count=num_lines)


def log_often(event: str, **fields: Any) -> None:
    """Log, at info level, what happens with every request: for a twentieth of what a line costs
    otherwise, and some time later.

    fields: on the allow-list (a test looks), and of JSON's types.
    """
    if _often is None or not _often.is_current or not _often.add(event, fields):
        structlog.get_logger(__name__).info(event, **fields)


class _Handler(logging.Handler):
    """Brings the libraries' own records (grpclib, aiohttp, asyncio) into the same lines."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = structlog.get_logger(record.name)
        logger.log(record.levelno, record.getMessage(), exc_info=record.exc_info or None)


def configure_logs(
    *,
    service: str,
    level: str = "info",
    form: str = "auto",
    stream: TextIO | None = None,
) -> None:
    """Set logging up for this process; call it once, first.

    service: stands in every line. level: debug, info, warning or error. form: json, pretty, or
    auto = pretty on a terminal. stream: stderr by default.
    """
    global _is_debugging, _is_informing, _often
    out = UnblockedText(stream if stream is not None else sys.stderr, _tell_lost)
    number = logging.getLevelNamesMapping()[level.upper()]
    _is_debugging = number <= logging.DEBUG
    _is_informing = number <= logging.INFO
    is_pretty = form == "pretty" or (form == "auto" and out.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=out.isatty(), pad_event_to=36)
        if is_pretty
        else structlog.processors.JSONRenderer(serializer=_dump)
    )

    def add_service(_logger: Any, _name: str, event: Event) -> Event:
        event["service"] = service
        return event

    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        add_service,
        structlog.processors.format_exc_info,
        _allow_only,
        _escape,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        renderer,
    ]
    _often = None if is_pretty or not _is_informing else _OftenLines(service, out, processors)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # One write a line, so that lines of processes that share a file do not mix.
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", out)),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_Handler()]
    root.setLevel(max(number, logging.WARNING))
