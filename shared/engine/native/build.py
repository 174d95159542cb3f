"""Compiling ``kernels.cpp``, once per machine, and finding what was compiled.

    python -m shared.engine.native.build             # all, into this package: images, installs
    python -m shared.engine.native.build --portable  # the same for a wheel (tools/release.py)
    python -m shared.engine.native.build --cache     # all, where the first use puts what it needs

There is a build for each kind of numbers and each of ``INSTRUCTIONS``. A file's name holds a digest
of source and flags, so an old build is never used for new code, and its end one of what is before,
so a damaged one is not used either: to load half a library ends the process. Nothing is tuned to
the machine it was made on (how it is linked is no part of its name), and all but ``OWN_BITS``
compute the same bits. Raises ``Unavailable`` with the reason where the kernels cannot be had; the
engine then computes the same in torch.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from shared.cache_folder import cache_folder

HERE = Path(__file__).parent
SOURCES = (HERE / "kernels.cpp", HERE / "lanes.h", HERE / "team.h", HERE / "amx.h")

_AVX512 = ("fma", "avx512f", "avx512bw", "avx512vl", "avx512dq")

INSTRUCTIONS = {
    "amx": (*_AVX512, "avx512_bf16", "amx_tile", "amx_bf16"),
    "avx512-bf16": (*_AVX512, "avx512_bf16"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma"),
}
"""What a CPU must have (as Linux calls it), the quickest first."""

_BFLOAT16_ALONE = ("amx", "avx512-bf16")

OWN_BITS = ("amx",)
"""Those that add in an order of their own. All others compute the same bits."""

NATIVE = ("native", "amx", "avx512-bf16", "avx512", "avx2")
"""Settings of ``--kernels`` that mean these kernels: by the quickest instructions here, or by what
is named."""

NUMBERS = {"bfloat16": (), "float32": ("-DPD_FLOAT32",)}
"""What is computed, and how the compiler is told."""

# Without contraction: products and sums are fused where the source says fma and nowhere else,
# whatever the compiler likes, for bits must be the same everywhere.
_COMPILE = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-fvisibility=hidden",
)  # fmt: skip

_PORTABLE = ("-static-libstdc++", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-s")
"""For other systems than the compiler's: what is needed of the C++ library is inside, unseen by the
process's others, and nothing else of it, which would want a newer glibc."""

TIMEOUT_S = 60.0
"""Of a compiler, which takes 2 s where it works."""

_DIGEST_BYTES = 32
_NAME_DIGITS = 16


class Unavailable(Exception):
    """The kernels cannot be had here; the text says why and what would help."""


class NotMade(Unavailable):
    """There is no compiler, it does not make these, or Linux does not grant what they compute with;
    those of lesser instructions may be had."""


class NoPlace(Unavailable):
    """A folder cannot be written, or nothing in it can be run."""


def best_instructions(numbers: str) -> str:
    """Return the quickest that this CPU has and that help with such numbers; the least of all where
    it has none."""
    return next(iter(usable_instructions(numbers)), "avx2")


def usable_instructions(numbers: str) -> list[str]:
    """Return what this CPU has of what helps with such numbers, the quickest first."""
    return [name for name in _helpful(numbers) if not unsupported(name)]


def _helpful(numbers: str) -> list[str]:
    """Return all that help with such numbers."""
    return [it for it in INSTRUCTIONS if numbers == "bfloat16" or it not in _BFLOAT16_ALONE]


def find_compiled(numbers: str, instructions: str) -> Iterator[tuple[Path, str]]:
    """Where compiled kernels lie, what was brought with us first, each with why it is not to be
    loaded; '' = it may be."""
    name = _name(numbers, instructions)
    for folder in (HERE, cache_folder("native")):
        if (path := folder / name).exists():
            yield path, "" if _is_whole(path) else "it is damaged"
        elif folder == HERE:
            for other in folder.glob(f"kernels-{numbers}-{instructions}-{'?' * _NAME_DIGITS}.so"):
                yield other, "it was made of other sources"


def unsupported(instructions: str) -> str:
    """Why this machine cannot run kernels of such instructions; '' if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"they are for Linux on x86-64, not {sys.platform} on {platform.machine()}"
    flags = cpu_flags()
    if missing := [flag for flag in INSTRUCTIONS[instructions] if flag not in flags]:
        return f"this CPU lacks {', '.join(missing)}"
    return ""


def compile_into(
    folder: Path,
    numbers: str,
    instructions: str,
    *,
    anew: bool = False,
    portable: bool = False,
) -> Path:
    """Compile into ``folder``; processes that ask at the same time wait for the first, and believe
    it if it had to give up. anew: what is there cannot be used on this machine. portable: for other
    systems, too.

    Raises Unavailable: the compiler hangs. NotMade: there is none, or it makes no such kernels.
    NoPlace: the folder cannot be written, or is mounted noexec.
    """
    compiler = _compiler()
    target = folder / _name(numbers, instructions)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise NoPlace(f"{folder} is mounted noexec (set XDG_CACHE_HOME to another folder)")
        with (folder / ".lock").open("a+") as lock:
            has_waited = _lock(lock.fileno())
            if _is_whole(target) and (has_waited or not anew):
                return target
            lock.seek(0)
            if (reason := lock.read()) and has_waited:
                raise Unavailable(reason)
            lock.truncate(0)
            try:
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    made = Path(scratch) / target.name
                    options = _options(numbers, instructions)
                    _compile(compiler, [*options, *_PORTABLE] if portable else options, made)
                    code = made.read_bytes()
                    made.write_bytes(code + _digest(code))
                    made.replace(target)
            except NotMade:
                raise
            except Unavailable as error:
                lock.write(str(error))
                raise
    except OSError as error:
        raise NoPlace(f"{folder} cannot be written: {error.strerror}") from error
    return target


def _lock(descriptor: int) -> bool:
    """Take a file's lock; return whether another had it."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return True


def _compile(compiler: Sequence[str], options: Sequence[str], target: Path) -> None:
    name = shlex.join(compiler)
    code, said = _run([*compiler, *options, str(SOURCES[0]), "-o", str(target)])
    if code:
        if any("No space left" in line for line in said):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        first = next((line for line in said if "error" in line), said[0])
        raise NotMade(f"{name} failed (GCC 11 or newer is needed): {first}")
    # In a process of its own, which what is no library may end.
    ask = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).pd_linear"
    code, said = _run([sys.executable, "-I", "-c", ask, str(target)])
    if code:
        raise NotMade(f"{name} made no library that can be loaded: {said[-1]}")


def _run(command: Sequence[str]) -> tuple[int, list[str]]:
    """Run a command to its end; return its code and the lines that it said, one at least."""
    pipe, joined = subprocess.PIPE, subprocess.STDOUT
    try:
        # A group of its own, for a compiler is several processes.
        process = subprocess.Popen(command, stdout=pipe, stderr=joined, process_group=0)
    except OSError as error:
        raise NotMade(f"{command[0]} cannot be run: {error.strerror}") from error
    with process:
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise Unavailable(f"{command[0]} took more than {TIMEOUT_S:g} s") from None
            raise
    return process.returncode, said.decode(errors="replace").strip().splitlines() or ["nothing"]


def _is_whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return len(data) > _DIGEST_BYTES and _digest(data[:-_DIGEST_BYTES]) == data[-_DIGEST_BYTES:]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _compiler() -> list[str]:
    """Return the command that CXX holds, or one that is there."""
    asked = os.environ.get("CXX", "")
    for name in [asked] if asked.strip() else ["g++", "c++", "clang++"]:
        if found := shutil.which(name):
            return [found]
    with suppress(ValueError):  # with words of its own, as "ccache g++"
        program, *words = shlex.split(asked)
        if found := shutil.which(program):
            return [found, *words]
    raise NotMade("there is no C++ compiler (install g++, set CXX, or take the wheel with kernels)")


def _options(numbers: str, instructions: str) -> list[str]:
    names = {"avx512_bf16": "avx512bf16", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16"}
    needed = (f"-m{names.get(flag, flag)}" for flag in INSTRUCTIONS[instructions])
    return [*_COMPILE, *needed, *NUMBERS[numbers]]


def _name(numbers: str, instructions: str) -> str:
    digest = hashlib.sha256(" ".join(_options(numbers, instructions)).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return f"kernels-{numbers}-{instructions}-{digest.hexdigest()[:_NAME_DIGITS]}.so"


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return what this CPU has, as Linux calls it; nothing where it does not say."""
    try:
        with cpuinfo.open() as file:
            for line in file:
                if line.startswith("flags"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def main() -> None:
    """Compile all for an image or an install: no CPU of their kind is needed for that."""
    parser = argparse.ArgumentParser(description="Compile pdmesh's native CPU kernels.")
    parser.add_argument("--cache", action="store_true", help=f"into {cache_folder('native')}")
    parser.add_argument("--portable", action="store_true", help="for other systems, too")
    asked = parser.parse_args()
    folder = cache_folder("native") if asked.cache else HERE
    try:
        for numbers in NUMBERS:
            for instructions in _helpful(numbers):
                print(compile_into(folder, numbers, instructions, portable=asked.portable))
    except Unavailable as error:
        sys.exit(f"native kernels: {error}")


if __name__ == "__main__":
    main()
