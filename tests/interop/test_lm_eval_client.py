"""lm-eval (EleutherAI's harness) against `pdmesh up`: its numbers are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.model_folder import DEMO_FOLDER
from tests.support.client_environments import PINS
from tests.support.demo_truth import MODEL, recall_prompts
from tests.support.foreign_client import run_client_well

pytestmark = [
    *(pytest.mark.process, pytest.mark.nightly, pytest.mark.torch),
    pytest.mark.timeout(2400),
]

RUNS_WITHIN_S = 300.0
NUM_DOCUMENTS = 16
TOLERANCE = 1e-3
"""Of a sum over six tokens, in float32; bfloat16 would be off by tenths."""


def documents() -> list[dict[str, Any]]:
    """Prompts with the right code among three codes of other prompts."""
    prompts = recall_prompts(NUM_DOCUMENTS)
    made: list[dict[str, Any]] = []
    for index, prompt in enumerate(prompts):
        codes = [other.answer for other in prompts if other.answer != prompt.answer][:3]
        codes.insert(index % 4, prompt.answer)
        choices = [f" {code}." for code in codes]
        target = f" {prompt.answer}"
        made.append({"text": prompt.text, "choices": choices, "target": index % 4, "code": target})
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def of_transformers(rows: list[dict[str, Any]]) -> list[list[float]]:
    """Log-likelihood of every choice, computed alone, without any mesh."""
    import torch
    import transformers

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype="float32").eval()

    def likelihood(text: str, choice: str) -> float:
        start = len(tokenizer(text)["input_ids"])
        ids = tokenizer(text + choice)["input_ids"]
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(logprobs[at - 1, ids[at]]) for at in range(start, len(ids)))

    return [[likelihood(row["text"], choice) for choice in row["choices"]] for row in rows]


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """What lm-eval kept of a task, in the documents' order."""
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(kept, key=lambda sample: sample["doc_id"])


async def test_lm_eval(client_bin: Callable[[str], Path], exact_mesh: str, tmp_path: Path) -> None:
    """Every log-likelihood is the one that transformers computes, and every code is found."""
    client = client_bin("lm-eval")
    rows = documents()
    write(tmp_path / "choice.jsonl", rows)
    answers = [{"text": row["text"], "target": row["code"]} for row in rows]
    write(tmp_path / "generate.jsonl", answers)
    settings = {
        "model": MODEL,
        "base_url": exact_mesh + "/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": DEMO_FOLDER,
        "num_concurrent": 4,
        "tokenized_requests": True,
        "max_length": 2048,
    }
    await run_client_well(
        *(client / "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in settings.items())),
        *("--include_path", PINS / "lm_eval_tasks"),
        *("--tasks", "pdmesh_choice,pdmesh_generate"),
        *("--log_samples", "--output_path", tmp_path / "out"),
        cwd=tmp_path,
        within_s=RUNS_WITHIN_S,
    )

    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text())["results"]
    assert results["pdmesh_choice"]["acc,none"] == 1.0
    assert results["pdmesh_generate"]["exact_match,none"] == 1.0

    due = of_transformers(rows)
    kept = samples(tmp_path / "out", "pdmesh_choice")
    assert len(kept) == NUM_DOCUMENTS
    for sample, of_row in zip(kept, due, strict=True):
        for (value, is_greedy), want in zip(sample["filtered_resps"], of_row, strict=True):
            assert abs(float(value) - want) < TOLERANCE, (value, want)
            assert (is_greedy == "True") == (want == max(of_row))
    told = [sample["filtered_resps"][0] for sample in samples(tmp_path / "out", "pdmesh_generate")]
    assert told == [row["code"] for row in rows]
