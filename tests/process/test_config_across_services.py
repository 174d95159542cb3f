"""One TOML file for all services, as real processes: each takes its part, and who joins without it
hears which setting differs."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from shared.runtime.service import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tests.support.command import pdmesh, run_pdmesh
from tests.support.process_mesh import ROLES, a_prompt, fake_ids, process_mesh

pytestmark = [pytest.mark.process, pytest.mark.ucx]

SMALL = ("--port", "0", "--num-blocks", "256", "--device", "cpu")

MESH = """
[mesh]
engine = "fake"
max_model_len = 512
[gateway]
model_name = "renamed"
[decode]
block_size = 32
"""


async def test_a_mesh_from_one_file_serves_and_a_worker_without_it_is_refused(
    tmp_path: Path,
) -> None:
    """The refusal names the setting, both values and the remedy, as the worker's reason to end;
    block sizes may differ."""
    file = tmp_path / "mesh.toml"
    file.write_text(MESH)
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway(config=file)
            for role in ROLES:
                await mesh.start(role, config=file)
            await mesh.paired(gateway, 1)
            url = f"http://127.0.0.1:{gateway.facts['http_port']}"
            (model,) = json.loads(await run_pdmesh("models", "--json", "--url", url))["data"]
            assert (model["id"], model["max_model_len"]) == ("renamed", 512)
            ids, _ = await mesh.ask_grpc(gateway, a_prompt(100), 9)
            assert ids == fake_ids(a_prompt(100), 9, max_model_len=512)
            stranger = await mesh.start("decode")
            assert await stranger.ended() == EXIT_FAILED
            (line,) = [line for line in stranger.log if '"level":"error"' in line]
            assert json.loads(line)["error"] == (
                "max_model_len: this decode worker has 2048, the mesh has 512: set [mesh] "
                "max_model_len = 512 here (--max-model-len, PDMESH_MAX_MODEL_LEN), or end the "
                "workers that have the other first"
            )


@pytest.mark.parametrize("role", ["gateway", *ROLES])
async def test_a_mistake_in_the_file_keeps_every_service_from_starting(
    role: str, tmp_path: Path
) -> None:
    """One line that names file, section and key; exit code 2."""
    file = tmp_path / "mesh.toml"
    file.write_text('[decode]\nstaging_mib = "1 MiB"\n')
    async with process_mesh() as mesh:
        mesh.gateway_names.append("127.0.0.1:9")
        process = await mesh.start(role, config=file)
        assert await process.ended() == EXIT_BAD_CONFIG
        (line,) = [line for line in process.log if "error" in line]
        assert f"{file}: [decode] staging_mib must be 16..32768" in line


@pytest.mark.parametrize("role", ["gateway", *ROLES])
async def test_an_argument_is_refused_and_not_overlooked(role: str) -> None:
    """Variables configure these processes; who wants flags hears of the command that has them."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"services.{role}", "--num-blocks", "9"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    assert (process.returncode, told.count(b"\n")) == (EXIT_BAD_CONFIG, 1), told
    assert f"`pdmesh {role}` takes flags" in told.decode()


@pytest.mark.parametrize("role", ["gateway", *ROLES])
async def test_help_says_how_the_process_is_configured(role: str) -> None:
    """And it is no mistake to ask."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"services.{role}", "--help"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    told, errors = await process.communicate()
    assert (process.returncode, errors) == (EXIT_OK, b"")
    assert f"PDMESH_* configure it; `pdmesh {role}` takes flags (--help)" in told.decode()


@pytest.mark.usefixtures("starts_are_executed")  # the kernel shows the environment of a start
async def test_up_reads_the_file_and_its_children_do_not(tmp_path: Path) -> None:
    """A child that crashes comes back as it was, whatever the file says by then."""
    file = tmp_path / "mesh.toml"
    file.write_text(MESH)
    async with pdmesh("up", *SMALL, "--config", str(file)) as up:
        url = await up.url()
        file.write_text("[mesh]\nmax_model_len = 256\n")
        pid = int((await up.said(r"decode-0 +ready +pid (\d+)"))[1])
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        assert "PDMESH_CONFIG=" in variables
        assert "PDMESH_BLOCK_SIZE=32" in variables
        assert "PDMESH_MAX_MODEL_LEN=512" in variables
        (model,) = json.loads(await run_pdmesh("models", "--json", "--url", url))["data"]
        assert (model["id"], model["max_model_len"]) == ("renamed", 512)
        up.process.terminate()
        assert await up.ended() == 0
