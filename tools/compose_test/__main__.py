"""Prepare, run tests/compose, and leave nothing running.

    python -m tools.compose_test [arguments of pytest]

What it makes (engine's data, wheels, base image) stays in .cache/compose, or in PDMESH_COMPOSE_DIR,
for the next run. PYTHON_IMAGE, TORCH and EXTRA choose the base image and torch as in compose.yaml.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tools.compose_test.engine import compose_command, docker_engine
from tools.compose_test.images import PREFIX, ROOT, build_images
from tools.compose_test.steps import CannotRun, Steps, output_of, say

TEARDOWN_WITHIN_S = 120.0


def main(arguments: list[str]) -> int:
    """Return pytest's exit code, 1 if the tests cannot be run, or 130 after Ctrl-C."""
    if {"-h", "--help"} & set(arguments):  # before minutes of preparing
        print(__doc__)
        return 0
    signal.signal(signal.SIGTERM, _as_interrupt)
    folder = Path(os.environ.get("PDMESH_COMPOSE_DIR") or ROOT / ".cache" / "compose").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _alone(folder):
            steps = Steps(folder / "prepare.log")
            with docker_engine(folder, steps):
                build_images(folder, steps)
                _remove_leftovers()  # of a run that was killed
                try:
                    return _run_tests(arguments)
                finally:
                    _remove_leftovers()
    except CannotRun as error:
        print(f"compose-test cannot run: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _as_interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRun(f"another run uses {folder}: wait, or set PDMESH_COMPOSE_DIR") from None
        yield


def _run_tests(arguments: list[str]) -> int:
    compose = compose_command()
    if compose is None:
        raise CannotRun("neither `docker compose` nor docker-compose works")
    say(f"tests, with {output_of(*compose, 'version', '--short') or compose[-1]}")
    environment = {
        **os.environ,
        "PDMESH_COMPOSE_TEST": shlex.join(compose),
        "PDMESH_IMAGE": PREFIX,
    }
    command = [sys.executable, "-m", "pytest", "-m", "compose", "tests/compose", *arguments]
    # A process group of its own: Ctrl-C comes to us alone, and the tests hear of it exactly once,
    # for a second one would cut off the taking down of their containers.
    with subprocess.Popen(command, cwd=ROOT, env=environment, process_group=0) as tests:
        try:
            return tests.wait()
        except KeyboardInterrupt:
            say("interrupted: the tests take their containers down")
            with contextlib.suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
                tests.send_signal(signal.SIGINT)
                tests.wait(TEARDOWN_WITHIN_S)
            tests.kill()
            raise


def _remove_leftovers() -> None:
    """Remove what a test that was cut off has left: containers first, then their networks."""
    for kind, remove in (("ps --all", "rm --force"), ("network ls", "network rm")):
        listed = output_of("docker", *kind.split(), "--quiet", "--filter", f"name={PREFIX}")
        if listed:
            say("removing what tests left")
            output_of("docker", *remove.split(), *listed.split(), timeout_s=TEARDOWN_WITHIN_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
