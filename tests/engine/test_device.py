"""Which device an engine gets, without one: of torch.cuda only what is asked for is replaced."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from shared.engine import torch_engine  # noqa: E402
from shared.engine.device import (  # noqa: E402
    has_expandable_segments,
    require_shareable_memory,
    resolve_device,
)
from shared.engine.torch_engine import TorchEngine  # noqa: E402
from shared.errors import EngineFailed  # noqa: E402

EngineOf = Callable[..., TorchEngine]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let torch see so many GPUs, and be on one of them."""

    def see(count: int, *, now: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: now)

    return see


@pytest.mark.parametrize(
    ("name", "count", "now", "wanted"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 2, 0, "cuda:0"),
        ("auto", 2, 1, "cuda:1"),
        ("cpu", 2, 0, "cpu"),
        ("cuda", 1, 0, "cuda:0"),
        ("cuda", 2, 1, "cuda:1"),
        ("cuda:1", 2, 0, "cuda:1"),
    ],
)
def test_a_device_is_found_with_its_index(
    gpus: Callable[..., None], name: str, count: int, now: int, wanted: str
) -> None:
    """auto and cuda mean the thread's current device; a number means that one."""
    gpus(count, now=now)
    assert str(resolve_device(name)) == wanted


def test_a_device_that_is_not_there_is_refused_with_what_there_is(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CUDA the error points to the doctor, else it names the devices."""
    gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    with pytest.raises(EngineFailed) as e:
        resolve_device("cuda:2")
    there = "cuda:0, cuda:1 (CUDA_VISIBLE_DEVICES=5,3)"
    assert e.value.message == f"--device cuda:2: torch sees {there}"
    assert e.value.code == "no_device"
    gpus(0)
    for name in ("cuda", "cuda:0"):
        with pytest.raises(EngineFailed, match=f"--device {name}: .* `pdmesh doctor`"):
            resolve_device(name)


def test_torch_takes_the_device_that_we_found_and_no_other(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own set_device wants an index."""
    entered: list[int] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", entered.append, raising=False)
    with pytest.raises(ValueError, match="index"):
        torch.cuda.set_device(torch.device("cuda"))
    gpus(2, now=1)
    torch.cuda.set_device(resolve_device("cuda"))
    assert entered == [1]


def test_an_engine_makes_its_device_current_on_a_thread(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting it is not enough: CUDA itself must be called, or UCX finds no context there."""
    called: list[object] = []
    monkeypatch.setattr(torch._C, "_cuda_setDevice", called.append, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: called.append(str(device)))
    engine = engine_of("llama-gqa2", num_blocks=4)
    engine.enter_thread()
    assert called == []
    engine._device = torch.device("cuda", 1)
    engine.enter_thread()
    assert called == [1, "cuda:1"]


@pytest.mark.parametrize(
    ("environment", "has"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": " expandable_segments : True , max_split_size_mb:64"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
        (
            {
                "PYTORCH_ALLOC_CONF": "expandable_segments:True",
                "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
            },
            False,
        ),
    ],
)
def test_expandable_segments_are_refused(environment: dict[str, str], has: bool) -> None:
    """Under both names of the variable, as torch reads them."""
    assert has_expandable_segments(environment) == has
    if has:
        with pytest.raises(EngineFailed, match="PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"):
            require_shareable_memory(environment)
    else:
        require_shareable_memory(environment)


@pytest.mark.slow
def test_of_two_variables_torch_reads_the_one_with_cuda_in_its_name() -> None:
    """What ``has_expandable_segments`` supposes, asked of torch itself."""
    program = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch does not tell")
    settings = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    }
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=settings, capture_output=True, text=True, check=True).stdout
    assert said.strip() == settings["PYTORCH_CUDA_ALLOC_CONF"]


def test_an_engine_on_a_gpu_does_not_start_with_expandable_segments(
    engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nobody minds them."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    engine_of("llama-gqa2", num_blocks=4)
    monkeypatch.setattr(torch_engine, "resolve_device", lambda _: torch.device("cuda", 0))
    with pytest.raises(EngineFailed, match="expandable_segments") as e:
        engine_of("llama-gqa2", num_blocks=4)
    assert e.value.code == "expandable_segments"
