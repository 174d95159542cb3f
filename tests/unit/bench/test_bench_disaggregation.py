"""How searches become row 9: ratios within a repetition, and what counts where nothing attained."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench.disaggregation.run import (
    COLOCATED,
    DISAGGREGATED,
    LOWEST_RATE,
    VLLM,
    Colocated,
    Repetition,
    colocated_systems,
    parse,
    repetitions_of,
    resume,
    servers_of,
    set_goals,
)
from bench.record import Goal, Record
from services.cli.bench.workload import Ask


def alone(
    itl_p99: float = 0.010, *, ttft: float = 0.2, tpot: float = 0.006, longest: float = 0.4
) -> dict[str, Any]:
    """What a system shows without load; longest: the TTFT of its slowest prompt."""
    first = {"p50": ttft, "max": longest}
    return {"ttft_s": first, "tpot_s": {"p50": tpot}, "itl_s": {"p99": itl_p99}}


def a_run(system: str, rate: float, share: float, *, itl_p99: float = 0.012) -> dict[str, Any]:
    """One rate that was asked for."""
    itl = {"p99": itl_p99}
    return {"system": system, "rate": rate, "attainment": share, "void": [], "itl_s": itl}


def goals_of(*found: Repetition) -> list[Goal]:
    """The goals of these repetitions."""
    record = Record(Path("disaggregation"), is_quick=True)
    set_goals(record, "a load", found)
    return record.goals


def test_limits_are_multiples_of_the_best_medians() -> None:
    """Of whichever system has them, each on its own."""
    repetition = Repetition({"one": alone(ttft=0.2, tpot=0.009), "other": alone(ttft=0.3)})
    slo = repetition.slo("tight")
    assert (slo.ttft_s, slo.tpot_s) == (pytest.approx(1.0), pytest.approx(0.009))
    assert repetition.slo("relaxed").ttft_s == pytest.approx(2.0)


def test_a_limit_that_long_prompts_miss_unloaded_is_none() -> None:
    """A quarter more than the slowest prompt's, where that is more; peers have no say in it."""
    ours = {"one": alone(longest=2.0), "other": alone(longest=1.0)}
    assert Repetition(ours).slo("tight").ttft_s == pytest.approx(1.25)
    peer = alone(ttft=0.01, tpot=0.001, longest=0.01)
    assert Repetition({**ours, VLLM: peer}).slo("tight") == Repetition(ours).slo("tight")


def test_ratios_are_taken_within_a_repetition() -> None:
    """Twice and four times the colocated pair is three times in the median."""
    unloaded = {DISAGGREGATED: alone()}
    slow = Repetition(unloaded, {DISAGGREGATED: 1.0, COLOCATED: 0.5})
    quick = Repetition(unloaded, {DISAGGREGATED: 8.0, COLOCATED: 2.0})
    (goal,) = goals_of(slow, quick)
    assert (goal.value, goal.lowest, goal.highest) == (3.0, 2.0, 4.0)


def test_who_attains_at_no_rate_counts_as_if_at_the_lowest_it_was_asked_for() -> None:
    """At the lowest of all if it was asked for none; what was void was not asked."""
    void = {**a_run(COLOCATED, 0.125, 0.0), "void": ["late"]}
    tried = [a_run(COLOCATED, 0.5, 0.3), a_run(COLOCATED, 0.25, 0.8), void]
    none_attained = Repetition({}, {DISAGGREGATED: 1.0, COLOCATED: 0.0}, tried)
    assert goals_of(none_attained)[0].value == 4.0
    not_asked = Repetition({}, {DISAGGREGATED: 1.0, COLOCATED: 0.0})
    assert goals_of(not_asked)[0].value == pytest.approx(1.0 / LOWEST_RATE)


def test_of_several_colocated_systems_the_best_counts() -> None:
    """Each is a system of its own; the first one is called as if it were alone."""
    asked = [Colocated.parse(text) for text in ("2:15", "2:10", "1:10")]
    names = [COLOCATED, "2 colocated, 10 ms", "1 colocated, 10 ms"]
    assert list(colocated_systems(asked).items()) == list(zip(names, asked, strict=True))
    assert list(colocated_systems(asked[2:])) == ["1 colocated"]
    cores = os.cpu_count() or 1
    assert [one.threads for one in asked] == [max(1, cores // 2), max(1, cores // 2), cores]
    found = {DISAGGREGATED: 2.0, COLOCATED: 0.5, "1 colocated, 10 ms": 1.0}
    (goal,) = goals_of(Repetition({}, found))
    assert goal.value == 2.0
    (goal,) = goals_of(Repetition({}, {DISAGGREGATED: 2.0, "1 colocated": 0.5}))
    assert goal.value == 4.0


def test_a_worker_on_all_cores_is_asked_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefill has all cores then, too: a pair of one thread each alone would be a weak peer."""
    monkeypatch.setattr("sys.argv", ["run.py"])
    asked = parse()
    assert asked.prefill_threads == (os.cpu_count() or 1)
    assert [one.num_workers for one in asked.colocated] == [2, 1]


@pytest.mark.parametrize("text", ["2", "0:10", "2:0", "2:nan", "2:inf", "two:10"])
def test_a_wrong_colocated_system_is_named(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not a number of workers and milliseconds."""
    monkeypatch.setattr("sys.argv", ["run.py", "--colocated", text])
    with pytest.raises(SystemExit):
        parse()
    assert f"--colocated: '{text}' is not WORKERS:MS, as 2:15 is" in capsys.readouterr().err


def test_a_peer_that_is_better_than_the_colocated_pair_is_what_counts() -> None:
    """In every repetition, though it was asked in the first one only."""
    first = Repetition({}, {DISAGGREGATED: 1.0, COLOCATED: 0.5, VLLM: 2.0})
    second = Repetition({}, {DISAGGREGATED: 1.0, COLOCATED: 0.5})
    assert goals_of(first, second)[0].highest == 0.5


def test_gaps_are_compared_with_those_without_load_of_the_same_repetition() -> None:
    """The worst rate that attained counts; one that did not, and the colocated pair's, do not."""
    goodput = {DISAGGREGATED: 1.0, COLOCATED: 1.0}
    tried = [
        a_run(DISAGGREGATED, 0.5, 1.0, itl_p99=0.012),
        a_run(DISAGGREGATED, 1.0, 0.9, itl_p99=0.015),
        a_run(DISAGGREGATED, 2.0, 0.1, itl_p99=0.090),
        a_run(COLOCATED, 1.0, 1.0, itl_p99=0.080),
    ]
    first = Repetition({DISAGGREGATED: alone(0.010)}, goodput, tried)
    second = Repetition({DISAGGREGATED: alone(0.015)}, goodput, tried)
    _, goal = goals_of(first, second)
    assert (goal.lowest, goal.highest) == (pytest.approx(1.0), pytest.approx(1.5))
    assert not goal.is_met


def rows_of(repetition: int) -> list[dict[str, Any]]:
    """What a record holds of one repetition."""
    about = {"load": "a load", "slo": "tight", "repetition": repetition}
    rows = [{**about, **a_run(DISAGGREGATED, 2.0, 1.0)}, {**about, **a_run(COLOCATED, 1.0, 1.0)}]
    rows.append({**about, "goodput": {DISAGGREGATED: 2.0, COLOCATED: 1.0}})
    unloaded = {DISAGGREGATED: alone(), COLOCATED: alone()}
    return [*rows, {"load": "a load", "repetition": repetition, "unloaded": unloaded}]


def test_a_record_gives_its_repetitions_back() -> None:
    """As if they had just been found."""
    rows = [*rows_of(0), *rows_of(1)]
    found = repetitions_of(rows, "a load")
    assert len(found) == 2
    assert [len(one.asked(DISAGGREGATED)) for one in found] == [1, 1]
    goodput, itl = goals_of(*found)
    assert (goodput.value, itl.value) == (2.0, pytest.approx(1.2))
    assert repetitions_of(rows, "another load") == []


def test_a_run_goes_on_with_a_record_of_the_same_systems(tmp_path: Path) -> None:
    """It says whose record that was; one that asked other targets of a step is refused."""
    path = tmp_path / "earlier.json.partial"
    before = {"at": "then", "commit": "abc", "arguments": ["--repetitions", "5"]}
    other = [{**row, "load": "another load"} for row in rows_of(0)]
    path.write_text(json.dumps({"environment": before, "goals": [], "rows": rows_of(0) + other}))
    record = Record(Path("disaggregation"), is_quick=True)
    resume(record, path, [DISAGGREGATED, COLOCATED, VLLM], ["a load"])
    assert record.rows == rows_of(0)
    assert record.environment["resumed"] == before
    with pytest.raises(SystemExit, match="same --colocated"):
        resume(record, path, [DISAGGREGATED, COLOCATED, f"{COLOCATED}, 10 ms"], ["a load"])
    with pytest.raises(SystemExit, match="no record to go on with"):
        resume(record, tmp_path / "another.json", [DISAGGREGATED, COLOCATED], ["a load"])


def test_requests_go_to_the_server_that_knows_their_prefix() -> None:
    """More than half of the blocks is enough, a shared first one is not; new ones go in turn."""
    asks = [
        Ask(num_input=1, num_output=1, block_ids=ids)
        for ids in [(0, 1, 2), (0, 3, 4), (0, 3, 4, 5), (0, 1, 2, 6), (0, 7), (0, 3, 8, 9), ()]
    ]
    assert servers_of(asks, 2) == [0, 1, 1, 0, 0, 1, 0]
    assert servers_of(asks, 1) == [0] * 7
