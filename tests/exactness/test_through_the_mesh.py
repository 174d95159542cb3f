"""Through gateway, prefill, UCX and decode every answer is the one that transformers gives.

float32 on CPU, greedy, for every family and shape and in every way that a prompt can travel: alone,
among others, in chunks, on cached prefixes, after preemption, and into blocks of another size. The
two workers read config.json in different forms, of transformers 4 and of 5.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pytest

from services.gateway.text.text_model import TextModel
from shared.engine.torch_engine import TorchEngine
from shared.kv.pool import BlockPool
from shared.worker.core.lease import LeasePolicy
from tests.exactness.reference import NUM_NEW, NUM_TOP, Reference, Tally
from tests.support.checkpoint_folders import FolderOf
from tests.support.checkpoints import SHAPES
from tests.support.grpc_client import Answer
from tests.support.real_mesh import RealMesh, real_mesh
from tests.support.tiers import few, in_turn

pytestmark = [pytest.mark.torch, pytest.mark.ucx]

LONGEST = 1500
MAX_WAIT_S = 30.0
ROOM_RESERVED = LeasePolicy().growth_tokens
BLOCK_SIZES = ((16, 5), (3, 16), (1, 32), (32, 1))

QUICK = "mistral-window"
every_shape = pytest.mark.parametrize("shape", few(SHAPES, QUICK))
few_and_many = pytest.mark.parametrize(
    "num_prompts", [8, pytest.param(100, marks=pytest.mark.nightly)]
)


def a_third_of_the_shapes(turn: int) -> pytest.MarkDecorator:
    """The others are nightly: all shapes cross the mesh in ``test_alone_and_together``."""
    return pytest.mark.parametrize("shape", in_turn(SHAPES, QUICK, of=3, turn=turn))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a mesh differs from an ordinary one; of each pair prefill's comes first.

    forms: of config.json.
    """

    forms: tuple[int, int] = (4, 5)
    block_sizes: tuple[int, int] = (16, 16)
    num_decode_blocks: int | None = None
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)


class Bench:
    """One shape under test: its prompts, its reference and its meshes."""

    def __init__(
        self, shape: str, folder_of: FolderOf, reference: Reference, text: TextModel
    ) -> None:
        self.shape = shape
        self.reference = reference
        self.tally = Tally()
        self._folder_of = folder_of
        self._text = text
        self._random = random.Random(shape)

    def tokens(self, count: int) -> list[int]:
        """Return random tokens."""
        return [self._random.randrange(SHAPES[self.shape].vocab) for _ in range(count)]

    def prompts(self, count: int) -> list[list[int]]:
        """Return prompts of 1 to 1,500 tokens, both included, as many short ones as long ones; the
        same ones for the same shape."""
        source = random.Random(f"{self.shape}/lengths")
        lengths = [1, LONGEST]
        while len(lengths) < count:
            lengths.append(source.randint(1, LONGEST))
            lengths.append(round(math.exp(source.uniform(0, math.log(LONGEST)))))
        self._random.seed(self.shape)
        prompts = [self.tokens(length) for length in lengths[:count]]
        source.shuffle(prompts)
        return prompts

    def branch(self, prompt: Sequence[int], *block_sizes: int) -> list[int]:
        """Return a prompt that begins as another one does and leaves it, or ends, at the edge of a
        block or one token from it."""
        source = self._random
        edge = source.choice(block_sizes) * source.randint(0, len(prompt) // min(block_sizes))
        shared = min(max(0, edge + source.randint(-1, 1)), len(prompt), LONGEST - 1)
        num_more = source.choice((0, 1, source.randint(1, LONGEST - shared)))
        return [*prompt[:shared], *self.tokens(num_more or not shared)]

    @contextlib.asynccontextmanager
    async def mesh(
        self, setup: Setup, prompts: Sequence[Sequence[int]]
    ) -> AsyncGenerator[RealMesh]:
        """Run a mesh with room for all these prompts, if the setup does not say otherwise."""
        # Before the mesh, for it takes seconds in which the event loop would stand still.
        for prompt in prompts:
            self.reference.answer(prompt)
        sizes = setup.block_sizes
        num_tokens = sum(len(prompt) + NUM_NEW for prompt in prompts)
        # Something over for last blocks that are not full, so that nothing cached is evicted.
        room = [num_tokens // size + 400 for size in sizes]
        room[1] = setup.num_decode_blocks or room[1]
        engines = [
            TorchEngine.load(
                self._folder_of(self.shape, form),
                num_blocks=num_blocks,
                block_size=size,
                num_threads=1,
            )
            for form, size, num_blocks in zip(setup.forms, sizes, room, strict=True)
        ]
        try:
            async with real_mesh(
                *engines,
                self._text,
                gateway={"max_wait_s": MAX_WAIT_S},
                prefill=setup.prefill,
                decode=setup.decode,
            ) as mesh:
                yield mesh
        finally:
            for engine in engines:
                engine.close()

    async def ask_all(
        self, mesh: RealMesh, prompts: Sequence[Sequence[int]], *, at_once: int = 32
    ) -> list[Answer]:
        """Get the answers and compare them."""
        answers = await mesh.ask_all(
            prompts, NUM_NEW, at_once=at_once, ignore_eos=True, logprobs=NUM_TOP
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            self.tally.take(answer, self.reference.answer(prompt), prompt)
        return answers


class BenchOf(Protocol):
    def __call__(self, shape: str) -> Bench: ...


@pytest.fixture
def bench_of(
    folder_of: FolderOf,
    reference_of: Callable[[str], Reference],
    tiny_text: TextModel,
) -> Any:
    """Make the bench of a shape; its tally is checked and printed at the end (``pytest -rP`` shows
    it)."""
    benches: list[Bench] = []

    def make(shape: str) -> Bench:
        benches.append(Bench(shape, folder_of, reference_of(shape), tiny_text))
        return benches[-1]

    yield make
    for bench in benches:
        bench.tally.assert_ties_are_rare()
        print(bench.shape, bench.tally)


def hits(pool: BlockPool) -> int:
    """Tokens that a pool found in its prefix cache."""
    return pool.statistics().num_hit_tokens


@few_and_many
@every_shape
async def test_alone_and_together(shape: str, num_prompts: int, bench_of: BenchOf) -> None:
    """Prompts one after another, then all at once: each is answered as transformers answers it."""
    bench = bench_of(shape)
    prompts = bench.prompts(num_prompts)
    no_cache = {"cache_prefixes": False}
    # Together means in one step on prefill, too, however long they are.
    setup = Setup(prefill={**no_cache, "batch_tokens": 2048}, decode=no_cache)
    async with bench.mesh(setup, prompts) as mesh:
        await bench.ask_all(mesh, prompts, at_once=1)
        answers = await bench.ask_all(mesh, prompts, at_once=num_prompts)
        assert hits(mesh.prefill.pool) == hits(mesh.decode.pool) == 0
        assert all(answer.receipt["transfer_bytes"] for answer in answers)


@few_and_many
@a_third_of_the_shapes(0)
async def test_in_chunks(shape: str, num_prompts: int, bench_of: BenchOf) -> None:
    """Prefill in chunks of at most 50 tokens, shared by several prompts, changes nothing."""
    bench = bench_of(shape)
    prompts = bench.prompts(num_prompts)
    # Small frames as well: each chunk is a span of its own and travels layer by layer.
    chunks = {"token_budget": 50, "group_kib": 1, "transfer_mode": "layerwise"}
    setup = Setup(forms=(5, 4), prefill={**chunks, "cache_prefixes": False})
    async with bench.mesh(setup, prompts) as mesh:
        await bench.ask_all(mesh, prompts)
        steps = mesh.prefill.scheduler.statistics().num_steps
        assert steps >= sum(map(len, prompts)) / 50


@few_and_many
@a_third_of_the_shapes(1)
async def test_on_cached_prefixes(shape: str, num_prompts: int, bench_of: BenchOf) -> None:
    """A prompt that was there before, or shares a beginning with one, is answered the same from
    cached KV on both workers."""
    bench = bench_of(shape)
    prompts = bench.prompts(num_prompts)
    branches = [bench.branch(prompt, 16, 12) for prompt in prompts]
    setup = Setup(block_sizes=(16, 12))
    async with bench.mesh(setup, prompts + branches) as mesh:
        await bench.ask_all(mesh, prompts)
        for prompt, answer in zip(prompts, await bench.ask_all(mesh, prompts), strict=True):
            # The last token is always computed, for its logits; decode has it from the answer.
            assert answer.usage.cached_tokens >= (len(prompt) - 1) // 16 * 16
            assert answer.receipt["decode_cached_tokens"] >= len(prompt) // 12 * 12
        before = hits(mesh.prefill.pool), hits(mesh.decode.pool)
        await bench.ask_all(mesh, branches, at_once=num_prompts)
        assert hits(mesh.prefill.pool) > before[0]
        assert hits(mesh.decode.pool) > before[1]


@few_and_many
@a_third_of_the_shapes(2)
async def test_after_preemption(shape: str, num_prompts: int, bench_of: BenchOf) -> None:
    """Answers that lost their blocks in the middle and were recomputed go on as if nothing had
    happened."""
    bench = bench_of(shape)
    prompts = sorted(bench.prompts(num_prompts), key=lambda prompt: len(prompt) != LONGEST)
    first, others = prompts[:8], prompts[8:]
    reserved = sum(len(prompt) + ROOM_RESERVED for prompt in first)
    setup = Setup(
        forms=(5, 4),
        block_sizes=(16, 1),
        num_decode_blocks=reserved + 2,
        decode={"token_budget": 70, "cache_prefixes": False},
    )
    async with bench.mesh(setup, prompts) as mesh, asyncio.TaskGroup() as tasks:
        mesh.prefill_gate.clear()
        asking = tasks.create_task(bench.ask_all(mesh, first))
        await mesh.until(lambda: mesh.decode.pool.num_held == reserved)
        mesh.prefill_gate.set()
        await asking
        assert mesh.decode.scheduler.statistics().num_recomputed_tokens > 0
        await bench.ask_all(mesh, others, at_once=12)


@few_and_many
@a_third_of_the_shapes(0)
async def test_into_blocks_of_another_size(shape: str, num_prompts: int, bench_of: BenchOf) -> None:
    """Prefill and decode may cut the same KV into blocks of different sizes."""
    bench = bench_of(shape)
    prompts = bench.prompts(num_prompts)
    first = list(SHAPES).index(shape)
    choices = [BLOCK_SIZES[first % len(BLOCK_SIZES)]] if num_prompts < 100 else BLOCK_SIZES
    for sizes in choices:
        setup = Setup(block_sizes=sizes, prefill={"group_kib": 8, "transfer_mode": "serialized"})
        async with bench.mesh(setup, prompts) as mesh:
            await bench.ask_all(mesh, prompts)
            assert (mesh.prefill.pool.block_size, mesh.decode.pool.block_size) == sizes


@a_third_of_the_shapes(1)
async def test_prompt_logprobs(shape: str, bench_of: BenchOf) -> None:
    """Logprobs of the prompt's own tokens come through, computed in chunks, as transformers has
    them."""
    bench = bench_of(shape)
    prompt = bench.tokens(333)
    async with bench.mesh(Setup(prefill={"token_budget": 100}), [prompt]) as mesh:
        answer = await mesh.ask(prompt, 2, ignore_eos=True, prompt_logprobs=NUM_TOP)
    want = bench.reference.prompt_logprobs(prompt)
    first, *rest = answer.prompt_logprobs
    assert math.isnan(first.logprob)
    assert len(rest) == len(prompt) - 1
    for index, entry in enumerate(rest):
        bench.tally.compare_entry(
            prompt[index + 1], entry.logprob, entry.top, want[index], f"prompt token {index + 1}"
        )
