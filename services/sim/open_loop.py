"""Requests that arrive when they arrive, and what each of them feels on a simulated mesh."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.gateway.core.admission.tenants import Terms
from services.sim.mesh import ANY, CoreAnswer, CoreMesh
from shared.errors import InvariantViolated
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.schedule.plan import PromptTimes
from shared.telemetry.definitions import RequestOutcome

PATIENCE_S: Final = 3600.0
"""How long a mesh may have requests and compute nothing, until they count as lost."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimAnswer(RequestOutcome):
    """What one request felt. error: '' or its code, or type. num_prompt: its tokens. sent_at: of
    the last attempt. prompt: as its worker told it; None = it never did."""

    error: str
    num_prompt: int
    num_attempts: int
    sent_at: float
    prompt: PromptTimes | None


def run_open_loop(
    mesh: CoreMesh,
    requests: Sequence[SimRequest],
    on_progress: Callable[[int], None] = lambda num_ended: None,
    terms: Terms = ANY,
) -> list[SimAnswer]:
    """Ask at the times given, whatever comes back, until all has come back. terms: of each.

    Raises InvariantViolated: a request was lost, or a worker holds something at the end.
    """
    num_requests = len(requests)
    felt: list[SimAnswer | None] = [None] * num_requests
    under_way: dict[CoreAnswer, tuple[int, int]] = {}
    start, num_ended, num_looks = mesh.clock.now, 0, 0
    num_steps, moved_at = 0, start

    def ended(answer: CoreAnswer) -> None:
        nonlocal num_ended
        idx, num_output = under_way.pop(answer)
        felt[idx] = _felt(answer, num_output, start)
        num_ended += 1

    mesh.on_end = ended

    def arrive(idx: int, request: SimRequest) -> None:
        """One comes, and the next is waited for: of a million, one by one."""
        wait_for(idx + 1)
        answer = mesh.new_answer(
            request.prompt, max_tokens=request.num_output, ignore_eos=True, temperature=0
        )
        under_way[answer] = idx, request.num_output
        mesh.admit(answer, terms)

    def wait_for(idx: int) -> None:
        if idx < num_requests:
            request = requests[idx]
            mesh.clock.arrive(start + request.at_s, lambda: arrive(idx, request))

    wait_for(0)

    def look() -> None:
        nonlocal num_steps, moved_at
        on_progress(num_ended)
        num_done = sum(member.core.work.num_steps for member in mesh.members.values())
        # An overloaded mesh takes long, and computes: only where nobody does is something wrong.
        if num_done != num_steps or not under_way:
            num_steps, moved_at = num_done, mesh.clock.now
        elif mesh.clock.now > moved_at + PATIENCE_S:
            raise InvariantViolated(
                f"{len(under_way)} requests wait, and for {PATIENCE_S:g} simulated seconds no step "
                "has ended: does one step, or one transfer, take so long?"
            )

    def is_over() -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks % 4096 == 0:
            look()
        return num_ended == num_requests

    mesh.run(is_over, math.inf)
    mesh.run(lambda: mesh.is_idle, PATIENCE_S)
    mesh.check()
    return [answer for answer in felt if answer is not None]


def _felt(answer: CoreAnswer, num_output: int, start: float) -> SimAnswer:
    has_all = len(answer.token_times) == num_output
    return SimAnswer(
        answer.asked_at - start,
        answer.token_times.count_from(start),
        answer.error is None and has_all,
        error="" if answer.error is None else answer.error.code or answer.error.type,
        num_prompt=len(answer.prompt),
        num_attempts=answer.life.num_attempts,
        sent_at=answer.sent_at - start,
        prompt=answer.computed,
    )
