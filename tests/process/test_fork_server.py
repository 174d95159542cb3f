"""What tests fork is what would have been executed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.runtime.service import EXIT_BAD_CONFIG
from tests.support import fork_server
from tests.support.fork_server import executed_starts
from tests.support.house import ROOT
from tests.support.process_mesh import process_mesh

pytestmark = [pytest.mark.process, pytest.mark.ucx]


def words_of(pid: int) -> str:
    """The command line that the kernel shows of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def settings(cwd: Path) -> dict[str, Any]:
    """How a command is started, whoever starts it."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith("PDMESH_")}
    env = ours | {"PYTHONPATH": str(ROOT)}
    return {"cwd": cwd, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def by_subprocess(*command: str, cwd: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    done = subprocess.run(command, **settings(cwd), check=False, timeout=60)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def by_asyncio(*command: str, cwd: Path) -> tuple[int, str, str]:
    """Likewise."""

    async def run() -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(*command, **settings(cwd))
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    return asyncio.run(run())


def test_a_command_says_and_returns_the_same_forked_or_executed(tmp_path: Path) -> None:
    """Words, streams, exit codes, and files and modules by names in its own folder."""
    (tmp_path / "mesh.toml").write_text("[decode]\nstaging_mib = 1\n")
    (tmp_path / "own.py").write_text("import sys\nsys.exit('it is mine')")
    for arguments in (
        ("version",), ("config", "--config", "mesh.toml"), ("nonsense",),
        ("up", "--policy", "own:Policy"),
    ):  # fmt: skip
        command = (sys.executable, "-m", "services.cli", *arguments)
        forked = [by_asyncio(*command, cwd=tmp_path), by_subprocess(*command, cwd=tmp_path)]
        with executed_starts():
            assert forked == 2 * [by_subprocess(*command, cwd=tmp_path)]
    assert "it is mine" in forked[0][2]


def test_what_subprocess_forks_is_waited_for_and_killed(tmp_path: Path) -> None:
    """As any process is."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = (sys.executable, "-m", "services.cli", "models", "--url", url)
        with subprocess.Popen(command, **settings(tmp_path)) as waiting:
            connection, _ = silent.accept()
            with connection:
                is_forked = "fork_server" in words_of(waiting.pid)
                assert is_forked is not Path(fork_server.GPU).exists()
                with pytest.raises(subprocess.TimeoutExpired):
                    waiting.wait(0.01)
                assert waiting.poll() is None
                waiting.kill()
                assert waiting.wait(30) == -signal.SIGKILL


async def test_services_have_their_own_environment_signals_and_ends() -> None:
    """A kill is told as a kill, a drain as 0, and a setting that is wrong as 2; failpoints act."""
    async with process_mesh() as mesh:
        gateway = await mesh.start_gateway()
        assert ("fork_server" in words_of(gateway.pid)) is not Path(fork_server.GPU).exists()
        armed = await mesh.add("decode", failpoints="decode.mid_decode:2=kill")
        await mesh.add("prefill")
        await mesh.paired(gateway, 1)
        await mesh.ask(gateway, [5, 6, 7])
        assert await armed.ended() == -signal.SIGKILL
        refused = await mesh.start("decode", staging_mib=0)
        assert await refused.ended() == EXIT_BAD_CONFIG
        await gateway.stop()


async def test_what_libraries_read_when_they_are_loaded_is_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server has loaded them already."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with process_mesh() as mesh:
        assert "services.gateway" in words_of((await mesh.start("gateway")).pid)


async def test_beside_a_gpu_all_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of the server's may have begun with it."""
    monkeypatch.setattr(fork_server, "GPU", "/dev/null")
    async with process_mesh() as mesh:
        assert "services.gateway" in words_of((await mesh.start("gateway")).pid)
