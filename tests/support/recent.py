"""Bodies of ``GET /cluster/requests``: what a gateway would tell of a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from services.planner.core.kv_size import kv_of_bytes
from services.planner.core.mesh_text import read_mesh
from services.planner.core.replay import fitted_times
from services.planner.mesh_run import MeshSetting, UnitModel, run_mesh
from services.sim.open_loop import SimAnswer, SimRequest
from services.sim.orders import WorkerSize
from shared.predict.step_time import StepFit
from shared.telemetry.definitions import Slo

PROMPT_STEPS = StepFit(0.02, 1e-4, 1e-8, 100, 0.01, 0.02)
ANSWER_STEPS = StepFit(0.02, 5e-4, 1e-7, 100, 0.01, 0.02)
KINDS = {"P": "prefill", "D": "decode", "M": "colocated"}
WIRE_S = 0.001
TOKEN_BYTES = 4096
NUM_BLOCKS = 2048
AGE_S = 30.0
"""Between the first request and the gateway's begin."""


def recent(
    mesh: str = "1P+1D",
    *,
    num: int = 60,
    rate: float = 6.0,
    slower: float = 1.0,
    batch_tokens: int = 0,
    max_running: int = 256,
    moves: bool = False,
    **facts: Any,
) -> dict[str, Any]:
    """What a gateway tells after ``num`` requests at an even rate, every third of which begins as
    the one before it. slower: factor of what workers really took beside what they report.
    batch_tokens: up to so many, prompts share a step, 0 = as many as it holds. max_running: most
    sequences of a step. moves: prefill and decode workers may be either, and are borrowed."""
    prompts: list[tuple[int, ...]] = []
    for number in range(num):
        own = (1000 + number,) * (200 + 7 * (number % 30))
        prompts.append(prompts[-1][:160] + own if number % 3 == 2 else own)
    requests = [
        SimRequest(number / rate, prompt, 5 + number % 20) for number, prompt in enumerate(prompts)
    ]
    answers = _run(mesh, requests, slower, batch_tokens, max_running, moves=moves)
    shape = read_mesh(mesh)
    kinds = [KINDS[part.kind] for part in shape.parts for _ in range(part.num)]
    return {
        "version": "1",
        "now_s": round(AGE_S + requests[-1].at_s + 30.0, 6),
        "model": "m",
        "policy": "splitwise" if moves else "least_loaded",
        "decides": True,
        "handover_s": {"pair": 2 * WIRE_S, "colocated": 2 * WIRE_S},
        "link_bytes_s": 1e9,
        "workers": [
            {**_worker(number, kind, batch_tokens, max_running), "moves": moves}
            for number, kind in enumerate(kinds, 1)
        ],
        "requests": [
            _request(number, answer, request)
            for number, (answer, request) in enumerate(zip(answers, requests, strict=True))
        ],
        **facts,
    }


def _run(
    mesh: str,
    requests: Sequence[SimRequest],
    slower: float,
    batch_tokens: int,
    max_running: int,
    *,
    moves: bool,
) -> Sequence[SimAnswer]:
    prompts, answers = (
        StepFit(*(value * slower for value in fit[:3]), fit.num_steps)
        for fit in (PROMPT_STEPS, ANSWER_STEPS)
    )
    times = fitted_times([prompts], [answers])
    assert times is not None
    model: Callable[[object], UnitModel] = lambda _: UnitModel(times, NUM_BLOCKS * 16)  # noqa: E731
    setting = MeshSetting(
        unit=model,
        kv=kv_of_bytes("m", TOKEN_BYTES),
        slo=Slo(1.0, 0.1),
        target=1.0,
        policy="splitwise" if moves else "least_loaded",
        borrowed="PD" if moves else "M",
        size=WorkerSize(max_running=max_running, link_bytes_s=1e9, batch_tokens=batch_tokens),
        token_budget=0 if moves or "M" in mesh else 2048,
        wire_s=WIRE_S,
    )
    return run_mesh(setting, read_mesh(mesh), requests, 1.0).answers


def _worker(number: int, kind: str, batch_tokens: int, max_running: int) -> dict[str, Any]:
    return {
        "incarnation": f"{number:016x}",
        "address": f"10.0.0.{number}:1",
        "kind": kind,
        "moves": False,
        "draining": False,
        "age_s": 0.1,
        "held": 0,
        "queue_s": 0.0,
        "prompt_steps": PROMPT_STEPS._asdict(),
        "answer_steps": ANSWER_STEPS._asdict(),
        "blocks": NUM_BLOCKS,
        "block_size": 16,
        "step_tokens": 2048,
        "batch_tokens": batch_tokens,
        "max_running": max_running,
        "token_bytes": TOKEN_BYTES,
        "taken": 0,
    }


def _request(number: int, answer: SimAnswer, request: SimRequest) -> dict[str, Any]:
    times, told = answer.token_times, answer.prompt
    assert told is not None
    ttft_s, num = times[0] - answer.arrived_at, len(times)
    queue_s = answer.sent_at - answer.arrived_at
    receipt = {
        "queue_s": queue_s,
        "route_s": 0.0,
        "retry_s": 0.0,
        "prefill_queue_s": told.queue_s,
        "prefill_s": told.compute_s,
        "handover_s": ttft_s - queue_s - told.queue_s - told.compute_s,
        "ttft_s": ttft_s,
        "first_step_s": times[1] - times[0],
        "tpot_s": (times[-1] - times[0]) / (num - 1),
        "e2e_s": times[-1] - answer.arrived_at,
        "prefill": f"{1:016x}",
        "decode": f"{2:016x}",
        "attempts": 1,
        "cached_tokens": told.cached_tokens,
        "prompt_tokens": len(request.prompt),
        "output_tokens": num,
        "errors": [],
    }
    return {
        "request_id": f"{number:032x}",
        "arrived_s": AGE_S + answer.arrived_at,
        "ended": True,
        "error": "",
        "receipt": receipt,
    }
