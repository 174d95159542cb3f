"""The seam inside the gateway: what its client side (HTTP, gRPC) may ask of its mesh side (sessions
with workers).

Above this page there is text, JSON and people; below it there are token ids, workers and attempts.
Neither side knows the other's words: no HTTP, no protobuf and no tokenizer here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.ids import RequestId
from shared.request import AnswerToken, SamplingParams
from shared.telemetry.tracing import NO_SPAN, TraceSpan
from shared.tenants import NOTHING_ASKED, Asked


@dataclass(slots=True, kw_only=True)  # frozen costs three times as much to make
class GenerationRequest:
    """One answer to generate; ``n > 1`` and lists of prompts are fanned out above this seam.

    label: for logs only, already checked. deadline_at, arrived_at: loop time; ``arrived_at`` is
    when the request's bytes arrived, so that TTFT counts parsing and tokenizing too. cache_salt:
    keys the prefix cache (tenant). span: of the call that asks for it. asked: tenant, priority and
    limits. follows: the first answer of the same request, which was admitted before this one is
    asked for; empty = this is the first.
    """

    request_id: RequestId
    label: str
    token_ids: tuple[int, ...] = field(repr=False)
    sampling: SamplingParams
    deadline_at: float | None
    cache_salt: bytes
    arrived_at: float
    span: TraceSpan = field(default=NO_SPAN, repr=False)
    asked: Asked = NOTHING_ASKED
    follows: bytes = b""


Tokens = Sequence[AnswerToken]
"""Tokens that arrived together, at least one, in order and without gaps: the next ones start where
these end. Only an answer's last token has a finish reason (it may be the end-of-sequence or a stop
token)."""


Take = Callable[[Tokens], bool]
"""Takes tokens of an answer as they arrive, at once; returns whether who waits for the answer is to
be woken."""


class Generation(Protocol):
    """A running answer. Its tokens go to the ``Take`` that it was begun with, in order.

    After a token with a finish reason nothing follows; an answer that has none fails with one
    MeshError, never silently. A consumer that is slow holds back nobody else: it keeps what it
    takes, which ``max_tokens`` bounds.
    """

    async def wait(self) -> bool:
        """Wait until ``Take`` wants it: True, or the answer is over: False. Somebody must wait all
        the time: in this call the answer is sent to another pair of workers when one has failed.

        Raises MeshError, from then on: the answer failed. What ``Take`` raised comes out, too, and
        it gets no more.
        """
        ...

    @property
    def first_token_at(self) -> float | None:
        """Loop time at which the first token arrived; None = not yet."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was not computed; final once the first token has arrived."""
        ...

    def receipt(self) -> dict[str, Any]:
        """Where the time went, JSON-ready; complete after the end."""
        ...


@dataclass(slots=True, kw_only=True)  # frozen costs three times as much to make
class ServedModel:
    """The one model of this mesh. max_model_len: prompt plus generated tokens. created: unix
    seconds."""

    name: str
    vocab_size: int
    max_model_len: int
    created: int


class Mesh(Protocol):
    """All workers together, as one thing that continues token lists."""

    @property
    def model(self) -> ServedModel | None:
        """What is served; None while no worker has said so yet."""
        ...

    async def wait_for_model(self, deadline_at: float | None) -> ServedModel:
        """Return what is served, once a worker has said so: waited for as long as for a pair.

        Raises Overloaded: none has in time, or too many wait. ShuttingDown.
        """
        ...

    @property
    def is_ready(self) -> bool:
        """Whether a request would be admitted now, load aside."""
        ...

    @property
    def not_ready_reason(self) -> str:
        """One sentence, empty when ready."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether nothing new is taken any more, because this process ends."""
        ...

    def cluster(self) -> dict[str, Any]:
        """Return workers, load and the last minute's traffic, JSON-ready: see ``cluster.py``."""
        ...

    def recent(self) -> dict[str, Any]:
        """Return the last requests as receipts, and the mesh that they met, JSON-ready: see
        ``cluster.py``."""
        ...

    def explain(self, request_id: str) -> dict[str, Any]:
        """Return why one of the last requests went where it went, JSON-ready: the record of each
        attempt's decision, which can be replayed (``core/routing``), and its receipt.

        request_id: of its answer, or what x-request-id said.
        Raises InvalidRequest: it is none. NotFound: it is not remembered here.
        """
        ...

    async def change_role(self, worker: str, role: str) -> dict[str, Any]:
        """Have a worker change what it is when nothing is asked of it; nothing it has in hand is
        touched. Returns the worker as ``cluster`` tells of it.

        worker: its incarnation as ``cluster`` writes it. role: prompt or token.
        Raises NotFound, InvalidRequest (with the remedy), WorkerLost, DeadlinePassed.
        """
        ...

    def generate(
        self, request: GenerationRequest, take: Take
    ) -> AbstractAsyncContextManager[Generation]:
        """Admit and dispatch on entry; leaving early (break, cancel, error) cancels everywhere.
        What follows an admitted answer is never refused for load or a limit of its own.

        Raises on entry: Overloaded, WouldBeLate, ShuttingDown, DeadlinePassed, WorkerLost,
        InvalidRequest (a priority above its tenant's). Expects a
        validated request: ids below the vocabulary size, prompt plus ``max_tokens`` within
        ``max_model_len``.
        """
        ...
