"""KV leaves one pool and enters another bit for bit, whatever the block sizes."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from shared.engine.attention.sdpa import SdpaAttention
from shared.engine.device_engine import DeviceEngine
from shared.engine.fake import FakeEngine
from shared.engine.gpu.streams import Streams
from shared.engine.memory.kv_copies import DeviceCopies, HostCopies
from shared.engine.memory.paged_kv import PagedKv
from shared.engine.torch_engine import TorchEngine
from shared.engine.torch_forward import TorchForward
from shared.errors import LocalProtocolError
from shared.kv.layout import KvLayout
from shared.step import SampleSpec, StepRow
from tests.support.checkpoints import SHAPES
from tests.support.engine_driver import Driver, greedy

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


Copies = type[HostCopies] | type[DeviceCopies]


class Pool(DeviceEngine):
    """An engine that only copies."""

    def __init__(
        self, dtype: str, num_blocks: int, block_size: int, copies: Copies = HostCopies
    ) -> None:
        layout = KvLayout(dtype=dtype, num_layers=3, num_kv_heads=2, head_dim=6)
        self.kv = PagedKv(layout, num_blocks, block_size, CPU)
        assert isinstance(self.kv.copies, HostCopies)
        pools = list(zip(self.kv.keys, self.kv.values, strict=True))
        super().__init__(
            *(FakeEngine().spec, layout, num_blocks, block_size, copies(pools)),
            device=CPU,
            streams=Streams(),
            guides=None,
        )


@pytest.mark.parametrize("copies", [HostCopies, DeviceCopies])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("first_size", "second_size"), [(16, 16), (16, 1), (3, 7)])
def test_round_trip(dtype: str, first_size: int, second_size: int, copies: Copies) -> None:
    """Random bits, NaNs among them, cross between pools of different block sizes unchanged."""
    rng = np.random.default_rng(1)
    one, two = Pool(dtype, 40, first_size, copies), Pool(dtype, 80, second_size)
    start, stop, num_tokens = 5, 33, 40
    table_one = [int(x) for x in rng.permutation(40)[: -(-num_tokens // first_size)]]
    table_two = [int(x) for x in rng.permutation(80)[: -(-num_tokens // second_size)]]
    frame = rng.integers(0, 256, (stop - start) * one.layout.token_layer_bytes * 2, dtype=np.uint8)
    out = np.zeros_like(frame)
    one.scatter(table_one, start, stop, 1, 3, frame)
    one.gather(table_one, start, stop, 1, 3, out)
    assert out.tobytes() == frame.tobytes()
    two.scatter(table_two, start, stop, 1, 3, out)
    again = np.zeros_like(frame)
    two.gather(table_two, start, stop, 1, 3, again)
    assert again.tobytes() == frame.tobytes()


@pytest.mark.parametrize("copies", [HostCopies, DeviceCopies])
def test_wire_layout(copies: Copies) -> None:
    """A frame is [layers, key and value, tokens, heads, dim]; other slots stay as they were."""
    engine = Pool("float32", 4, 4, copies)
    kv = engine.kv
    for layer in range(3):
        for part, pool in enumerate((kv.keys[layer], kv.values[layer])):
            for slot in range(16):
                pool[slot] = 1000 * layer + 100 * part + slot
    out = np.zeros(2 * 2 * 3 * 12, dtype=np.float32)
    engine.gather([2, 0], 3, 6, 1, 3, out.view(np.uint8))
    frame = out.reshape(2, 2, 3, 12)
    assert (frame == frame[..., :1]).all()
    slots = np.array([11, 0, 1])
    want = np.array([[slots + 1000, slots + 1100], [slots + 2000, slots + 2100]])
    assert (frame[..., 0] == want).all()
    before = [pool.clone() for pool in (*kv.keys, *kv.values)]
    engine.scatter([2, 0], 3, 6, 1, 3, (out * 0).tobytes())
    for old, new in zip(before, (*kv.keys, *kv.values), strict=True):
        changed = sorted({int(slot) for slot in (old != new).nonzero()[:, 0]})
        assert changed in ([], [0, 1, 11])


@pytest.mark.parametrize("copies", [HostCopies, DeviceCopies])
def test_bad_ranges_are_refused(copies: Copies) -> None:
    """A table that is too short, a foreign block, an empty range or a small buffer is our bug."""
    engine = Pool("float32", 4, 4, copies)
    out = np.zeros(3 * 96, dtype=np.uint8)
    engine.gather([0], 0, 3, 0, 1, out)
    for table, start, stop, first, last in (
        ([0], 3, 5, 0, 1),
        ([4], 0, 1, 0, 1),
        ([-1], 0, 1, 0, 1),
        ([0], 2, 2, 0, 1),
        ([0], 0, 1, 2, 2),
        ([0], 0, 1, 0, 4),
        ([0], 0, 4, 0, 1),
    ):
        with pytest.raises(LocalProtocolError):
            engine.gather(table, start, stop, first, last, out)
    with pytest.raises(LocalProtocolError):
        engine.gather([0], 0, 1, 0, 1, bytes(96))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["llama-gqa2", "qwen3-bias-mixed-windows"])
def test_answer_continues_on_another_engine(
    shape: str, dtype: str, engine_of: Callable[..., TorchEngine]
) -> None:
    """Prefill on one engine, frames layer by layer, decode on another: the colocated answer."""
    prefill = engine_of(shape, block_size=16, num_blocks=40, dtype=dtype)
    decode = engine_of(shape, block_size=5, num_blocks=120, dtype=dtype)
    rng = random.Random(3)
    prompt = [rng.randrange(SHAPES[shape].vocab) for _ in range(103)]
    want = Driver(prefill).run_alone(prompt, greedy(10), chunk=40).output

    source = Driver(prefill, 7).start(prompt, greedy(1))
    target = Driver(decode, 8).start(prompt, greedy(10))
    buffer = prefill.new_buffer(103 * prefill.layout.token_layer_bytes)
    while not source.is_done:
        row = source.row(40)
        stop = row.start + len(row.token_ids)

        def push(layer: int, start: int = row.start, stop: int = stop) -> None:
            prefill.gather(source.block_table, start, stop, layer, layer + 1, buffer)
            decode.scatter(target.block_table, start, stop, layer, layer + 1, buffer)

        source.commit(row, prefill.step([row], push)[0])
    target.output.append(source.output[0])
    target.num_computed = len(prompt)
    while not target.is_done:
        row = target.row(1)
        target.commit(row, decode.step([row])[0])
    assert target.output == want


def test_layers_are_reported_in_order(engine_of: Callable[..., TorchEngine]) -> None:
    """on_layer hears each layer once, in order, with its KV already in the pool."""
    engine = engine_of("llama-gqa4-biases", num_blocks=4)
    frame_bytes = 20 * engine.layout.token_layer_bytes
    early: list[bytes] = []
    out = engine.new_buffer(frame_bytes)

    def on_layer(layer: int) -> None:
        assert layer == len(early)
        engine.gather([3, 1], 0, 20, layer, layer + 1, out)
        early.append(out.tobytes())

    engine.step([StepRow(list(range(20)), 0, [3, 1])], on_layer)
    late: list[bytes] = []
    for layer in range(engine.layout.num_layers):
        engine.gather([3, 1], 0, 20, layer, layer + 1, out)
        late.append(out.tobytes())
    assert early == late
    assert len(set(early)) == engine.layout.num_layers


@pytest.mark.parametrize("shape", ["llama-gqa2", "mistral-window"])
def test_foreign_memory_is_never_read(shape: str, engine_of: Callable[..., TorchEngine]) -> None:
    """With NaN in every slot that a sequence has not written itself, its answer is the same."""
    clean, dirty = engine_of(shape), engine_of(shape)
    with torch.inference_mode():
        for pool in (*dirty._kv.keys, *dirty._kv.values):
            pool.fill_(float("nan"))
    rng = random.Random(5)
    prompts = [[rng.randrange(199) for _ in range(n)] for n in (40, 41, 44, 47, 3)]
    params = [greedy(8, logprobs=1)] * 5
    want = Driver(clean, 1).run_mixed(prompts, params, max_chunk=30)
    got = Driver(dirty, 1).run_mixed(prompts, params, max_chunk=30)
    assert [one.results for one in got] == [one.results for one in want]


class MarkingStreams:
    """Notes what the engine asks of its streams."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []

    def computing(self) -> MarkingStreams:
        self.log.append(("step",))
        return self

    def layer_written(self, layer: int) -> None:
        self.log.append(("written", layer))

    def copying(self, first_layer: int, last_layer: int) -> MarkingStreams:
        self.log.append(("copy", first_layer, last_layer))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.log.append(("end",))


def test_layers_are_marked_before_they_are_reported(
    engine_of: Callable[..., TorchEngine],
) -> None:
    """On CUDA a copy waits for a layer's mark, so the mark must be set when on_layer is called."""
    loaded = engine_of("llama-gqa2", num_blocks=2, kernels="torch")
    streams = MarkingStreams()
    forward = TorchForward(
        loaded.forward._decoder,
        loaded._kv,
        attention=SdpaAttention(),
        streams=streams,
        max_model_len=loaded.spec.max_model_len,
        device=CPU,
    )
    engine = TorchEngine(forward, loaded.spec, loaded._kv, streams=streams, device=CPU)
    sample = SampleSpec(greedy(1), 0, (), ())
    engine.step(
        [StepRow([1, 2], 0, [0], sample)], lambda layer: streams.log.append(("heard", layer))
    )
    out = engine.new_buffer(4096)
    engine.gather([0], 0, 1, 0, 2, out)
    engine.scatter([1], 0, 1, 0, 2, out)
    assert streams.log == [
        ("step",),
        ("written", 0),
        ("heard", 0),
        ("written", 1),
        ("heard", 1),
        ("end",),
        ("copy", 0, 2),
        ("end",),
        ("copy", 0, 0),
        ("end",),
    ]
