"""``pdmesh plan simulate`` from the command line."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.cli import main
from services.cli.plan.sim_flags import SimFlags
from services.planner.core.mesh_text import MeshPart, MeshShape, Unit, read_mesh
from services.planner.mesh_run import MeshRun
from shared.config import GatewayConfig
from shared.errors import InvalidRequest
from shared.predict.times import OPT_13B_A100


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """The facts of a small run."""
    command = ["plan", "simulate", *arguments, "--num-requests", "40", "--json", "--no-what-if"]
    assert main(command) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_run_says_what_was_felt(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal seeds, equal facts; what is asked for stands in them."""
    first = told(capsys, "2P+1D", "--rate", "4")
    assert first == told(capsys, "2P+1D", "--rate", "4")
    assert first != told(capsys, "2P+1D", "--rate", "4", "--seed", "1")
    assert (first["mesh"], first["fidelity"], first["attainment"]) == ("2P+1D", "runs", 1.0)
    other = told(capsys, "2P+1D", "--rate", "4", "--fidelity", "exact")
    assert other == {**first, "fidelity": "exact"}
    assert (
        main(["plan", "simulate", "1M", "--rate", "1", "--num-requests", "5", "--no-what-if"]) == 0
    )
    assert "attainment 100.0%" in (said := capsys.readouterr().out)
    assert "binds: " in said
    assert "headroom" not in said
    warned = told(capsys, "1D+1M")["warnings"]
    assert warned == ["nobody computes prompts for D, which does nothing: add a P"]
    assert told(capsys, "1D+1M", "--policy", "splitwise")["warnings"] == []


@pytest.mark.parametrize("plan", ["simulate 1M", "compare 1M 2M", "map 2", "fleet --max-devices 1"])
def test_requests_that_were_cut_are_told(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What no worker holds is simulated shorter, which is another load than was asked for."""
    trace = tmp_path / "trace.csv"
    lines = [f"2023-11-16 18:15:4{idx}.68,{num},2\n" for idx, num in enumerate((100, 99999))]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    flags = ["--workload", str(trace), "--no-what-if", "--kv-tokens"]
    main(["plan", *plan.split(), *flags, "2000"])
    cut = "pdmesh: 1 of 2 requests are longer than a worker holds, and were cut to 1,750 tokens: "
    assert capsys.readouterr().err.count(cut) == 1
    main(["plan", *plan.split(), *flags, "200000"])
    assert "cut" not in capsys.readouterr().err


def test_tiers_below_pools_have_the_flags_of_a_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run says what was cached where, and which copy times that goes by."""
    trace = tmp_path / "trace.jsonl"
    with trace.open("w") as file:
        for idx in range(9):
            ids = [10 * (idx % 3) + block for block in range(3)]
            row = {"timestamp": 5000 * idx, "input_length": 1536, "output_length": 2}
            file.write(json.dumps(row | {"hash_ids": ids}) + "\n")
    load = ["--workload", str(trace), "--num-requests", "9", "--rate", "0.2", "--no-what-if"]
    command = ["plan", "simulate", "1M", *load, "--kv-tokens", "2000"]
    assert main(command) == 0
    assert "cached" not in capsys.readouterr().out
    both = ["--dram-cache", "40GB", "--ssd-cache", "1TB", "--cache-policy", "lfu"]
    assert main([*command, *both, "--ssd-bandwidth", "3GB/s"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^cached: (\S+)% of the prompts' tokens; \1% came from memory$", said, re.M)
    assert "tiers: memory 10.0 GB/s and disk 3.0 GB/s, as given or assumed" in said
    assert main([*command, "--ssd-cache", "1TB", "--json"]) == 0
    cached = json.loads(capsys.readouterr().out)["cached_tokens"]
    assert cached["prompts"] == 9 * 1536
    assert cached["ssd"] > 0 == cached["pool"] + cached["dram"] + cached["fetched"]


@pytest.mark.parametrize(
    ("command", "flag", "value", "remedy"),
    [
        ("simulate 1M", "--dram-cache", "4", "holds not one KV block of"),
        ("compare 1M 2M", "--dram-cache", "4 gigs", "must be a number with a unit"),
        ("fleet", "--dram-cache", "9999TB", "must be at most"),
        ("verify x", "--ssd-cache", "/kv", "must be a number with a unit (B, kB"),
        ("map 2", "--dram-bandwidth", "0GB/s", "must be a rate above zero such as 25GB/s"),
        ("simulate 1M", "--ssd-bandwidth", "2GB", "must be a rate above zero such as 25GB/s"),
    ],
)
def test_tiers_that_no_worker_can_have(
    command: str, flag: str, value: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the flag and the remedy, wherever it is given, before anything is searched."""
    assert main(["plan", *command.split(), flag, value]) == 2
    said = capsys.readouterr().err
    assert flag in said
    assert remedy in said


def test_a_mesh_has_a_gateway_as_it_is_by_default() -> None:
    """What nobody asks for is as in a mesh: policy, places, and how long is waited for one."""
    flags, gateway = SimFlags(), GatewayConfig()
    setting = flags.setting
    assert (setting.policy, setting.overload) == (gateway.policy, gateway.overload)
    for name, value in setting.gateway._asdict().items():
        assert value == getattr(gateway, name)


def test_whom_the_gateway_refuses_did_not_attain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Admission acts as in a mesh, and its refusals stand in the report."""
    load = ("1P+3D", "--rate", "20", "--block-size", "256")
    few = ("--gateway-max-running", "4", "--max-waiting", "3", "--max-wait-s", "0.5")
    facts = told(capsys, *load, *few, "--output", str(tmp_path))
    errors: Any = facts["errors"]
    assert set(errors) == {"queue_full", "queue_timeout"}
    limit: Any = facts["limit"]
    assert (limit["name"], limit["phase"]) == ("capacity", "gateway")
    assert facts["attainment"] <= 1 - sum(errors.values()) / 40  # type: ignore[operator]
    rows = (tmp_path / "requests.csv").read_text()
    assert rows.count("queue_full") == errors["queue_full"]
    assert told(capsys, *load)["errors"] == {}


def test_refusing_early_serves_more_in_time(capsys: pytest.CaptureFixture[str]) -> None:
    """With --overload each request names the limits, and who would miss them makes room."""
    load = ("1P+4D", "--rate", "20", "--block-size", "256", "--slo-ttft", "500ms")
    off, early = (told(capsys, *load, "--overload", mode) for mode in ("off", "early"))
    assert off["errors"] == {}
    assert set(early["errors"]) == {"slo_ttft"}  # type: ignore[call-overload]
    assert early["attainment"] > off["attainment"]  # type: ignore[operator]


@pytest.mark.parametrize("has_files", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_equal_seeds_give_equal_bytes_in_every_process(has_files: bool, tmp_path: Path) -> None:
    """What is printed, and every file: nothing hangs on the order of a set, or on the clock."""
    command = (sys.executable, "-m", "services.cli", "plan", "simulate", "1P+1D", "--rate", "4")
    flags = ("--num-requests", "6", "--block-size", "256", "--no-what-if", "--json")
    runs = [
        subprocess.Popen(
            [*command, *flags, *(("--output", str(tmp_path / seed)) if has_files else ())],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
        )
        for seed in "12"
    ]
    said = [run.communicate()[0] for run in runs]
    assert said[0].startswith(b"{")
    assert said[0] == said[1]
    files = [{it.name: it.read_bytes() for it in (tmp_path / s).glob("*")} for s in "12"]
    assert files[0] == files[1]
    assert ({"report.json", "report.svg"} <= files[0].keys()) == has_files


@pytest.mark.slow
def test_no_prompt_of_a_trace_begins_with_a_simulated_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks are named from 0 on; who found them in answers found what runs have not told yet."""
    rng = random.Random(39)
    rows = (
        {
            "timestamp": 1000 * n,
            "input_length": rng.randint(1, 500),
            "output_length": rng.randint(1, 80),
            "hash_ids": [n * rng.choice((0, 0, 1))],
        }
        for n in range(40)
    )
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ("--workload", str(trace), "--rate", "60", "--policy", "conductor")
    runs, exact = (
        told(capsys, "1P+1D", *flags, "--kv-tokens", "640", "--fidelity", fidelity)
        for fidelity in ("runs", "exact")
    )
    assert runs == {**exact, "fidelity": "runs"}


@pytest.mark.parametrize(("num", "longer"), [("5", "4 x the requests"), ("8", "all 20 requests")])
def test_a_trace_is_not_said_to_be_safe_by_the_same_run_again(
    num: str, longer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No seed changes what a file holds, and it is run for longer as far as it goes."""
    rows = ({"timestamp": 500 * n, "input_length": 30, "output_length": 2} for n in range(20))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    command = ["plan", "simulate", "1M", "--workload", str(trace), "--json", "--num-requests"]
    for asked, others in ((num, [longer]), ("20", [])):
        assert main([*command, asked]) == 0
        sensitivity = json.loads(capsys.readouterr().out)["what_if"]["sensitivity"]
        assert [name for name in sensitivity if "%" not in name] == others


def test_ctrl_c_before_there_is_anything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so, and the exit code."""

    def run(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SimFlags, "run", run)
    assert main(["plan", "simulate", "1P+1D"]) == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("", "pdmesh: interrupted, with nothing to show yet\n")


@pytest.mark.parametrize("command", ["simulate 1M", "compare 1M 2M", "fleet", "map 2"])
def test_a_report_that_cannot_be_written_costs_no_search(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told before the first run."""
    pytest.importorskip("matplotlib")
    monkeypatch.delattr(SimFlags, "run")
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "report")
    assert main(["plan", *command.split(), "--output", folder]) == 1
    assert f"cannot write to --output {folder}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("simulate 1P+1D", "attainment"),
        ("compare 1P+1D 2M", "1P+1D"),
        ("fleet --rate 2 --max-devices 3 --no-mixed", "1P+1D: 2 devices"),
        ("map 2", "1 simulated, fewest workers that attain 90%: 1P+1D"),
    ],
)
def test_ctrl_c_keeps_what_was_found(
    command: str,
    kept: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the first mesh that attains, and that it was interrupted is said."""
    run, num_whole = SimFlags.run, 0

    def interrupted(flags: SimFlags, shape: MeshShape, *rest: Any, **kw: Any) -> MeshRun:
        nonlocal num_whole
        found = run(flags, shape, *rest, **kw)
        if num_whole == 1:
            raise KeyboardInterrupt
        num_whole += found.num_requests == 20 and found.attains
        return found

    monkeypatch.setattr(SimFlags, "run", interrupted)
    monkeypatch.setattr(SimFlags, "trial_s", lambda *_: 0.0)
    assert main(["plan", *command.split(), "--num-requests", "20"]) == 130
    out, err = capsys.readouterr()
    assert kept in " ".join(out.split())
    assert err == "pdmesh: interrupted: this is what was found\n"


@pytest.mark.parametrize(("budget", "most"), [(0, 60), (1, 2)])
def test_how_long_it_takes_is_soon_known(
    budget: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a thousand steps each are tried by one or two."""
    num = 0

    def counted(flags: SimFlags, shape: MeshShape, requests: Any) -> Any:
        nonlocal num
        num = len(requests)
        return SimpleNamespace(took_s=0.5 * num)

    monkeypatch.setattr(SimFlags, "run", counted)
    flags, pair = SimFlags(token_budget=budget, num_requests=400), read_mesh("1P+1D")
    assert flags.trial_s(pair, flags.requests([Unit()])) == 200.0
    assert 0 < num <= most


def test_too_much_load_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    """One pair, forty at once."""
    few = told(capsys, "1P+1D", "--rate", "1")
    many = told(capsys, "1P+1D", "--rate", "500")
    assert isinstance(few["attainment"], float)
    assert isinstance(many["attainment"], float)
    assert many["attainment"] < 0.5 < few["attainment"]


def test_a_trace_file_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal block ids are equal prefixes: the second prompt is nearly all there."""
    lines = [
        {"timestamp": at, "input_length": 4096, "output_length": 2, "hash_ids": list(range(8))}
        for at in (0, 5000, 10000)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    facts = told(capsys, "1P+1D", "--workload", str(path), "--rate", "0.3")
    latencies = facts["latency_s"]
    assert isinstance(latencies, dict)
    assert latencies["TTFT"]["p50"] < 0.3 * latencies["TTFT"]["p99"]


@pytest.mark.slow
def test_meshes_are_compared_by_the_same_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is what a run alone says; the best one is named, and stands first."""
    flags = ["--rate", "9", "--num-requests", "60", "--slo-ttft", "400ms", "--no-what-if"]
    assert main(["plan", "compare", "1P+3D", "3P+1D", *flags, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    best, other = (row["mesh"] for row in rows)
    assert {best, other} == {"1P+3D", "3P+1D"}
    assert rows[0]["attainment"] > rows[1]["attainment"]
    assert main(["plan", "simulate", other, *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == rows[1]
    assert main(["plan", "compare", other, best, *flags, "--json"]) == 0
    assert [row["mesh"] for row in json.loads(capsys.readouterr().out)] == [best, other]
    assert main(["plan", "compare", "1P+3D", "3P+1D", *flags]) == 0
    said = capsys.readouterr().out
    assert f"{best} attains most" in said
    assert said.count("not served") == 1
    assert main(["plan", "compare", "1P+3D", "3D+1P"]) == 2
    assert "two meshes at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("meshes", "words"),
    [
        (("3P+1D", "2P+2D"), "attain the same; 2P+2D has more room below its limits"),
        (("2P+2D", "1P+1D"), "attain the same; 1P+1D has fewer workers"),
    ],
)
def test_of_equal_meshes_the_smaller_or_the_one_with_more_room(
    meshes: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And why it is the first is said."""
    load = ("--rate", "1", "--num-requests", "10", "--no-what-if")
    assert main(["plan", "compare", *meshes, *load]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_programs_are_told_of_the_best_mesh_what_people_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its headroom and sensitivity; of the others nothing was looked for."""
    load = ["--rate", "1", "--num-requests", "5", "--json"]
    assert main(["plan", "compare", "1M", "2M", *load]) == 0
    best, other = json.loads(capsys.readouterr().out)
    assert best["what_if"]["headroom"] > 1
    assert "rate +20 %" in best["what_if"]["sensitivity"]
    assert "what_if" not in other


def test_default_times_are_the_published_fit() -> None:
    """The flags' defaults and the record say the same."""
    assert SimFlags().times.unit(Unit()).times is OPT_13B_A100


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("3P+2D", (MeshPart(3, "P"), MeshPart(2, "D"))),
        ("p + d", (MeshPart(1, "P"), MeshPart(1, "D"))),
        ("5xmixed", (MeshPart(5, "M"),)),
        ("1P+1D+2M+1P", (MeshPart(2, "P"), MeshPart(1, "D"), MeshPart(2, "M"))),
        (
            "3P(tp2,pp2)+2D(pp4)",
            (MeshPart(3, "P", Unit("", 2, 2)), MeshPart(2, "D", Unit("", 1, 4))),
        ),
        (
            "2P(tp2)+1D(H100, tp4)",
            (MeshPart(2, "P", Unit("", 2)), MeshPart(1, "D", Unit("h100", 4))),
        ),
    ],
)
def test_meshes_as_people_write_them(text: str, parts: tuple[MeshPart, ...]) -> None:
    """Read, and written back in short."""
    shape = MeshShape(parts)
    assert read_mesh(text) == shape
    assert read_mesh(str(shape)) == shape


@pytest.mark.parametrize(
    "text",
    [
        *("", "3Q", "P+", "2", "3P", "2D", "0M", "9999M"),
        *("9" * 5000 + "M", "1M(tp" + "9" * 5000 + ")", "1M(tp)"),
        *("1M(ep2)", "1M(tp3)", "1M(tp2", "1M(tp2,tp4)", "1M(a100,h100)", "1M(pp3)"),
    ],
)
def test_meshes_that_are_none(text: str) -> None:
    """The known words, or what is missing."""
    words = r"P \(prefill\)|needs P and D|1\.\.256|known are [tp]p1|one tp"
    with pytest.raises(InvalidRequest, match=words):
        read_mesh(text)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rate 1e6", "--rate must be above 0 and below 1e6"),
        ("--rate 1e-12", "500 requests at --rate 1e-12 take 5.79e+09 days to arrive"),
        ("--base 0s --prompt-token 0s", "a step of one token must take some time"),
        ("--base 0s --decode-row 0s --context-token 0s", "a step of one token must take some time"),
    ],
)
def test_loads_and_times_that_no_run_can_have(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused in a line; a run without end, or a division by zero, is no answer."""
    assert main(["plan", "simulate", "1P+1D", *flags.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_steps_longer_than_any_patience_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The run ends, and says what may be wrong."""
    assert main(["plan", "simulate", "1P+1D", "--base", "3h", "--no-what-if"]) == 1
    assert "does one step, or one transfer, take so long?" in capsys.readouterr().err


@pytest.mark.parametrize("first_id", [-9, 2**32 - 2, 2**64])
def test_block_ids_may_be_hashes(
    first_id: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace tells the same whatever its blocks are called."""

    def latencies(first: int) -> object:
        ids = [first, first + 1]
        lines = [
            {"timestamp": at, "input_length": 1000, "output_length": 2, "hash_ids": ids}
            for at in (0, 5000, 10000)
        ]
        path = tmp_path / "trace.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        return told(capsys, "1P+1D", "--workload", str(path), "--rate", "1")["latency_s"]

    assert latencies(first_id) == latencies(7)


@pytest.mark.parametrize("num_runs", [1, 3])
def test_ctrl_c_ends_the_picture_of_rates_too(
    num_runs: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before it, no more is simulated; within it, what was found is shown all the same."""
    pytest.importorskip("matplotlib")
    run, num = SimFlags.run, 0

    def interrupted(flags: SimFlags, shape: MeshShape, *rest: Any, **kw: Any) -> MeshRun:
        nonlocal num
        num += 1
        if num > num_runs:
            raise KeyboardInterrupt
        return run(flags, shape, *rest, **kw)

    monkeypatch.setattr(SimFlags, "run", interrupted)
    monkeypatch.setattr(SimFlags, "trial_s", lambda *_: 0.0)
    what_if = "--what-if" if num_runs == 1 else "--no-what-if"
    command = ["simulate", "1P+1D", "--num-requests", "20", what_if, "--output", str(tmp_path)]
    assert main(["plan", *command]) == 130
    out, err = capsys.readouterr()
    assert "attainment" in out
    assert err == "pdmesh: interrupted: this is what was found\n"
    assert num == num_runs + 1
    assert (tmp_path / "attainment.svg").exists()


def test_a_map_that_was_interrupted_says_what_it_has_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not simulated may attain."""
    run, num = SimFlags.run, 0

    def interrupted(flags: SimFlags, *rest: Any, **kw: Any) -> MeshRun:
        nonlocal num
        num += 1
        if num > 2:
            raise KeyboardInterrupt
        return run(flags, *rest, **kw)

    monkeypatch.setattr(SimFlags, "run", interrupted)
    monkeypatch.setattr(SimFlags, "trial_s", lambda *_: 0.0)
    assert main(["plan", "map", "4", "--rate", "300", "--num-requests", "40"]) == 130
    assert "2 simulated, none attains 90%" in capsys.readouterr().out
