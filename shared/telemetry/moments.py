"""The turns in one request's life, told by the processes it visits: one debug log line each.

Off unless the process logs at debug level: a moment then costs a log line, and otherwise a
comparison. Every line has the request's id and ``at_s``, the loop's clock. On one Linux machine
that is one clock for all processes (CLOCK_MONOTONIC), so the lines of several processes can be put
in their true order; across machines they cannot. ``pdmesh tour`` reads them. Ids and counts only,
never a word of a prompt or an answer.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any

import structlog

from shared.log import is_debugging

_log = structlog.get_logger(__name__)


class Moment(Enum):
    """In the order of the walk; what overlaps in time is ordered by where the walk goes first."""

    ARRIVED = "arrived"  # the gateway gave the request its id
    PARSED = "parsed"  # its body is a form
    TOKENIZED = "tokenized"  # its prompt is token ids, and within every limit
    ADMITTED = "admitted"  # it has a place in the gateway
    ROUTED = "routed"  # a pair of workers is chosen, from these
    DISPATCHED = "dispatched"  # both legs were sent
    RESERVED = "reserved"  # decode has taken the blocks for it
    QUEUED = "queued"  # prefill has it, and now asks decode to open its transfer
    OPENED = "opened"  # decode met the open with its lease and granted it
    PLANNED = "planned"  # a prefill step is planned, and its span announced
    FRAME_POSTED = "frame posted"  # decode waits for a frame, in a staging slot
    LAYERS_WRITTEN = "layers written"  # KV of so many layers of the span is in prefill's blocks
    FRAME_SENT = "frame sent"  # gathered, and given to the transport
    FRAME_PLACED = "frame placed"  # verified, in decode's blocks, and acknowledged
    SAMPLED = "sampled"  # prefill has token 1
    COMMITTED = "committed"  # prefill now says how many frames there are
    EMITTED = "emitted"  # the gateway let tokens go
    WRITTEN = "written"  # their text is on its way to the client
    JOINED = "joined"  # decode has all KV, and the sequence is in the batch
    ACKNOWLEDGED = "acknowledged"  # prefill knows that decode has all KV
    PREFILL_CLOSED = "prefill closed"  # prefill's blocks are free, or kept as cache
    STEPPED = "stepped"  # a decode step made a token
    DECODE_CLOSED = "decode closed"  # decode's blocks are free, or kept as cache
    ENDED = "ended"  # the gateway's part is over


def note(moment: Moment, request_id: bytes, *, at_s: float | None = None, **facts: Any) -> None:
    """Log one moment of a request, if this process logs at debug level. Call it on the loop, and
    before what tells other processes of it: theirs may run, and note what comes of it, at once.

    at_s: when it was, in loop time; None = now.
    """
    if is_debugging():
        if at_s is None:
            at_s = asyncio.get_running_loop().time()
        _log.debug(moment.value, request_id=request_id.hex(), at_s=at_s, **facts)
