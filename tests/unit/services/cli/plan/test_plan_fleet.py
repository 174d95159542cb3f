"""``pdmesh plan fleet`` and ``map``: what is chosen, why, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli import main
from services.cli.bench.report import read_requests
from services.cli.interrupts import EXIT_INTERRUPTED
from services.cli.plan import explain, fleet
from services.cli.plan.explain import Explained, goodput
from services.cli.plan.fleet import FleetFlags
from services.cli.plan.sim_flags import SimFlags
from services.cli.plan.times_flags import TimesFlags
from services.planner.core.bounds import AskedLengths, alone, least_limits, worker_bound
from services.planner.core.fleet import (
    Price,
    Search,
    best_goodput,
    candidates,
    cheapest,
    neighbours,
)
from services.planner.core.limits import Felt, binding_limit
from services.planner.core.mesh_text import MeshShape, Unit, read_mesh
from shared.predict.times import AffineTimes

QUICK = ["--num-requests", "60", "--no-what-if", "--max-devices", "4"]
TIMES = AffineTimes(base_s=0.01, prompt_token_s=1e-4, decode_row_s=1e-4, context_token_s=0.0)
LENGTHS = [AskedLengths(1000, 101)] * 10


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The facts of a command."""
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def bounds() -> dict[Unit, Any]:
    return {Unit(): worker_bound(TIMES, 60_000, LENGTHS, token_budget=2048, max_running=16)}


def test_ctrl_c_amid_the_search_leaves_what_was_tried_in_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(
        offers: Any, rate: float, attains: Callable[[MeshShape], bool], search: Search
    ) -> None:
        def tried(shape: MeshShape) -> bool:
            if search.tried:
                raise KeyboardInterrupt
            return attains(shape)

        cheapest(offers, rate, tried, search)

    monkeypatch.setattr(fleet, "cheapest", interrupted)
    given = ["--rate", "1", "--device", "h100", "--model", "llama-3-8b", *QUICK]
    assert main(["plan", "fleet", *given, "--output", str(tmp_path)]) == EXIT_INTERRUPTED
    plan = json.loads((tmp_path / "report.json").read_text())["plan"]
    assert len(plan["tried"]) == 1
    assert not plan["is_whole"]
    assert plan["tried"][0]["mesh"] in (tmp_path / "cost.svg").read_text()


def test_bounds_are_full_batches_for_ever() -> None:
    """2048 tokens of prompts a step; 16 rows a step of 11.6 ms, 100 steps an answer."""
    (found,) = bounds().values()
    assert found.prompts == pytest.approx(2.048 / 0.2148, rel=1e-5)
    assert found.answers == pytest.approx(16 / (100 * 0.0116))
    assert found.both < min(found.prompts, found.answers)


@pytest.mark.parametrize(
    "lengths",
    [
        [AskedLengths(8000, 2), AskedLengths(20, 400)],
        [AskedLengths(8000, 200, cached=7980), AskedLengths(8000, 200, cached=7980)],
    ],
)
def test_a_bound_is_above_what_a_worker_can_do(lengths: list[AskedLengths]) -> None:
    """Sixteen answers run at once in 4,000 tokens of KV, for those with long prompts are soon over,
    or their prompts are one prefix: a mean prompt beside a mean answer would be the only one."""
    found = worker_bound(TIMES, 4000, lengths, token_budget=2048, max_running=16)
    num_steps = sum(one.output - 1 for one in lengths) / len(lengths)
    assert found.answers == pytest.approx(16 / (num_steps * 0.0116))


def test_a_request_alone_is_the_least_that_can_be_felt() -> None:
    """A prompt in chunks, a token a step; what is cached is not computed."""
    assert alone(TIMES, AskedLengths(1000, 101), 500) == pytest.approx((0.12, 0.0101))
    assert alone(TIMES, AskedLengths(1000, 101, cached=900), 500)[0] == pytest.approx(0.02)
    least = least_limits([(TIMES, 1)], LENGTHS, 0.9, 2048)
    assert (least.ttft_s, least.tpot_s) == pytest.approx((0.11, 0.0101))


def test_the_cheapest_is_found_and_what_holds_it_is_no_runner_up() -> None:
    """All that cannot attain by its bound, or is less than one that missed, is not simulated."""
    offers = candidates(bounds(), Price({"": 1.0}, "devices"), most_devices=5)
    asked: list[MeshShape] = []

    def attains(shape: MeshShape) -> bool:
        asked.append(shape)
        return is_good(shape)

    def is_good(shape: MeshShape) -> bool:
        return shape.holds(read_mesh("2P+1D")) or shape.num_of("M") >= 3

    search = Search()
    cheapest(offers, 9.0, attains, search)
    assert search.chosen is not None
    good = [one for one in offers if one.bound >= 9.0 and is_good(one.shape)]
    assert search.chosen.cost == min(one.cost for one in good)
    assert search.runner_up is not None
    assert not search.runner_up.shape.holds(search.chosen.shape)
    assert len(asked) < len(offers) - search.num_ruled_out


def test_a_budget_is_spent_on_the_best() -> None:
    """Only meshes to which nothing can be added are tried, and none whose bound is below the best;
    the answer is the maximum by brute force."""
    offers = candidates(bounds(), Price({"": 2.0}, "€/h"), most_devices=5)
    search = Search()
    rates = {one.shape: one.bound * 0.9 for one in offers}
    best_goodput(offers, 8.0, lambda shape, above: rates[shape], search)
    assert search.chosen is not None
    assert search.chosen.cost <= 8.0
    best = max(rates[one.shape] for one in offers if one.cost <= 8.0)
    assert search.goodput_of(search.chosen) == pytest.approx(best)

    within = [one for one in offers if one.cost <= 8.0]
    widest = [
        rates[one.shape]
        for one in within
        if not any(it.shape.holds(one.shape) for it in within if it is not one)
    ]
    assert search.runner_up is not None
    assert search.runner_up is not search.chosen
    assert search.goodput_of(search.runner_up) == sorted(widest)[-2]


@pytest.mark.parametrize(
    ("flags", "most"),
    [
        (FleetFlags(), 16),
        (FleetFlags(budget=50.0), 25),
        (FleetFlags(budget=1000.0), 128),
        (FleetFlags(budget=50.0, max_devices=4), 4),
    ],
)
def test_a_budget_says_how_many_devices_there_may_be(flags: FleetFlags, most: int) -> None:
    """As many as it buys of the cheapest, unless fewer are asked for."""
    assert flags.most_devices(Price({"a100": 2.0, "h100": 4.0}, "€/h")) == most


@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ("2P+1D", ["1P+2D", "1P+1D+1M", "2P+1M"]),
        ("1P+1D", ["2M", "1P+1M"]),
        ("4M", ["1P+3M", "1P+1D+2M"]),
        ("1M", []),
    ],
)
def test_neighbours_have_a_worker_of_another_kind(mesh: str, others: list[str]) -> None:
    """As many workers; none that serves nothing, no decode worker without a prefill worker."""
    assert [str(shape) for shape in neighbours(read_mesh(mesh))] == others


def test_the_highest_rate_is_found_from_far_above() -> None:
    """The search begins where queues no longer grow for ever."""
    flags = SimFlags(rate=1e5, num_requests=40)
    assert goodput(flags, read_mesh("1P+1D"), flags.rate) > 1.0


def test_a_rate_beyond_the_bound_is_not_safe_however_short_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All that come attain before the queues are long, and the closed forms know better."""
    monkeypatch.setattr(explain, "MOST_RUNS", 2)
    flags = SimFlags(rate=14.0, num_requests=10)
    run = flags.run(read_mesh("2P+1D"))
    assert run.attained == 1.0
    explain.explain(flags, run, found := Explained())
    assert found.headroom is not None
    assert found.headroom < 1.0
    assert found.misses[-1] == "requests without end"


@pytest.mark.slow
def test_a_load_that_attains_by_chance_is_said_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other draws or a longer run of the very load miss: this run is too short."""
    monkeypatch.setattr(explain, "MOST_RUNS", 3)
    load = ("--workload", "azure-code", "--rate", "3.8", "--num-requests", "60")
    assert main(["plan", "map", "3", *load]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "fewest workers that attain 90%: 2M" in said
    assert "NOT SAFE: the same load misses the target with seed 2" in said
    assert "with --num-requests 240" in said
    for word in ("binds: ", "headroom: ", "attainment if: ", "runner-up: "):
        assert word in said


@pytest.mark.parametrize(
    ("cost", "unit", "text"),
    [(1.0, "devices", "1 device"), (2.0, "devices", "2 devices"), (1.0, "€/h", "1 €/h")],
)
def test_a_cost_has_its_unit(cost: float, unit: str, text: str) -> None:
    """One device is no plural."""
    assert Price({"": 1.0}, unit).text(cost) == text


@pytest.mark.slow
def test_a_device_of_given_times_has_a_price(capsys: pytest.CaptureFixture[str]) -> None:
    """The one that is given, whatever the device is called."""
    facts = told(capsys, "fleet", "--price", "mine=2", "--budget", "2.5", "--base", "20ms", *QUICK)
    assert facts["chosen"]["mesh"] == "1M"
    assert (facts["chosen"]["cost"], facts["cost_unit"]) == (2.0, "€/h")


@pytest.mark.parametrize("name", ["l4", "L4"])
def test_a_device_in_capitals_is_the_same_device(name: str) -> None:
    """Times, price and power are found for it."""
    flags = SimFlags(times=TimesFlags(device=name, model="demo"))
    (unit,) = (fleet := FleetFlags(watts=True)).units(flags)
    assert fleet.priced(flags, [unit]).of == {"": 72}
    assert FleetFlags(price="l4=2").priced(flags, [unit]).of == {"": 2}


def test_a_fleet_that_is_none_says_what_binds(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the strongest mesh that was tried."""
    limits = ("--max-devices", "1", "--rate", "2", "--num-requests", "60")
    assert main(["plan", "fleet", *limits]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "nothing was found that attains: one worker does the prompts of at most" in said
    assert "1M attains" in said
    assert "binds: " in said


@pytest.mark.parametrize(
    ("changes", "name", "phase"),
    [
        ({"late": 0.3, "prompt_busy": 0.9}, "ttft", "prefill"),
        ({"slow": 0.3, "answer_busy": 0.9}, "tpot", "decode"),
        ({"late": 0.2, "kv_use": 1.0, "answer_busy": 0.9}, "ttft", "blocks"),
        ({"unserved": 0.5}, "capacity", "blocks"),
        ({"tpot_use": 0.9, "ttft_use": 0.2}, "tpot", "decode"),
    ],
)
def test_what_binds(changes: dict[str, float], name: str, phase: str) -> None:
    """The limit that most miss, or that is used most; the part of the mesh that it hangs on."""
    nothing = dict.fromkeys(
        (
            "late",
            "slow",
            "unserved",
            "refused",
            "ttft_use",
            "tpot_use",
            "prompt_busy",
            "answer_busy",
            "kv_use",
        ),
        0.0,
    )
    limit = binding_limit(Felt(**{**nothing, **changes}))
    assert (limit.name, limit.phase) == (name, phase)


def test_a_fleet_may_have_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights that fit no device fit two stages; each device counts, and the answer warns."""
    flags = SimFlags(times=TimesFlags(device="a100", model="llama-3-70b"))
    units = FleetFlags(pp="1,2").units(flags)
    assert [str(unit) for unit in units] == ["(pp2)"]
    assert FleetFlags().priced(flags, units).cost(read_mesh("2P(tp2,pp2)+1D(tp2)")) == 10.0
    asked = ("fleet", "--device", "a100", "--model", "llama-3-70b", "--tp", "2", "--pp", "2")
    load = ("--rate", "2", "--slo-ttft", "5s", "--num-requests", "30", "--block-size", "256")
    facts = told(capsys, *asked, *load, "--no-what-if")
    assert (facts["chosen"]["mesh"], facts["chosen"]["cost"]) == ("1P(tp2,pp2)+1M(tp2,pp2)", 8.0)
    assert any("--engine vllm" in word for word in facts["run"]["warnings"])
    assert main(["plan", "fleet", "--pp", "1,3"]) == 2
    assert "--pp must be degrees out of 1,2,4,8" in capsys.readouterr().err


def test_a_fleet_is_found_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chosen mesh attains; one of fewer devices was found not to; its report is bench's."""
    pytest.importorskip("matplotlib")
    facts = told(capsys, "fleet", "--rate", "7", *QUICK, "--output", str(tmp_path))
    chosen = read_mesh(facts["chosen"]["mesh"])
    assert facts["run"]["attainment"] >= 0.9
    assert facts["runner_up"]["mesh"] != str(chosen)
    tried = [one["mesh"] for one in facts["tried"]]
    assert all(one["rate"] == 0 for one in facts["tried"][: tried.index(str(chosen))])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["pdmesh_bench"] == 2
    assert report["runs"][0]["attainment"] == facts["run"]["attainment"]
    assert len(read_requests(tmp_path, "again")) == 60
    assert (tmp_path / "cost.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_map_has_every_pair(capsys: pytest.CaptureFixture[str]) -> None:
    """More workers of a kind, more that attain; the fewest that do are named."""
    load = ("--rate", "9", "--num-requests", "40", "--slo-ttft", "400ms", "--no-what-if")
    facts = told(capsys, "map", "4", *load)
    shares = {it["mesh"]: it["attainment"] for it in facts}
    pairs = ["1P+1D", "1P+2D", "1P+3D", "2P+1D", "2P+2D", "3P+1D"]
    assert sorted(shares) == sorted([*pairs, "1M", "2M", "3M", "4M"])
    assert shares["3P+1D"] > shares["1P+1D"]
    assert [share >= 0.9 for share in shares.values()] == [True] * 1 + [False] * 9


def test_a_trace_out_of_order_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By file and line."""
    path = tmp_path / "trace.jsonl"
    line = {"input_length": 64, "output_length": 2}
    rows = [{"timestamp": at, **line} for at in (0, 2000, 1000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert main(["plan", "simulate", "1M", "--workload", str(path)]) == 2
    assert f"{path}:3: arrives 1 s before the line above" in " ".join(
        capsys.readouterr().err.split()
    )
