"""``pdmesh plan paper distserve`` from the command line: files in and out, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.cli import main
from services.cli.plan import view
from services.sim.baselines.distserve import DistServeSim

DATA = Path(__file__).parents[2] / "sim" / "data"
REFERENCE = DATA / "ref_simdistserve_opt13b_distserve_tp2pp1_tp1pp1.csv"
HEAD = "req_id,arrival_s,prompt_len,output_len\n"


def run(requests: Path, *flags: str, data: Path = DATA) -> int:
    """The command with a folder of data."""
    return main(
        ["plan", "paper", "distserve", "--requests", str(requests), "--data", str(data), *flags]
    )


def ours(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """What was told to programs."""
    return {it["what"]: it["ours"] for it in json.loads(capsys.readouterr().out)[0]["rows"]}


@pytest.mark.parametrize("fidelity", ["exact", "runs"])
def test_the_reference_file_comes_out_again(
    fidelity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, and it says so."""
    out = tmp_path / "out.csv"
    assert run(REFERENCE, "--out", str(out), "--fidelity", fidelity) == 0
    assert out.read_bytes() == REFERENCE.read_bytes()
    said = " ".join(capsys.readouterr().out.split())
    assert "rows that are the same, digit by digit 500 500" in said
    assert "TTFT p50 91.522 91.522 ms TTFT p90 186.4" in said


def test_a_run_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What people read, as numbers; a file without results is held against nothing."""
    assert run(REFERENCE, "--json") == 0
    told = ours(capsys)
    assert told["TTFT p90"] == pytest.approx(186.416, abs=5e-4)
    assert told["rows that are the same, digit by digit"] == 500
    path = tmp_path / "one.csv"
    path.write_text(HEAD + "0,0,374,44\n")
    assert run(path, "--json") == 0
    told = ours(capsys)
    assert list(told) == [f"{name} p{q}" for name in ("TTFT", "TPOT") for q in (50, 90, 99)]
    assert told["TPOT p50"] == told["TPOT p99"] == pytest.approx(22.26134, abs=5e-6)


def test_an_earlier_run_without_a_number_is_held_against_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Theirs divides by no output tokens: that line says nothing, and no figure becomes nan."""
    path = tmp_path / "two.csv"
    head = HEAD.strip() + ",ttft_ms,decode_ms,tpot_ms\n"
    path.write_text(head + "0,0,374,0,43.7709,0,nan\n1,9,374,44,43.7709,979.4989,22.26134\n")
    assert run(path, "--json") == 0
    told = ours(capsys)
    assert told["rows that are the same, digit by digit"] == 1
    assert told["largest difference of tpot_ms"] == 0


def test_a_file_that_cannot_be_written_is_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, not by that of what would become it."""
    monkeypatch.delattr(DistServeSim, "run")
    for out, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "out", "no such folder")):
        assert run(REFERENCE, "--out", str(out)) == 2
        assert f"--out {out}: " in (said := capsys.readouterr().err)
        assert why in said


def test_a_file_that_could_not_be_written_after_all_is_told_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk: not by the name of what would have become it, and nothing is left."""
    out = tmp_path / ("x" * 255)  # which leaves no room for the other's name
    assert run(REFERENCE, "--out", str(out)) == 1
    assert f"pdmesh: cannot write to --out {out} (file name too long)\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


PROFILE = "ref_distserve_profile_a100_80g_distserve.json"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"facebook/opt-', '"facebook/other-', "have no model in common"),
        ("14.742973695171262,", "", PROFILE),
        ('"prefill"', '"prefil"', PROFILE),
        ("14.742973695171262", '"x"', PROFILE),
        ("14.742973695171262", "-1e3", "tp2,pp1 make a step (prompts 1, tokens 374) take -9"),
        (
            "19.934702624895458",
            "-1e3",
            "tp1,pp1 make a step (sequences 1, tokens 374) take -9",
        ),
        ("14.742973695171262", "1e308", "tp2,pp1 make a step (prompts 1, tokens 374) take 1e+308"),
        (
            "0.0006269356524350583",
            "1e308",
            "tp1,pp1 make a step (sequences 1, tokens 374) take inf",
        ),
    ],
)
def test_coefficients_that_cannot_be_say_so(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, and nothing is written."""
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    text = (DATA / PROFILE).read_text()
    assert old in text
    (tmp_path / PROFILE).write_text(text.replace(old, new))
    out = tmp_path / "out.csv"
    assert run(REFERENCE, "--out", str(out), data=tmp_path) == 2
    assert said in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert not out.exists()


def place(*flags: str) -> int:
    """The search of placements, with few requests."""
    files = ["--requests", str(REFERENCE), "--data", str(DATA), "--num-requests", "50"]
    return main(["plan", "paper", "distserve-placement", *files, *flags])


@pytest.mark.slow
def test_limits_that_no_placement_keeps_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Which one, and what would be kept; what is found is told to programs, too."""
    assert place("--slo-ttft", "5ms") == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "keeps TTFT 5ms" in said
    assert "give --slo-ttft" in said
    assert place("--slo-tpot", "1ms", "--json") == 1
    (told,) = json.loads(capsys.readouterr().out)
    assert "keeps TPOT 1ms" in told["notes"][0]
    assert {row["ours"] for row in told["rows"]} == {0.0}
    assert place("--json") == 0
    (told,) = json.loads(capsys.readouterr().out)
    rates = [row["ours"] for row in told["rows"]]
    assert len(rates) == 9
    assert rates == sorted(rates, reverse=True)
    assert told["notes"] == []


def test_a_long_search_of_placements_says_so_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what shortens it."""
    monkeypatch.setattr(view, "SHORT_S", 0.0)
    assert place() == 0
    assert "at most 45 simulations" in (said := capsys.readouterr().err)
    assert "--num-requests" in said


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (HEAD, [], "holds no request"),
        ("req_id,arrival_s\n0,0\n", [], "no column prompt_len, output_len"),
        (HEAD.strip() + ",arrival_s\n", [], ":1: more than one column arrival_s"),
        (HEAD + "0,0,ten,1\n", [], ":2: Expected `int`, got `str` - at `$.prompt_len`"),
        (HEAD + "0,0,0,1\n", [], ":2: Expected `int` >= 1 - at `$.prompt_len`"),
        (HEAD + "0,0,1.5,1\n", [], ":2: Expected `int`, got `str` - at `$.prompt_len`"),
        (HEAD + "0,nan,1,1\n", [], ":2: arrival_s must be at least 0, not 'nan'"),
        (HEAD + "0,5,1,1\n1,4,1,1\n", [], ":3: arrives at 4 s, before the line above"),
        (HEAD + "0,5,1,1\n1,1e306,1,1\n", [], ":3: arrives more than 1e+08 s after the first"),
        (HEAD + "0,0,1\n", [], ":2: 3 columns, not 4"),
        (HEAD + "0,0,66145,1\n", ["--prefill", "1,1"], "would wait for ever"),
        (HEAD + "0,0,49999,2\n", [], "more than the 50000 of one decode batch"),
        (HEAD + "0,0,1,1\n", ["--prefill", "2"], "--prefill must be TP,PP"),
        (HEAD + "0,0,1,1\n", ["--prefill", "9" * 5000 + ",1"], "--prefill must be TP,PP"),
        (HEAD + "0,0,1,1\n", ["--prefill", "3,1"], "opt-13b does not run at tp3,pp1"),
        (HEAD + "0,0,1,1\n", ["--decode", "8,1"], "no coefficients of opt-13b at tp 8"),
        (HEAD + "0,0,1,1\n", ["--model", "opt-1"], "--model must be opt-13b or opt-66b"),
        (HEAD + "0,0,1,1\n", ["--system", "orca"], '"distserve", "vllm"'),
        (HEAD + "0,0,1,1\n", ["--system", "vllm"], "give one degree twice"),
    ],
)
def test_bad_input_is_one_line_that_helps(
    text: str, flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, file and line, the known words."""
    path = tmp_path / "requests.csv"
    path.write_text(text)
    assert run(path, *flags) == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split())
    assert error.count("\n") == 1


def test_missing_files_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not there, by name."""
    assert run(tmp_path / "none.csv") == 2
    assert "none.csv: no such file" in capsys.readouterr().err
    assert run(REFERENCE, data=tmp_path) == 2
    assert "holds no ref_distserve_profile_a100_80g_distserve.json" in capsys.readouterr().err
    assert main(["plan", "paper", "distserve", "--requests", str(REFERENCE)]) == 2
    assert "--data" in capsys.readouterr().err
    for flag in ("--data", "--out"):  # the closed forms that are shown without read and write none
        assert main(["plan", "paper", "distserve", flag, str(tmp_path / "x")]) == 2
        assert "need --requests FILE.csv" in capsys.readouterr().err
