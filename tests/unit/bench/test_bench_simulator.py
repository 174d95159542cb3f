"""Other simulators beside ours: one load for all, and what is said where one cannot be run."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from bench.simulator.peer_run import attention, clocked
from bench.simulator.peers import (
    OURS,
    PeerError,
    Told,
    ask_ours,
    ask_peer,
    checked,
    load_of,
    row_of,
    told_of,
)


def test_all_get_the_requests_that_ours_gets() -> None:
    """As many as are asked for, in order, and all of them end."""
    load = load_of(5)
    arrivals = [at for at, *_ in load["asks"]]
    assert (load["prefill"], load["decode"], len(arrivals)) == (24, 40, 5)
    assert arrivals == sorted(arrivals)
    told = ask_ours(*OURS[0], 5)
    assert len(told.felt) == 5
    assert told.cpu_s > 0 < told.num_events


def test_what_is_no_clone_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    """By file, flag and repository."""
    with pytest.raises(PeerError, match=r"--vidur .*no vidur/simulator.py.*microsoft/vidur"):
        checked("vidur", tmp_path)
    (tmp_path / "vidur").mkdir()
    (tmp_path / "vidur" / "simulator.py").touch()
    assert checked("vidur", tmp_path) == tmp_path.resolve()


def test_a_peer_that_fails_says_its_last_words_and_the_flag(tmp_path: Path) -> None:
    """An interpreter without what it imports is the usual reason."""
    with pytest.raises(PeerError, match=r"simdistserve ended with 1: .*--python-for-simdistserve"):
        ask_peer("simdistserve", tmp_path, sys.executable, load_of(1))


def test_a_row_counts_who_ended_and_compares_turn_by_turn() -> None:
    """Two turns, the second on a slower machine: half of ours in both."""
    tolds = [Told(1.0, 50, [(0.1, 2.0), (0.3, 4.0)]), Told(3.0, 50, [(0.1, 2.0), (0.3, 4.0)])]
    row = row_of("one", "apart", tolds, [2e5, 6e5], 10)
    assert (row["num_ended"], row["num_requests"], row["events_a_request"]) == (2, 10, 5.0)
    assert row["times_first"]["values"] == [0.5, 0.5]
    assert (row["ttft_s"], row["e2e_s"]) == ([0.2, 0.3], [3.0, 4.0])
    assert row["requests_a_cpu_second"] == 5.0
    assert "2 of 10 ended" in told_of(row)


def test_the_profile_of_attention_has_both_kinds_of_steps(tmp_path: Path) -> None:
    """Prompts by chunk, one sequence each; answers by batch."""
    attention(tmp_path / "attention.csv")
    with (tmp_path / "attention.csv").open() as file:
        rows = list(csv.DictReader(file))
    chunks = {(row["prefill_chunk_size"] == "0", row["batch_size"] == "1") for row in rows}
    assert chunks == {(True, True), (True, False), (False, True)}
    assert all(float(row["time_stats.attn_decode.median"]) > 0 for row in rows)


def test_only_what_is_called_is_timed() -> None:
    """A call of nothing takes next to none."""
    assert 0 <= clocked(lambda: None) < 0.1
