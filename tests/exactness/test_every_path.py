"""Every way of computing that ``auto`` can choose on a CPU keeps the promise: what a client reads
does not depend on what else was computed with it, on chunks, or on being computed again.

Each way is forced, so that all of them run wherever the native kernels do. What ``auto`` chooses is
in ``tests/engine/test_native.py``; on a GPU the promise needs ``--exact``, whose kernels are in
``tests/engine/test_triton_*.py`` and ``test_decode_buckets.py``.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.gateway.text.text_model import TextModel
from shared.engine.torch_engine import TorchEngine
from shared.model_folder import DEMO_FOLDER
from shared.request import TokenLogprobs
from shared.worker.core.lease import LeasePolicy
from tests.exactness.reference import LOGPROB_TOLERANCE
from tests.support.engine_driver import Driver, Running, greedy
from tests.support.grpc_client import Answer
from tests.support.native import needs_native
from tests.support.real_mesh import real_mesh
from tests.support.tiers import few

pytestmark = [pytest.mark.torch, pytest.mark.ucx]

NUM_NEW = 24
NUM_TOP = 3
NUM_PROMPTS = 12

PATHS = {
    "native": {"kernels": "native", "dtype": "bfloat16"},
    "native avx2": {"kernels": "avx2", "dtype": "bfloat16"},
    "native float32": {"kernels": "native", "dtype": "float32"},
    "torch": {"kernels": "torch", "dtype": "float32"},
}
SAME_BITS = ("native", "native avx2", "native float32")
every_path = pytest.mark.parametrize("path", PATHS)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How prompts go through a mesh. block_sizes: prefill's (None: there is none), decode's.
    is_tight: answers outgrow decode's blocks, so that some are thrown out and computed again."""

    block_sizes: tuple[int | None, int] = (16, 16)
    at_once: int = NUM_PROMPTS
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    is_tight: bool = False


WAYS = {
    "one after the other": Way(at_once=1),
    "all at once": Way(prefill={"batch_tokens": 2048}),
    "in chunks, into other blocks": Way(block_sizes=(16, 5), prefill={"token_budget": 50}),
    "colocated": Way(block_sizes=(None, 16), decode={"colocated": True, "token_budget": 60}),
    "computed again": Way(
        block_sizes=(16, 1),
        is_tight=True,
        decode={"token_budget": 70, "cache_prefixes": False},
    ),
}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Of 1 to 700 tokens; the second half begins as the first half does."""
    source = random.Random(7)
    lengths = [1, 700, *(source.randint(2, 300) for _ in range(NUM_PROMPTS // 2 - 2))]
    first = [[source.randrange(1200) for _ in range(length)] for length in lengths]
    return [*first, *([*one, source.randrange(1200)] for one in first)]


@pytest.fixture(scope="module")
def truth(prompts: list[list[int]]) -> Callable[[str], list[Running]]:
    """What a path says to each prompt alone, whole, in one process."""
    known: dict[str, list[Running]] = {}

    def of(path: str) -> list[Running]:
        if path not in known:
            engine = an_engine(path, 16, 100)
            params = greedy(NUM_NEW, logprobs=NUM_TOP)
            known[path] = [Driver(engine).run_alone(prompt, params) for prompt in prompts]
            engine.close()
        return known[path]

    return of


def an_engine(path: str, block_size: int, num_blocks: int) -> TorchEngine:
    if path in SAME_BITS:
        needs_native()
    return TorchEngine.load(
        DEMO_FOLDER, block_size=block_size, num_blocks=num_blocks, num_threads=1, **PATHS[path]
    )


def compare(path: str, got: Sequence[TokenLogprobs], want: Sequence[TokenLogprobs]) -> None:
    """The same bits on paths that promise them; close on the others."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        ours, theirs = (
            [entry.logprob, *(value for _, value in entry.top)] for entry in (one, other)
        )
        if path in SAME_BITS:
            assert array("f", ours) == array("f", theirs)  # float32 is what travels
        else:
            assert ours == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)


@every_path
@pytest.mark.parametrize("way", few(WAYS, "in chunks, into other blocks"))
async def test_answers_through_the_mesh_are_those_of_one_process(
    path: str,
    way: str,
    prompts: list[list[int]],
    truth: Callable[[str], list[Running]],
    tiny_text: TextModel,
) -> None:
    """Token by token, and where bits are promised logprob by logprob."""
    want, how = truth(path), WAYS[way]
    of_prefill, of_decode = how.block_sizes
    room = sum(map(len, prompts)) + LeasePolicy().growth_tokens * len(prompts)
    num_blocks = room + 2 if how.is_tight else 2 * room // of_decode
    engines = [
        an_engine(path, of_prefill, 2 * room // of_prefill) if of_prefill else None,
        an_engine(path, of_decode, num_blocks),
    ]
    options = {"prefill": how.prefill} if of_prefill else {}
    async with (
        real_mesh(*engines, tiny_text, decode=how.decode, **options) as mesh,
        asyncio.TaskGroup() as tasks,
    ):
        if how.is_tight:
            mesh.prefill_gate.clear()
        asking = tasks.create_task(
            mesh.ask_all(prompts, NUM_NEW, at_once=how.at_once, ignore_eos=True, logprobs=NUM_TOP)
        )
        if how.is_tight:
            await mesh.until(lambda: mesh.decode.pool.num_held == room)
            mesh.prefill_gate.set()
        answers: Sequence[Answer] = await asking
        again = mesh.decode.scheduler.statistics().num_recomputed_tokens
        assert (again > 0) == how.is_tight
    for answer, due in zip(answers, want, strict=True):
        assert answer.token_ids == due.output
        compare(path, answer.logprobs, [one.logprobs for one in due.results if one.logprobs])
    for engine in engines:
        if engine is not None:
            engine.close()


@every_path
@pytest.mark.parametrize("num_done", [1, 7, NUM_NEW - 1])
def test_another_worker_goes_on_with_the_same_text(
    path: str, num_done: int, prompts: list[list[int]], truth: Callable[[str], list[Running]]
) -> None:
    """As failover does: prompt and tokens so far are computed as one prompt, beside others, in an
    engine that has never seen them."""
    engine = an_engine(path, 16, 400)
    whole = truth(path)
    params = greedy(NUM_NEW - num_done, logprobs=NUM_TOP)
    continued = [
        [*prompt, *due.output[:num_done]] for prompt, due in zip(prompts, whole, strict=True)
    ]
    done = Driver(engine, seed=num_done).run_mixed(
        continued, [params] * len(continued), max_chunk=80, max_rows=8
    )
    for sequence, due in zip(done, whole, strict=True):
        assert sequence.output == due.output[num_done:]
        got = [one.logprobs for one in sequence.results if one.logprobs]
        compare(path, got, [one.logprobs for one in due.results[num_done:] if one.logprobs])
    engine.close()
