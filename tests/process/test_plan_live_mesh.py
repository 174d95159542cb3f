"""``pdmesh plan verify`` and ``plan watch`` on a mesh of real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.command import pdmesh

pytestmark = [pytest.mark.process, pytest.mark.ucx]

MESH = ("--engine", "fake", "--device", "cpu", "--port", "0", "--prefill", "1", "--decode", "1")
LOAD = ("--synthetic", "fixed", "--input-len", "64", "--output-len", "8", "--rate", "3")


async def test_a_live_mesh_is_replayed_and_watched(tmp_path: Path) -> None:
    """Steps of 0.1 s come out as such, from the gateway, from what was kept and from the bench's
    folder; the watcher sees the same mesh, says what binds, and is left with Ctrl-C."""
    report, kept = tmp_path / "report", tmp_path / "seen.json"
    async with pdmesh("up", *MESH, "--num-blocks", "512", PDMESH_FAKE_STEP_S="0.1") as mesh:
        url = await mesh.url()

        async def told(*arguments: str) -> str:
            async with pdmesh(*arguments) as command:
                await command.ended()
                assert command.out, command.err
                return command.out

        await told("bench", url, *LOAD, "--requests", "24", "--output", str(report))
        facts = json.loads(
            await told("plan", "verify", "--url", url, "--json", "--keep", str(kept))
        )
        assert (facts["mesh"], facts["policy"]) == ("1P+1D", "conductor")
        assert facts["num_requests"] >= 24
        figures = {it["name"]: it for it in facts["figures"]}
        assert figures["TTFT p50"]["predicted"] > 0.09
        # A machine on which others work, too: much wider than the bars.
        assert abs(figures["TPOT p50"]["error"]) < 0.3
        assert abs(figures["TTFT p50"]["error"]) < 0.5
        names = [it["name"] for it in facts["terms"]]
        assert names[:4] == ["gateway", "prefill_queue", "prefill", "hand_over"]
        again = json.loads(await told("plan", "verify", str(kept), "--json"))
        assert again["figures"] == facts["figures"]
        profile = tmp_path / "mesh.json"
        learned = json.loads(await told("profile", "--from", url, "-o", str(profile), "--json"))
        assert learned["answers"]["constant_s"] == pytest.approx(0.1, rel=0.3)
        assert 1 <= learned["prompts"]["most_tokens"] <= 2048
        folder = json.loads(await told("plan", "verify", str(report), "--json"))
        assert (folder["mesh"], folder["num_requests"]) == ("1P+1D", 24)

        async with pdmesh("plan", "watch", "--url", url, "--interval", "0.5") as watcher:
            await watcher.said("binds: TTFT, by the prefill workers, up to ")
            await watcher.said("runner-up: 2M would keep")
            watcher.process.send_signal(signal.SIGINT)
            assert await watcher.ended() == 0
        assert "1P+1D" in watcher.out
