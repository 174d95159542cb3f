"""Makes what a release consists of: wheel, sdist, a wheel with the CPU kernels compiled, bills of
materials, checksums; the same bytes again from the same commit (and compiler).

    python tools/release.py [--out dist] [--commit HEAD]

Built from the commit alone, so nothing untracked gets in; times are the commit's, modes and owners
fixed. Then the wheel is installed into an empty environment, first as a gateway's, then with torch
(TORCH names the build, as in the Makefile) as a worker's; each gets a bill of what is in it
(CycloneDX, by cyclonedx-bom), and the latter answers a prompt through three processes.

The wheel with kernels is for x86-64 alone and made there; its tag says which glibc it needs. The
plain one installs everywhere, and compiles what it needs where there is a compiler.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BILL_MAKER = "cyclonedx-bom==7.5.0"
GATEWAY, WORKER = "otel", "worker,otel"
"""Extras, as the Dockerfile installs them."""

_BUILD = "import sys, setuptools.build_meta as it; print(it.{0}(sys.argv[1], {1}))"

SYSTEM_LIBRARIES = frozenset({
    "libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1", "ld-linux-x86-64.so.2",
})  # fmt: skip
"""What a manylinux system has, and our kernels may need of it (PEP 600)."""


def main() -> int:
    """Make all of it; the exit code is 1 if a step fails, and what it said is shown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="a new or empty folder")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--build-only", action="store_true", help="no environment, no bills")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        parser.error(f"{out} is not empty")
    try:
        made = build(out, arguments.commit)
        if not arguments.build_only:
            made += install_and_bill(made[0], out)
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))} failed:\n{error.output}", file=sys.stderr)
        return 1
    except ValueError as error:  # kernels that would run nowhere else
        print(error, file=sys.stderr)
        return 1
    sums = "".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in made)
    (out / "SHA256SUMS").write_text(sums)
    print(sums, end="")
    return 0


def build(out: Path, commit: str) -> list[Path]:
    """Write wheel and sdist of a commit into ``out``, and, on x86-64, the wheel with kernels.

    Raises CalledProcessError: no such commit, setuptools refuses, or there is no C++ compiler.
    ValueError: see ``platform_tag``.
    """
    made_at = _run(["git", "show", "--no-patch", "--format=%ct", f"{commit}^{{commit}}"]).strip()
    archive = subprocess.run(
        ["git", "-c", "tar.umask=0022", "archive", commit],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        env = {"SOURCE_DATE_EPOCH": made_at, "PYTHONDONTWRITEBYTECODE": "1"}

        def made(hook: str, settings: object = None) -> Path:
            command = [sys.executable, "-c", _BUILD.format(hook, settings), out]
            return out / _run(command, cwd=folder, env=env).splitlines()[-1]

        wheel, sdist = made("build_wheel"), made("build_sdist")
        _settle(sdist, int(made_at))
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            print("no wheel with kernels: they are for Linux on x86-64", file=sys.stderr)
            return [wheel, sdist]
        compiling = [sys.executable, "-m", "shared.engine.native.build", "--portable"]
        kernels = map(Path, _run(compiling, cwd=folder, env=env).splitlines())
        option = f"--plat-name={platform_tag(kernels)}"
        return [wheel, sdist, made("build_wheel", {"--build-option": [option]})]


def platform_tag(libraries: Iterable[Path]) -> str:
    """Return what of PEP 600 these may run on: what their tables of names say that they need.

    Raises ValueError: libraries that such a system need not have.
    """
    versions, needed = {(2, 17)}, set[str]()
    for library in libraries:
        data = library.read_bytes()
        for major, minor in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", data):
            versions.add((int(major), int(minor)))
        found = re.findall(rb"\0((?:lib[\w+-]+|ld-[\w-]+)\.so(?:\.\d+)*)(?=\0)", data)
        needed |= {name.decode() for name in found}
    if others := needed - SYSTEM_LIBRARIES:
        raise ValueError(f"the kernels need {', '.join(sorted(others))}")
    major, minor = max(versions)
    return f"manylinux_{major}_{minor}_x86_64"


def _settle(sdist: Path, made_at: int) -> None:
    """Write an archive anew with one time, one owner, sorted names: setuptools keeps the disk's."""
    with tarfile.open(sdist) as before:
        members = sorted(before.getmembers(), key=lambda one: one.name)
        contents = [before.extractfile(one) if one.isfile() else None for one in members]
        plain = io.BytesIO()
        with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as after:
            for one, content in zip(members, contents, strict=True):
                one.mtime, one.pax_headers = made_at, {}
                one.uid = one.gid = 0
                one.uname = one.gname = ""
                one.mode = 0o755 if one.isdir() or one.mode & 0o100 else 0o644
                after.addfile(one, content)
    with sdist.open("wb") as file, gzip.GzipFile("", "wb", 9, file, made_at) as packed:
        packed.write(plain.getvalue())


def install_and_bill(wheel: Path, out: Path) -> list[Path]:
    """Install the wheel where nothing is, write a bill of what came along, and have it answer.

    Raises CalledProcessError: pip, the bill's maker or the mesh failed.
    """
    torch = os.environ.get("TORCH") or f"torch=={importlib.metadata.version('torch')}"
    bills: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        tools, empty = Path(folder, "tools"), Path(folder, "empty")
        for environment in (tools, empty):
            _run([sys.executable, "-m", "venv", "--without-pip", environment])
        _install(tools, BILL_MAKER)
        for name, extras, first in (("gateway", GATEWAY, ()), ("worker", WORKER, (torch,))):
            for one in first:
                _install(empty, one)
            _install(empty, f"{wheel}[{extras}]")
            bill = out / f"{wheel.name.removesuffix('-py3-none-any.whl')}-{name}.cdx.json"
            _run(
                [
                    *(tools / "bin/cyclonedx-py", "environment", "--output-reproducible"),
                    *("--pyproject", ROOT / "pyproject.toml", "--mc-type", "application"),
                    *("--output-file", bill, empty / "bin/python"),
                ]
            )
            bills.append(bill)
        said = _run([empty / "bin/pdmesh", "demo"], cwd=folder)
        print(said, file=sys.stderr)
    return bills


def _install(environment: Path, what: str) -> None:
    python = environment / "bin/python"
    _run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", what])


def _run(
    command: Sequence[str | Path], *, cwd: str | Path = ROOT, env: Mapping[str, str] | None = None
) -> str:
    """Return what a command prints. Raises CalledProcessError, with all it said."""
    done = subprocess.run(
        command,
        cwd=cwd,
        # Whoever has this tree on their path has pdmesh, and pip would install nothing.
        env={**os.environ, "PYTHONPATH": "", **(env or {})},
        text=True,
        check=False,
        capture_output=True,
        umask=0o022,  # files' modes are in a wheel
    )
    if done.returncode:
        raise subprocess.CalledProcessError(
            done.returncode, list(map(str, command)), done.stdout + done.stderr
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
