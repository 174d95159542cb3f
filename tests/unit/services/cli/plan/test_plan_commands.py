"""``pdmesh plan kv`` and ``plan paper``: what is printed, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from services.cli import main


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """Standard output without line breaks."""
    return " ".join(capsys.readouterr().out.split())


def trace(path: Path, *lines: dict[str, object]) -> Path:
    """A trace file with defaults for what a line does not say."""
    whole = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    path.write_text("".join(json.dumps({**whole, **line}) + "\n" for line in lines))
    return path


def test_kv_of_a_published_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Size, time and verdict."""
    assert main(["plan", "kv", "llama-3-70b", "--tokens", "8192", "--link", "25GB/s"]) == 0
    text = said(capsys)
    for piece in ("327.680 kB", "107.37 ms", "5.86 GB/s fetch"):
        assert piece in text
    assert main(["plan", "kv", "llama-3-70b", "--link", "5GB/s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "recompute"


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        ({"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}, 2 * 4 * 512 * 2),
        (
            {
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 96,
                "hidden_size": 512,
                "torch_dtype": "float32",
            },
            2 * 4 * 2 * 96 * 4,
        ),
        ({"n_layer": 3, "n_head": 4, "n_embd": 256}, 2 * 3 * 256 * 2),
        (
            {
                "num_hidden_layers": 61,
                "num_attention_heads": 128,
                "hidden_size": 7168,
                "kv_lora_rank": 512,
                "qk_rope_head_dim": 64,
            },
            61 * 576 * 2,
        ),
        (
            {
                "text_config": {
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "hidden_size": 64,
                }
            },
            2 * 2 * 64 * 2,
        ),
    ],
    ids=["mha", "gqa", "gpt2", "mla", "multimodal"],
)
def test_kv_of_a_folder(
    config: dict[str, object],
    token_bytes: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whatever family: config.json says it."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", "kv", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_bytes"] == token_bytes


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("kv llama-9", "one of llama-7b"),
        ("kv demo --tokens 0", "--tokens must be 1.."),
        ("kv demo --link 25", "such as 25GB/s"),
        ("kv demo --link 0GB/s", "above zero"),
        ("kv demo --rate 0", "--rate must be above 0"),
        ("kv demo --device abacus", "--device must be one of a100"),
        ("kv demo --efficiency 2", "--efficiency must be above 0 and at most 1"),
        ("simulate 1M --rate 0", "--rate must be above 0"),
        ("simulate 1M --policy fifo", "--policy must be one of round_robin"),
        ("simulate 1M --workload nonsense", "--workload must be azure-conv, azure-code, mooncake"),
        ("simulate 1M --workload none.jsonl", "no such file"),
        ("simulate 1M --slo-ttft soon", "--slo-ttft must be a number with a unit"),
        ("simulate 1M --slo-ttft 0s", "nobody could keep 0"),
        ("simulate 1M --slo-tpot 1e400s", "--slo-tpot must be a number with a unit"),
        ("simulate 1M --kv-tokens 0", "--kv-tokens must be 1.."),
        ("simulate 1M --link fast", "such as 25GB/s"),
        ("simulate 1M --beside earlier", "--beside needs --output"),
        ("simulate 1M --times fast", '"opt-13b-a100", "fake", "distserve"'),
        ("simulate 1M --times fake --device a100", "give one time model"),
        ("simulate 1M --device tpu", "a device must be one of a100"),
        ("simulate 1M --times distserve", "needs --data"),
        ("simulate 1M --device l4 --model llama-3-70b", "do not fit into 1 x l4"),
        ("simulate 1M --device a100 --base 3ms", "--base belongs to affine times"),
        ("simulate 1M --profile none.json", "none.json: no such file"),
        ("simulate 1M --slower 0", "--slower must be"),
        ("simulate 1M(tp2)", "this time model knows no tp2: --device (a roofline)"),
        ("simulate 1M(h100) --base 3ms", "(h100) in a mesh needs --device"),
        ("fleet --slo-ttft 5ms", "no mesh of these workers keeps TTFT 5ms"),
        ("fleet --slo-ttft 5ms", "give --slo-ttft"),
        ("fleet --slo-tpot 1ms", "no mesh of these workers keeps TPOT 1ms"),
        ("fleet --devices a100,h100 --model llama-3-8b", "several kinds of devices need --price"),
        ("fleet --devices a100,abacus", "known are a100"),
        ("fleet --tp 3", "--tp must be degrees out of 1,2,4,8"),
        ("fleet --device l4 --model llama-3-70b", "do not fit"),
        ("fleet --rate 0", "--rate must be above 0"),
        ("fleet --price a100=free --device a100", "--price must be like"),
        ("fleet --price a100=nan --device a100", "--price must be like"),
        ("fleet --price a100=2,h100=3", "--price has one price"),
        ("fleet --price a100=1,A100=3 --device a100", "--price has two prices of a100"),
        ("fleet --price a100=2 --device h100", "--price says nothing of h100"),
        ("fleet --budget nan", "--budget must be above 0"),
        ("fleet --budget inf", "--budget must be above 0"),
        ("fleet --watts", "--watts needs --device"),
        ("paper splitwise --budget nan", "--budget must be above 0"),
        ("paper splitwise --budget inf", "--budget must be above 0"),
        ("kv llama-3-70b --tokens 1.5", "--tokens must be a whole number, not '1.5'"),
        ("simulate 1M --num-requests 2.e-1", "--num-requests must be a whole number"),
        ("simulate 1M --num-requests 1.e999", "--num-requests must be a whole number"),
        ("fleet --budget 0.5", "too little for any mesh"),
        ("watch --slo-ttft 0s", "must be above 0: nobody could keep 0"),
        ("watch --slo-tpot quick", "--slo-tpot must be a number with a unit"),
        ("watch --attainment 1", "--attainment must be above 0 and below 1"),
        ("watch --max-workers -1", "--max-workers must be 0..1024"),
        ("watch --interval 0", "--interval must be 0.5..3600 seconds"),
        ("watch --url nowhere", "--url must be http://host:port"),
    ],
)
def test_what_a_plan_refuses_is_one_line(
    command: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is allowed, or would be kept, before anything is simulated; exit code 2."""
    assert main(["plan", *command.split()]) == 2
    error = capsys.readouterr().err
    assert words in " ".join(error.split())
    assert error.count("\n") == 1


def test_a_config_without_layers_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name of the key."""
    (tmp_path / "config.json").write_text('{"num_attention_heads": 4, "hidden_size": 64}')
    assert main(["plan", "kv", str(tmp_path)]) == 1
    assert "num_hidden_layers" in capsys.readouterr().err


def test_hit_rate_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of four blocks."""
    path = trace(tmp_path / "t.jsonl", {}, {"timestamp": 5})
    command = ["plan", "paper", "mooncake", "--replay", str(path)]
    assert main([*command, "--policy", "lfu", "--blocks", "10"]) == 0
    assert "hit rate 0.5000" in capsys.readouterr().out
    assert main([*command, "--blocks", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["hit_rate"], found["num_evicted"]) == (0.0, 3)


@pytest.mark.parametrize(
    ("lines", "flags", "word"),
    [
        ([{}, {"hash_ids": []}], [], "t.jsonl:2: no hash_ids"),
        ([{}], ["--data", "."], "give one of them"),
        ([{"timestamp": 2}, {"timestamp": 1}], [], ":2: arrives 0.001 s before the line above"),
        ([{"input_length": -1}], [], ":1: Expected `int` >= 1"),
        ([{"hash_ids": None}], [], ":1: Expected `array`"),
        ([], [], "is empty"),
        (
            [{}],
            ["--blocks", "0"],
            "--blocks must be a whole number from 1 to 1,000,000,000,000,000, ",
        ),
        ([{}], ["--blocks", "9" * 5000, "--json"], "1,000,000,000,000,000, or inf, not '999"),
        (None, ["--policy", "lfu"], "--policy and --blocks need --replay"),
        ([{}], ["--policy", "fifo"], '"lru", "lfu", "length-aware"'),
    ],
)
def test_bad_traces(
    lines: list[dict[str, object]] | None,
    flags: list[str],
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """File, line, what is wrong."""
    path = trace(tmp_path / "t.jsonl", *(lines or ()))
    replayed = [] if lines is None else ["--replay", str(path)]
    assert main(["plan", "paper", "mooncake", *replayed, *flags]) == 2
    assert word in " ".join(capsys.readouterr().err.split())


def test_a_line_whose_length_says_otherwise_is_counted_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ids count; that they are odd goes to stderr."""
    path = trace(tmp_path / "t.jsonl", {"input_length": 512})
    assert main(["plan", "paper", "mooncake", "--replay", str(path)]) == 0
    assert "1 of 1 lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("paper", "figure"),
    [
        ("distserve", "0.936"),
        ("mooncake", "18.57"),
        ("splitwise", "70"),
        ("orca", "36.9x"),
        ("pope", "42,654"),
        ("founding", "608 ms"),
    ],
)
def test_every_paper_has_its_table(
    paper: str, figure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """For people and for programs."""
    assert main(["plan", "paper", paper]) == 0
    assert figure in capsys.readouterr().out
    assert main(["plan", "paper", paper, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["rows"]


@pytest.mark.parametrize(("most", "code"), [("6", 0), ("1", 1)])
def test_splitwises_clusters_for_programs(
    most: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """All tables are one document, whether a cluster keeps the limits or not; the paper's cluster
    stands beside no other rate than its own."""
    data = Path(__file__).parents[2] / "sim" / "data"
    load = ("--rate", "12", "--duration", "5", "--most-prompt", most, "--most-token", "3")
    command = ["plan", "paper", "splitwise", "--data", str(data), *load, "--json"]
    assert main(command) == code
    *_, frontier = json.loads(capsys.readouterr().out)
    assert bool(frontier["rows"]) == (code == 0)
    assert all(row["theirs"] == "" for row in frontier["rows"])
    assert ("do not keep the limits" in frontier["notes"][0]) == (code == 1)
    assert main([*command, "--budget", "7", "--budget-of", "power"]) == 0
    *_, most = json.loads(capsys.readouterr().out)
    assert most["title"].endswith("most requests/s for power 7")
    rates = [row["ours"] for row in most["rows"]]
    assert rates == sorted(rates)
    assert rates[-1] > 1.0
    assert main([*command, "--budget", "1"]) == 2
    assert "--budget must be enough for a prompt and a token machine" in capsys.readouterr().err
    assert main([*command[:3], "--budget", "70"]) == 2
    assert "--budget needs --data" in capsys.readouterr().err


def test_a_damaged_file_of_the_founding_documents_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An answer of no token is none to divide by; runs that are not there are asked for."""
    data = Path(__file__).parents[2] / "sim" / "data"
    for name in ("code", "conv"):
        azure = "AzureLLMInferenceTrace_{}_2023.csv".format
        shutil.copy(data / azure("code"), tmp_path / azure(name))
    for name in ("conversation", "synthetic"):
        trace(tmp_path / f"{name}_trace.jsonl", {"output_length": 0})
    command = ["plan", "paper", "founding", "--data", str(tmp_path)]
    head, *rows = (data / "splitwise_sim_perf_model.csv").read_text().splitlines()
    for kept, code in ((rows, 0), ([row for row in rows if ",512,64," not in row], 2)):
        (tmp_path / "perf_model.csv").write_text("\n".join((head, *kept)))
        assert main(command) == code
    assert "with 64 prompts of 512 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("took", ["0", "inf", "nan"])
def test_a_run_that_took_no_time_or_for_ever_is_named(
    took: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors are relative to what was measured."""
    data = Path(__file__).parents[2] / "sim" / "data"
    head, first, *rows = (data / "splitwise_sim_perf_model.csv").read_text().splitlines()
    fields = first.split(",")
    fields[head.split(",").index("prompt_time")] = took
    (tmp_path / "perf_model.csv").write_text("\n".join((head, ",".join(fields), *rows)))
    shutil.copy(data / "AzureLLMInferenceTrace_code_2023.csv", tmp_path)
    assert main(["plan", "paper", "splitwise", "--data", str(tmp_path)]) == 2
    assert "perf_model.csv:2: " in (error := capsys.readouterr().err)
    assert "prompt_time" in error


@pytest.mark.parametrize(
    ("command", "first", "last"),
    [("plan", "simulate", "paper"), ("plan paper", "distserve", "founding")],
)
def test_what_is_asked_most_stands_first_in_the_help(
    command: str, first: str, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in the order of letters, below "Other"; and examples are of these commands."""
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "Commands" in out
    assert "Other" not in out
    assert out.index(f"│ {first} ") < out.index(f"│ {last} ")
    assert f" pdmesh {command} " in out.split("Examples")[1]
