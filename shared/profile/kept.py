"""A machine's profile as a file: found by the next start, measured where there is none that fits.

One small JSON file for each device, model and number of threads. Whoever measures holds a lock, so
that workers that start together do not measure each other: the second finds the file of the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import orjson
import structlog

from shared.cache_folder import cache_folder
from shared.engine.base import Engine
from shared.errors import TransferFailed
from shared.profile.machine import UNMEASURED, MachineProfile
from shared.whole_file import write_whole

_log = structlog.get_logger(__name__)

_FORMAT = "1"
"""Part of the key: a file of another way to measure fits no longer."""

Key = Mapping[str, str]
"""Everything that the values depend on, in words."""

Measure = Callable[[], Awaitable[MachineProfile]]
Holds = Callable[[MachineProfile], Awaitable[bool]]


class KeptProfile(NamedTuple):
    """A profile and where it is. path: None = nowhere. took_s: to measure it now; 0 = found."""

    profile: MachineProfile
    path: Path | None = None
    took_s: float = 0.0


class _File(msgspec.Struct):
    machine: dict[str, str]
    profile: MachineProfile


def key_of(engine: Engine, most_tokens: int) -> Key:
    """Return what this engine's profile depends on; empty: it computes on no machine."""
    if not engine.machine:
        return {}
    spec = engine.spec
    return {
        "format": _FORMAT,
        **engine.machine,
        "model": spec.name,
        "fingerprint": spec.fingerprint.hex(),
        "dtype": spec.dtype,
        "most_tokens": str(most_tokens),
    }


async def _always(_: MachineProfile) -> bool:
    return True


async def find_or_measure(
    key: Key, measure: Measure, *, path: Path | None = None, holds: Holds = _always
) -> KeptProfile:
    """Return the profile that the file holds, or measure and write it.

    path: None = in the user's cache folder; a folder gets a file for each key. holds: whether what
    is found may be used. A file that cannot be written costs a warning, and the next start its
    seconds.
    Raises what ``measure`` raises but TransferFailed: without a message to itself a worker starts
    all the same, and without a profile.
    """
    if not key:
        return KeptProfile(UNMEASURED)
    path = path or cache_folder("profiles")
    if path.suffix != ".json":
        digest = hashlib.sha256(orjson.dumps(key, option=orjson.OPT_SORT_KEYS)).hexdigest()
        path /= f"{digest[:16]}.json"
    async with _locked(path.parent):
        if (found := _read(path, key)) is not None and await holds(found):
            return _told(KeptProfile(found, path))
        began_at = time.perf_counter()
        try:
            profile = await measure()
        except TransferFailed as error:
            _log.warning("machine not measured", error=error.message)
            return KeptProfile(UNMEASURED)
        seconds = time.perf_counter() - began_at
        return _told(KeptProfile(profile, path if _write(path, key, profile) else None, seconds))


def _told(kept: KeptProfile) -> KeptProfile:
    profile = kept.profile
    _log.info(
        "machine measured" if kept.took_s else "machine known from an earlier start",
        seconds=round(kept.took_s, 2),
        saturating_tokens=profile.saturating_tokens,
        tokens_per_s=round(profile.tokens_per_s),
        message_us=round(profile.message_s * 1e6),
        interference=round(profile.interference, 3),
        file=str(kept.path or ""),
    )
    return kept


def _read(path: Path, key: Key) -> MachineProfile | None:
    """Return the file's profile if it is this key's; whatever else it is, it is measured anew."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError) as error:
        _log.info("profile unreadable, the machine is measured", file=str(path), error=str(error))
        return None
    other = sorted(
        name for name in {*key, *file.machine} if key.get(name) != file.machine.get(name)
    )
    if other:
        _log.info("profile of something else, the machine is measured", file=str(path), other=other)
        return None
    return file.profile


def _write(path: Path, key: Key, profile: MachineProfile) -> bool:
    body = orjson.dumps({"machine": key, "profile": profile}, option=orjson.OPT_INDENT_2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, body + b"\n")
    except OSError as error:
        _log.warning(
            "profile not kept, the next start measures again; --profile-file names another place",
            file=str(path),
            error=error.strerror,
        )
        return False
    return True


@contextlib.asynccontextmanager
async def _locked(folder: Path) -> AsyncGenerator[None]:
    """Hold this folder's lock; where there can be none, hold nothing. The kernel frees it if its
    holder dies."""
    # On a thread: another worker may hold it for as long as it measures.
    lock = await asyncio.to_thread(_lock, folder)
    with lock or contextlib.nullcontext():
        yield


def _lock(folder: Path) -> IO[str] | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:
        return None
    return lock
