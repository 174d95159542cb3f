"""A mesh that says what a test tells it to: the gateway's client side without workers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from tokenizers import Tokenizer

from services.gateway.core.admission.admission import AdmissionStatistics
from services.gateway.core.routing.expectations import Expectations
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.window import LastMinute
from services.gateway.front.auth import KeyRing
from services.gateway.front.frontdoor import ClientMetrics, FrontDoor
from services.gateway.http.door import serve_http
from services.gateway.mesh import Generation, GenerationRequest, ServedModel, Take, Tokens
from services.gateway.text.text_model import TextModel
from services.gateway.workers.cluster import cluster_body
from shared.address import Address
from shared.config import GatewayConfig
from shared.errors import MeshError, NotFound, Overloaded
from shared.ids import Incarnation
from shared.request import AnswerToken, FinishReason, TokenLogprobs
from shared.rpc.tls import ServerTls
from tests.support.answer_tokens import answer_tokens
from tests.support.tiny_tokenizer import (
    EOS,
    NUM_TOKENS,
    VOCAB_SIZE,
    tiny_text_model,
    tiny_tokenizer,
)

Script = Callable[[GenerationRequest], AsyncGenerator[Tokens]]

MODEL = ServedModel(name="tiny", vocab_size=VOCAB_SIZE, max_model_len=512, created=1_700_000_000)


class ScriptedGeneration:
    """One scripted answer."""

    def __init__(
        self,
        request: GenerationRequest,
        take: Take,
        arrivals: AsyncGenerator[Tokens],
        receipt: dict[str, Any],
    ) -> None:
        self._num_prompt_tokens = len(request.token_ids)
        self._arrivals = arrivals
        self._receipt = receipt
        self._take: Take | None = take
        self._failure: MeshError | None = None
        self.is_over = False

    async def wait(self) -> bool:
        if self._failure is not None:
            raise self._failure
        try:
            async for tokens in self._arrivals:
                if self._take is not None and self._take(tokens):
                    return True
        except MeshError as failure:
            self._failure = failure
            raise
        return False

    def leave(self) -> None:
        """Forget the consumer, as a real mesh does, for the consumer knows this one."""
        self._take = None

    @property
    def first_token_at(self) -> float | None:
        """A script has no clock."""
        return None

    @property
    def cached_tokens(self) -> int:
        return self._num_prompt_tokens // 2

    def receipt(self) -> dict[str, Any]:
        return {**self._receipt, "is_over": self.is_over}


class ScriptedMesh:
    """Plays ``script`` for every request; ``refusal`` is raised instead, if set."""

    def __init__(self, script: Script | None = None, *, model: ServedModel | None = MODEL) -> None:
        self.script = script or saying("hello and the end")
        self.model = model
        self.not_ready_reason = "" if model is not None else "no worker has joined yet"
        self.is_draining = False
        self.refusal: Exception | None = None
        self.receipt: dict[str, Any] = {"ttft_s": 0.5}
        self.requests: list[GenerationRequest] = []
        self.num_running = 0
        self._changed = asyncio.Event()

    async def wait_for_model(self, deadline_at: float | None) -> ServedModel:
        raise Overloaded(self.not_ready_reason, code="not_ready", retry_after_s=1.0)

    @property
    def is_ready(self) -> bool:
        return not self.not_ready_reason

    async def change_role(self, worker: str, role: str) -> dict[str, Any]:
        raise NotFound(f"no worker {worker} is in the mesh", param="worker", code="no_worker")

    def explain(self, request_id: str) -> dict[str, Any]:
        raise NotFound(f"no request {request_id}", param="request_id", code="no_request")

    def recent(self) -> dict[str, Any]:
        return {
            "now_s": 1.0,
            "model": "" if self.model is None else self.model.name,
            "policy": "least_loaded",
            "decides": True,
            "handover_s": {"pair": 0.0, "colocated": 0.0},
            "link_bytes_s": 0.0,
            "workers": [],
            "requests": [],
        }

    def cluster(self) -> dict[str, Any]:
        return cluster_body(
            incarnation=Incarnation(1),
            not_ready_reason=self.not_ready_reason,
            uptime_s=1.0,
            model=self.model,
            table=PeerTable(),
            expectations=Expectations(),
            prefixes=None,
            now=1.0,
            counts=AdmissionStatistics(self.num_running, 0),
            summary=LastMinute(0.0).summary(1.0),
        )

    @asynccontextmanager
    async def generate(self, request: GenerationRequest, take: Take) -> AsyncGenerator[Generation]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        self._count(1)
        try:
            async with aclosing(self.script(request)) as arrivals:
                generation = ScriptedGeneration(request, take, arrivals, self.receipt)
                try:
                    yield generation
                finally:
                    generation.leave()
            generation.is_over = True
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.num_running += change
        self._changed.set()

    async def wait_running(self, count: int) -> None:
        """Wait until exactly this many generations run."""
        while self.num_running != count:
            self._changed.clear()
            await self._changed.wait()


def saying(
    text: str,
    *,
    per_batch: int = 3,
    gate: asyncio.Semaphore | None = None,
    tokenizer: Tokenizer | None = None,
) -> Script:
    """Return a script that answers with this text and ends with the end-of-sequence token.

    gate: taken once a batch, so that a test decides when tokens arrive.
    """
    tokenizer = tokenizer or tiny_tokenizer()
    token_ids = [*tokenizer.encode(text, add_special_tokens=False).ids, EOS]

    async def script(request: GenerationRequest) -> AsyncGenerator[Tokens]:
        sampling = request.sampling
        ids = token_ids[: sampling.max_tokens]
        last = FinishReason.STOP if len(ids) == len(token_ids) else FinishReason.LENGTH
        for start in range(0, len(ids), per_batch):
            if gate is not None:
                await gate.acquire()
            stop = min(start + per_batch, len(ids))
            yield [
                AnswerToken(
                    index,
                    ids[index],
                    last if index == len(ids) - 1 else FinishReason.NONE,
                    _logprobs(ids[index], sampling.logprobs),
                    _prompt_logprobs(request) if index == 0 else None,
                )
                for index in range(start, stop)
            ]

    return script


def failing_after(text: str, error: Exception) -> Script:
    """Return a script that says the text and then fails."""
    ids = tiny_tokenizer().encode(text, add_special_tokens=False).ids

    async def script(_: GenerationRequest) -> AsyncGenerator[Tokens]:
        if ids:
            yield answer_tokens(ids)
        raise error

    return script


def _logprobs(token_id: int, num_top: int | None) -> TokenLogprobs | None:
    return None if num_top is None else _entry(token_id, num_top)


def _entry(token_id: int, num_top: int) -> TokenLogprobs:
    top = tuple(((token_id + rank) % NUM_TOKENS, -0.25 - rank) for rank in range(num_top))
    return TokenLogprobs(-0.25, top)


def _prompt_logprobs(request: GenerationRequest) -> tuple[TokenLogprobs, ...] | None:
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return None
    rest = [_entry(token_id, num_top) for token_id in request.token_ids[1:]]
    return (TokenLogprobs(float("nan")), *rest)


def front_door(
    mesh: ScriptedMesh,
    *,
    text: TextModel | None = None,
    keys: KeyRing | None = None,
    stall_s: float = 10.0,
    **settings: Any,
) -> FrontDoor:
    """Return a front door with random bytes from a fixed seed. settings: of its gateway."""
    return FrontDoor(
        GatewayConfig(**{"request_timeout_s": 0.0, **settings}),
        mesh=mesh,
        text=text or tiny_text_model(),
        random_bytes=random.Random(7).randbytes,
        metrics=ClientMetrics(),
        keys=keys or KeyRing(),
        defaults={},
        stall_s=stall_s,
    )


@asynccontextmanager
async def http_gateway(
    mesh: ScriptedMesh,
    keys: KeyRing | None = None,
    *,
    tls: ServerTls | None = None,
    origins: frozenset[str] = frozenset(),
    **options: Any,
) -> AsyncGenerator[str]:
    """Serve a scripted mesh over HTTP on a free port; gives the base URL. options: of its front
    door."""
    front = front_door(mesh, keys=keys, **options)
    try:
        here = Address("127.0.0.1", 0)
        async with serve_http(front, here, drain_s=5, tls=tls, origins=origins) as address:
            yield f"{'https' if tls else 'http'}://{address}"
    finally:
        front.text.close()
