"""DistServe's simulator by its rules, against files that the public one has written."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from services.planner.distserve_data import (
    DistServeData,
    GivenRequest,
    System,
    printed,
    read_requests,
    results_text,
)
from services.sim.baselines.distserve import Arrival, DistServeSim, Fidelity, Latency
from services.sim.baselines.distserve_times import Degree

DATA = Path(__file__).parents[1] / "data"
FILES = sorted(DATA.glob("ref_simdistserve_*.csv"))

NAME = re.compile(r"ref_simdistserve_opt(\d+b)_(\w+?)_tp(\d)pp(\d)_tp(\d)pp(\d)(?:_made)?\.csv")


def simulated(
    path: Path, fidelity: Fidelity
) -> tuple[list[GivenRequest], list[Latency], DistServeSim]:
    """Run the requests of a file on the system that its name says."""
    match = NAME.fullmatch(path.name)
    assert match is not None
    system: System = "vllm" if match[2] == "vllm" else "distserve"
    data = DistServeData(DATA, system)
    tp, pp, tp_decode, pp_decode = map(int, match.groups()[2:])
    model = f"opt-{match[1]}"
    phases = data.phase(model, Degree(tp, pp)), data.phase(model, Degree(tp_decode, pp_decode))
    given = read_requests(path)
    sim = DistServeSim(*phases, is_split=system == "distserve", fidelity=fidelity)
    return given, sim.run(given), sim


def test_there_are_files_of_both_systems_and_of_rings() -> None:
    """Else the next test proves less than it says."""
    names = " ".join(path.name for path in FILES)
    assert len(FILES) == 7
    assert "vllm" in names
    assert "pp4" in names


@pytest.mark.parametrize("fidelity", ["exact", "runs"])
@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: path.stem.removeprefix("ref_simdistserve_")
)
def test_every_request_is_exact_to_the_printed_decimals(path: Path, fidelity: Fidelity) -> None:
    """And the file that is written is theirs, byte for byte."""
    given, latencies, _ = simulated(path, fidelity)
    for request, latency in zip(given, latencies, strict=True):
        assert printed(latency) == request.felt, f"line {request.line}"
    assert results_text(given, latencies).encode() == path.read_bytes()


def test_runs_need_fewer_events_for_the_same_steps() -> None:
    """500 requests: what it saves is why it is there."""
    (path,) = (path for path in FILES if "made" not in path.name)
    _, _, exact = simulated(path, "exact")
    _, _, runs = simulated(path, "runs")
    assert exact.num_steps == runs.num_steps
    assert runs.clock.num_events < 0.75 * exact.clock.num_events


@pytest.mark.parametrize("seed", range(12))
def test_both_fidelities_are_the_same_bit_for_bit(seed: int) -> None:
    """Any model, degree and pattern of arrivals."""
    rng = random.Random(seed)
    system: System = rng.choice(["distserve", "vllm"])
    data = DistServeData(DATA, system)
    model = rng.choice(data.models)
    degrees = data.degrees(model)
    prefill = data.phase(model, rng.choice(degrees))
    decode = data.phase(model, rng.choice(degrees))
    if system == "vllm":
        decode = prefill
    at_ms, arrivals = 0.0, list[Arrival]()
    longest = min(prefill.capacity, rng.choice([100, 2000, 8000]))
    for _ in range(60):
        at_ms += rng.choice([0.0, 0.0, 5.0, rng.expovariate(0.01)])
        arrivals.append(Arrival(at_ms, rng.randint(1, longest), rng.randint(0, 150)))
    exact, runs = (
        DistServeSim(prefill, decode, is_split=system == "distserve", fidelity=fidelity)
        for fidelity in ("exact", "runs")
    )
    assert exact.run(arrivals) == runs.run(arrivals)
    assert exact.num_steps == runs.num_steps


def test_a_request_alone_is_the_closed_form() -> None:
    """OPT-13B, prefill at tp 2, decode at tp 1, 374 tokens in, 44 out."""
    data = DistServeData(DATA, "distserve")
    phases = data.phase("opt-13b", Degree(2, 1)), data.phase("opt-13b", Degree(1, 1))
    (latency,) = DistServeSim(*phases).run([Arrival(0.0, 374, 44)])
    assert round(latency.ttft_ms, 4) == 43.7709
    assert round(latency.decode_ms, 4) == 979.4989


@pytest.mark.parametrize(
    ("model", "tp", "pp", "lengths", "ms"),
    [
        ("opt-13b", 1, 1, [512], 73.1487),
        ("opt-13b", 1, 1, [1024], 130.9289),
        ("opt-13b", 1, 1, [512, 512], 127.1948),
        ("opt-13b", 2, 1, [512], 51.4966),
        ("opt-66b", 4, 1, [512], 110.1143),
        ("opt-66b", 4, 2, [512], 56.5572),
        ("opt-66b", 4, 1, [2048], 375.2968),
    ],
)
def test_prefill_times(model: str, tp: int, pp: int, lengths: list[int], ms: float) -> None:
    """Of one stage, without what the first one adds."""
    fit = DistServeData(DATA, "distserve").phase(model, Degree(tp, pp)).coefficients
    squares = sum(length**2 for length in lengths)
    assert round(fit.prefill_ms(sum(lengths), squares, pp), 4) == ms


@pytest.mark.parametrize(
    ("model", "tp", "batch", "each", "ms"),
    [
        ("opt-13b", 1, 1, 512, 20.2942),
        ("opt-13b", 1, 32, 512, 31.4386),
        ("opt-13b", 1, 94, 256, 38.6409),
        ("opt-13b", 1, 95, 256, 36.3065),
        ("opt-66b", 4, 32, 512, 40.1901),
    ],
)
def test_decode_times(model: str, tp: int, batch: int, each: int, ms: float) -> None:
    """Two fits: from 95 sequences on it is the other one."""
    fit = DistServeData(DATA, "distserve").phase(model, Degree(tp, 1)).coefficients
    assert round(fit.decode_ms(batch, batch * each, 1), 4) == ms
