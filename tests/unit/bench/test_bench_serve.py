"""How a run of servers goes on where one that its load is taken from is missing."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench.record import Record
from bench.serve import run
from bench.serve.run import LLAMA, OURS, measure


@pytest.mark.parametrize(("system", "has_poisson"), [(LLAMA, False), (OURS, True)])
async def test_random_arrivals_are_a_share_of_what_ours_or_vllms_server_reached(
    system: str, has_poisson: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where neither was asked the closed loops are all that there is."""

    @contextlib.asynccontextmanager
    async def started(*_: object) -> AsyncIterator[str]:
        yield "http://nowhere"

    async def ask(*_: object, **more: Any) -> dict[str, Any]:
        times = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
        return dict.fromkeys((*times, "tokens_per_s", "requests_per_s"), 1.0)

    monkeypatch.setattr(run, "started", started)
    monkeypatch.setattr(run, "ask", ask)
    monkeypatch.setattr(run.disaggregation, "make_model", lambda *_: None)
    record = Record(tmp_path, is_quick=True)
    asked = argparse.Namespace(quick=True, size="125m", repetitions=2)
    await measure(record, [system], asked)
    assert ("Poisson" in {row["load"] for row in record.rows}) is has_poisson
    assert record.rows[-1]["repetition"] == 1
