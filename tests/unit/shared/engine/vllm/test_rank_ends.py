"""A rank and its worker end together, from before the rank has anything to compute with."""

from __future__ import annotations

import queue
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from shared.engine.vllm.ranks import LayerEvents, write_logging

RANK = """
import json, logging.config, pathlib, sys
logging.config.dictConfig(json.loads(pathlib.Path(sys.argv[1]).read_text()))
print("loads", flush=True)
sys.stdin.read()
"""
ENDS_WITHIN_S = 30.0


def a_rank(config: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, config],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("level", ["ERROR", "INFO", "of a file"])
def test_a_rank_does_not_outlive_a_worker_that_ends_amid_its_start(
    level: str, tmp_path: Path
) -> None:
    """It is gone before it has KV to share, however it logs; and one that begins later loads
    nothing."""
    events = LayerEvents(tmp_path, 1)
    own = tmp_path / "own.json"
    own.write_text('{"version": 1, "root": {"level": "INFO"}}')
    config = write_logging(tmp_path, level, str(own) if level == "of a file" else None)
    with a_rank(config) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "loads\n"
        events.close()
        assert rank.wait(ENDS_WITHIN_S) == -signal.SIGKILL
    with a_rank(config) as late:
        assert late.stdout is not None
        assert late.stdout.readline() == ""
        assert late.wait(ENDS_WITHIN_S) == -signal.SIGKILL


def test_a_rank_that_was_lost_before_anybody_watched_is_told_all_the_same(tmp_path: Path) -> None:
    """It has ended between its last word of the start and the first step."""
    events = LayerEvents(tmp_path, 1)
    told: queue.Queue[int | str] = queue.Queue()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
            rank.connect(str(tmp_path / "layers"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
            other.connect(str(tmp_path / "layers"))
            events.begin(1 << 32, 2, told.put)  # a worker may live for years
            for layer in range(2):  # behind the second one the first rank's end has been heard
                other.send(struct.pack("<BHQ", 0, layer, 1 << 32))
                assert told.get(timeout=ENDS_WITHIN_S) == layer
            events.watch(lambda: told.put("lost"))
            assert told.get(timeout=ENDS_WITHIN_S) == "lost"
    finally:
        events.close()
