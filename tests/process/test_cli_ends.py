"""Every command ends well: when its reader has left (``| head``), and on Ctrl-C while it waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.house import ROOT

LIMIT_S = 120.0

pytestmark = pytest.mark.process


def start(command: str, **streams: int) -> subprocess.Popen[bytes]:
    """Run a command without our variables, with output buffered as it is for users, and with
    SIGINT at its default: whoever runs the tests in the background of a script ignores it."""
    others = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
    environment = {k: v for k, v in others.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", *command.split()],
        cwd=ROOT, env=environment, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **streams,
    )  # fmt: skip


@pytest.mark.parametrize(
    "command", ["--help", "version", "config --json", "completion bash", "doctor --json"]
)
def test_a_reader_that_has_left_is_no_catastrophe(command: str) -> None:
    """Exit code 1, and not a word on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    process = start(command, stdin=subprocess.DEVNULL, stdout=writer)
    os.close(writer)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (1, b"")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_fail_nothing(closed: str) -> None:
    """As cron and some starters of daemons leave them."""
    command = f"{sys.executable} -m services.cli version {closed}"
    assert (
        subprocess.run(command, shell=True, cwd=ROOT, check=False, timeout=LIMIT_S).returncode == 0
    )


@pytest.mark.parametrize("command", ["models", "generate hi", "chat", "top --once"])
def test_ctrl_c_ends_a_command_that_waits_for_a_gateway(command: str) -> None:
    """One that has taken the connection and says nothing; 130, and no traceback."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(LIMIT_S)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = start(f"{command} --url {url}", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")


@pytest.mark.usefixtures("starts_are_executed")
def test_ctrl_c_while_a_command_still_imports_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes before the command can take the signal."""
    (tmp_path / "structlog.py").write_text("raise KeyboardInterrupt")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    process = start("version", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_ctrl_c_ends_the_doctor_and_what_it_has_started() -> None:
    """The process that loads a library for it goes with it."""
    process = start("doctor", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    children: list[int] = []
    while not children:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        children = [int(pid) for pid in listed.split()]
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (130, b"")
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
