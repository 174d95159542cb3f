"""Files below a worker's KV pool: what was evicted comes back, exactly, also to a worker that
starts on them anew; whatever is wrong with them is a miss, a clear error, or a fallback that the
log names."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.engine.fake import FakeModel, FakeTiming
from shared.errors import InvalidRequest
from shared.kv.journal import key_of
from shared.predict.step_time import attended
from shared.worker.core.lower_tiers import BATCH_BLOCKS
from shared.worker.disk_arena import REST_S
from tests.mesh.test_tiers import OTHERS, PROMPT, answered, evicted, settled
from tests.support.fake_gateway import FakeRequest
from tests.support.tiers import few
from tests.support.virtual_loop import run_virtual, virtual_time
from tests.support.worker_mesh import WorkerMesh, a_prompt, worker_mesh

SLOT_BYTES = 2048


def on_disk(folder: Path, **more: Any) -> dict[str, Any]:
    """A pool of 48 blocks, and room for every block of a test below it."""
    settings = {"ssd_cache": folder, "ssd_cache_size": 1 << 24, **more}
    return {"prefill_blocks": 48, "prefill": settings}


def disk_of(mesh: WorkerMesh, p: int = 0) -> Any:
    """The disk of a worker; it is the last of its tiers."""
    return mesh.prefills[p].worker.tiers.levels[-1]


async def ended(mesh: WorkerMesh, p: int = 0) -> None:
    """Kill a prefill worker, and wait until its files are closed."""
    await settled(mesh)
    await mesh.kill(mesh.prefills[p])
    await asyncio.sleep(0.01)


async def loaded(mesh: WorkerMesh, prompt: list[int] = PROMPT) -> tuple[int, int]:
    """Return which tokens of a prompt came from the two tiers, and see that all is right."""
    request = mesh.start(prompt)
    await answered(request, prompt)
    assert request.token is not None
    return request.token.dram_tokens, request.token.ssd_tokens


def test_what_was_evicted_comes_back_from_disk(tmp_path: Path) -> None:
    """A prompt that others have driven out of the pool is read, not computed; the first token says
    from where, and how long that took."""

    @virtual_time
    async def run() -> None:
        async with worker_mesh(**on_disk(tmp_path)) as mesh:
            await evicted(mesh)
            await settled(mesh)
            disk_of(mesh).arena._reader.delay_s = 0.002
            request = mesh.start(PROMPT)
            assert await answered(request, PROMPT) == 240
            token = request.token
            assert token is not None
            assert (token.dram_tokens, token.ssd_tokens) == (0, 240)
            assert 0.002 <= token.load_s < 0.01
            await settled(mesh)
            count = mesh.prefills[0].worker.prompt_metrics.registry.get_sample_value
            assert count("pdmesh_prefill_tier_tokens_loaded_total", {"tier": "ssd"}) == 240

    run()


def test_a_chain_comes_from_both_tiers(tmp_path: Path) -> None:
    """What memory has no room for comes from disk, in one prompt; gateways hear of either."""

    @virtual_time
    async def run() -> None:
        async with worker_mesh(**on_disk(tmp_path, dram_cache=64 * SLOT_BYTES)) as mesh:
            dram, disk = mesh.prefills[0].worker.tiers.levels
            assert dram.tier.num_slots < 112 < disk.tier.num_slots
            mesh.prefills[0].worker.journal.subscribe("me", 128)
            await evicted(mesh)
            await settled(mesh)
            chain = mesh.prefills[0].pool.new_chain()
            keys = chain.hashes(PROMPT, 15)
            assert dram.tier.num_found(keys) == 0
            assert disk.tier.num_found(keys) == 15
            # Some of them in memory again, as if it had been larger.
            assert await loaded(mesh, PROMPT[:100]) == (0, 96)
            for other in OTHERS[:3]:
                await answered(mesh.start(other), other)
            await settled(mesh)
            assert dram.tier.num_found(keys) == 6
            assert await loaded(mesh) == (96, 144)
            await settled(mesh)
            report = mesh.prefills[0].worker.journal.report("me")
            key = key_of(chain.hashes(PROMPT, 16)[15])
            assert key in report.tiers[2].stored
            assert report.tiers[2].num_keys == 2 * (1 + len(OTHERS))

    run()


def test_a_new_worker_finds_what_the_old_one_wrote(tmp_path: Path) -> None:
    """After SIGKILL the next worker on the folder tells of what is there, and reads it."""

    @virtual_time
    async def run() -> None:
        async with worker_mesh(**on_disk(tmp_path)) as mesh:
            await evicted(mesh)
            await ended(mesh)
            new = await mesh.restart()
            assert len(disk_of(mesh).tier) == 16 * 7
            new.worker.journal.subscribe("me", 128)
            assert new.worker.journal.report("me").tiers[2].num_keys == 14
            for prompt in (PROMPT, *OTHERS):
                assert await loaded(mesh, prompt) == (0, 240)
            await settled(mesh)

    run()


def test_what_was_used_longest_ago_goes_first_after_a_restart(tmp_path: Path) -> None:
    """A smaller cache keeps what lies within it; the order of use outlives the worker."""

    @virtual_time
    async def run() -> None:
        size = 40 * SLOT_BYTES
        async with worker_mesh(**on_disk(tmp_path, ssd_cache_size=size)) as mesh:
            num_slots = disk_of(mesh).tier.num_slots
            await evicted(mesh)
            await ended(mesh)
            await mesh.restart()
            assert len(disk_of(mesh).tier) == num_slots
            assert await answered(mesh.start(OTHERS[-1]), OTHERS[-1]) == 240
            new = a_prompt(256, seed=77)
            assert await answered(mesh.start(new), new) == 0
            await settled(mesh)
            chain = mesh.prefills[0].pool.new_chain()
            assert disk_of(mesh).tier.num_found(chain.hashes(OTHERS[-1], 16)) == 16
            await ended(mesh)

        smaller = on_disk(tmp_path, ssd_cache_size=size // 2)
        async with worker_mesh(**smaller) as mesh:
            assert 0 < len(disk_of(mesh).tier) <= num_slots // 2
            for prompt in (new, *OTHERS):
                await answered(mesh.start(prompt), prompt)
            await settled(mesh)

    run()


def test_a_folder_of_another_model_is_emptied(tmp_path: Path) -> None:
    """Neither another model's blocks, nor another release's, nor those of other sizes are found."""

    async def run(prefill_block_size: int, seed: int, release: str) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shared.worker.disk_arena.VERSION", release)
            async with worker_mesh(
                **on_disk(tmp_path),
                prefill_block_size=prefill_block_size,
                model=FakeModel(max_model_len=2048, vocab_size=1024 * seed),
            ) as mesh:
                num_kept = len(disk_of(mesh).tier)
                request = mesh.start(PROMPT)
                await request.finished()
                await settled(mesh)
        return num_kept

    assert run_virtual(run(16, 1, "1")) == 0
    assert run_virtual(run(16, 1, "1")) == 16
    assert run_virtual(run(32, 1, "1")) == 0
    assert run_virtual(run(32, 1, "2")) == 0
    assert run_virtual(run(32, 3, "2")) == 0
    assert run_virtual(run(32, 3, "2")) == 8
    assert [it.name for it in tmp_path.iterdir()] == ["0"]


@pytest.mark.parametrize(
    "harm",
    ["bytes", "cut", "gone", "index", "ones", "index gone", "other's", "identity", "moved"],
)
def test_a_damaged_file_is_a_miss(harm: str, tmp_path: Path) -> None:
    """Bytes that have changed, files that are shorter, gone, mixed up or of another time: what is
    wrong is computed, what is right is used, and the answer is the same."""
    folder = tmp_path / "0"

    def damage(slot_bytes: int) -> None:
        slots, index = folder / "slots", folder / "index"
        match harm:
            case "bytes":
                with slots.open("r+b") as file:
                    file.seek(4 * slot_bytes + 7)
                    (byte,) = file.read(1)
                    file.seek(4 * slot_bytes + 7)
                    file.write(bytes([byte ^ 1]))
            case "cut":
                with slots.open("r+b") as file:
                    file.truncate(5 * slot_bytes - 3)
            case "gone":
                slots.unlink()
            case "index":
                index.write_bytes(random.Random(1).randbytes(len(index.read_bytes()) - 7))
            case "ones":  # as worn out flash has them
                with index.open("r+b") as file:
                    file.write(b"\xff" * 64)
            case "index gone":
                index.unlink()
            case "other's":  # each record names the next slot's prefix
                content = index.read_bytes()
                index.write_bytes(content[64:] + content[:64])
            case "identity":
                (folder / "identity.json").write_text("{")
            case _:  # a key of one record and the digest of another: half a record was written
                content = bytearray(index.read_bytes())
                content[:32] = content[64:96]
                index.write_bytes(content)

    @virtual_time
    async def run() -> None:
        async with worker_mesh(**on_disk(tmp_path)) as mesh:
            await evicted(mesh)
            await ended(mesh)
            damage(disk_of(mesh).arena._slot_bytes)
            await mesh.restart()
            num_cached = await answered(mesh.start(PROMPT), PROMPT)
            assert num_cached == {"bytes": 64, "cut": 64}.get(harm, 0)
            for prompt in (*OTHERS, PROMPT):
                await answered(mesh.start(prompt), prompt)
            assert await answered(mesh.start(PROMPT), PROMPT) == 240
            await settled(mesh)

    run()


def test_workers_of_one_host_share_a_folder(tmp_path: Path) -> None:
    """Each takes a part that nobody holds, after a restart one with its own model's blocks."""

    @virtual_time
    async def run() -> None:
        settings = {**on_disk(tmp_path), "num_prefill": 2}
        async with worker_mesh(**settings) as mesh:
            assert [disk_of(mesh, p).arena.folder.name for p in (0, 1)] == ["0", "1"]
            await answered(mesh.start(PROMPT, p=1), PROMPT)
            await settled(mesh)
        async with worker_mesh(**on_disk(tmp_path), model=FakeModel(vocab_size=2048)) as mesh:
            assert disk_of(mesh).arena.folder.name == "0"
        async with worker_mesh(**on_disk(tmp_path)) as mesh:
            assert disk_of(mesh).arena.folder.name == "1"
            assert await answered(mesh.start(PROMPT), PROMPT) == 240

    run()


def test_another_user_s_part_of_a_folder_is_left_to_it(tmp_path: Path) -> None:
    """Its files are closed to others, who take the next part."""
    (tmp_path / "0").mkdir()

    @virtual_time
    async def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            before = os.open

            def refused(path: Any, *more: Any) -> int:
                if path == tmp_path / "0" / "lock":  # as to whoever is not root
                    raise PermissionError(errno.EACCES, "permission denied")
                return before(path, *more)

            patch.setattr(os, "open", refused)
            async with worker_mesh(**on_disk(tmp_path)) as mesh:
                assert disk_of(mesh).arena.folder.name == "1"

    run()


def test_a_slow_disk_holds_nobody_up(tmp_path: Path) -> None:
    """Blocks wait in the pool for their write and are dropped when they are evicted; a read that
    is late is given up, its blocks are free, and no other is begun before it has ended."""

    @virtual_time
    async def run() -> None:
        async with worker_mesh(**on_disk(tmp_path), timing=FakeTiming()) as mesh:
            disk = disk_of(mesh)
            await evicted(mesh)
            await settled(mesh)
            disk.arena._writer.delay_s = 50.0
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            more = [a_prompt(256, seed=seed) for seed in range(20, 30)]
            for prompt in more:
                await answered(mesh.start(prompt), prompt)
            assert loop.time() - began_at < 10.0
            assert disk.tier.num_moving <= BATCH_BLOCKS
            assert len(disk.queue) <= 48
            assert disk.queue.num_lost > 0
            pool = mesh.prefills[0].pool
            assert pool.num_available == pool.num_blocks

            disk.arena._writer.delay_s = 0.0
            disk.arena._reader.delay_s = 50.0
            began_at = loop.time()
            assert await answered(mesh.start(PROMPT), PROMPT) == 0
            assert 1.0 <= loop.time() - began_at < 2.0
            assert not disk.arena.can_load
            assert not mesh.prefills[0].worker.tiers.tables()
            began_at = loop.time()
            assert await answered(mesh.start(OTHERS[0]), OTHERS[0]) == 0
            assert loop.time() - began_at < 0.5
            disk.arena._reader.delay_s = 0.0
            await asyncio.sleep(60)
            assert disk.arena.can_load
            disk.block_s.value = 0.0
            assert await loaded(mesh, OTHERS[1]) == (0, 240)
            await settled(mesh)

    run()


def test_a_disk_that_was_slow_is_tried_again(tmp_path: Path) -> None:
    """A speed that was measured once is not believed for ever."""

    @virtual_time
    async def run() -> None:
        async with worker_mesh(**on_disk(tmp_path), timing=FakeTiming()) as mesh:
            await evicted(mesh)
            await settled(mesh)
            level = disk_of(mesh)
            compute_s = mesh.prefills[0].worker.step_times.predict(240, attended(0, 240))
            level.block_s.add(1.5 * compute_s / 15)
            for num_tried in range(100):
                if (await loaded(mesh, (PROMPT, *OTHERS)[num_tried % 7]))[1]:
                    break
            assert 10 < num_tried < 99
            await settled(mesh)

    run()


@contextlib.contextmanager
def full(*disks: Any) -> Iterator[None]:
    """Have the kernel refuse writes for want of room."""
    files = [disk.arena._files.slots for disk in disks]
    before = [os.dup(file) for file in files]
    with open("/dev/full", "r+b", buffering=0) as no_room:
        for file in files:
            os.dup2(no_room.fileno(), file)
    try:
        yield
    finally:
        for file, was in zip(files, before, strict=True):
            os.dup2(was, file)
            os.close(was)


def test_a_disk_that_takes_nothing_is_read_all_the_same(tmp_path: Path) -> None:
    """The kernel refuses writes, as of a full disk: nothing is stored for a while, answers go on,
    what is there is read, and later it is tried again."""

    @virtual_time
    async def run() -> None:
        async with worker_mesh(**on_disk(tmp_path)) as mesh:
            disk = disk_of(mesh)
            await answered(mesh.start(PROMPT), PROMPT)
            await settled(mesh)
            with full(disk):
                for other in OTHERS:
                    assert await answered(mesh.start(other), other) == 0
                assert disk.arena.rests_s > 0
                timers: Any = asyncio.get_running_loop()
                assert not [it for it in timers._scheduled if it._callback == disk.wake.set]
                assert len(disk.tier) == 16
                assert await loaded(mesh) == (0, 240)
            count = mesh.prefills[0].worker.prompt_metrics.registry.get_sample_value
            assert count("pdmesh_prefill_tier_blocks_lost_total", {"tier": "ssd"}) > 0
            await asyncio.sleep(REST_S + 1)
            await settled(mesh)
            assert len(disk.tier) > 16

    run()


@pytest.mark.parametrize("number", [0, errno.EOPNOTSUPP])
def test_a_file_system_that_promises_no_room_gets_nothing_written_at_start(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that can be promised is; where it cannot, blocks take it as they come."""
    if number:
        monkeypatch.setattr("shared.worker.disk_arena.allocate", lambda *_: number)

    @virtual_time
    async def run() -> None:
        async with worker_mesh(**on_disk(tmp_path)) as mesh:
            slots = disk_of(mesh).arena.folder / "slots"
            assert slots.stat().st_size == 1 << 24
            assert slots.stat().st_blocks * 512 == (0 if number else 1 << 24)
            await answered(mesh.start(PROMPT), PROMPT)
            await settled(mesh)
            assert slots.stat().st_blocks

    run()


@pytest.mark.parametrize("wrong", ["file", "too large", "too small", "read-only", "full"])
def test_a_folder_that_cannot_be_used_is_refused(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clear error at start, which names the remedy. What a full disk leaves of it has one name,
    however often a worker starts there."""
    settings: dict[str, Any] = {"ssd_cache": tmp_path / "kv"}
    if wrong == "file":
        settings["ssd_cache"].write_text("")
    if wrong == "read-only":
        settings["ssd_cache"] = Path("/proc/sys/kv")  # where not even root makes a folder
    settings |= {"too large": {"ssd_cache_size": 1 << 49}, "too small": {"ssd_cache_size": 1}}.get(
        wrong, {}
    )

    if wrong == "full":

        def refuse(file: int) -> None:
            if not stat.S_ISDIR(os.fstat(file).st_mode):
                raise OSError(errno.ENOSPC, "")

        monkeypatch.setattr(os, "fsync", refuse)

    @virtual_time
    async def run() -> None:
        async with worker_mesh(prefill=settings):
            pass

    with pytest.raises((InvalidRequest, ExceptionGroup)) as failed:
        run()
    error: BaseException = failed.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, InvalidRequest)
    remedy = "holds not one KV block" if wrong == "too small" else "--ssd-cache"
    assert remedy in error.message
    if wrong == "full":
        assert "no space left on device" in error.message
        assert sorted(os.listdir(tmp_path / "kv" / "0")) == [".identity", "lock"]


@pytest.mark.parametrize("state", ["storing", "reading", "scattering"])
@pytest.mark.parametrize("who", ["worker", "gateway"])
def test_who_dies_while_blocks_are_copied_leaves_nothing_wrong(
    who: str, state: str, tmp_path: Path
) -> None:
    """A worker is killed in the middle of a write or a read, or the gateway that asked: others have
    all their blocks, and who comes after it, on the same files, gives right answers."""

    @virtual_time
    async def run() -> None:
        async with worker_mesh(**on_disk(tmp_path)) as mesh:
            await evicted(mesh)
            await settled(mesh)
            level = disk_of(mesh)
            thread = level.arena._writer if state == "storing" else level.arena._reader
            thread.delay_s = 0.4
            if state == "scattering":
                thread.delay_s, level.arena._compute._copy_s = 0.0, 0.4
            prompt = a_prompt(256, seed=99) if state == "storing" else PROMPT
            request = mesh.start(prompt, by=mesh.other_gateway)
            await mesh.gateway.until(lambda: level.tier.num_moving)
            await asyncio.sleep(0.1)
            assert level.tier.num_moving
            if who == "worker":
                await mesh.kill(mesh.prefills[0])
                request.cancel_decode()
                await asyncio.sleep(1.0)
                await mesh.restart()
            else:
                mesh.network.fabric.kill("other-gateway")
                thread.delay_s = level.arena._compute._copy_s = 0.0
            for again in (prompt, *OTHERS, PROMPT):
                await answered(mesh.start(again), again)
            await settled(mesh)

    run()


@pytest.mark.parametrize("has_dram", [False, True])
@pytest.mark.parametrize("seed", few([0, 3], 0))  # under which disks of either kind are read
def test_a_storm_gives_no_wrong_token(seed: int, has_dram: bool, tmp_path: Path) -> None:
    """Conversations that share beginnings, in a pool, memory and files too small for them; cancels,
    slow disks, refused writes, damaged files, workers killed and started anew on the files: every
    answer is the right one, and no block is lost in any tier."""

    @virtual_time
    async def storm() -> None:
        chance = random.Random(f"{has_dram}/{seed}")
        settings = {
            "ssd_cache": tmp_path,
            "ssd_cache_size": 1 << 17,
            "dram_cache": 1 << 16 if has_dram else 0,
            "cache_policy": chance.choice(["lru", "lfu", "length-aware"]),
        }
        async with (
            asyncio.timeout(600.0),
            worker_mesh(
                num_prefill=2,
                prefill_blocks=40,
                decode_blocks=96,
                prefill=settings,
                timing=FakeTiming(),
                seed=seed,
            ) as mesh,
        ):
            roots = [a_prompt(chance.randrange(32, 300), seed=it) for it in range(5)]
            running: list[tuple[FakeRequest, list[int], int]] = []
            num_loaded = 0

            async def finish(request: FakeRequest, prompt: list[int]) -> None:
                nonlocal num_loaded
                await answered(request, prompt)
                assert request.token is not None
                assert request.token.ssd_tokens <= request.token.cached_tokens
                num_loaded += request.token.ssd_tokens

            for idx in range(80):
                for p in range(2):
                    disk = disk_of(mesh, p)
                    disk.arena._reader.delay_s = chance.choice([0.0, 0.0005, 0.02, 3.0])
                    disk.arena._writer.delay_s = chance.choice([0.0, 0.0005, 0.02, 0.3])
                    if chance.random() < 0.1:
                        damage(disk.arena, chance)
                if chance.random() < 0.05:
                    p = chance.randrange(2)
                    await mesh.kill(mesh.prefills[p])
                    for request, _, at in running:
                        if at == p:
                            request.cancel_decode()
                    running = [it for it in running if it[2] != p]
                    await mesh.restart(p)
                prompt = chance.choice(roots) + a_prompt(chance.randrange(1, 60), seed=idx % 7)
                p = chance.randrange(2)
                no_room = [disk_of(mesh, p)] if chance.random() < 0.1 else []
                with full(*no_room):
                    request = mesh.start(prompt, p=p)
                    running.append((request, prompt, p))
                    if chance.random() < 0.2:
                        await asyncio.sleep(chance.random() * 0.05)
                        request.cancel()
                        running.pop()
                    elif len(running) > 3:
                        await finish(*running.pop(0)[:2])
            for request, prompt, _ in running:
                await finish(request, prompt)
            for p in range(2):
                disk_of(mesh, p).arena._reader.delay_s = 0.0
                disk_of(mesh, p).arena._writer.delay_s = 0.0
            await settled(mesh)
            assert num_loaded > 0

    storm()


def damage(arena: Any, chance: random.Random) -> None:
    """Change a byte of the blocks, or of what is known of them."""
    path = arena.folder / chance.choice(["slots", "slots", "index"])
    with path.open("r+b") as file:
        file.seek(chance.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))
