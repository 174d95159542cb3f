"""bfloat16 by the kernels that vLLM takes for this CPU. Those for AMX keep KV as its tiles: what
lies in them is what travels, to and from any other worker."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.config import PrefillConfig
from shared.engine.vllm.pools import HostPools
from shared.kv.layout import KvLayout
from tests.support.engine_driver import Driver, greedy
from tests.support.remote_engine import remote_engine
from tests.support.vllm_checkpoints import reference
from tests.vllm import test_models as models
from tests.vllm.conftest import EAGER, NUM_BLOCKS, EngineOf

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

HAS_AMX = torch.cpu._is_amx_tile_supported()
NUM_NEW = 16
DRAWN = greedy(NUM_NEW, temperature=0.8, top_p=0.95, seed=11)
NUM_HEADS, HEAD_DIM, BLOCK_SIZE, POOL_BLOCKS = 3, 64, 64, 5


def prompts() -> list[list[int]]:
    source = random.Random(6)
    return [[source.randrange(3, 500) for _ in range(n)] for n in (1, 5, 32, 33, 100, 300, 700)]


def without_amx() -> None:
    """As on a CPU that has none."""
    torch.cpu._is_amx_tile_supported = lambda: False


@pytest.mark.parametrize(
    ("isa", "dtype", "kept"),
    [
        ("amx", "bfloat16", "auto"),
        ("amx", "bfloat16", "fp8_e4m3"),
        ("amx", "bfloat16", "fp8_e5m2"),
        ("vec", "bfloat16", "auto"),
        ("vec", "float32", "auto"),
    ],
)
def test_kv_is_where_vllms_kernel_writes_it(isa: str, dtype: str, kept: str) -> None:
    """vLLM's own operation fills a pool, and we gather what it was given; we scatter that into
    another pool, and no byte of it is another one."""
    models.needs_avx512()
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    source = random.Random(isa)
    slots = torch.tensor(source.sample(range(POOL_BLOCKS * BLOCK_SIZE), 150))
    torch.manual_seed(1)
    parts = torch.randn(2, len(slots), NUM_HEADS, HEAD_DIM).to(getattr(torch, dtype))
    shape = (POOL_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)

    def filled(isa: str) -> torch.Tensor:
        pool = torch.zeros(shape, dtype=torch.uint8 if kept != "auto" else parts.dtype)
        halves = pool.view(POOL_BLOCKS, NUM_HEADS, 2 * BLOCK_SIZE, HEAD_DIM).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(*parts, *halves, slots, isa, kv_cache_dtype=kept)
        return pool

    layout = KvLayout(
        dtype=dtype if kept == "auto" else kept,
        num_layers=1,
        num_kv_heads=NUM_HEADS,
        head_dim=HEAD_DIM,
    )

    def frame_of(pool: torch.Tensor, isa: str) -> bytearray:
        found = bytearray(layout.token_layer_bytes * len(slots))
        pools = HostPools([[pool]], layout, BLOCK_SIZE, is_tiled=isa == "amx")
        pools.gather(slots.numpy(), 0, 1, found)
        return found

    theirs = filled(isa)
    frame = frame_of(theirs, isa)
    if kept == "auto":
        assert frame == parts.view(torch.uint8).numpy().tobytes()
    else:  # eight bits as the kernel rounds them, which does not depend on where it puts them
        assert frame == frame_of(filled("vec"), "vec")
    ours = torch.zeros_like(theirs)
    HostPools([[ours]], layout, BLOCK_SIZE, is_tiled=isa == "amx").scatter(
        slots.numpy(), 0, 1, frame
    )
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_answer_alone_is_that_of_vllm_alone(
    family: str, engine_of: EngineOf, folder_of: Callable[[str], Path]
) -> None:
    """And where it goes on from KV in other blocks."""
    engine = engine_of(family, dtype="bfloat16")
    assert engine.spec.engine.endswith(" amx") == HAS_AMX
    want = reference(
        folder_of(family), models.prompts(), models.NUM_NEW, dtype="bfloat16", one_by_one=True
    )
    models.require_alone_and_moved(Driver(engine), want)


def test_attention_does_not_depend_on_who_else_is_in_a_step(engine_of: EngineOf) -> None:
    """By the bits of logprobs, of as few rows as vLLM multiplies alike: no thread takes a part of a
    row's keys, which with AMX changed a third of all numbers."""
    engine = engine_of("llama", dtype="bfloat16", threads=2)
    driver, params = Driver(engine), greedy(NUM_NEW, logprobs=0)
    alone = [driver.run_alone(prompt, params) for prompt in prompts()[-3:]]
    together = [driver.start(one.prompt, params) for one in alone]
    for one in together:
        row = one.row(1 << 30)
        one.commit(row, engine.step([row])[0])
    while not together[0].is_done:
        rows = [one.row(1) for one in together]
        for one, row, result in zip(together, rows, engine.step(rows), strict=True):
            one.commit(row, result)
    for one, other in zip(together, alone, strict=True):
        assert one.output == other.output
        assert [it.logprobs for it in one.results] == [it.logprobs for it in other.results]


def test_ranks_keep_what_one_rank_keeps(engine_of: EngineOf) -> None:
    """Each has tiles of its heads, in a process of its own, which may use AMX's registers as well.
    Two add otherwise than one, so that numbers are alike to their last bits."""
    frames: list[torch.Tensor] = []
    for ranks in (1, 2):
        engine = engine_of("llama", dtype="bfloat16", ranks=ranks)
        driver, prompt = Driver(engine), prompts()[-2]
        sequence = driver.start(prompt, greedy(1))
        engine.step([sequence.row(1 << 30)])
        frame = engine.new_buffer(engine.layout.token_bytes * len(prompt))
        engine.gather(sequence.block_table, 0, len(prompt), 0, engine.layout.num_layers, frame)
        driver.finish(sequence)
        frames.append(torch.from_numpy(frame).view(torch.bfloat16).float())
    assert frames[0].std() > 0.5
    assert (frames[0] - frames[1]).abs().max() < 0.3


@pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX")
@pytest.mark.parametrize("kept", ["auto", "fp8_e4m3"])
def test_kv_with_amx_is_read_without_and_the_reverse(
    kept: str, engine_of: EngineOf, folder_of: Callable[[str], Path]
) -> None:
    """A worker on an older CPU has another engine by name and the same layout on the wire; every
    byte comes back, and where KV came back to its own kind, so does the text."""
    arguments = "" if kept == "auto" else f"kv_cache_dtype={kept}"
    with_amx = engine_of("llama", dtype="bfloat16", vllm_args=arguments)
    config = PrefillConfig(
        engine="vllm",
        device="cpu",
        dtype="bfloat16",
        model=str(folder_of("llama")),
        num_blocks=NUM_BLOCKS,
        threads=1,
        vllm_args=f"{EAGER} {arguments}",
    )
    with remote_engine(config, without_amx) as older:
        layout = older.layout
        assert older.spec.engine + " amx" == with_amx.spec.engine
        assert layout == with_amx.layout
        assert older.spec.fingerprint == with_amx.spec.fingerprint
        for here, there in ((with_amx, older), (older, with_amx)):
            ours, theirs = Driver(here), Driver(there, seed=2)
            for prompt in prompts():
                want = ours.run_alone(prompt, DRAWN).output
                first, guest, back = (d.start(prompt, DRAWN) for d in (ours, theirs, ours))
                row = first.row(1 << 30)
                first.commit(row, here.step([row])[0])
                at = (0, len(prompt), 0, layout.num_layers)
                frames = [here.new_buffer(layout.token_bytes * len(prompt)) for _ in range(3)]
                here.gather(first.block_table, *at, frames[0])
                there.scatter(guest.block_table, *at, frames[0])
                there.gather(guest.block_table, *at, frames[1])
                here.scatter(back.block_table, *at, frames[1])
                here.gather(back.block_table, *at, frames[2])
                assert np.count_nonzero(frames[0])
                assert np.array_equal(frames[0], frames[1])
                assert np.array_equal(frames[0], frames[2])
                back.num_computed, back.output = len(prompt), list(first.output)
                while not back.is_done:
                    row = back.row(1)
                    back.commit(row, here.step([row])[0])
                assert back.output == want
                for driver, one in ((ours, first), (theirs, guest), (ours, back)):
                    driver.finish(one)
