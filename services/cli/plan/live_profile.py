"""A profile out of what the workers of a running mesh report of their own steps."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from typing import Final

from services.cli.client import CannotRun, RunningGateway
from services.cli.plan.seen import ask_gateway
from services.gateway.http.cluster_bodies import RecentWorker
from services.planner.core.replay import are_unequal, fitted_times
from shared.predict.step_time import StepFit
from shared.profile.step_profile import MOST_ERROR, StepProfile

COMPARED: Final = {"prompts": 256, "answers": 8}
"""Tokens of the step of each kind by which workers are called unequal."""


def profile_of(gateway: RunningGateway) -> tuple[StepProfile, list[str]]:
    """Return the profile, and what a reader must know of it.

    Raises CannotRun, GatewayRefused: there is no gateway, or its workers have not learned enough,
    or predict badly.
    """
    mesh = ask_gateway(gateway)
    model = asyncio.run(gateway.ask("/cluster"))["model"]
    if model is None or not mesh.workers:
        raise CannotRun(f"{gateway.url} has no worker: wait until it is ready")
    notes, machine = list[str](), {"gateway": gateway.url}
    computing = [it for it in mesh.workers if it.kind != "decode"]
    answering = [it for it in mesh.workers if it.kind != "prefill"]
    fits = {
        "prompts": [(it, StepFit(**it.prompt_steps)) for it in computing],  # type: ignore[arg-type]
        "answers": [(it, StepFit(**it.answer_steps)) for it in answering],  # type: ignore[arg-type]
    }
    for kind, told in fits.items():
        num_tokens = COMPARED[kind]
        if are_unequal([fit for _, fit in told], num_tokens, 256 * num_tokens):
            told.sort(key=lambda one: -one[1].num_steps)
            del told[1:]
            notes.append(
                f"workers' steps with {kind} differ by more than a fifth: taken are those of "
                f"{told[0][0].address}, which has run most"
            )
        machine[kind] = _of([worker for worker, _ in told])
    times = fitted_times(*([fit for _, fit in told] for told in fits.values()))
    if times is None:
        raise CannotRun(
            f"no profile: the workers of {gateway.url} have not run enough steps of both kinds to "
            "know how long they take: send some requests (pdmesh bench), and ask again"
        )
    if (error := max(times.prompts.error, times.answers.error)) > MOST_ERROR:
        raise CannotRun(
            f"no profile: half of the workers' predictions are off by {error:.0%} or more, "
            f"{MOST_ERROR:.0%} is the most. Are their machines busy?"
        )
    return (
        StepProfile(
            version=mesh.version,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            machine=machine,
            model=mesh.model,
            fingerprint="",
            dtype="",
            max_model_len=model["max_model_len"],
            token_bytes=mesh.workers[0].token_bytes,
            kv_tokens=min(it.blocks * it.block_size for it in answering),
            prompts=times.prompts,
            answers=times.answers,
        ),
        notes,
    )


def _of(workers: Sequence[RecentWorker]) -> str:
    return f"{workers[0].address}{f' and {len(workers) - 1} more' if workers[1:] else ''}"
