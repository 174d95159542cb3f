"""What the flags of the two workers do to a push: mode, groups and staging."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from shared.engine.fake import FakeModel, FakeTiming
from shared.profile.machine import MachineProfile
from shared.transfer.frames import Header, check_digest, pack_header
from tests.support.fake_reference import fake_continuation
from tests.support.virtual_loop import virtual_time
from tests.support.worker_mesh import a_prompt, expected, worker_mesh

SMALL_GROUPS = {"group_kib": 1}


@pytest.mark.parametrize("mode", ["layerwise", "serialized"])
@virtual_time
async def test_frames_leave_when_the_mode_says(mode: str) -> None:
    """Layer-wise the first one leaves during the step, serialized none does before its end."""
    prompt = a_prompt(300)
    async with worker_mesh(prefill={"transfer_mode": mode, **SMALL_GROUPS}) as mesh:
        request = mesh.start(prompt, 4)
        assert await request.finished() == expected(prompt, 4)
        assert request.done is not None
        assert request.joined is not None
        assert request.done.mode == mode
        assert request.joined.num_frames > 1
        is_early = request.done.transfer_s > request.done.exposed_s
        assert is_early is (mode == "layerwise")


@virtual_time
async def test_the_frames_are_the_same_in_both_modes() -> None:
    """Decode cannot tell: as many frames, as many bytes."""
    counts: list[tuple[int, int]] = []
    for mode in ("layerwise", "serialized"):
        async with worker_mesh(prefill={"transfer_mode": mode, **SMALL_GROUPS}) as mesh:
            request = mesh.start(a_prompt(130), 2)
            await request.finished()
            assert request.joined is not None
            counts.append((request.joined.num_frames, request.joined.bytes_received))
    assert counts[0] == counts[1]


@virtual_time
async def test_serialized_waits_for_its_own_step_alone() -> None:
    """The chunks of a long prompt leave one after the other, not all at the end."""
    prompt = a_prompt(600)
    settings = {"transfer_mode": "serialized", "token_budget": 100, **SMALL_GROUPS}
    async with worker_mesh(prefill=settings) as mesh:
        request = mesh.start(prompt, 3)
        assert await request.finished() == expected(prompt, 3)
        assert request.done is not None
        assert request.done.mode == "serialized"
        assert request.done.transfer_s > 3 * request.done.exposed_s


@virtual_time
async def test_a_cached_prefix_does_not_count_for_the_mode() -> None:
    """It has no step to wait for, so it leaves at once; the rest is still serialized."""
    prompt = a_prompt(100)
    async with worker_mesh(
        prefill={"transfer_mode": "serialized"}, decode={"cache_prefixes": False}
    ) as mesh:
        first = mesh.start(prompt, 3)
        await first.finished()
        await mesh.idle()
        second = mesh.start(prompt, 3)
        assert await second.finished() == expected(prompt, 3)
        assert second.token is not None
        assert second.token.cached_tokens == 96
        assert first.done is not None
        assert second.done is not None
        assert second.done.bytes_sent > 0.9 * first.done.bytes_sent
        assert second.done.mode == "serialized"


@pytest.mark.parametrize(("step_s", "mode"), [(0.01, "layerwise"), (50e-6, "serialized")])
@virtual_time
async def test_auto_takes_what_exposes_less(step_s: float, mode: str) -> None:
    """A step that hides the messages is pushed layer by layer, one that is over too soon is not."""
    prompt = a_prompt(64)
    timing = FakeTiming(base_s=step_s, prefill_token_s=0.0)
    profile = MachineProfile(message_s=200e-6)
    async with worker_mesh(timing=timing, prefill={"profile": profile, **SMALL_GROUPS}) as mesh:
        request = mesh.start(prompt, 3)
        assert await request.finished() == expected(prompt, 3)
        assert request.done is not None
        assert request.done.mode == mode


@pytest.mark.parametrize(("group_kib", "num_frames"), [(512, 4), (1024, 2), (4096, 1)])
@virtual_time
async def test_prefill_says_how_large_groups_are(group_kib: int, num_frames: int) -> None:
    """Below and above the default, both ends cut the same frames, of the size that was set."""
    model = FakeModel(max_model_len=128, num_kv_heads=16, head_dim=1024)
    prompt = a_prompt(16)  # 512 KiB a layer
    async with worker_mesh(
        model=model, prefill={"group_kib": group_kib}, prefill_blocks=8, decode_blocks=8
    ) as mesh:
        request = mesh.start(prompt, 3)
        assert await request.finished() == fake_continuation(prompt, 3, model=model)
        assert request.joined is not None
        assert request.joined.num_frames == num_frames


@virtual_time
async def test_staging_memory_becomes_slots_of_the_largest_frame() -> None:
    """24 MiB are three slots of 8 MiB on prefill, 40 MiB five on decode."""
    async with worker_mesh(prefill={"staging_mib": 24}, decode={"staging_mib": 40}) as mesh:
        prefill, decode = mesh.prefills[0].worker, mesh.decodes[0].worker
        assert prefill.pusher.core.statistics().num_free_slots == 3
        assert decode.receiver.core.statistics().num_free_slots == 5


class DeviceMemory(np.ndarray):
    """Host memory that has to be handled as a device's."""

    __cuda_array_interface__: ClassVar[dict[str, object]] = {}

    def new_tensor(self, data: np.ndarray) -> np.ndarray:
        return data

    def cpu(self) -> DeviceMemory:
        return self

    def numpy(self) -> np.ndarray:
        return np.asarray(self)


@pytest.mark.parametrize("exact", [False, True])
@virtual_time
async def test_frames_in_device_memory_carry_a_digest_where_answers_are_exact(
    exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs a way through the host, so else they carry none; decode checks each that came."""
    packed: list[Header] = []
    checked: list[int] = []

    def pack(header: Header) -> bytes:
        packed.append(header)
        return pack_header(header)

    def check(due: int, actual: int) -> None:
        checked.append(actual)
        check_digest(due, actual)

    def new_buffer(num_bytes: int) -> DeviceMemory:
        return np.zeros(num_bytes, np.uint8).view(DeviceMemory)

    monkeypatch.setattr("tests.support.worker_mesh.new_buffer", new_buffer)
    monkeypatch.setattr("shared.worker.pusher.pack_header", pack)
    monkeypatch.setattr("shared.worker.receiver.check_digest", check)
    prompt = a_prompt(130)
    async with worker_mesh(prefill={"exact": exact, **SMALL_GROUPS}) as mesh:
        assert await mesh.start(prompt, 4).finished() == expected(prompt, 4)
    assert len(packed) > 1
    assert checked == [header.digest for header in packed if header.digest is not None]
    assert len(checked) == (len(packed) if exact else 0)
