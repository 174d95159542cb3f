"""bench/gpu without a GPU: it refuses, and its model and its arithmetic are right."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import run as bench
from bench.record import NOT_HERE

pytestmark = pytest.mark.torch

TINY = {
    **bench.SHAPE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 99,
}


def test_without_a_device_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says why, ends with a code of its own, and prints no figure."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run", "--quick"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == NOT_HERE
    said = capsys.readouterr().out
    assert said.startswith("--device cuda: torch sees no CUDA device;")
    assert said.endswith(": nothing was measured\n")


def test_our_end_steps_and_knows_what_a_step_reads(tmp_path: Path) -> None:
    """The folder without weights loads, is filled with noise, decodes and computes a prompt."""
    bench.make_folder(tmp_path, TINY)
    end = bench.OurEnd(tmp_path, "cpu", max_rows=2, num_blocks=8, kernels="torch")
    matrices = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)
    norms = 5 * 64
    assert end.read_bytes == 2 * (matrices + norms + 99 * 64)
    assert all(weight.float().std() > 0.01 for weight in end.engine.forward.weights)
    end.decode(2, 20)()
    end.prefill(40)()
    with pytest.raises(MemoryError):
        end.decode(2, 500)
    end.close()


def test_limits_count_what_the_device_must_do() -> None:
    """8B parameters but the embedding, twice a token; KV of 128 KiB a token."""
    per_token = bench.prefill_flops(bench.SHAPE, 1)
    assert per_token == pytest.approx(2 * 6.98e9, rel=0.01)
    # One more token of context costs each head of each layer two products of head_dim.
    longer = bench.prefill_flops(bench.SHAPE, 1000) - 1000 * per_token
    assert longer == pytest.approx(32 * 2 * 2 * 4096 * (999 * 1000 / 2))
    assert bench.kv_bytes(bench.SHAPE, 3, 100) == 300 * 2 * 32 * 8 * 128 * 2
