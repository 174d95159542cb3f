"""pdmesh on AArch64 without such a machine: a Debian of that kind, run by QEMU on an x86-64 one.

    python -m tools.aarch64 FOLDER                      # the demo: three real processes, one answer
    python -m tools.aarch64 FOLDER pytest -p no:cacheprovider tests/engine/test_demo_model.py

Needs root, Debian's debootstrap and qemu-user-static, and a network for packages. The system and
the wheels (2 GB) stay in FOLDER for the next time; the tree is the one that this file is in, read
through a mount. Everything takes some twenty times as long as on a real machine: what this shows is
that it runs and what it answers.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parents[1]
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
DEBIAN, PYTHON = "bookworm", "3.11"
SYSTEM = (f"python{PYTHON}", "libstdc++6", "libgomp1")
TORCH = os.environ.get("TORCH", "torch==2.10.0")
"""The newest whose published wheel for AArch64 is a CPU build; newer ones want CUDA's libraries."""
TORCH_NEEDS = ("sympy", "networkx", "filelock", "fsspec", "mpmath", "setuptools")
TESTS = ("hypothesis", "jsonschema", "pytest", "pytest-asyncio", "pytest-timeout", "transformers")
GLIBC = ("2_17", "2_24", "2_26", "2_28", "2_31", "2_34")
"""Of the wheels that run on this Debian: the C library they were made for."""


def make_system(root: Path) -> None:
    """Unpack Debian's packages into ``root``; none of them is configured, so nothing is emulated
    yet."""
    print("unpacking a Debian for AArch64", flush=True)
    wanted = "--include=" + ",".join(SYSTEM)
    options = ("--foreign", "--arch=arm64", "--variant=minbase", wanted)
    subprocess.run(["debootstrap", *options, DEBIAN, root, MIRROR], check=True)
    for package in sorted((root / "var/cache/apt/archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True)


def install_packages(root: Path) -> None:
    """Unpack the wheels that a gateway, a worker and the tests need into ``root/site``."""
    print("fetching wheels for AArch64", flush=True)
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["worker"], *TESTS]
    wanted = [line for line in wanted if not line.startswith("torch")]
    platforms = [f"--platform=manylinux_{version}_aarch64" for version in GLIBC]
    where = ("--dest", root / "wheels", f"--python-version={PYTHON}", *platforms)
    download = (sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", *where)
    subprocess.run([*download, *wanted], check=True)
    # By itself pip would take CUDA's libraries along.
    subprocess.run([*download, "--no-deps", TORCH, *TORCH_NEEDS], check=True)
    for wheel in (root / "wheels").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(root / "site")


def run(root: Path, module: Sequence[str]) -> int:
    """Run a module of the tree inside; the mounts end with it. Return its exit code."""
    (root / "pdmesh").mkdir(exist_ok=True)
    inside = (
        "cd /pdmesh; export PYTHONPATH=/site:/pdmesh PYTHONDONTWRITEBYTECODE=1 HOME=/root; "
        f"exec python{PYTHON} -m {shlex.join(module)}"
    )
    mounts = [f"mount --rbind /{name} {root}/{name}" for name in ("proc", "sys", "dev")]
    mounts.append(f"mount --bind -o ro {HERE} {root}/pdmesh")
    script = f"{' && '.join(mounts)} && exec chroot {root} sh -c {shlex.quote(inside)}"
    return subprocess.run(["unshare", "--mount", "sh", "-c", script], check=False).returncode


def main(root: Path, module: Sequence[str]) -> int:
    """Make what is not there yet, then run; return the exit code."""
    root = root.resolve()
    if not (root / f"usr/bin/python{PYTHON}").exists():
        make_system(root)
    if not (root / "site/torch").exists():
        install_packages(root)
    if subprocess.run(["chroot", root, "true"], capture_output=True, check=False).returncode:
        print("this kernel does not run programs for AArch64: install qemu-user-static", flush=True)
        return 2
    return run(root, module)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or ["services.cli", "demo"]))
