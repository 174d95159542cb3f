"""A drain as an operator sees it, with real processes: what its exit code says."""

from __future__ import annotations

import asyncio
import signal

import pytest

from shared.runtime.service import EXIT_DRAIN_LIMIT, EXIT_OK
from tests.support.process_mesh import Answer, a_prompt, process_mesh

pytestmark = [pytest.mark.process, pytest.mark.ucx]

NUM_TOKENS = 200


@pytest.mark.parametrize("leaves", ["decode", "gateway"])
@pytest.mark.parametrize(("drain_s", "code"), [(60.0, EXIT_OK), (0.1, EXIT_DRAIN_LIMIT)])
async def test_the_exit_code_says_whether_a_drain_was_cut_off(
    leaves: str, drain_s: float, code: int
) -> None:
    """With time enough the answer in hand is finished and the code is 0; else it fails with one
    typed error and the code is 3."""
    limits = {leaves: {"drain_s": drain_s}}
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway(failover_wait_s=0.5, **limits.get("gateway", {}))
            await mesh.add("prefill")
            decode = await mesh.add("decode", fake_step_s=0.02, **limits.get("decode", {}))
            await mesh.paired(gateway, 1)
            process = decode if leaves == "decode" else gateway
            is_told = False

            def stop_it(_: Answer) -> None:
                nonlocal is_told
                if not is_told:
                    is_told = True
                    process.send(signal.SIGTERM)

            async with asyncio.timeout(60):
                answer = await mesh.ask(gateway, a_prompt(40), NUM_TOKENS, on_token=stop_it)
            assert await process.ended() == code
            if code == EXIT_OK:
                answer.require_whole(NUM_TOKENS)
            else:
                answer.require_one_error()
