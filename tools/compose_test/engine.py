"""A Docker engine that answers: the one that runs, or one of our own with its own socket and data,
which is ended again. Knows no image."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.compose_test.steps import CannotRun, Steps, last_lines, output_of, say

START_WITHIN_S = 60.0
STOP_WITHIN_S = 60.0
_SHORT_ROOT = 60
"""A socket's path has 108 bytes, and the engine makes longer ones of ours."""


def compose_command() -> list[str] | None:
    """Return how compose is called here: the plugin, the older program, or None."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if output_of(*command, "version") is not None:
            return command
    return None


def is_answering() -> bool:
    """Whether an engine answers where DOCKER_HOST, or its default, says."""
    return output_of("docker", "version", "--format", "{{.Server.Version}}") is not None


def install_missing(steps: Steps) -> None:
    """Install what an engine of our own needs. Raises CannotRun: not root, or not Debian's kin."""
    missing: list[str] = []
    if not shutil.which("dockerd"):
        missing.append("docker.io")
    if compose_command() is None:
        missing.append("docker-compose")
    if not shutil.which("iptables"):
        missing.append("iptables")
    if missing:
        install(steps, *missing)
    if not shutil.which("docker"):  # a package of its own in newer releases
        install(steps, "docker-cli")


def install(steps: Steps, *packages: str) -> None:
    """Install Debian packages. Raises CannotRun: there is no apt-get, we are not root, it fails."""
    names = " ".join(packages)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise CannotRun(f"needs {names}: install that, or run as root on Debian or Ubuntu")
    env = {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}  # 1: no daemon is started
    steps.run("apt-get update", ["apt-get", "update"], env=env)
    steps.run(
        f"apt-get install {names}",
        ["apt-get", "install", "--yes", "--no-install-recommends", *packages],
        env=env,
    )


@contextlib.contextmanager
def docker_engine(folder: Path, steps: Steps) -> Iterator[None]:
    """Have an engine answer, DOCKER_HOST set to it, until the block ends.

    Raises CannotRun: none answers, and we cannot start one."""
    if is_answering():
        if compose_command() is None:
            install(steps, "docker-compose")
        say(f"using the Docker engine that runs ({_version()})")
        yield
        return
    if os.geteuid() != 0:
        raise CannotRun(
            "no Docker engine answers, and only root can start one: start Docker "
            "(sudo systemctl start docker), join its group, or run this as root"
        )
    install_missing(steps)
    with _own_engine(folder):
        yield


@contextlib.contextmanager
def _own_engine(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        run = folder / "run"
        if len(str(run)) > _SHORT_ROOT:
            run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdmesh-")))
        run.mkdir(exist_ok=True)
        log_path = folder / "dockerd.log"
        host = f"unix://{run}/docker.sock"
        before = os.environ.get("DOCKER_HOST")
        os.environ["DOCKER_HOST"] = host
        stack.callback(_restore, before)
        _forget_dead_engine(folder / "dockerd.pid")
        say("starting a Docker engine of our own")
        log = stack.enter_context(log_path.open("w"))
        # A session of its own: Ctrl-C ends the tests first, and the engine only after them.
        engine = subprocess.Popen(
            [
                *("dockerd", "--host", host, "--pidfile", str(folder / "dockerd.pid")),
                *("--data-root", str(folder / "docker"), "--exec-root", str(run / "exec")),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_stop, engine)
        deadline = time.monotonic() + START_WITHIN_S
        while not is_answering():
            if engine.poll() is not None or time.monotonic() > deadline:
                raise CannotRun(f"the Docker engine does not start:\n{last_lines(log_path)}")
            time.sleep(0.2)
        say(f"Docker engine {_version()}")
        yield


def _version() -> str:
    about = output_of("docker", "info", "--format", "{{.ServerVersion}}, storage {{.Driver}}")
    return about or "of unknown version"


def _restore(host: str | None) -> None:
    if host is None:
        os.environ.pop("DOCKER_HOST", None)
    else:
        os.environ["DOCKER_HOST"] = host


def _forget_dead_engine(pid_file: Path) -> None:
    """End the engine that a killed run of ours left behind; drop a number that is somebody else's
    by now, which would keep the new one from starting."""
    try:
        pid = int(pid_file.read_text())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except (OSError, ValueError):
        pid, name = 0, ""
    if name == "dockerd":
        say("ending the engine that an earlier run left behind")
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_WITHIN_S
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
    pid_file.unlink(missing_ok=True)


def _stop(engine: subprocess.Popen[bytes]) -> None:
    if engine.poll() is not None:
        return
    say("stopping the Docker engine")
    engine.terminate()
    try:
        engine.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        engine.kill()
        engine.wait()
