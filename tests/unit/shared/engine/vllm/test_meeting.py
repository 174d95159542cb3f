"""Who is killed amid a start leaves a folder and shared memory; the next start takes them away, and
what a living worker has it leaves alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shared.engine.vllm import meeting

STARTS = """
import sys, time
from shared.engine.vllm import meeting
folder, lock = meeting.meet()
print(folder, flush=True)
time.sleep(60)
"""


def test_what_a_killed_start_left_goes_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside one that lives and one of something else."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(meeting, "_SHARED", shared)
    with subprocess.Popen(
        [sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        pool = shared / f"{left.name}-0"
        pool.touch()
        first, lock = meeting.meet()
        with lock:
            assert left.is_dir()  # it lives
            killed.send_signal(signal.SIGKILL)
            killed.wait()
            second, other = meeting.meet()
            with other:
                assert not left.exists()
                assert not pool.exists()
                assert first.is_dir()
            meeting.leave(second)
        meeting.leave(first)
    assert not list(tmp_path.glob(f"{meeting.PREFIX}*"))
