"""KV blocks in files, for a worker and for the next one that starts on them.

A folder for each worker of a host, held by a lock: ``identity.json`` says whose KV it is,
``slots`` has the blocks, ``index`` of each slot the prefix whose KV is there. No write is waited
for, for none is believed: a digest binds identity, prefix and bytes together, and what does not
match it when it is read, torn, old or forged, is a miss. So a power failure costs blocks and no
answer, and nothing is ever synced but the identity.

A disk that is slow delays nobody: it has two threads of its own, a block is let go as soon as it is
copied to be written, a read is waited for as long as its prompt may wait, and nothing is asked of a
disk that still owes an answer. A disk that fails is left alone for a while.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import structlog
import xxhash

from shared.engine.base import Engine
from shared.engine.work_thread import OrderedWork
from shared.engine.worker import ComputeRunner
from shared.errors import InvalidRequest
from shared.kv.journal import Tier
from shared.version import VERSION
from shared.worker.arenas import BlocksLoaded, gather, scatter, slots_of
from shared.worker.core.lower_tiers import BlockMove

_log = structlog.get_logger(__name__)

REST_S = 30.0
"""How long nothing is written after a write has failed."""

MAX_FOLDERS = 256
"""Workers that may share one --ssd-cache."""

_FORMAT = "1"

_RECORD = struct.Struct("<32s16sQI4x")
"""Of a slot: key, digest, when it was written (a count), tokens of the prefix. 64 bytes, of which
no disk writes half."""

_MOST_WRITES = 1 << 62
"""No disk sees so many: a record that says more is damaged, and nothing could follow it."""

_SPARSE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def identity_of(engine: Engine) -> dict[str, str]:
    """Return what must be equal before a block may be used: what two workers that exchange KV have
    in common, the release, and what the files look like."""
    return {
        "format": _FORMAT,
        "release": VERSION,
        "fingerprint": engine.spec.fingerprint.hex(),
        "engine": engine.spec.engine,
        "layout": engine.layout.digest.hex(),
        "block_size": str(engine.block_size),
    }


@dataclass(frozen=True, slots=True)
class _Files:
    """What is open of a folder. reading: ``slots`` once more, for the thread that reads."""

    lock: int
    index: int
    slots: int
    reading: int


class DiskArena:
    """Slots of a file.

    Raises InvalidRequest: not one block fits, the disk has not so much room, or the folder cannot
    be used.
    """

    tier = Tier.SSD

    def __init__(
        self,
        engine: Engine,
        compute: ComputeRunner,
        root: Path,
        num_bytes: int,
        new_thread: Callable[[str], OrderedWork],
    ) -> None:
        self._engine = engine
        self._compute = compute
        self._slot_bytes = engine.block_size * engine.layout.token_bytes
        self.num_slots = slots_of(num_bytes, engine, "ssd_cache_size")
        identity = identity_of(engine)
        self._seed = xxhash.xxh3_128_digest(orjson.dumps(identity, option=orjson.OPT_SORT_KEYS))
        try:
            self.folder, lock = _claim(root, identity)
            self._files = self._open(lock)
            records = self._read_index()
        except OSError as error:
            raise _unusable(root, os.strerror(error.errno or 0).lower()) from None
        self.kept: Sequence[tuple[int, bytes, int]] = [
            (slot, key, end) for _, slot, key, end in records
        ]
        self._num_writes = records[-1][0] if records else 0
        self._reader, self._writer = new_thread("pdmesh-disk-in"), new_thread("pdmesh-disk-out")
        self._num_late = 0
        self._rests_until = 0.0
        _log.info(
            "KV is kept on disk",
            file=str(self.folder),
            num_blocks=self.num_slots,
            count=len(self.kept),
        )

    def _open(self, lock: int) -> _Files:
        num_bytes = self.num_slots * self._slot_bytes
        flags = os.O_RDWR | os.O_CREAT
        index = os.open(self.folder / "index", flags, 0o600)
        slots = os.open(self.folder / "slots", flags, 0o600)
        # A file from before counts: its blocks (of 512 bytes whatever the file system) are no
        # longer free.
        has = os.fstat(slots).st_blocks * 512
        disk = os.statvfs(self.folder)
        if num_bytes - has > disk.f_bavail * disk.f_frsize:
            free = has + disk.f_bavail * disk.f_frsize
            raise _unusable(
                self.folder.parent,
                f"{num_bytes} bytes are more than the {free} that its disk has left",
                "give a smaller --ssd-cache-size, or another folder",
            )
        os.ftruncate(index, self.num_slots * _RECORD.size)
        os.ftruncate(slots, num_bytes)
        number = allocate(slots, num_bytes)
        if number and number not in _SPARSE:  # else a full disk shows when it is written to
            raise OSError(number, os.strerror(number))
        return _Files(lock, index, slots, os.open(self.folder / "slots", os.O_RDONLY))

    def _read_index(self) -> list[tuple[int, int, bytes, int]]:
        """Return when each slot was written, the slot, and its prefix; in order of time."""
        index = os.pread(self._files.index, self.num_slots * _RECORD.size, 0)
        records = enumerate(_RECORD.iter_unpack(index[: len(index) // _RECORD.size * _RECORD.size]))
        return sorted(
            (at, slot, key, end) for slot, (key, _, at, end) in records if 0 < at < _MOST_WRITES
        )

    # --- down ------------------------------------------------------------------------------------

    @property
    def rests_s(self) -> float:
        return max(0.0, self._rests_until - asyncio.get_running_loop().time())

    async def store(self, moves: Sequence[BlockMove], on_read: Callable[[], None]) -> bool:
        data = np.empty((len(moves), self._slot_bytes), np.uint8)

        def gather_all() -> None:
            for move, out in zip(moves, data, strict=True):
                gather(self._engine, move.block, out)

        await self._compute.copy(gather_all)
        on_read()
        try:
            await self._writer.run(lambda: self._write(moves, data))
        except OSError as error:
            self._rests_until = asyncio.get_running_loop().time() + REST_S
            _log.warning(
                "KV not written to disk, what is there is still read",
                file=str(self.folder),
                error=os.strerror(error.errno or 0).lower(),
                retry_after_s=REST_S,
            )
            return False
        return True

    def _write(self, moves: Sequence[BlockMove], data: np.ndarray) -> None:
        for move, block in zip(moves, data, strict=True):
            self._num_writes += 1
            record = _RECORD.pack(move.key, self._digest(move, block), self._num_writes, move.end)
            _write_at(self._files.slots, block.data, move.slot * self._slot_bytes)
            _write_at(self._files.index, memoryview(record), move.slot * _RECORD.size)

    def _digest(self, move: BlockMove, data: np.ndarray) -> bytes:
        digest = xxhash.xxh3_128(self._seed + move.key + move.end.to_bytes(8, "little"))
        digest.update(data.data)
        return digest.digest()

    # --- up --------------------------------------------------------------------------------------

    @property
    def can_load(self) -> bool:
        return not self._num_late

    async def load(self, moves: Sequence[BlockMove], until: float) -> BlocksLoaded:
        data = np.empty((len(moves), self._slot_bytes), np.uint8)
        # Into memory of its own, not into blocks: a read that is late goes on writing.
        reading = self._reader.run(lambda: self._read(moves, data))
        try:
            async with asyncio.timeout_at(until):
                num_good = await asyncio.shield(reading)
        except TimeoutError:
            self._num_late += 1
            reading.add_done_callback(self._late_read_ended)
            _log.info("KV on disk is late, its prompt is computed", file=str(self.folder))
            return BlocksLoaded(0)

        def scatter_all() -> None:
            for move, block in zip(moves[:num_good], data, strict=False):
                scatter(self._engine, move.block, block)

        await self._compute.copy(scatter_all)
        return BlocksLoaded(num_good, num_good < len(moves))

    def _late_read_ended(self, _: object) -> None:
        self._num_late -= 1

    def _read(self, moves: Sequence[BlockMove], data: np.ndarray) -> int:
        """Return how many of the blocks are what was written."""
        for idx, (move, block) in enumerate(zip(moves, data, strict=True)):
            try:
                self._read_one(move, block)
            except OSError:
                return idx
        return len(moves)

    def _read_one(self, move: BlockMove, out: np.ndarray) -> None:
        """Raises OSError: it cannot be read, or is not what was written."""
        files = self._files
        has = os.preadv(files.reading, [out.data], move.slot * self._slot_bytes)
        record = os.pread(files.index, _RECORD.size, move.slot * _RECORD.size)
        digest = _RECORD.unpack(record)[1] if len(record) == _RECORD.size else b""
        if has != self._slot_bytes or digest != self._digest(move, out):
            raise OSError(errno.EIO, "not what was written")

    def close(self) -> None:
        """See ``Arena``. Each file is closed by the thread that uses it, and the folder is free
        when the last write is over."""
        files = self._files
        self._reader.run(lambda: os.close(files.reading))
        self._writer.run(lambda: [os.close(it) for it in (files.slots, files.index, files.lock)])
        self._reader.end()
        self._writer.end()


def _write_at(file: int, data: memoryview, offset: int) -> None:
    while data:
        num_bytes = os.pwrite(file, data, offset)
        data, offset = data[num_bytes:], offset + num_bytes


def _unusable(
    root: Path,
    why: str,
    remedy: str = "give --ssd-cache a folder that this user may write, on a local disk with room",
) -> InvalidRequest:
    return InvalidRequest(
        f"KV cannot be kept in {root} ({why}): {remedy}", code="ssd_cache", param="ssd_cache"
    )


def allocate(file: int, num_bytes: int) -> int:
    """Have the file system promise a file's bytes; return the error's number, 0 = they are there.

    Not by ``os.posix_fallocate``: where the file system promises nothing (ext2, ramfs, some of
    FUSE and NFS), glibc has every page written, or read if it was, at every start: ext2 took 4 to
    13 s a GiB (CPU), in which this process heard no signal.
    """
    try:
        fallocate: Callable[..., int] = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, TypeError):  # another system
        return errno.ENOSYS
    while fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(num_bytes)):
        if (number := ctypes.get_errno()) != errno.EINTR:
            return number
    return 0


# --- whose folder it is ---------------------------------------------------------------------------


def _claim(root: Path, identity: Mapping[str, str]) -> tuple[Path, int]:
    """Return a folder that no other worker holds, and its lock: one with such KV, or else the first
    that is free, emptied."""
    root.mkdir(parents=True, exist_ok=True)
    free: list[tuple[Path, int]] = []
    for number in range(MAX_FOLDERS):
        path = root / str(number)
        is_new = not path.exists()
        if is_new and free:
            break
        lock = _lock(path)
        if lock is None:
            continue
        free.append((path, lock))
        if is_new or _identity_in(path) == identity:
            free.insert(0, free.pop())
            break
    if not free:
        raise _unusable(root, f"{MAX_FOLDERS} workers use it", "give another folder")
    (path, lock), *others = free
    for _, other in others:
        os.close(other)
    before = _identity_in(path)
    if before != identity:
        if before:
            names = sorted(it for it in identity if before.get(it) != identity[it])
            _log.warning("KV on disk is not this model's, emptied", file=str(path), other=names)
        for name in ("index", "slots"):
            (path / name).unlink(missing_ok=True)
        _write_identity(path, identity)
    return path, lock


def _lock(path: Path) -> int | None:
    """KV is as private as its prompts: nobody else may read it."""
    path.mkdir(mode=0o700, exist_ok=True)
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except PermissionError:
        return None  # it is another user's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _identity_in(path: Path) -> dict[str, str]:
    try:
        identity = orjson.loads((path / "identity.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return identity if isinstance(identity, dict) else {}


def _write_identity(path: Path, identity: Mapping[str, str]) -> None:
    """In one step, and after what it says of the other files is true even if power fails."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
        with (path / ".identity").open("wb") as scratch:  # one name: a full disk keeps one file
            scratch.write(orjson.dumps(identity, option=orjson.OPT_INDENT_2))
            scratch.flush()
            os.fsync(scratch.fileno())
        Path(scratch.name).replace(path / "identity.json")
        os.fsync(directory)
    finally:
        os.close(directory)
