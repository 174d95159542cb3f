"""Trace files as published are read; what is wrong in one is named by file and line."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from services.cli.bench.sources import read_trace
from services.cli.bench.workload import Ask
from services.planner.rows import DataError

MOONCAKE = """\
{"timestamp": 3000, "input_length": 900, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 6000, "input_length": 400, "output_length": 7, "hash_ids": [0], "more": true}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-16 18:15:46.4951690,374,44\r
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, newline="")
    return path


def test_mooncake(tmp_path: Path) -> None:
    """Milliseconds from the first arrival, with the ids of shared blocks; further keys are left."""
    trace = read_trace(written(tmp_path, MOONCAKE))
    assert list(trace.asks(random.Random(0))) == [
        Ask(num_input=900, num_output=5, due_s=0.0, block_ids=(0, 1)),
        Ask(num_input=400, num_output=7, due_s=3.0, block_ids=(0,)),
    ]


@pytest.mark.parametrize("text", [MOONCAKE, AZURE])
def test_a_trace_may_come_through_a_pipe(tmp_path: Path, text: str) -> None:
    """As of ``--trace <(zcat trace.gz)``: it can be read once."""
    here, there = os.pipe()
    with os.fdopen(there, "w", newline="") as pipe:
        pipe.write(text)
    piped = read_trace(Path(f"/dev/fd/{here}"))
    os.close(here)
    assert piped.rows == read_trace(written(tmp_path, text)).rows


def test_azure(tmp_path: Path) -> None:
    """Seven decimals of a second, carriage returns, rows out of order."""
    trace = read_trace(written(tmp_path, AZURE))
    first, second = trace.rows
    assert (first.num_input, first.num_output, first.due_s) == (374, 44, 0.0)
    assert (second.num_input, second.due_s) == (396, pytest.approx(4.5))


def test_times_of_a_trace_may_name_their_offset(tmp_path: Path) -> None:
    """A whole second has no decimals, and Z is an offset, too; after a byte order mark."""
    head, *_ = AZURE.splitlines()
    times = ("2024-05-12 00:00:00+00:00", "2024-05-12T00:00:01.5Z", "2024-05-12 02:00:03.25+02:00")
    text = "\r\n".join(["\ufeff" + head, *(f"{at},1,1" for at in times)])
    assert [ask.due_s for ask in read_trace(written(tmp_path, text)).rows] == [0.0, 1.5, 3.25]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", ":1: neither Mooncake's JSONL nor Azure's CSV: no column TIMESTAMP"),
        (MOONCAKE + "{broken\n", ":3: "),
        (MOONCAKE + '{"timestamp": 1, "input_length": 3}\n', ":3: .*output_length"),
        (
            MOONCAKE + '{"timestamp": 1, "input_length": 0, "output_length": 1}\n',
            ":3: .*>= 1.*input_length",
        ),
        (
            MOONCAKE + '{"timestamp": -5, "input_length": 3, "output_length": 1}\n',
            ":3: .*>= 0.*timestamp",
        ),
        (MOONCAKE + '{"timestamp": 1, "input_length": "3", "output_length": 1}\n', ":3: "),
        (AZURE + "2023-11-16,1\n", ":4: 2 columns, not 3"),
        (AZURE + "yesterday,1,2\n", ":4: .*'yesterday"),
        (AZURE + "2023-11-16 18:15:50.1,many,2\n", ":4: Expected `int`, got `str` .*ContextTokens"),
        (AZURE + "2023-11-16 18:15:50.1,1,-2\n", r":4: Expected `int` >= 1 .*GeneratedTokens"),
        ("x" * 200_000, ":1: field larger than"),
        (AZURE + "x" * 200_000 + ",1,2\n", ":4: field larger than"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    ],
)
def test_the_first_wrong_line_is_named(text: str, words: str, tmp_path: Path) -> None:
    """By file and number, with what is wrong there."""
    path = written(tmp_path, text)
    with pytest.raises(DataError, match=words) as caught:
        read_trace(path)
    assert str(path) in caught.value.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """One that is not there, and one that is not text."""
    with pytest.raises(DataError, match="no such file"):
        read_trace(tmp_path / "nothing")
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is not text"):
        read_trace(path)
