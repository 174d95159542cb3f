"""Meshes of workers with pipeline stages, against the closed form of a pipeline."""

from __future__ import annotations

import random

import pytest

from services.planner.core.fetch import pipeline_makespan
from services.planner.core.kv_size import kv_of_bytes
from services.planner.core.mesh_text import read_mesh
from services.planner.mesh_run import MeshSetting, UnitModel, run_mesh
from services.sim.open_loop import SimRequest
from services.sim.orders import WorkerSize
from shared.predict.times import AffineTimes
from shared.telemetry.definitions import Slo

TIMES = AffineTimes(base_s=0.01, prompt_token_s=1e-4, decode_row_s=1e-3, context_token_s=0.0)
SETTING = MeshSetting(
    unit=lambda unit: UnitModel(TIMES, 1 << 20),
    kv=kv_of_bytes("m", 1.0),
    slo=Slo(1e3, 1e3),
    target=0.9,
    policy="conductor",
    size=WorkerSize(batch_tokens=1),
    token_budget=0,
    wire_s=0.0,
)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_prompts_follow_each_other_through_the_stages(pp: int) -> None:
    """Token 1 comes when a pipeline of so many stages is through with all prompts up to its own."""
    draws = random.Random(pp)
    lengths = [draws.randint(16, 2048) for _ in range(40)]
    requests = [SimRequest(0.0, (idx + 1,) * num, 3) for idx, num in enumerate(lengths)]
    answers = run_mesh(SETTING, read_mesh(f"1P(pp{pp})+1D"), requests, 1.0).answers
    steps_s = [TIMES.step_s(num, 0, 0, 0) for num in lengths]
    for idx, answer in enumerate(answers):
        due_s = pipeline_makespan(steps_s[: idx + 1], pp)
        assert answer.ttft_s == pytest.approx(due_s)
        assert answer.is_complete
