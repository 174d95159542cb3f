"""Failpoints: what the environment variable means, and that an armed point really acts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from shared.failpoints import failpoint, parse

CODE = """
from shared.failpoints import failpoint
for i in range(5):
    print(i, flush=True)
    failpoint("here")
print("past")
"""


def test_points_carry_a_count_and_an_action() -> None:
    """name[:count]=action, with commas between."""
    assert parse("a=stop, b:3=kill,,") == {"a": (1, "stop"), "b": (3, "kill")}


@pytest.mark.parametrize("text", ["a", "a=", "=kill", "a:x=kill", "a:=kill", "a=explode"])
def test_a_misspelt_point_is_an_error_not_a_test_that_tests_nothing(text: str) -> None:
    """Whatever is not understood is refused."""
    with pytest.raises(ValueError, match="PDMESH_FAILPOINTS"):
        parse(text)


def test_an_unarmed_point_does_nothing() -> None:
    """This very test goes on."""
    failpoint("nowhere")


@pytest.mark.process
def test_an_armed_point_kills_at_its_count() -> None:
    """The third pass is the last, and stderr says so."""
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PDMESH_FAILPOINTS": "here:3=kill"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1", "2"]
    assert done.stderr.startswith("failpoint here kill pid=")


@pytest.mark.process
def test_a_stopped_process_goes_on_after_sigcont() -> None:
    """stop is SIGSTOP, once."""
    child = subprocess.Popen(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PDMESH_FAILPOINTS": "here=stop"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    assert child.stderr.readline() == f"failpoint here stop pid={child.pid}\n"
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    child.send_signal(signal.SIGCONT)
    out, _ = child.communicate(timeout=60)
    assert out.split() == ["0", "1", "2", "3", "4", "past"]
    assert child.returncode == 0
