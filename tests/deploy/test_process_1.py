"""What our containers start, as process 1: the kernel drops a signal that it neither handles nor
blocks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.house import ROOT

INSIDE = ["unshare", "--user", "--map-root-user", "--fork", "--pid", "--kill-child"]
"""Process 1 of a PID namespace, as in a container."""


@pytest.fixture(autouse=True)
def namespaces() -> None:
    """Skip where there are none."""
    if subprocess.run([*INSIDE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no PID namespace")


def exit_code_on_sigterm(*command: str) -> int:
    """Run it, and send SIGTERM again and again, for it may not hear the first; return how it
    ends."""
    with subprocess.Popen([*INSIDE, *command]) as outside:
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
        try:
            for _ in range(50):
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    for child in children.read_text().split():
                        os.kill(int(child), signal.SIGTERM)
                    return outside.wait(timeout=0.2)
        finally:
            outside.kill()
    pytest.fail("it does not hear SIGTERM")


def test_the_holder_of_the_ipc_namespace_ends_on_sigterm() -> None:
    """Else each `compose down` waits ten seconds, and kills it."""
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    program, *arguments = compose["services"]["ipc"]["entrypoint"]
    assert program == "python3"
    assert exit_code_on_sigterm(program, *arguments) == 0


def test_a_service_that_still_imports_ends_on_sigterm() -> None:
    """By the signal, not by the service, which would hear one that comes later."""
    command = (sys.executable, "-m", "services.cli", "gateway")
    assert exit_code_on_sigterm(*command) == 128 + signal.SIGTERM
