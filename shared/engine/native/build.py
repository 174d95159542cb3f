"""Compiling ``kernels.cpp``, once per machine, and finding what was compiled.

    python -m shared.engine.native.build            # into this package: for images and installs
    python -m shared.engine.native.build --cache    # where the first use puts it

The file's name holds a digest of source and flags, so an old build is never used for new code. One
build runs on every CPU with the needed instructions: nothing is tuned to the machine it was made
on. Raises ``Unavailable`` with the reason where the kernels cannot be had; the engine then computes
the same in torch.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shared.cache_folder import cache_folder

HERE = Path(__file__).parent
SOURCE = HERE / "kernels.cpp"

NEEDED_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")

_COMPILE = (
    "-std=c++17", "-O3", "-fopenmp", "-shared", "-fPIC", "-fvisibility=hidden",
    "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma",
)  # fmt: skip

_TIMEOUT_S = 300.0


class Unavailable(Exception):
    """The kernels cannot be had here; the text says why and what would help."""


def library() -> Path:
    """Return the compiled kernels, compiling them if need be (seconds, under a lock).

    Raises Unavailable: another CPU or system, no compiler, or nowhere to write.
    """
    if reason := unsupported():
        raise Unavailable(reason)
    return find_compiled() or compile_into(cache_folder("native"))


def find_compiled() -> Path | None:
    """Return the compiled kernels if they are there."""
    name = f"kernels-{_digest()}.so"
    found = (folder / name for folder in (HERE, cache_folder("native")))
    return next((path for path in found if path.is_file()), None)


def unsupported() -> str:
    """Why this machine cannot run the kernels; '' if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"they are for Linux on x86-64, not {sys.platform} on {platform.machine()}"
    flags = _cpu_flags()
    if missing := [flag for flag in NEEDED_FLAGS if flag not in flags]:
        return f"this CPU lacks {', '.join(missing)}"
    return ""


def compile_into(folder: Path) -> Path:
    """Compile into ``folder``; processes that ask at the same time wait for the first.

    Raises Unavailable: no compiler, or the folder cannot be written.
    """
    compiler = _compiler()
    target = folder / f"kernels-{_digest()}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_file():
                return target
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch) / target.name
                _compile(compiler, made)
                made.replace(target)
    except OSError as error:
        raise Unavailable(f"{folder} cannot be written: {error.strerror}") from error
    return target


def _compile(compiler: str, target: Path) -> None:
    command = [compiler, *_COMPILE, str(SOURCE), "-o", str(target)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{compiler} took more than {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[0]
        raise Unavailable(f"{compiler} failed (GCC 11 or newer is needed): {said}")


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["g++", "c++", "clang++"]:
        if found := shutil.which(name):
            return found
    raise Unavailable("there is no C++ compiler (install g++, or set CXX)")


def _digest() -> str:
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(_COMPILE).encode()).hexdigest()[:16]


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
    """Compile for an image or an install: no CPU of this kind is needed for that."""
    parser = argparse.ArgumentParser(description="Compile pdmesh's native CPU kernels.")
    parser.add_argument("--cache", action="store_true", help=f"into {cache_folder('native')}")
    asked = parser.parse_args()
    try:
        print(compile_into(cache_folder("native") if asked.cache else HERE))
    except Unavailable as error:
        sys.exit(f"native kernels: {error}")


if __name__ == "__main__":
    main()
