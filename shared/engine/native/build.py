"""Compiling ``kernels.cpp``, once per machine, and finding what was compiled.

    python -m shared.engine.native.build            # all, into this package: images, installs
    python -m shared.engine.native.build --cache    # all, where the first use puts what it needs

There is a build for each kind of numbers and each of ``INSTRUCTIONS``. A file's name holds a digest
of source and flags, so an old build is never used for new code. Nothing is tuned to the machine it
was made on, and all of them compute the same bits. Raises ``Unavailable`` with the
reason where the kernels cannot be had; the engine then computes the same in torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shared.cache_folder import cache_folder

HERE = Path(__file__).parent
SOURCES = (HERE / "kernels.cpp", HERE / "lanes.h")

INSTRUCTIONS = {
    "avx512-bf16": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"),
    "avx2": ("avx2", "fma"),
}
"""What a CPU must have (as Linux calls it), the quickest first."""

NATIVE = ("native", "avx512", "avx2")
"""Settings of ``--kernels`` that mean these kernels: by the quickest instructions here, or by what
is named."""

NUMBERS = {"bfloat16": (), "float32": ("-DPD_FLOAT32",)}
"""What is computed, and how the compiler is told."""

_COMPILE = (
    "-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden",
)  # fmt: skip

_TIMEOUT_S = 300.0


class Unavailable(Exception):
    """The kernels cannot be had here; the text says why and what would help."""


def library(numbers: str, instructions: str) -> Path:
    """Return the kernels for numbers of a kind by such instructions, compiling them if need be
    (seconds, under a lock).

    Raises Unavailable: another CPU or system, no compiler, or nowhere to write.
    """
    if reason := unsupported(instructions):
        raise Unavailable(reason)
    return find_compiled(numbers, instructions) or compile_into(
        cache_folder("native"), numbers, instructions
    )


def best_instructions(numbers: str) -> str:
    """Return the quickest that this CPU has and that help with such numbers; the least of all where
    it has none."""
    wanted = list(INSTRUCTIONS)[numbers == "float32" :]
    return next((name for name in wanted if not unsupported(name)), wanted[-1])


class AvailableKernels(NamedTuple):
    """How it stands with these kernels on this machine: what bfloat16 and float32 would be computed
    by, and why they would not be ('')."""

    instructions: Mapping[str, str]
    reason: str


def available() -> AvailableKernels:
    """Return what the next worker here would find; compiles nothing."""
    chosen = {numbers: best_instructions(numbers) for numbers in NUMBERS}
    reason = unsupported(chosen["float32"])
    if not reason and not all(itertools.starmap(find_compiled, chosen.items())):
        try:
            _compiler()
        except Unavailable as error:
            reason = str(error)
    return AvailableKernels(chosen, reason)


def find_compiled(numbers: str, instructions: str) -> Path | None:
    """Return the compiled kernels if they are there."""
    name = _name(numbers, instructions)
    found = (folder / name for folder in (HERE, cache_folder("native")))
    return next((path for path in found if path.is_file()), None)


def unsupported(instructions: str) -> str:
    """Why this machine cannot run kernels of such instructions; '' if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"they are for Linux on x86-64, not {sys.platform} on {platform.machine()}"
    flags = _cpu_flags()
    if missing := [flag for flag in INSTRUCTIONS[instructions] if flag not in flags]:
        return f"this CPU lacks {', '.join(missing)}"
    return ""


def compile_into(folder: Path, numbers: str, instructions: str) -> Path:
    """Compile into ``folder``; processes that ask at the same time wait for the first.

    Raises Unavailable: no compiler, or the folder cannot be written.
    """
    compiler = _compiler()
    target = folder / _name(numbers, instructions)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_file():
                return target
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / target.name
                _compile(compiler, _options(numbers, instructions), made)
                made.replace(target)
    except OSError as error:
        raise Unavailable(f"{folder} cannot be written: {error.strerror}") from error
    return target


def _compile(compiler: str, options: Sequence[str], target: Path) -> None:
    command = [compiler, *options, str(SOURCES[0]), "-o", str(target)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{compiler} took more than {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["nothing"]
        said = next((line for line in lines if "error" in line), lines[0])
        raise Unavailable(f"{compiler} failed (GCC 11 or newer is needed): {said}")


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "c++", "clang++"]:
        if found := shutil.which(name):
            return found
    raise Unavailable("there is no C++ compiler (install g++, or set CXX)")


def _options(numbers: str, instructions: str) -> list[str]:
    needed = (f"-m{flag.replace('_', '')}" for flag in INSTRUCTIONS[instructions])
    return [*_COMPILE, *needed, *NUMBERS[numbers]]


def _name(numbers: str, instructions: str) -> str:
    digest = hashlib.sha256(" ".join(_options(numbers, instructions)).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return f"kernels-{numbers}-{instructions}-{digest.hexdigest()[:16]}.so"


def _cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo") as file:
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
    asked = parser.parse_args()
    folder = cache_folder("native") if asked.cache else HERE
    try:
        for numbers in NUMBERS:
            for instructions in list(INSTRUCTIONS)[numbers == "float32" :]:
                print(compile_into(folder, numbers, instructions))
    except Unavailable as error:
        sys.exit(f"native kernels: {error}")


if __name__ == "__main__":
    main()
