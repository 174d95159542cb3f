"""What a machine can do: samples become values, and values are kept in a file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.engine.fake import FakeEngine, FakeModel, FakeTiming
from shared.errors import TransferFailed
from shared.profile.kept import KeptProfile, find_or_measure, key_of
from shared.profile.machine import (
    UNMEASURED,
    MachineProfile,
    Sample,
    interference,
    saturating_tokens,
    tokens_per_s,
)
from shared.profile.measure import SWEEP_S, doubled, is_outdone, measure, sweep
from tests.support.loopback import LoopbackFabric, LoopbackSettings
from tests.support.virtual_compute import VirtualCompute
from tests.support.virtual_loop import virtual_time

PROFILE = MachineProfile(
    saturating_tokens=64,
    tokens_per_s=5e4,
    message_s=5e-5,
    interference=0.25,
    samples=((16, 0.001), (64, 0.002)),
)
KEY = {"device": "a test", "model": "demo", "threads": "2"}


# --- samples become values ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step_ms", "knee"),
    [
        ({16: 10, 32: 10.5, 64: 12, 128: 22, 256: 43, 512: 85}, 128),  # a constant, then by tokens
        ({16: 10, 32: 12, 64: 14, 128: 26, 256: 60, 512: 200}, 64),  # attention makes it fall
        ({16: 1, 32: 2, 64: 4}, 16),  # busy from the first on
        ({16: 10, 32: 10, 64: 10}, 64),  # rises to the end
        ({16: 10}, 16),
    ],
)
def test_the_knee_is_the_shortest_prompt_near_the_best_speed(step_ms: dict[int, float], knee: int):
    """Nine tenths of the best tokens/s are enough, wherever the best is."""
    samples: list[Sample] = [(count, ms / 1e3) for count, ms in step_ms.items()]
    assert saturating_tokens(samples) == knee
    assert tokens_per_s(samples) == pytest.approx(max(n / ms for n, ms in step_ms.items()) * 1e3)


def test_interference_is_what_the_copies_cost_and_not_what_others_do():
    """A burst of others' work slows some steps of either kind; a step that was quicker beside
    copies gained nothing by them."""
    assert interference([10, 30, 11], [12.5, 13, 50]) == pytest.approx(0.2)
    assert interference([50, 10], [40, 90]) == pytest.approx(0.75)
    assert interference([10, 12], [9, 11]) == 0.0


# --- a machine is measured ------------------------------------------------------------------------


def an_engine(num_blocks: int = 512, **timing: float) -> FakeEngine:
    model = FakeModel(max_model_len=8192)
    return FakeEngine(
        model=model, num_blocks=num_blocks, block_size=16, timing=FakeTiming(**timing)
    )


@virtual_time
async def test_a_machine_of_known_speed_is_measured_right():
    """20 us a token on top of 0.5 ms: 256 tokens are 0.92 of the best. A message costs its copy:
    the transport buffers it."""
    engine = an_engine(base_s=0.0005, prefill_token_s=20e-6)
    fabric = LoopbackFabric(LoopbackSettings(latency_s=0.0002))
    transport = await fabric.open()
    clock = asyncio.get_running_loop().time
    compute = VirtualCompute(engine, copy_s=0.0001)
    profile = await measure(engine, compute, transport, clock, most_tokens=2048)
    assert [count for count, _ in profile.samples] == [16, 32, 64, 128, 256, 512, 1024, 2048]
    assert profile.saturating_tokens == 256
    assert profile.tokens_per_s == pytest.approx(2048 / (0.0005 + 2048 * 20e-6))
    assert profile.message_s == pytest.approx(0.0001)
    assert profile.interference == pytest.approx(0.0, abs=1e-6)
    assert transport.num_endpoints == 0
    assert clock() < 2.0
    await transport.close()


@pytest.mark.parametrize(
    ("num_blocks", "token_s", "lengths"),
    [(512, 1e-6, [16, 32, 64, 128]), (4, 1e-6, [16, 32, 64]), (512, 0.004, [16, 32, 64])],
)
@virtual_time
async def test_a_sweep_ends_with_the_lengths_the_pool_or_the_time(
    num_blocks: int, token_s: float, lengths: list[int]
):
    """And never takes longer than it may by more than its warm-up."""
    engine = an_engine(num_blocks, base_s=0.001, prefill_token_s=token_s)
    clock = asyncio.get_running_loop().time
    samples = await sweep(engine, VirtualCompute(engine), clock, lengths=doubled(16, 128))
    assert [count for count, _ in samples] == lengths
    assert clock() <= SWEEP_S + samples[0][1]


@virtual_time
async def test_a_quicker_step_outdoes_what_was_measured():
    """Something disturbed the machine then; a slower one may be disturbed now."""
    engine = an_engine(512, base_s=0.001, prefill_token_s=1e-6)
    clock, compute = asyncio.get_running_loop().time, VirtualCompute(engine)
    samples = await sweep(engine, compute, clock, lengths=doubled(16, 128))
    for slower, is_wrong in ((1.0, False), (2.0, True), (0.5, False)):
        kept = [(count, slower * seconds) for count, seconds in samples]
        assert await is_outdone(engine, compute, clock, kept) == is_wrong
    assert not await is_outdone(engine, compute, clock, [])


# --- and remembered -------------------------------------------------------------------------------


class Measurer:
    """Counts how often it is asked, and takes a while."""

    def __init__(self, error: Exception | None = None) -> None:
        self.num_asked = 0
        self._error = error

    async def __call__(self) -> MachineProfile:
        self.num_asked += 1
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error
        return PROFILE


async def test_the_second_start_finds_what_the_first_measured(tmp_path: Path):
    """To the last digit, and says so; unless it holds no longer."""
    path, measurer = tmp_path / "new" / "profile.json", Measurer()
    first = await find_or_measure(KEY, measurer, path=path)
    assert first.took_s > 0
    with capture_logs() as lines:
        assert await find_or_measure(KEY, measurer, path=path) == KeptProfile(PROFILE, path)
    assert [line["event"] for line in lines] == ["machine known from an earlier start"]
    assert measurer.num_asked == 1

    async def holds(found: MachineProfile) -> bool:
        return found != PROFILE

    await find_or_measure(KEY, measurer, path=path, holds=holds)
    assert measurer.num_asked == 2


@pytest.mark.parametrize(
    ("content", "event"),
    [
        (b"", "profile unreadable, the machine is measured"),
        (b"{}", "profile unreadable, the machine is measured"),
        (b"\xff\x00", "profile unreadable, the machine is measured"),
        (
            b'{"machine":{},"profile":{"message_s":-1}}',
            "profile unreadable, the machine is measured",
        ),
        (
            b'{"machine":{"device":"another","model":"demo","threads":"2"},"profile":{}}',
            "profile of something else, the machine is measured",
        ),
    ],
)
async def test_a_file_that_does_not_fit_is_measured_anew(
    tmp_path: Path, content: bytes, event: str
):
    """Torn, foreign or of another machine: one line in the log, and a good file in its place."""
    path, measurer = tmp_path / "profile.json", Measurer()
    path.write_bytes(content)
    with capture_logs() as lines:
        assert (await find_or_measure(KEY, measurer, path=path)).profile == PROFILE
    assert [line["event"] for line in lines] == [event, "machine measured"]
    assert (await find_or_measure(KEY, measurer, path=path)).took_s == 0
    assert measurer.num_asked == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "profile.json"]


async def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path):
    """The profile is used all the same."""
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    with capture_logs() as lines:
        kept = await find_or_measure(KEY, Measurer(), path=blocker / "profile.json")
    assert (kept.profile, kept.path) == (PROFILE, None)
    assert [line["log_level"] for line in lines] == ["warning", "info"]


async def test_workers_that_start_together_measure_once(tmp_path: Path):
    """The others wait for the first and find its file."""
    path, measurer = tmp_path / "profile.json", Measurer()
    async with asyncio.TaskGroup() as tasks:
        starts = [tasks.create_task(find_or_measure(KEY, measurer, path=path)) for _ in range(4)]
    assert measurer.num_asked == 1
    assert {start.result().profile for start in starts} == {PROFILE}
    assert sum(start.result().took_s > 0 for start in starts) == 1


async def test_models_and_devices_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In the user's cache folder, or in the folder that is named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for named, folder in (
        (None, tmp_path / "pdmesh/profiles"),
        (tmp_path / "own", tmp_path / "own"),
    ):
        kept = [
            await find_or_measure({**KEY, "threads": str(n)}, Measurer(), path=named)
            for n in range(2)
        ]
        paths = {one.path for one in kept}
        assert len(paths) == 2
        assert all(path is not None and path.parent == folder for path in paths)


async def test_without_a_message_to_itself_a_worker_starts_unmeasured(tmp_path: Path):
    """Nothing is kept, so the next start tries again."""
    path, measurer = tmp_path / "profile.json", Measurer(TransferFailed("no lane"))
    assert await find_or_measure(KEY, measurer, path=path) == KeptProfile(UNMEASURED)
    assert not path.exists()


async def test_an_engine_without_a_machine_is_not_measured(tmp_path: Path):
    """The fake engine's times are nobody's."""
    key, measurer = key_of(an_engine(), 2048), Measurer()
    path = tmp_path / "profile.json"
    assert await find_or_measure(key, measurer, path=path) == KeptProfile(UNMEASURED)
    assert not measurer.num_asked
