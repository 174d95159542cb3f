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
    """Size, time, verdict, and what the founding documents have wrong."""
    assert main(["plan", "kv", "llama-3-70b", "--tokens", "8192", "--link", "25GB/s"]) == 0
    text = said(capsys)
    for piece in ("327.680 kB", "107.37 ms", "5.86 GB/s fetch", "it is 524", "76 ms"):
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
    ("arguments", "words"),
    [
        ("llama-9", "known|one of llama-7b"),
        ("demo --tokens 0", "--tokens must be 1.."),
        ("demo --link 25", "such as 25GB/s"),
        ("demo --link 0GB/s", "above zero"),
        ("demo --rate 0", "--rate must be above 0"),
        ("demo --device abacus", "--device must be one of a100"),
        ("demo --efficiency 2", "--efficiency must be above 0 and at most 1"),
    ],
)
def test_kv_refuses_what_makes_no_sense(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit code 2."""
    assert main(["plan", "kv", *arguments.split()]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert any(word in error for word in words.split("|"))


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
        ([{"hash_ids": []}], [], ":1: no hash_ids"),
        ([{"timestamp": 2}, {"timestamp": 1}], [], ":2: arrives before the line above"),
        ([{"input_length": -1}], [], ":1: Expected `int` >= 0"),
        ([{"hash_ids": None}], [], ":1: Expected `array`"),
        ([], [], "holds no request"),
        ([{}], ["--blocks", "0"], "--blocks must be a whole number from 1, or inf"),
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
    most: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All tables are one document, whether a cluster keeps the limits or not; the paper's cluster
    stands beside no other rate than its own."""
    data = Path(__file__).parents[2] / "sim" / "data"
    shutil.copy(data / "splitwise_sim_perf_model_tp8.csv", tmp_path / "perf_model.csv")
    name = "AzureLLMInferenceTrace_code_2023.csv"
    shutil.copy(data / "azure_code_lengths.csv", tmp_path / name)
    load = ("--rate", "12", "--duration", "5", "--most-prompt", most, "--most-token", "3")
    command = ["plan", "paper", "splitwise", "--data", str(tmp_path), *load, "--json"]
    assert main(command) == code
    *_, frontier = json.loads(capsys.readouterr().out)
    assert bool(frontier["rows"]) == (code == 0)
    assert all(row["theirs"] == "" for row in frontier["rows"])
    assert ("do not keep the limits" in frontier["notes"][0]) == (code == 1)


def test_unknown_papers_get_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    """As every unknown command."""
    assert main(["plan", "paper", "orka"]) == 2
    assert "orka" in capsys.readouterr().err
