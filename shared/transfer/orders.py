"""What a gateway asks of a worker, as both ends' cores have it: one attempt of a request."""

from __future__ import annotations

from typing import NamedTuple

from shared.ids import Incarnation, StreamId
from shared.request import WorkItem
from shared.transfer.messages import TransferKey


class PrefixAt(NamedTuple):
    """Who has KV of a prompt's first tokens; worth waiting for so many seconds."""

    worker: Incarnation
    num_tokens: int
    wait_s: float


class Order(NamedTuple):
    """One attempt, as its worker is told of it.

    peer: the worker at the other end of its KV; of a prompt None = no KV is pushed. wait_s: how
    long a reservation may wait for blocks. deadline_s: seconds left, None = no limit.
    trace_context: see ``tracing.TraceSpan.context``. prefix: to be fetched before the prompt is
    computed.
    """

    stream_id: StreamId
    key: TransferKey
    item: WorkItem
    peer: Incarnation | None
    deadline_s: float | None = None
    wait_s: float = 0.0
    trace_context: str = ""
    prefix: PrefixAt | None = None
