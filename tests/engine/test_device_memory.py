"""How much of a GPU goes to KV, without one: the arithmetic, the steps that are measured, and what
is said when memory is too small."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shared.config import DecodeConfig, PrefillConfig  # noqa: E402
from shared.engine import load, torch_engine  # noqa: E402
from shared.engine.gpu.decode_buckets import bucket_sizes  # noqa: E402
from shared.engine.gpu.device_memory import (  # noqa: E402
    GIB,
    GRAPH_BYTES,
    RUNTIME_BYTES,
    DeviceMemory,
    MemoryNeeds,
    kv_bytes_of,
    largest_steps,
    measure,
)
from shared.engine.gpu.streams import Streams  # noqa: E402
from shared.engine.torch_engine import TorchEngine  # noqa: E402
from shared.errors import EngineFailed  # noqa: E402
from shared.step import StepRow  # noqa: E402

EngineOf = Callable[..., TorchEngine]
CPU = torch.device("cpu")
MIB = 1 << 20
MEMORY = DeviceMemory(80 * GIB, 62 * GIB, 16 * GIB, 3 * GIB, GIB // 2, GIB // 4)


def test_kv_gets_what_is_left_of_the_share() -> None:
    """Weights, the largest step, recorded steps, staging and CUDA itself come first."""
    besides = 3 * GIB + GIB // 2 + GIB // 4 + RUNTIME_BYTES
    assert kv_bytes_of(MEMORY, 0.9, least=1) == int(80 * GIB * 0.9) - 16 * GIB - besides
    assert kv_bytes_of(MEMORY, 0.45, least=1) == 36 * GIB - 16 * GIB - besides


def test_kv_never_gets_what_others_have() -> None:
    """What the driver calls free is a bound, whatever the share."""
    crowded = MEMORY._replace(free=10 * GIB)
    besides = 3 * GIB + GIB // 2 + GIB // 4 + RUNTIME_BYTES
    assert kv_bytes_of(crowded, 1.0, least=1) == 10 * GIB - besides


def test_two_workers_fit_on_a_gpu_in_any_order() -> None:
    """Each with half a share, the second one while the first has taken all that is its own."""
    alone = kv_bytes_of(MEMORY, 0.45, least=1)
    free = 80 * GIB - int(0.45 * 80 * GIB) - 16 * GIB - RUNTIME_BYTES // 2
    assert kv_bytes_of(MEMORY._replace(free=free), 0.45, least=1) == alone


def test_staging_is_that_of_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes come to who pushes and go from who receives; half as many slots do for them."""
    needs: list[MemoryNeeds] = []
    monkeypatch.setattr(
        TorchEngine, "load", lambda *_, **options: needs.append(options["memory_needs"])
    )
    for config in (
        PrefillConfig(staging_mib=64),
        DecodeConfig(staging_mib=128),
        DecodeConfig(staging_mib=128, share_prefixes=False),
        DecodeConfig(staging_mib=128, movable=True),
    ):
        load.load_engine(config)
    assert [one.staging_bytes // MIB for one in needs] == [64 + 32, 128 + 64, 128, 2 * 128]


def test_no_room_for_kv_names_what_took_it_and_the_flags() -> None:
    """One sentence with all figures in GiB."""
    with pytest.raises(EngineFailed) as e:
        kv_bytes_of(MEMORY, 0.25, least=1)
    assert e.value.code == "out_of_memory"
    assert e.value.message == (
        "no memory is left for KV: of this GPU's 80.00 GiB this worker may have 25% "
        "(--gpu-memory-share), 62.00 are free beside its weights, and it needs: weights 16.00, "
        "the largest step (--token-budget, --max-running) 3.00, recorded steps (--max-graph-rows) "
        "0.50, staging (--staging-mib) 0.25, CUDA itself 1.00"
    )
    least = kv_bytes_of(MEMORY, 0.9, least=1)
    assert kv_bytes_of(MEMORY, 0.9, least=least) == least
    with pytest.raises(EngineFailed):
        kv_bytes_of(MEMORY, 0.9, least=least + 1)


@pytest.mark.parametrize(
    ("needs", "max_model_len", "prompts", "singles"),
    [
        (MemoryNeeds(step_tokens=300, max_rows=8), 4096, [(3796, 300)], [4096, *[1024] * 7]),
        (MemoryNeeds(step_tokens=300, max_rows=3), 128, [(0, 128), (0, 128), (84, 44)], [128] * 3),
        (MemoryNeeds(step_tokens=300, max_rows=1), 128, [(0, 128)], [128]),
        (MemoryNeeds(step_tokens=2, max_rows=8), 64, [(62, 2)], [64] * 2),
    ],
)
def test_the_largest_steps_fill_budget_rows_and_context(
    needs: MemoryNeeds, max_model_len: int, prompts: list[tuple[int, int]], singles: list[int]
) -> None:
    """As many tokens, rows and positions as a worker's settings allow, and no more."""
    chunks, decode = largest_steps(needs, max_model_len=max_model_len, block_size=16)
    assert [(row.start, len(row.token_ids)) for row in chunks] == prompts
    assert [row.stop for row in decode] == singles
    assert {len(row.token_ids) for row in decode} == {1}
    assert all(row.sample is not None for row in [*chunks, *decode])


def test_measuring_runs_the_largest_steps_and_a_recorded_one(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real engine with a pool of one block runs them; each peak counts from what torch held
    before it, and the largest one is taken."""
    engine = engine_of("llama-gqa2", num_blocks=1)
    asked: list[list[StepRow]] = []
    peaks = iter((7, 9, 4))
    sorted_widths: list[int] = []
    sort = torch.Tensor.sort

    def step(rows: Any) -> None:
        asked.append(list(rows))
        engine.step(rows)

    def watched(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        sorted_widths.append(tensor.shape[0])
        return sort(tensor, *args, **options)

    monkeypatch.setattr("shared.engine.sampling.sampler._NUCLEUS_GUESS", 16)
    monkeypatch.setattr(torch.Tensor, "sort", watched)
    cuda = {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda _: None,
        "memory_reserved": lambda _: 100,
        "max_memory_reserved": lambda _: 100 + next(peaks),
        "mem_get_info": lambda _: (500, 1000),
    }
    for name, fake in cuda.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    memory = measure(
        step,
        MemoryNeeds(step_tokens=40, max_rows=4, staging_bytes=80),
        max_model_len=64,
        block_size=engine.block_size,
        graph_rows=2,
        device=CPU,
    )
    graphs = 4 + len(bucket_sizes(2)) * GRAPH_BYTES
    assert memory == DeviceMemory(1000, 500, 100, step=9, graphs=graphs, staging=100)
    assert [len(rows) for rows in asked] == [1, 4, 2]
    assert not any(row.sample for row in asked[2])
    # The dearest way to sample was gone, by the prompt and by every single row.
    assert sorted_widths == [1, 4]


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB "
        "of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB "
        "memory in use. If reserved but unallocated memory is large try setting "
        "expandable_segments:True\nmore"
    )


@pytest.mark.parametrize(
    ("place", "doing", "flag"),
    [
        ("load_decoder", "loading the weights", "another --device"),
        ("PagedKv", "making the KV pool", "--gpu-memory-share, --kv-gib or --num-blocks"),
    ],
)
def test_out_of_memory_at_start_names_the_flag(
    folder_of: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    doing: str,
    flag: str,
) -> None:
    """What torch tells of the sizes is kept, its advice, which workers refuse, is not."""
    monkeypatch.setattr(torch_engine, place, out_of_memory)
    with pytest.raises(EngineFailed) as e:
        TorchEngine.load(folder_of("llama-gqa2"), num_blocks=4, kernels="torch")
    assert e.value.code == "out_of_memory"
    said = e.value.message
    assert said.startswith(f"{doing} failed: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0")
    assert "1.20 GiB is free; " in said
    assert flag in said
    assert "expandable" not in said


def no_memory_for_a_library(*_: Any) -> Any:
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")


@pytest.mark.parametrize("failing", [out_of_memory, no_memory_for_a_library])
def test_out_of_memory_in_a_step_names_the_flags(
    failing: Callable[..., Any], engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ran out of it; the largest step, tried at start, is a step like any other."""
    engine = engine_of("llama-gqa2", num_blocks=1)
    monkeypatch.setattr(engine.forward, "run", failing)
    needs = MemoryNeeds(step_tokens=8, max_rows=2)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    with pytest.raises(EngineFailed, match=r"--token-budget, --max-running") as e:
        measure(engine.step, needs, max_model_len=64, block_size=16, graph_rows=0, device=CPU)
    assert e.value.code == "out_of_memory"


def test_an_engine_on_a_gpu_sizes_its_pool_by_its_share(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded as on cuda:1, with all memory on the CPU: the device that is asked about has its
    index, and who asks for a size gets it, unmeasured."""
    gpu = torch.device("cuda", 1)
    asked: list[object] = []

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        def there(value: Any) -> Any:
            return CPU if isinstance(value, torch.device) else value

        return lambda *args, **options: make(
            *map(there, args), **{name: there(value) for name, value in options.items()}
        )

    def told(value: Any) -> Callable[..., Any]:
        return lambda *devices: asked.extend(devices) or value

    for name in ("load_decoder", "PagedKv", "TorchForward"):
        monkeypatch.setattr(torch_engine, name, on_cpu(getattr(torch_engine, name)))
    monkeypatch.setattr(torch_engine, "resolve_device", lambda _: gpu)
    monkeypatch.setattr(torch_engine, "current", lambda _: nullcontext())
    monkeypatch.setattr(torch_engine, "CudaStreams", lambda *_: Streams())
    for name, fake in (
        ("empty_cache", None),
        ("reset_peak_memory_stats", None),
        ("memory_reserved", 10 * MIB),
        ("max_memory_reserved", 30 * MIB),
        ("mem_get_info", (GIB + 900 * MIB, 2 * GIB)),
    ):
        monkeypatch.setattr(torch.cuda, name, told(fake))

    def loaded(**options: Any) -> TorchEngine:
        needs = MemoryNeeds(share=0.75, step_tokens=8, max_rows=2, staging_bytes=16 * MIB)
        return TorchEngine.load(
            folder_of("llama-gqa2"), kernels="torch", memory_needs=needs, **options
        )

    assert loaded(num_blocks=3).num_blocks == 3
    block_bytes = loaded(num_blocks=3).layout.token_bytes * 16
    assert loaded(kv_bytes=GIB // 100).num_blocks == GIB // 100 // block_bytes
    assert not asked
    left = 1536 * MIB - 10 * MIB - 20 * MIB - 20 * MIB - RUNTIME_BYTES
    assert loaded().num_blocks == left // block_bytes
    assert {*map(str, asked)} == {"cuda:1"}
