"""The engine's contract, kept by vLLM: what a row gets depends on nothing else that is computed,
and its tokens are our own engine's."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shared.config import DecodeConfig, PrefillConfig
from shared.engine.base import Engine
from shared.engine.torch_engine import TorchEngine
from shared.request import SamplingParams, TokenLogprobs, WorkItem
from shared.schedule.budget import TokenBudget
from shared.schedule.sequence import Sequence
from shared.step import SampleSpec, StepRow
from shared.worker.life import pool_and_scheduler
from tests.support.engine_driver import Driver, Running, greedy
from tests.support.grammars import a_grammar
from tests.support.remote_engine import remote_engine
from tests.vllm.conftest import EAGER, NUM_BLOCKS, RUNNERS, EngineOf

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_NEW = 10
LOGPROB_TOLERANCE = 1e-3

OURS = ("llama", "qwen3")
"""Families that our own engine computes as well."""

DRAWN = greedy(
    NUM_NEW, temperature=0.8, top_p=0.95, seed=11, frequency_penalty=0.2, repetition_penalty=1.1
)
ODD = greedy(NUM_NEW, temperature=0.7, top_k=20, seed=3, bad_words=((5, 6),), min_tokens=4)


def prompts_of(engine: Engine, lengths: tuple[int, ...] = (1, 5, 32, 33, 100, 300)) -> list:
    source = random.Random(5)
    return [[source.randrange(3, engine.spec.vocab_size) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    """Return one of vLLM's model runners."""
    return request.param


@pytest.fixture(scope="module")
def ours(folder_of: Callable[[str], Path]) -> Callable[[str], TorchEngine]:
    """Our own engine on a family's checkpoint."""
    known: dict[str, TorchEngine] = {}

    def engine(family: str) -> TorchEngine:
        if family not in known:
            known[family] = TorchEngine.load(
                folder_of(family), dtype="float32", num_blocks=NUM_BLOCKS, num_threads=1
            )
        return known[family]

    return engine


@pytest.mark.parametrize("family", OURS)
@pytest.mark.parametrize("params", [greedy(NUM_NEW), DRAWN, ODD], ids=["greedy", "drawn", "odd"])
def test_tokens_are_those_of_our_engine(
    family: str, params: SamplingParams, engine_of: EngineOf, ours: Callable[[str], TorchEngine]
) -> None:
    """In float32, most likely or drawn, whole or in chunks, alone or beside others."""
    theirs = Driver(engine_of(family))
    prompts = prompts_of(theirs.engine)
    want = [Driver(ours(family)).run_alone(prompt, params).output for prompt in prompts]
    assert [theirs.run_alone(prompt, params).output for prompt in prompts] == want
    assert [theirs.run_alone(prompt, params, chunk=37).output for prompt in prompts] == want
    for seed in range(2):
        driver = Driver(theirs.engine, seed)
        done = driver.run_mixed(prompts, [params] * len(prompts), max_chunk=80)
        assert [one.output for one in done] == want


def test_rows_that_pause_go_on_as_if_they_had_not(engine_of: EngineOf) -> None:
    """A sequence that is left out of some steps, as a full pool does, loses nothing."""
    driver, source = Driver(engine_of("llama")), random.Random(3)
    prompts = prompts_of(driver.engine)
    want = [driver.run_alone(prompt, DRAWN).output for prompt in prompts]
    running = [driver.start(prompt, DRAWN) for prompt in prompts]
    while not all(one.is_done for one in running):
        here = [one for one in running if not one.is_done and source.random() < 0.6]
        rows = [one.row(64) for one in here]
        for one, row, result in zip(here, rows, driver.engine.step(rows), strict=True):
            one.commit(row, result)
    assert [one.output for one in running] == want


def test_the_second_runner_queues_steps_before_tokens_are_read(engine_of: EngineOf) -> None:
    """Tokens that stay on the device are those that the host would have given, whoever pauses
    meanwhile. One test of that runner which every run of the tests has."""
    engine = engine_of("llama", runner="second")
    driver, source = Driver(engine), random.Random(8)
    drawn = [greedy(NUM_NEW, temperature=0.9, seed=seed) for seed in (1, 2)]
    params = [greedy(NUM_NEW), *drawn, greedy(NUM_NEW)]
    pairs = list(zip(prompts_of(engine, (1, 32, 33, 100)), params, strict=True))
    want = [driver.run_alone(*pair).output for pair in pairs]
    running = [driver.start(*pair) for pair in pairs]
    rows = [one.row(1 << 30) for one in running]
    for one, row, result in zip(running, rows, engine.step(rows), strict=True):
        one.commit(row, result)
    steps: list[list[StepRow]] = []
    orders: list[list[Running]] = []
    num_planned = dict.fromkeys(map(id, running), 1)
    while here := [one for one in running if num_planned[id(one)] < NUM_NEW]:
        orders.append([one for one in here if source.random() < 0.8] or here)
        source.shuffle(orders[-1])
        steps.append([])
        for one in orders[-1]:
            index = num_planned[id(one)]
            num_planned[id(one)] += 1
            sample = SampleSpec(one.params, index, one.prompt, [])
            start = len(one.prompt) + index - 1
            steps[-1].append(StepRow([one.output[0]], start, one.block_table, sample))
    for order, results in zip(orders, engine.step_ahead(steps), strict=True):
        for one, result in zip(order, results, strict=True):
            one.output.append(result.token_id)
    assert [one.output for one in running] == want


def test_kv_that_moved_goes_on_where_it_was(
    engine_of: EngineOf, ours: Callable[[str], TorchEngine]
) -> None:
    """Into other blocks and into our own engine and back, byte by byte; whoever continues says the
    same tokens."""
    theirs = Driver(engine_of("llama"))
    engine, layers = theirs.engine, theirs.engine.layout.num_layers
    assert engine.layout == ours("llama").layout
    assert engine.spec.fingerprint == ours("llama").spec.fingerprint
    for prompt in prompts_of(engine):
        want = theirs.run_alone(prompt, DRAWN).output
        first = theirs.start(prompt, DRAWN)
        row = first.row(1 << 30)
        first.commit(row, engine.step([row])[0])
        for other in (theirs, Driver(ours("llama"), seed=4)):
            frame = engine.new_buffer(engine.layout.token_bytes * len(prompt) + 100)
            engine.gather(first.block_table, 0, len(prompt), 0, layers, frame)
            moved = other.start(prompt, DRAWN)
            # Layer by layer and in two parts, as transfers do.
            for layer in range(layers):
                for start, stop in ((0, len(prompt) // 2), (len(prompt) // 2, len(prompt))):
                    if start < stop:
                        part = engine.new_buffer(engine.layout.token_layer_bytes * (stop - start))
                        engine.gather(first.block_table, start, stop, layer, layer + 1, part)
                        other.engine.scatter(moved.block_table, start, stop, layer, layer + 1, part)
            back = other.engine.new_buffer(len(frame))
            other.engine.gather(moved.block_table, 0, len(prompt), 0, layers, back)
            assert np.array_equal(frame, np.asarray(back))
            moved.num_computed, moved.output = len(prompt), list(first.output)
            while not moved.is_done:
                row = moved.row(1)
                moved.commit(row, other.engine.step([row])[0])
            assert moved.output == want
            other.finish(moved)
        theirs.finish(first)


def logprobs_of(done: Running) -> list[TokenLogprobs]:
    of_prompt = [entry for part in done.prompt_results for entry in part.prompt_logprobs]
    return [*of_prompt, *(one.logprobs for one in done.results if one.logprobs)]


@pytest.mark.parametrize("chunk", [1 << 30, 10, 1])
def test_logprobs_are_those_of_the_raw_distribution(
    chunk: int, engine_of: EngineOf, ours: Callable[[str], TorchEngine]
) -> None:
    """Of prompt and answer, greedy and drawn, for every way to cut the prompt."""
    prompt = prompts_of(ours("llama"))[3]
    for params in (
        greedy(5, logprobs=3, prompt_logprobs=2),
        greedy(5, logprobs=0, prompt_logprobs=0, temperature=1.0, seed=8),
    ):
        got = logprobs_of(Driver(engine_of("llama")).run_alone(prompt, params, chunk=chunk))
        want = logprobs_of(Driver(ours("llama")).run_alone(prompt, params))
        assert len(got) == len(want) == len(prompt) - 1 + 5
        for one, other in zip(got, want, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=LOGPROB_TOLERANCE)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


@pytest.mark.parametrize(
    ("ranks", "compiles"), [(1, "0"), pytest.param(2, "", marks=pytest.mark.nightly)]
)
def test_eager_serves_logprobs_where_there_is_no_compiler(
    ranks: int,
    compiles: str,
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM compiles small parts of itself at their first use, whatever it is told: nothing that an
    answer asks for is among them, even where torch may compile, nor of what ranks need."""
    for tool in ("lscpu", "sh"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.delenv("CXX", raising=False)
    if compiles:
        monkeypatch.setenv("TORCH_COMPILE_DISABLE", compiles)
    config = PrefillConfig(
        engine="vllm",
        device="cpu",
        model=str(folder_of("llama")),
        num_blocks=NUM_BLOCKS,
        threads=1,
        vllm_args=f"{EAGER} tensor_parallel_size={ranks}",
    )
    with remote_engine(config) as engine:
        prompt = prompts_of(engine)[2]
        done = Driver(engine).run_alone(prompt, greedy(2, logprobs=1, prompt_logprobs=1))
        assert len(logprobs_of(done)) == len(prompt) - 1 + 2


def test_layers_are_told_in_order(engine_of: EngineOf) -> None:
    """Once each, also of a step of several chunks and of single tokens."""
    engine = engine_of("llama")
    driver = Driver(engine)
    running = [driver.start(prompt, greedy(3)) for prompt in prompts_of(engine)]
    for _ in range(3):
        told: list[int] = []
        rows = [one.row(40) for one in running]
        for one, row, result in zip(running, rows, engine.step(rows, told.append), strict=True):
            one.commit(row, result)
        assert told == list(range(engine.layout.num_layers))


@pytest.mark.parametrize(
    ("family", "grammar"),
    [("llama", ""), ("demo-tools", a_grammar("[a-f ]{600}", "regex"))],
    ids=["free", "guided"],
)
def test_prefix_hits_and_preemption_change_no_token(
    family: str, grammar: str, engine_of: EngineOf, ours: Callable[[str], TorchEngine]
) -> None:
    """Our scheduler over vLLM's blocks, in a pool that is too small for all: sequences are thrown
    out and computed again, and prompts that begin alike share blocks."""
    engine = engine_of(family)
    base = prompts_of(engine, (70,))[0]
    prompts = [*([*base, 7 + idx] for idx in range(4)), *prompts_of(engine, (90, 64, 33))]
    params = greedy(60, temperature=0.9, seed=2, grammar=grammar)
    alone = [Driver(ours(family)).run_alone(prompt, params).output for prompt in prompts]
    config = DecodeConfig(max_running=16)
    few = _Few(engine, 14)
    pool, scheduler = pool_and_scheduler(config, few, budget=TokenBudget(96))
    sequences = [
        Sequence(WorkItem(token_ids=tuple(prompt), num_prompt_tokens=len(prompt), sampling=params))
        for prompt in prompts
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    num_preempted = num_cached = 0
    while True:
        plan = scheduler.plan()
        num_preempted += len(plan.preempted)
        if plan.is_empty:
            break
        num_cached += sum(one.num_cached_tokens for one in plan.admitted)
        scheduler.commit(plan, engine.step(plan.rows))
    assert [list(one.tokens[one.num_prompt_tokens :]) for one in sequences] == alone
    assert num_preempted > 0
    assert num_cached > 0
    assert pool.num_held == 0


class _Few:
    """The engine, as if it had fewer blocks."""

    def __init__(self, engine: Engine, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.block_size, self.spec, self.layout = engine.block_size, engine.spec, engine.layout


def test_what_a_row_must_not_name_is_refused_before_anything_ran(engine_of: EngineOf) -> None:
    """Tokens and blocks that are not there; the engine serves on."""
    engine = engine_of("llama")
    params = greedy(1)
    for ids, table in (([1, 1 << 20], [0]), ([1, 2], [NUM_BLOCKS]), ([1] * 40, [0])):
        with pytest.raises(Exception, match=r"outside|no room"):
            engine.step([StepRow(ids, 0, table, SampleSpec(params, 0, ids, []))])
    Driver(engine).run_alone([1, 2, 3], params)
