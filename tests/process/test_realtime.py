"""``--realtime``: which threads the kernel runs first, and what is said where it may not be."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from shared.runtime.realtime import RealTime, is_allowed
from shared.runtime.service import EXIT_BAD_CONFIG
from tests.support.process_mesh import ROLES, a_prompt, fake_ids, process_mesh

pytestmark = [pytest.mark.process, pytest.mark.ucx]

PR_CAPBSET_DROP, CAP_SYS_NICE = 24, 23


def priorities(pid: int) -> Counter[int]:
    """Threads of a process by real-time priority; 0 = ordinary."""
    found: Counter[int] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        thread = int(task.name)
        is_realtime = os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR
        found[os.sched_getparam(thread).sched_priority if is_realtime else 0] += 1
    return found


@pytest.mark.skipif(not is_allowed(), reason="this process may not take real-time priority")
async def test_loops_and_kv_threads_have_it_and_compute_threads_have_not() -> None:
    """Loops before the UCX and the copy thread, before all others; answers are the same."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway(realtime=True)
            workers = [await mesh.start(role, realtime=True) for role in ROLES]
            await mesh.ready(*workers)
            await mesh.paired(gateway, 1)
            ids, _ = await mesh.ask_grpc(gateway, a_prompt(100), 9)
            assert ids == fake_ids(a_prompt(100), 9)
            of_gateway = priorities(gateway.pid)
            assert of_gateway[RealTime.LOOP] == 1
            assert of_gateway[RealTime.CARRIER] == 0
            for worker in workers:
                of_worker = priorities(worker.pid)
                assert of_worker[RealTime.LOOP] == 1
                assert of_worker[RealTime.CARRIER] == 2
                assert of_worker[0] >= 1
            await mesh.home([gateway], workers)


def give_up_the_privilege() -> None:
    """What the next program may not do: root included."""
    resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)


@pytest.mark.parametrize("role", ["gateway", *ROLES])
def test_who_may_not_have_it_is_told_what_to_do(role: str) -> None:
    """Asked for and not to be had: the service does not start without it in silence."""
    done = subprocess.run(
        [sys.executable, "-m", f"services.{role}"],
        env={**os.environ, "PDMESH_REALTIME": "1", "PDMESH_ENGINE": "fake"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=give_up_the_privilege,
    )
    assert done.returncode == EXIT_BAD_CONFIG
    assert "rtprio limit of 2" in done.stderr
    assert "Traceback" not in done.stderr
