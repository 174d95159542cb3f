"""Traces: one span a phase, across the three services; here is the seam, and what costs nothing.

A gateway begins a request's span and one for each attempt; the text form of an attempt's context
travels to its workers with their orders, and they report their phases under it when those are over.
Only what a gateway decided to sample travels, so a worker without a context has nothing to do.

Whether anything is exported is for the standard ``OTEL_*`` variables to say (``trace_export.py``);
the library behind it is in ``otel.py``, imported only then. Knows no request and no service, and
never sees a client's text: attributes are ids, counts, names of ours and error types.
"""

from __future__ import annotations

from collections.abc import Mapping

Value = str | int | float | bool | tuple[str, ...]
Attributes = Mapping[str, Value]

CANCELLED = "cancelled"
"""The error of a span whose work was given up by the client; others are types of ``MeshError``."""


class TraceSpan:
    """Work in progress; this one records nothing, ``otel.py`` has the one that does.

    Nothing here waits or raises; after ``end`` all but ``context`` is void.
    """

    is_recording: bool = False
    """Whether it is worth while to collect attributes."""

    @property
    def context(self) -> str:
        """What another process needs to add to it: a W3C ``traceparent``; '' if nobody shall."""
        return ""

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""

    def begin(
        self,
        name: str,
        began_at: float,
        attributes: Attributes | None = None,
        *,
        is_call: bool = False,
    ) -> TraceSpan:
        """Begin a part of it. began_at: loop time. is_call: it is what others do for us."""
        return self

    def phase(
        self, name: str, began_at: float, attributes: Attributes | None = None, *, error: str = ""
    ) -> None:
        """Report a part of it that ends now. began_at: loop time. error: type of what ended it."""

    def end(self, *, error: str = "") -> None:
        """End it. error: type of what ended it, '' if all went well."""


class Tracer:
    """One service's way to its traces; this one has none. Nothing but ``close`` waits, and nothing
    raises."""

    def request(self, name: str, began_at: float, headers: Mapping[str, str]) -> TraceSpan:
        """Begin what a client asked for, under the client's own ``traceparent`` if it sent one."""
        return NO_SPAN

    def within(self, context: str) -> TraceSpan:
        """Return another process's span, to report phases under; '' = one that records nothing.

        context: a ``TraceSpan.context``, checked where it was received.
        """
        return NO_SPAN

    async def close(self) -> None:
        """Hand over what is left, for a bounded while."""


NO_SPAN = TraceSpan()
NO_TRACER = Tracer()


class Phases:
    """Parts of a span that follow each other without a gap. name: of the first one."""

    __slots__ = ("_began_at", "_name", "_span")

    def __init__(self, span: TraceSpan, name: str, began_at: float) -> None:
        self._span = span
        self._name = name
        self._began_at = began_at

    def turn(self, name: str, now: float, attributes: Attributes | None = None) -> None:
        """End the running phase, with these attributes, and begin the next."""
        self._span.phase(self._name, self._began_at, attributes)
        self._name, self._began_at = name, now

    def end(self, attributes: Attributes | None = None, *, error: str = "") -> None:
        """End the running phase; nothing follows. Idempotent: the first end counts.

        error: type of what ended it. A worker cannot know whether whoever cancelled had enough or
        gave up, so ``CANCELLED`` is an attribute here and no error.
        """
        if not self._name:
            return
        if error == CANCELLED:
            attributes, error = {**(attributes or {}), "pdmesh.cancelled": True}, ""
        self._span.phase(self._name, self._began_at, attributes, error=error)
        self._name = ""
