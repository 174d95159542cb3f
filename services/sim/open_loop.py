"""Requests that arrive when they arrive, and what each of them feels on a simulated mesh."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from services.sim.mesh import CoreAnswer, CoreMesh
from shared.errors import InvariantViolated
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.schedule.plan import PromptTimes
from shared.telemetry.definitions import RequestOutcome, Slo

PATIENCE_S: Final = 3600.0
"""How long after the last arrival a mesh may need for what it has."""


LAYER_GROUPS: Final = 4
"""Layers are simulated in so many groups: a frame is an event."""


def simulated_model(name: str, token_bytes: float, max_len: int) -> tuple[ModelSpec, KvLayout]:
    """Return a model of which nothing is known but the size of its KV; it never ends an answer."""
    layout = KvLayout(
        dtype="uint8",
        num_layers=LAYER_GROUPS,
        num_kv_heads=1,
        head_dim=math.ceil(token_bytes / LAYER_GROUPS),
        parts=1,
    )
    spec = ModelSpec(
        name=name,
        fingerprint=hashlib.sha256(name.encode()).digest(),
        vocab_size=1 << 31,
        max_model_len=max_len,
        eos_token_ids=frozenset(),
        dtype="uint8",
        engine="simulated",
    )
    return spec, layout


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. prompt: its token ids; equal beginnings are found in prefix caches."""

    at_s: float
    prompt: tuple[int, ...]
    num_output: int


@dataclass(frozen=True, slots=True)
class SimAnswer:
    """What one request felt. token_times, sent_at (of the last attempt): on the clock of
    ``asked_at``. error: '' or its type. prompt: as its worker told it; None = it never did."""

    asked_at: float
    token_times: tuple[float, ...]
    is_complete: bool
    error: str
    num_attempts: int
    sent_at: float = 0.0
    prompt: PromptTimes | None = None


@dataclass(slots=True)
class RunVerdict:
    """Whether so large a share of requests keeps the limits, known as soon as it cannot come out
    otherwise. attains: None = not yet."""

    slo: Slo
    target: float
    num_requests: int
    num_kept: int = 0
    num_missed: int = 0
    attains: bool | None = None
    _missed: set[int] = field(default_factory=set[int])

    def first_is_due(self, answer: CoreAnswer) -> None:
        """The limit of its first token is over."""
        if not answer.token_times and not answer.is_over:
            self._missed.add(id(answer))
            self._count(kept=False)

    def ended(self, answer: CoreAnswer) -> None:
        """It is over."""
        if id(answer) in self._missed:
            return
        is_whole = answer.error is None
        outcome = RequestOutcome(answer.asked_at, answer.token_times, is_whole)
        self._count(kept=outcome.meets(self.slo))

    def _count(self, *, kept: bool) -> None:
        self.num_kept += kept
        self.num_missed += not kept
        if self.num_kept >= self.target * self.num_requests:
            self.attains = True
        elif self.num_missed > (1 - self.target) * self.num_requests:
            self.attains = False


def run_open_loop(
    mesh: CoreMesh,
    requests: Sequence[SimRequest],
    on_progress: Callable[[int], None] = lambda num_ended: None,
    verdict: RunVerdict | None = None,
) -> list[SimAnswer]:
    """Ask at the times given, whatever comes back, until all has come back, or until the verdict
    that is asked for is known: then answers that are under way are not complete.

    Raises InvariantViolated: a request was lost, or a worker holds something at the end.
    """
    answers: list[CoreAnswer] = []
    start = mesh.clock.now
    if verdict is not None:
        mesh.on_end = verdict.ended

    def ask(request: SimRequest) -> None:
        answer = mesh.ask(
            request.prompt, max_tokens=request.num_output, ignore_eos=True, temperature=0
        )
        answers.append(answer)
        if verdict is not None:
            # A float's width later, so that a token at the limit is in time.
            due_at = math.nextafter(mesh.clock.now + verdict.slo.ttft_s, math.inf)
            mesh.clock.at(due_at, lambda judge=verdict: judge.first_is_due(answer))

    for request in requests:
        mesh.clock.at(start + request.at_s, lambda request=request: ask(request))
    num_ended, num_looks = 0, 0

    def is_over() -> bool:
        nonlocal num_ended, num_looks
        while num_ended < len(answers) and answers[num_ended].is_over:
            num_ended += 1
        num_looks += 1
        if num_looks % 4096 == 0:
            on_progress(num_ended)
        if verdict is not None and verdict.attains is not None:
            return True
        return num_ended == len(requests)

    last_s = requests[-1].at_s if requests else 0.0
    mesh.run(is_over, last_s + PATIENCE_S)
    is_whole = num_ended == len(requests)
    if is_whole:
        mesh.run(lambda: mesh.is_idle, PATIENCE_S)
        mesh.check()
    if is_whole and len(answers) != len(requests):
        raise InvariantViolated(f"{len(requests)} requests were sent, {len(answers)} arrived")
    return [
        SimAnswer(
            answer.asked_at - start,
            tuple(at - start for at in answer.token_times),
            answer.is_over
            and answer.error is None
            and len(answer.token_times) == request.num_output,
            "" if answer.error is None else answer.error.type,
            answer.life.num_attempts,
            answer.sent_at - start,
            answer.computed,
        )
        for answer, request in zip(answers, requests, strict=False)
    ]
