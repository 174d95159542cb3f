"""Whole meshes of real processes with vLLM below: faults, engines side by side, ranks, and starts
that fail."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.engine.torch_engine import TorchEngine
from shared.model_folder import DEMO_FOLDER
from shared.runtime.service import EXIT_BAD_CONFIG, EXIT_FAILED, EXIT_OK
from tests.process.test_refused_starts import require_refused
from tests.support import second_runner
from tests.support.engine_driver import Driver, greedy
from tests.support.process_mesh import Answer, ProcessMesh, a_prompt, process_mesh
from tests.support.service_process import ServiceProcess
from tests.vllm.conftest import EAGER

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.process, pytest.mark.ucx),
    pytest.mark.timeout(600),
]

VLLM = {"vllm_args": EAGER, "num_blocks": 160, "dtype": "float32"}
TORCH = {"engine": "torch", "num_blocks": 400, "dtype": "float32"}
NUM_TOKENS = 48
NUM_ANSWERS = 20
HAS_BEGUN = 5


def prompts(seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    lengths = [source.randint(5, 200) for _ in range(NUM_ANSWERS)]
    return [[source.randrange(3, 1200) for _ in range(length)] for length in lengths]


async def ask_all(
    mesh: ProcessMesh,
    gateway: ServiceProcess,
    asked: Sequence[list[int]],
    begun: asyncio.Event | None = None,
) -> list[Answer]:
    """All at once, half of them greedy. begun: set when some are amid their answers."""

    def watch(answer: Answer) -> None:
        if begun is not None and len(answer.tokens) >= HAS_BEGUN:
            begun.set()

    async def ask(idx: int, prompt: list[int]) -> Answer:
        params = {"temperature": 0.9, "top_p": 0.95, "seed": idx} if idx % 2 else {}
        answer = await mesh.ask(gateway, prompt, NUM_TOKENS, on_token=watch, **params)
        answer.require_whole(NUM_TOKENS)
        return answer

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(ask(idx, prompt)) for idx, prompt in enumerate(asked)]
    return [one.result() for one in running]


async def a_mesh(mesh: ProcessMesh, gateway: dict[str, Any], *workers: tuple[str, Any]) -> Any:
    """A gateway, and these workers, paired."""
    started = await mesh.start_gateway(**gateway)
    running = [await mesh.start(role, **settings) for role, settings in workers]
    await mesh.ready(*running)
    roles = [role for role, _ in workers]
    await mesh.paired(started, roles.count("prefill") * roles.count("decode"))
    return started, running


async def test_killed_and_stopped_workers_cost_no_token() -> None:
    """Amid 20 answers, of either role: the same text as without, and nothing is held behind."""
    async with process_mesh("vllm") as mesh:
        workers = [(role, VLLM) for role in ("prefill", "decode") for _ in range(2)]
        gateway, running = await a_mesh(mesh, {}, *workers)
        asked = prompts()
        one_by_one = [(await ask_all(mesh, gateway, [prompt]))[0] for prompt in asked[:1]]
        want = [one.tokens for one in await ask_all(mesh, gateway, asked)]
        assert one_by_one[0].tokens == want[0]
        for role in ("decode", "prefill"):
            for number in (signal.SIGKILL, signal.SIGSTOP):
                victim = next(one for one in running if one.name.startswith(role))
                begun = asyncio.Event()
                async with asyncio.TaskGroup() as tasks:
                    asking = tasks.create_task(ask_all(mesh, gateway, asked, begun))
                    await begun.wait()
                    victim.send(number)
                assert [one.tokens for one in asking.result()] == want
                await victim.end_at_once()
                mesh.processes.remove(victim)
                running.remove(victim)
                running.append(await mesh.add(role, **VLLM))
                await mesh.paired(gateway, 4)
        await mesh.home([gateway], running)


async def test_a_prompt_that_is_given_up_and_a_worker_that_drains_leave_nothing() -> None:
    """A client goes amid its prompt's chunks, whose KV travels already: both ends have all blocks
    again. Then a decode worker is told to end amid 20 answers: it finishes its own, new ones go
    elsewhere, all have the same text, and its exit code is 0."""
    told = {"token_budget": 64, "batch_tokens": 64, "transfer_mode": "layerwise"}
    async with process_mesh("vllm") as mesh:
        with mesh.explained():
            workers = [("prefill", VLLM | told), ("decode", VLLM), ("decode", VLLM)]
            gateway, running = await a_mesh(mesh, {}, *workers)
            prefill, *decodes = running
            prompt = a_prompt(1900)

            async def is_amid() -> bool:
                sender, *receivers = [await mesh.gauges(one) for one in running]
                return sender["step_tokens_total"] > 0 and any(
                    one["kv_blocks:reserved"] and one["transfers_open"] for one in receivers
                )

            async with asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(mesh.ask(gateway, prompt, NUM_TOKENS))
                await mesh.until(is_amid)
                asking.cancel()
            await mesh.home([gateway], running)
            assert (await mesh.gauges(prefill))["step_tokens_total"] < len(prompt)

            asked = prompts()
            want = [one.tokens for one in await ask_all(mesh, gateway, asked)]
            begun = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                first = tasks.create_task(ask_all(mesh, gateway, asked, begun))
                await begun.wait()
                busy = [(await mesh.gauges(one))["requests_running"] for one in decodes]
                leaver = decodes[busy.index(max(busy))]
                leaver.send(signal.SIGTERM)
                await leaver.said('"stopping"')
                late = tasks.create_task(ask_all(mesh, gateway, asked))
            assert max(busy) > 0
            for answers in (first.result(), late.result()):
                assert [one.tokens for one in answers] == want
            assert await leaver.ended() == EXIT_OK
            running.remove(leaver)
            await mesh.home([gateway], running)


@pytest.fixture(scope="module")
def truth() -> list[list[str]]:
    """What our own engine says in float32, greedily."""
    engine = TorchEngine.load(DEMO_FOLDER, dtype="float32", num_blocks=400, num_threads=1)
    driver = Driver(engine)
    return [driver.run_alone(prompt, greedy(NUM_TOKENS)).output for prompt in prompts()[:6]]


@pytest.mark.parametrize("apart", [("vllm", "torch"), ("torch", "vllm")])
async def test_two_engines_serve_together_where_that_is_allowed(
    apart: tuple[str, str], truth: list[list[int]]
) -> None:
    """And then exactly in float32; else the second one is refused and told of the flag."""
    settings = {"vllm": {"engine": "vllm", **VLLM}, "torch": TORCH}
    prefill, decode = (settings[engine] for engine in apart)
    allowed = {"allow_mixed_engines": "1"}
    async with process_mesh("vllm") as mesh:
        gateway = await mesh.start_gateway()
        first = await mesh.add("prefill", **prefill)
        await mesh.usable(gateway, 1)
        await require_refused(
            await mesh.start("decode", **decode), EXIT_FAILED, "--allow-mixed-engines", "vllm 0."
        )
        assert first.is_alive
    async with process_mesh("vllm") as mesh:
        workers = ("prefill", prefill | allowed), ("decode", decode | allowed)
        gateway, _ = await a_mesh(mesh, allowed, *workers)
        for prompt, answer in zip(prompts(), truth, strict=False):
            ids, receipt = await mesh.ask_grpc(gateway, prompt, NUM_TOKENS)
            assert ids == answer
            assert receipt["transfer_bytes"] > 0
            assert receipt["mode"] == "layerwise"


def children_of(pid: int) -> list[int]:
    """Processes that a process has started, and theirs."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(mesh: ProcessMesh, pids: Sequence[int]) -> None:
    """Wait until none of them is there."""

    async def are_gone() -> bool:
        return not any(map(is_there, pids))

    await mesh.until(are_gone)


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where workers keep temporary files; a short name, since sockets are among them."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


async def nothing_is_left(mesh: ProcessMesh, folder: Path) -> None:
    """Wait until no file, socket or shared memory of a worker is there; some have a process that
    sees to it."""

    async def is_so() -> bool:
        return not [*folder.iterdir(), *Path("/dev/shm").glob("pdmesh-ranks-*")]

    await mesh.until(is_so)


@pytest.mark.parametrize(
    ("number", "runner"),
    [
        (signal.SIGKILL, "first"),
        pytest.param(signal.SIGSTOP, "first", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, "second", marks=pytest.mark.nightly),
    ],
)
async def test_a_rank_that_dies_ends_its_worker_and_no_answer(
    number: signal.Signals, runner: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks prefill for one that decodes, and say what one rank says. With one of them gone, or
    silent for longer than vLLM waits, the worker says so in one line and ends with all its
    processes; its prompts move."""
    if number is signal.SIGSTOP:
        monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "10")
    async with process_mesh("vllm") as mesh:
        # Nothing is left to a profile of the machine: two ranks on two cores would measure long.
        told = {"batch_tokens": 256, "transfer_mode": "layerwise"}
        two = VLLM | told | {"vllm_args": f"{EAGER} tensor_parallel_size=2"}
        gateway = await mesh.start_gateway()
        with monkeypatch.context() as own:
            for name, value in (second_runner.variables() if runner == "second" else {}).items():
                own.setenv(name, value)
            ranks = await mesh.add("prefill", **two)
        await mesh.add("decode", **VLLM)
        await mesh.paired(gateway, 1)
        alone = [one.tokens for one in await ask_all(mesh, gateway, prompts())]
        await mesh.add("prefill", **VLLM, **told)
        await mesh.paired(gateway, 2)
        processes = children_of(ranks.pid)
        workers = [
            pid for pid in processes if "Worker" in Path(f"/proc/{pid}/comm").read_text()
        ] or processes[-2:]
        assert len(processes) >= 2
        asking = asyncio.ensure_future(  # noqa: TID251 - ended below
            ask_all(mesh, gateway, prompts())
        )
        os.kill(workers[-1], number)
        assert [one.tokens for one in await asking] == alone
        assert await ranks.ended() != 0
        errors = [line for line in ranks.log if '"level":"error"' in line]
        assert len(errors) == 1, errors
        assert "rank" in errors[0]
        assert not [line for line in ranks.log if not line.startswith("{")]
        await gone(mesh, processes)
    await nothing_is_left(mesh, own_folder)


@pytest.mark.parametrize(
    ("ranks", "number"), [(1, signal.SIGKILL), (2, signal.SIGTERM), (2, signal.SIGKILL)]
)
async def test_a_worker_that_ends_leaves_nothing(
    ranks: int, number: signal.Signals, own_folder: Path
) -> None:
    """Told to or killed: its ranks end, and no file, socket or shared memory stays."""
    async with process_mesh("vllm") as mesh:
        await mesh.start_gateway()
        arguments = f"{EAGER} tensor_parallel_size={ranks}"
        worker = await mesh.add("decode", **(VLLM | {"vllm_args": arguments}))
        processes = children_of(worker.pid)
        worker.send(number)
        assert await worker.ended() == (0 if number is signal.SIGTERM else -number)
        await gone(mesh, processes)
    await nothing_is_left(mesh, own_folder)


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ({"vllm_args": "max_model_len=5"}, EXIT_BAD_CONFIG, ["--max-model-len"]),
        ({"vllm_args": f"{EAGER} pipeline_parallel_size=2"}, EXIT_BAD_CONFIG, ["pipeline"]),
        ({"vllm_args": f"{EAGER} quantisation=x"}, EXIT_BAD_CONFIG, ["did you mean quantization"]),
        ({"vllm_args": "/no/such/file"}, EXIT_BAD_CONFIG, ["/no/such/file"]),
        ({"vllm_args": EAGER, "exact": "1"}, EXIT_FAILED, ["--exact"]),
        ({"vllm_args": f"{EAGER} model_impl=odd"}, EXIT_BAD_CONFIG, ["model_impl must be one of"]),
        (
            {"vllm_args": f"{EAGER} model_impl=terratorch"},
            EXIT_BAD_CONFIG,
            ["model_impl must be one of auto, vllm, transformers"],
        ),
        ({"vllm_args": EAGER, "kernels": "native"}, EXIT_BAD_CONFIG, ["--kernels has no effect"]),
        ({"vllm_args": EAGER, "block_size": 17}, EXIT_BAD_CONFIG, ["--block-size", "32"]),
        (
            # Its ranks find out, and the worker says it.
            {"vllm_args": f"{EAGER} tensor_parallel_size=2", "kv_gib": 100000, "num_blocks": 0},
            EXIT_FAILED,
            ["memory", "Decrease --kv-gib,"],
        ),
        ({"vllm_args": EAGER, "engine": "torch"}, EXIT_BAD_CONFIG, ["--vllm-args"]),
    ],
)
async def test_a_start_that_cannot_be_is_one_line(
    settings: dict[str, Any], code: int, words: list[str], own_folder: Path
) -> None:
    """And the exit code of its kind; nobody waits for a gateway first, and no file stays."""
    async with process_mesh("vllm") as mesh:
        await mesh.start_gateway()
        await require_refused(await mesh.start("decode", **(VLLM | settings)), code, *words)
    await nothing_is_left(mesh, own_folder)


async def test_without_a_compiler_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM compiles the model unless it is told not to."""
    monkeypatch.setenv("PATH", "/nowhere")
    async with process_mesh("vllm") as mesh:
        await mesh.start_gateway()
        worker = await mesh.start("decode", **(VLLM | {"vllm_args": ""}))
        await require_refused(worker, EXIT_FAILED, "g++", "enforce_eager=true")
