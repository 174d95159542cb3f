"""Whole engines on Triton's kernels: the same answers as plain torch, replayed or not."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.config import DecodeConfig, PrefillConfig
from shared.engine import computing, load
from shared.engine.gpu.decode_buckets import DecodeBuckets, bucket_sizes
from shared.engine.gpu.recording import Recorder, Work
from shared.engine.native import library
from shared.engine.torch_engine import TorchEngine
from shared.engine.torch_forward import TorchForward
from shared.engine.worker import BegunStep, ThreadCompute
from shared.errors import LocalProtocolError, ModelError
from shared.model_folder import DEMO_FOLDER
from shared.request import SamplingParams
from shared.step import SampleSpec, StepRow, ToCome
from tests.support.checkpoints import SHAPES
from tests.support.engine_driver import Driver, greedy
from tests.support.interpreted import DEVICE, needs_triton
from tests.support.tiers import few

needs_triton()
pytestmark = pytest.mark.torch

EngineOf = Callable[..., TorchEngine]
SHAPE = "mistral-window"
MAX_LEN = 64


@pytest.fixture
def triton_of(engine_of: EngineOf) -> EngineOf:
    """Load a shape in float32 on Triton's kernels; short, so that buffers are small."""

    def engine(shape: str = SHAPE, **options: Any) -> TorchEngine:
        options = {"num_blocks": 40, "max_model_len": MAX_LEN, **options}
        return engine_of(shape, device=DEVICE.type, kernels="triton", **options)

    return engine


def forward_of(engine: TorchEngine) -> TorchForward:
    assert isinstance(engine.forward, TorchForward)
    return engine.forward


def buckets_of(engine: TorchEngine) -> DecodeBuckets:
    buckets = forward_of(engine).buckets
    assert buckets is not None
    return buckets


def hidden_of(engine: TorchEngine, rows: Sequence[StepRow], on_layer: Any = None) -> torch.Tensor:
    """Hidden states of the rows' last tokens, in the rows' order."""
    with torch.inference_mode(), engine._streams.computing():
        passed = engine.forward.run(rows, (), on_layer)
        return passed.hidden()[list(passed.lasts)].clone()


def decode_rows(engine: TorchEngine, count: int, seed: int = 0) -> list[StepRow]:
    """Fill the pool with noise; return a row each for sequences of several lengths in it."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for pool in [*engine._kv.keys, *engine._kv.values]:
            known = pool[: engine.num_blocks * engine.block_size]
            known.copy_(torch.randn(known.shape, generator=generator))
    free = rng.sample(range(engine.num_blocks), engine.num_blocks)
    rows: list[StepRow] = []
    for _ in range(count):
        start = rng.randrange(MAX_LEN - 4)
        # As the scheduler hands them over.
        table = array("i", [free.pop() for _ in range(start // engine.block_size + 1)])
        rows.append(StepRow([rng.randrange(SHAPES[SHAPE].vocab)], start, table))
    return rows


class CountingRecorder(Recorder):
    """Counts replays by the number of rows; refuses sizes that memory has no room for."""

    def __init__(self, *, no_room_above: int = 1 << 30) -> None:
        self.replayed: list[int] = []
        self._no_room_above = no_room_above

    def record(self, work: Work) -> Work:
        size = work().shape[0]
        if size > self._no_room_above:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

        def replay() -> torch.Tensor:
            self.replayed.append(size)
            return work()

        return replay


def recorded_again(engine: TorchEngine, recorder: CountingRecorder) -> CountingRecorder:
    buckets = buckets_of(engine)
    buckets._recordings.clear()
    with torch.inference_mode(), engine._streams.computing():
        buckets.record(recorder)
    return recorder


def test_sizes_of_buckets() -> None:
    """Powers of two, then every 8th, then every 16th, and always the largest batch itself."""
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(8) == (1, 2, 4, 8)
    assert bucket_sizes(70) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70)
    assert bucket_sizes(256)[-4:] == (208, 224, 240, 256)
    assert len(bucket_sizes(256)) == 23


@pytest.mark.slow
def test_triton_continues_as_torch_does() -> None:
    """The bundled model's greedy tokens in float32 are the same, replayed and not, chunks mixed
    in."""
    prompts = [[5 + 7 * idx % 1200 for idx in range(length)] for length in (20, 3)]

    def answers(**options: Any) -> list[list[int]]:
        engine = TorchEngine.load(
            DEMO_FOLDER,
            device=DEVICE.type,
            dtype="float32",
            num_blocks=20,
            max_model_len=MAX_LEN,
            **options,
        )
        done = Driver(engine, seed=3).run_mixed(prompts, [greedy(4)] * 2, max_chunk=12)
        return [one.output for one in done]

    want = answers(kernels="torch")
    assert answers(kernels="triton") == want
    assert answers(kernels="triton", max_graph_rows=2) == want


@pytest.mark.parametrize("count", few([1, 3, 4], 3))
def test_replayed_steps_compute_what_others_do(count: int, triton_of: EngineOf) -> None:
    """The same hidden states in the caller's order; the same bits if the bucket is just full."""
    engine = triton_of(max_graph_rows=4)
    rows = decode_rows(engine, count)
    plain = hidden_of(engine, rows, on_layer=lambda _: None)
    recorder = recorded_again(engine, CountingRecorder())
    replayed = hidden_of(engine, rows)
    bucket = {3: 4}.get(count, count)
    assert recorder.replayed == [bucket]
    if bucket == count and DEVICE.type == "cpu":
        # Only if longest first is the caller's order are products computed row for row alike.
        longest_first = sorted(rows, key=lambda row: -row.start)
        plain = hidden_of(engine, longest_first, on_layer=lambda _: None)
        assert torch.equal(hidden_of(engine, longest_first), plain)
    else:
        # Products of other shapes, and keys split into other parts: sums in another order.
        torch.testing.assert_close(replayed, plain, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_kv_of_replayed_steps_is_where_it_belongs(triton_of: EngineOf) -> None:
    """Step after step, replayed and plain engines hold the same KV in the rows' blocks."""
    pools = []
    for max_rows in (4, 0):
        engine = triton_of(max_graph_rows=max_rows)
        size = engine.block_size
        rows = decode_rows(engine, 3)
        for _ in range(3):
            hidden_of(engine, rows)
            rows = [row._replace(start=row.start + 1) for row in rows]
            rows = [row for row in rows if row.start < len(row.block_table) * size]
        pools.append([pool[: engine.num_blocks * size] for pool in engine._kv.keys])
    for one, other in zip(*pools, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_what_a_replay_samples_and_reports_is_the_same(triton_of: EngineOf) -> None:
    """Greedy, drawn, penalised and biased rows; tokens equal, logprobs close."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "seed": 4, "top_p": 0.8, "logprobs": 0},
        {"temperature": 1.3, "seed": 5, "top_k": 20, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 1},
        {"temperature": 0.0, "logit_bias": ((3, 50.0),)},
    ]
    results = []
    for max_rows in (5, 0):
        engine = triton_of(max_graph_rows=max_rows)
        specs = [
            SampleSpec(SamplingParams(max_tokens=8, **kind), 2, [1, 2, 3], [4, 5]) for kind in kinds
        ]
        rows = decode_rows(engine, len(specs))
        rows = [row._replace(sample=spec) for row, spec in zip(rows, specs, strict=True)]
        results.append(engine.step(rows))
    for one, other in zip(*results, strict=True):
        assert one.token_id == other.token_id
        assert (one.logprobs is None) == (other.logprobs is None)
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
            tops = [
                [token_id for token_id, _ in entry.top] for entry in (one.logprobs, other.logprobs)
            ]
            assert tops[0] == tops[1]


@pytest.mark.slow
async def test_tokens_stay_on_the_device_between_steps(
    triton_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is queued before the one before it was read, and takes its tokens from there: the
    answers are those of one step after the other, greedy and drawn, rows that come and go
    included."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 1.3, "seed": 5, "top_k": 20, "min_p": 0.01},
    ]
    given = decode_rows(triton_of(), 3)  # fills no pool but that engine's own
    given = [row._replace(start=20 + idx, block_table=[idx, 10 + idx, 20 + idx])
             for idx, row in enumerate(given)]  # fmt: skip
    # Rows of each step, by their places in ``given``.
    steps = [(0, 1, 2), (2, 0, 1), (2, 0), (0, 2, 1), (1,)]

    async def answers(*, is_ahead: bool) -> dict[int, list[int]]:
        engine = triton_of(max_graph_rows=3)
        assert len(decode_rows(engine, 3)) == 3  # the same noise
        compute = ThreadCompute(engine)
        tokens = {idx: [row.token_ids[0]] for idx, row in enumerate(given)}
        counts = dict.fromkeys(tokens, 0)
        running: tuple[BegunStep, tuple[int, ...]] | None = None
        taken: list[int] = []
        fill = buckets_of(engine).fill

        def counted(rows: Sequence[StepRow], to_come: ToCome = ()) -> Any:
            taken.append(len(to_come))
            return fill(rows, to_come)

        monkeypatch.setattr(buckets_of(engine), "fill", counted)

        async def read(step: BegunStep, places: tuple[int, ...]) -> None:
            for place, result in zip(places, await step.results(), strict=True):
                tokens[place].append(result.token_id)

        for places in steps:
            if running is not None and not is_ahead:
                await read(*running)
                running = None
            rows, to_come = [], []
            for place in places:
                params = SamplingParams(max_tokens=9, **kinds[place])
                spec = SampleSpec(params, counts[place], (), ())
                own = tokens[place][-1:]
                if running is not None and place in running[1]:
                    own = [-1]
                    to_come.append((own, running[1].index(place)))
                row = given[place]._replace(token_ids=own, sample=spec)
                rows.append(row._replace(start=row.start + counts[place]))
                counts[place] += 1
            following = compute.begin(rows, to_come)
            if running is not None:
                await read(*running)
            running = following, places
        assert running is not None
        await read(*running)
        await compute.close()
        assert (sum(taken) > 0) == is_ahead
        return tokens

    want = await answers(is_ahead=False)
    assert [len(want[idx]) for idx in range(3)] == [5, 5, 5]
    assert await answers(is_ahead=True) == want


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 32 positions, so that short rows have several."""
    for module in ("batch", "gpu.decode_buckets", "attention.triton_kernels"):
        monkeypatch.setattr(f"shared.engine.{module}.SPLIT_KEYS", 32)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.slow
def test_exact_steps_have_the_same_bits_replayed_or_not(triton_of: EngineOf) -> None:
    """Alone and together, in any order, in a bucket that is full or not, as chunks or as single
    tokens."""
    engine = triton_of(max_graph_rows=4, exact=True)
    rows = decode_rows(engine, 3)
    want = torch.cat([hidden_of(engine, [row], on_layer=lambda _: None) for row in rows])
    assert torch.equal(hidden_of(engine, rows), want)
    assert torch.equal(hidden_of(engine, rows[::-1]), want.flip(0))
    assert torch.equal(hidden_of(engine, rows[1:2]), want[1:2])
    table = rows[0].block_table
    tokens = [1 + idx % 50 for idx in range(34)]
    chunk = hidden_of(engine, [StepRow(tokens, 0, table), *rows[1:]])[:1]
    engine.step([StepRow(tokens[:31], 0, table)])
    for place in range(31, 34):
        single = hidden_of(engine, [rows[2], StepRow(tokens[place : place + 1], place, table)])
    assert torch.equal(single[1:], chunk)


@pytest.mark.usefixtures("short_splits")
@pytest.mark.slow
def test_rows_with_more_splits_than_there_is_room_for_are_not_replayed(
    triton_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step runs all the same."""
    monkeypatch.setattr("shared.engine.gpu.decode_buckets._SHARED", 0)
    engine = triton_of(max_graph_rows=2)
    recorder = recorded_again(engine, CountingRecorder())
    rows = [row for row in decode_rows(engine, 8) if row.start >= 32][:2]
    short = [StepRow([1], 3, rows[0].block_table)] * 2
    want = hidden_of(engine, rows, on_layer=lambda _: None)
    assert torch.equal(hidden_of(engine, rows), want)
    assert recorder.replayed == []
    hidden_of(engine, short)
    assert recorder.replayed == [2]


@pytest.mark.slow
def test_nothing_of_the_padding_block_reaches_a_row(triton_of: EngineOf) -> None:
    """NaN all over it changes no bit of a result."""
    engine = triton_of(max_graph_rows=4)
    rows = decode_rows(engine, 3)
    want = hidden_of(engine, rows)
    with torch.inference_mode():
        for pool in [*engine._kv.key_blocks, *engine._kv.value_blocks]:
            assert len(pool) == engine.num_blocks + 1
            pool[engine.num_blocks] = float("nan")
    assert torch.equal(hidden_of(engine, rows), want)


@pytest.mark.slow
def test_padding_rows_write_to_the_padding_block_alone(triton_of: EngineOf) -> None:
    """A step of one row in a bucket of four changes that row's slot, and the padding block."""
    engine = triton_of(max_graph_rows=4)
    buckets_of(engine).sizes = [4]
    hidden_of(engine, decode_rows(engine, 4, seed=1))  # what a full bucket leaves in the buffers
    row = decode_rows(engine, 1)[0]
    before = [pool.clone() for pool in engine._kv.keys]
    hidden_of(engine, [row])
    size = engine.block_size
    own = row.block_table[row.start // size] * size + row.start % size
    for pool, old in zip(engine._kv.keys, before, strict=True):
        changed = (pool != old).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {own, engine.num_blocks * size}
        assert own in changed


@pytest.mark.slow
def test_other_steps_are_not_replayed(triton_of: EngineOf) -> None:
    """Chunks, steps that somebody follows by layers, and batches above the largest bucket."""
    engine = triton_of(max_graph_rows=2)
    rows = decode_rows(engine, 3)
    recorder = recorded_again(engine, CountingRecorder())
    reported: list[int] = []
    hidden_of(engine, rows[:2], on_layer=reported.append)
    assert reported == list(range(engine.layout.num_layers))
    hidden_of(engine, rows)
    hidden_of(engine, [rows[0], StepRow([1, 2], 0, rows[1].block_table)])
    assert recorder.replayed == []
    hidden_of(engine, rows[:2])
    assert recorder.replayed == [2]


@pytest.mark.slow
def test_tables_too_long_for_the_buffer_are_not_replayed(
    triton_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step runs all the same."""
    monkeypatch.setattr("shared.engine.gpu.decode_buckets.MAX_TABLE_BLOCKS", 4)
    engine = triton_of(max_graph_rows=4)
    rows = decode_rows(engine, 4)
    assert max(len(row.block_table) for row in rows) > 1
    recorder = recorded_again(engine, CountingRecorder())
    want = hidden_of(engine, rows, on_layer=lambda _: None)
    assert torch.equal(hidden_of(engine, rows), want)
    assert recorder.replayed == []


def test_bad_rows_are_refused_before_anything_runs(triton_of: EngineOf) -> None:
    """As without replays."""
    engine = triton_of(max_graph_rows=2)
    for row in (
        StepRow([SHAPES[SHAPE].vocab], 0, [0]),
        StepRow([-1], 0, [0]),
        StepRow([1], -1, [0]),
        StepRow([1], 0, []),
        StepRow([1], 16, [0]),
        StepRow([1], 0, [-1]),
        StepRow([1], 0, [40]),  # the padding block
        StepRow([1], MAX_LEN, list(range(10))),
    ):
        with pytest.raises(LocalProtocolError):
            engine.step([StepRow([1], 0, [1]), row])
        assert not any(pool[: engine.num_blocks].any() for pool in engine._kv.key_blocks), row


@pytest.mark.slow
def test_sizes_without_memory_are_left_out(triton_of: EngineOf) -> None:
    """Their batches run kernel by kernel; smaller ones are replayed."""
    engine = triton_of(max_graph_rows=4)
    rows = decode_rows(engine, 3)
    want = hidden_of(engine, rows)
    recorder = recorded_again(engine, CountingRecorder(no_room_above=2))
    assert buckets_of(engine).sizes == [1, 2]
    torch.testing.assert_close(hidden_of(engine, rows), want, rtol=2e-5, atol=2e-5)
    assert recorder.replayed == []
    hidden_of(engine, rows[:2])
    assert recorder.replayed == [2]


def test_the_padding_block_is_nobodys(triton_of: EngineOf) -> None:
    """It is not among the blocks given out, counts as memory, and cannot be copied."""
    engine = triton_of(num_blocks=None, kv_bytes=1 << 18, max_graph_rows=2)
    block_bytes = engine.block_size * engine.layout.token_bytes
    assert engine.num_blocks == (1 << 18) // block_bytes - 1
    assert triton_of(num_blocks=7, max_graph_rows=2).num_blocks == 7
    out = bytearray(block_bytes)
    with pytest.raises(LocalProtocolError):
        engine.gather([engine.num_blocks], 0, 1, 0, 1, out)


def test_plain_torch_records_nothing(engine_of: EngineOf) -> None:
    """Its attention looks at the rows on the host, so it has no padding block either."""
    engine = engine_of(SHAPE, num_blocks=4, kernels="torch", max_graph_rows=8)
    assert forward_of(engine).buckets is None
    assert len(engine._kv.key_blocks[0]) == 4


def test_kernels_are_chosen_by_device(
    triton_of: EngineOf, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto takes triton on CUDA where it runs, never on a CPU; who insists is told why not."""
    assert type(forward_of(triton_of()).attention).__name__ == "TritonAttention"
    config = forward_of(triton_of())._decoder.config
    layout = triton_of().layout

    def chosen(asked: str, device: str) -> str:
        return computing.choose_kernels(asked, config, layout, 16, torch.device(device))

    monkeypatch.setattr(computing, "triton_unsupported", lambda *_, **__: "")
    assert chosen("auto", "cuda") == "triton"
    assert chosen("torch", "cuda") == "torch"
    monkeypatch.setattr(computing, "native_unsupported", lambda *_: "")
    assert chosen("auto", "cpu") == chosen("native", "cpu") == "native"
    assert chosen("avx2", "cpu") == "avx2"
    monkeypatch.setattr(computing, "native_unsupported", lambda *_: "no native ones here")
    assert chosen("auto", "cpu") == "torch"
    monkeypatch.setattr(computing, "triton_unsupported", lambda *_, **__: "no triton here")
    assert chosen("auto", "cuda") == "torch"
    with pytest.raises(ModelError, match="the triton kernels cannot run here: no triton here"):
        chosen("triton", "cuda")
    with pytest.raises(ModelError, match="the native kernels cannot run here"):
        chosen("native", "cuda")


@pytest.mark.parametrize("is_compiled", [True, False])
def test_each_slow_part_of_loading_is_told(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it begins; compiling only where it has to be done."""
    compiled: list[tuple[torch.dtype, str]] = []
    found = [(Path("kernels.so"), "" if is_compiled else "it is damaged")]
    monkeypatch.setattr(TorchEngine, "load", lambda *_, **__: None)
    monkeypatch.setattr(load, "unsupported", lambda _: "")
    monkeypatch.setattr(load, "best_instructions", lambda _: "avx512-bf16")
    monkeypatch.setattr(load, "find_compiled", lambda *_: found)
    monkeypatch.setattr(library, "load", lambda *what: compiled.append(what))
    parts: list[str] = []
    load.load_engine(PrefillConfig(device="cpu"), parts.append)
    middle = [] if is_compiled else ["compiling kernels, once for this machine"]
    assert parts == ["importing torch", *middle, "loading weights"]
    load.load_engine(PrefillConfig(device="cpu", dtype="float32", kernels="avx2"), parts.append)
    assert parts[-len(middle) - 2 :] == ["importing torch", *middle, "loading weights"]
    assert compiled == ([] if is_compiled else [(torch.bfloat16, ""), (torch.float32, "avx2")])
    load.load_engine(PrefillConfig(device="cpu", kernels="torch"), parts.append)
    assert parts[-2:] == ["importing torch", "loading weights"]


def test_only_decode_workers_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more rows than a step can have; none for prefill or if told so."""
    given: list[int] = []
    monkeypatch.setattr(
        TorchEngine, "load", lambda *_, **options: given.append(options["max_graph_rows"])
    )
    for config in (
        DecodeConfig(),
        DecodeConfig(max_running=24),
        DecodeConfig(max_running=512, max_graph_rows=64),
        DecodeConfig(cuda_graphs=False),
        PrefillConfig(),
    ):
        load.load_engine(config)
    assert given == [256, 24, 64, 0, 0]
