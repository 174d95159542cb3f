"""The one container of compose.yaml that runs none of our services."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.house import ROOT

INSIDE = ["unshare", "--user", "--map-root-user", "--fork", "--pid", "--kill-child"]
"""Process 1 of a PID namespace, as in a container."""


def test_the_holder_of_the_ipc_namespace_ends_on_sigterm() -> None:
    """As process 1, for which the kernel drops a signal that it neither handles nor blocks: else
    each `compose down` waits ten seconds, and kills it."""
    if subprocess.run([*INSIDE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system gives no PID namespace")
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    program, *arguments = compose["services"]["ipc"]["entrypoint"]
    assert program == "python3"
    with subprocess.Popen([*INSIDE, program, *arguments]) as outside:
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
        try:
            # Again and again: it may not have begun to wait.
            for _ in range(50):
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    for child in children.read_text().split():
                        os.kill(int(child), signal.SIGTERM)
                    assert outside.wait(timeout=0.2) == 0
                    return
            pytest.fail("it does not hear SIGTERM")
        finally:
            outside.kill()
