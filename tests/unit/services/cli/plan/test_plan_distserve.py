"""``pdmesh plan paper distserve`` from the command line: files in and out, and bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli import main

DATA = Path(__file__).parents[2] / "sim" / "data"
REFERENCE = DATA / "ref_simdistserve_opt13b_distserve_tp2pp1_tp1pp1.csv"
HEAD = "req_id,arrival_s,prompt_len,output_len\n"


def run(requests: Path, *flags: str, data: Path = DATA) -> int:
    """The command with a folder of data."""
    return main(
        ["plan", "paper", "distserve", "--requests", str(requests), "--data", str(data), *flags]
    )


@pytest.mark.parametrize("fidelity", ["exact", "runs"])
def test_the_reference_file_comes_out_again(
    fidelity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, and it says so."""
    out = tmp_path / "out.csv"
    assert run(REFERENCE, "--out", str(out), "--fidelity", fidelity) == 0
    assert out.read_bytes() == REFERENCE.read_bytes()
    said = capsys.readouterr().out
    assert "500 of 500 rows are the same, digit by digit" in said
    assert "TTFT p50 / p90 / p99  91.522 / 186.4" in said


def test_without_a_file_the_closed_forms_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Theirs beside ours."""
    assert main(["plan", "paper", "distserve"]) == 0
    assert "0.936" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (HEAD, [], "holds no request"),
        ("req_id,arrival_s\n0,0\n", [], "no column prompt_len, output_len"),
        ("req_id,arrival_s,prompt_len,arrival_s,output_len\n", [], "more than one column arrival_s"),
        (HEAD + "0,0,ten,1\n", [], ":2: prompt_len must be a number, not 'ten'"),
        (HEAD + "0,0,0,1\n", [], ":2: prompt_len must be at least 1"),
        (HEAD + "0,0,1.5,1\n", [], ":2: prompt_len must be a whole number"),
        (HEAD + "0,nan,1,1\n", [], ":2: arrival_s must be at least 0, not 'nan'"),
        (HEAD + "0,5,1,1\n1,4,1,1\n", [], ":3: arrives at 4 s, before the line above"),
        (HEAD + "0,0,1\n", [], ":2: 3 columns, not 4"),
        (HEAD + "0,0,66145,1\n", ["--prefill", "1,1"], "would wait for ever"),
        (HEAD + "0,0,49999,2\n", [], "more than the 50000 of one decode batch"),
        (HEAD + "0,0,1,1\n", ["--prefill", "2"], "--prefill must be TP,PP"),
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
