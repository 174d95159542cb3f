"""``pdmesh explain`` against real processes, and what it says when there is nothing to explain."""

from __future__ import annotations

import json
from pathlib import Path

import aiohttp
import pytest

from services.cli.app import run
from tests.support.process_mesh import a_prompt, process_mesh

pytestmark = [pytest.mark.process, pytest.mark.ucx]


async def test_a_request_is_explained_again_and_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its id and from a file: the pair, the terms of the prediction, and the same decision."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            for role in ("prefill", "decode", "decode"):
                await mesh.add(role, fake_step_s=0.005)
            await mesh.paired(gateway, 2)
            url = f"http://127.0.0.1:{gateway.facts['http_port']}"
            body = {"prompt": a_prompt(30), "max_tokens": 4}
            async with aiohttp.ClientSession() as session:
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.json()
                    request_id = response.headers["x-request-id"]
                path = f"{url}/cluster/requests/{request_id}"
                async with session.get(path) as response:
                    told = await response.json()
                for wrong, status in (("0" * 32, 404), ("nonsense", 400)):
                    async with session.get(f"{url}/cluster/requests/{wrong}") as response:
                        assert response.status == status
                        assert (await response.json())["error"]["code"] == "no_request"
            assert answer["id"].endswith(request_id)
            assert [len(told["decisions"][0][side]) for side in ("prefills", "decodes")] == [1, 2]
    kept = tmp_path / "why.json"
    kept.write_text(json.dumps(told))
    assert run(["explain", str(kept), "--replay"]) == 0
    said = capsys.readouterr().out
    assert "policy conductor" in said
    assert "first token expected after" in said
    assert "the same pair, from the same scores" in said
    other = told["decisions"][0]["decodes"]
    other[0]["reserved_blocks"], other[1]["reserved_blocks"] = 50, 20
    kept.write_text(json.dumps(told))
    assert run(["explain", str(kept), "--replay"]) == 1
    kept.write_text("{}")
    assert run(["explain", str(kept)]) == 2
    assert "is not what `pdmesh explain" in capsys.readouterr().err
