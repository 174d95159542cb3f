"""Schemathesis against the OpenAPI document and the gateway that serves it: what the document
allows is accepted, what it forbids is refused, answers are as described, and nothing is a 5xx."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from services.gateway.front.auth import KeyRing, hash_key
from tests.support.client_environments import PINS
from tests.support.foreign_client import run_client_well
from tests.support.scripted_mesh import ScriptedMesh, http_gateway

pytestmark = pytest.mark.timeout(900)  # the client may have to be installed first

RUNS_WITHIN_S = 300.0


async def run(client: Path, url: str, cwd: Path, *options: str, key: str = "none") -> str:
    """Run all checks with examples that are the same every time."""
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url + "/openapi.json") as response,
    ):
        assert response.status == 200
        (cwd / "openapi.json").write_bytes(await response.read())
    return await run_client_well(
        client / "schemathesis",
        *("--config-file", PINS / "schemathesis.toml", "--no-color"),
        *("run", "openapi.json", "--url", url, "--checks", "all", "--continue-on-failure"),
        *("--seed", "1", *options),
        cwd=cwd,
        within_s=RUNS_WITHIN_S,
        environment={
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "PYTHONPATH": str(PINS),
            "PDMESH_API_KEY": key,
        },
    )


@pytest.mark.parametrize(
    "phases",
    [
        "examples,fuzzing,stateful",
        # Each bound of each field, in thousands of cases that are the same every time.
        pytest.param("coverage", marks=pytest.mark.nightly),
    ],
)
async def test_the_document_is_true(
    client_bin: Callable[[str], Path], phases: str, tmp_path: Path
) -> None:
    """Right and wrong data for every operation, and no answer without the key."""
    client = client_bin("schemathesis")
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret"))
    async with http_gateway(ScriptedMesh(), KeyRing(path)) as url:
        # The scripted mesh has no members to tell of.
        options = ("--exclude-path", "/cluster", "-n", "12", "--phases", phases)
        words = await run(client, url, tmp_path, *options, key="secret")
    assert " passed" in words


@pytest.mark.process
async def test_the_document_is_true_of_a_running_mesh(
    client_bin: Callable[[str], Path], running_mesh: tuple[str, str], tmp_path: Path
) -> None:
    """Few examples against `pdmesh up`, whose answers come from workers."""
    options = ("--phases", "examples,fuzzing", "-n", "15")
    words = await run(client_bin("schemathesis"), running_mesh[0], tmp_path, *options)
    assert " passed" in words
