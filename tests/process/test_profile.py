"""``pdmesh profile`` and a prefill worker's first start: measured for real, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.torch]

FLAGS = ("--threads", "1", "--num-blocks", "256")
LIMIT_S = 120.0


def command(verb: str, *arguments: str, file: Path) -> list[str]:
    return [
        sys.executable, "-m", "services.cli", verb, *FLAGS, "--profile-file", str(file), *arguments
    ]  # fmt: skip


def profile(*arguments: str, file: Path) -> dict[str, Any]:
    """What ``pdmesh profile --json`` prints."""
    done = subprocess.run(
        command("profile", "--json", *arguments, file=file),
        capture_output=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    return orjson.loads(done.stdout)


def first_words_of_a_worker(file: Path) -> dict[str, Any]:
    """The line of a prefill worker's log about its machine; there is no gateway, and need be none.

    Standard input must stay open, else the worker takes its parent for dead.
    """
    environment = {**os.environ, "PDMESH_LOG_FORMAT": "json"}
    worker = subprocess.Popen(
        command("prefill", file=file), env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        assert worker.stderr is not None
        for line in worker.stderr:
            if line.startswith("{") and "saturating_tokens" in (said := orjson.loads(line)):
                return said
        raise AssertionError("the worker said nothing of its machine")
    finally:
        worker.kill()
        worker.communicate()


def scale_samples(file: Path, factor: float) -> None:
    """Have what was measured be as of a machine that was so much slower."""
    kept = orjson.loads(file.read_bytes())
    kept["profile"]["samples"] = [[num, s * factor] for num, s in kept["profile"]["samples"]]
    file.write_bytes(orjson.dumps(kept))


def test_a_machine_is_measured_once_and_known_to_every_later_start(tmp_path: Path) -> None:
    """A worker measures if nobody has, and leaves the file; the command finds the same, until it is
    to measure anew or steps are much quicker, and a worker with the same flags joins without
    measuring."""
    file = tmp_path / "profile.json"
    said = first_words_of_a_worker(file)
    assert said["event"] == "machine measured"
    assert said["seconds"] > 0
    scale_samples(file, 1 / 9)  # nor does a busy machine that is quicker now outdo them
    known = profile(file=file)
    assert known["saturating_tokens"] == said["saturating_tokens"]
    measured = profile("--force", file=file)
    assert measured["samples"] != known["samples"]
    assert measured["saturating_tokens"] in [count for count, _ in measured["samples"]]
    assert measured["tokens_per_s"] > 0
    assert 0 < measured["message_s"] < 0.1
    assert measured["interference"] >= 0
    scale_samples(file, 90)  # as of a machine that had much else to do
    measured_anew = profile(file=file)
    assert measured_anew["samples"][0][1] < 90 * measured["samples"][0][1]
    scale_samples(file, 1 / 9)
    said = first_words_of_a_worker(file)
    assert said["event"] == "machine known from an earlier start"
    assert said["saturating_tokens"] == measured_anew["saturating_tokens"]
