"""Who is killed amid a start leaves a folder and shared memory; the next start takes them away, and
what a living worker has it leaves alone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from shared.engine.vllm import meeting
from shared.errors import EngineFailed

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
        assert left.is_dir()  # it lives
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        empty = tmp_path / f"{meeting.PREFIX}killed-at-once"
        empty.mkdir()
        second, other = meeting.meet()
        assert not left.exists()
        assert not pool.exists()
        assert not empty.exists()
        assert first.is_dir()
        for folder, held in ((second, other), (first, lock)):
            meeting.leave(folder)
            os.close(held)
    assert not list(tmp_path.glob(f"{meeting.PREFIX}*"))


def test_a_folder_that_another_start_found_before_it_was_locked_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It looks like one that a killed start has left, and is taken away."""
    names = iter("abc")

    def make(prefix: str) -> str:
        made = tmp_path / f"{prefix}{next(names)}"
        if not made.name.endswith("a"):
            made.mkdir()
        return str(made)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    folder, lock = meeting.meet()
    os.close(lock)
    assert folder.name == f"{meeting.PREFIX}b"


def test_a_name_that_is_a_pattern_takes_nothing_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the folder for temporary files chooses its names."""
    monkeypatch.setattr(meeting, "_SHARED", tmp_path)
    others, own = tmp_path / f"{meeting.PREFIX}abc-0", tmp_path / f"{meeting.PREFIX}*-0"
    others.touch()
    own.touch()
    meeting.leave(tmp_path / f"{meeting.PREFIX}*")
    assert others.exists()
    assert not own.exists()


def test_a_folder_too_long_for_sockets_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One byte too many; the system and vLLM would say that a path is, and not which or why."""
    for length, is_too_long in ((48, False), (49, True)):
        place = Path(tempfile.mkdtemp(prefix="pdmesh-", dir="/tmp"))
        inner = place / ("x" * (length - len(str(place)) - 1))
        inner.mkdir()
        monkeypatch.setenv("TMPDIR", str(inner))
        monkeypatch.setattr(tempfile, "tempdir", None)
        folder, lock = meeting.meet()
        try:
            if is_too_long:
                with pytest.raises(EngineFailed, match=r"longer than 48 bytes.*TMPDIR"):
                    meeting.require_room_for_sockets(folder)
            else:
                meeting.require_room_for_sockets(folder)
                with socket.socket(socket.AF_UNIX) as door:
                    door.bind(str(folder / str(uuid.uuid4())))
        finally:
            os.close(lock)
            meeting.leave(folder)
            shutil.rmtree(place)
