"""``python -m bench.gpu.apart`` on a CPU: real processes, and what it says of their tokens."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from bench.record import NOT_HERE
from tests.support.house import ROOT

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.torch]

WITHIN_S = 100.0


async def apart(*arguments: str) -> tuple[int, str, str]:
    """Run it; exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bench.gpu.apart", *arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_two_processes_answer_as_one_does_one_at_a_time() -> None:
    """Every token is equal on a CPU, the control's too, and KV was handed over."""
    code, out, err = await apart("--device", "cpu", "--quick")
    assert code == 0, out + err
    assert re.search(r"^[1-9][\d.]* MB of KV handed over by \S.*; \d+ retries$", out, re.MULTILINE)
    alone = dict(re.findall(r"^(.+), one at a time +against .+ tokens equal (\S+)", out, re.M))
    assert alone == {"one process, again": "1.0000", "two processes": "1.0000"}
    assert len(re.findall(r"tokens equal \d", out)) == 5
    assert "Traceback" not in err


async def test_without_the_device_nothing_is_compared() -> None:
    """It says which, with an exit code of its own."""
    code, out, err = await apart("--device", "cuda:99")
    assert (code, err) == (NOT_HERE, "")
    assert re.fullmatch(r"--device cuda:99: torch sees .+: nothing was measured\n", out)
