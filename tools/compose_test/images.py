"""The three images, built without a network: a base image, a folder of wheels, the Dockerfile."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import sys
import tomllib
from pathlib import Path

from tools.compose_test.engine import install
from tools.compose_test.steps import CannotRun, Steps, output_of, say

ROOT = Path(__file__).parents[2]
TARGETS = ("gateway", "prefill", "decode")
PREFIX = "pdmesh-compose-test"
"""PDMESH_IMAGE of the tests: images that a user has built stay as they are."""

PUBLIC_BASE = "python:3.12-slim"
OWN_BASE = f"{PREFIX}-base"
SUITE = "bookworm"
PULL_WITHIN_S = 300.0
COMPILE_WITHIN_S = 120.0


def build_images(folder: Path, steps: Steps) -> None:
    """Build all targets from the working tree. Raises CannotRun."""
    base = _base_image(folder, steps)
    version = output_of(
        *("docker", "run", "--rm", "--network", "none", "--entrypoint", "python3", base),
        *("-c", "import sys; print('%d.%d' % sys.version_info[:2])"),
    )
    if version is None:
        raise CannotRun(f"the base image {base} does not run python3: set PYTHON_IMAGE to another")
    torch = os.environ.get("TORCH") or f"torch=={importlib.metadata.version('torch')}"
    extra = os.environ.get("EXTRA") or "worker"
    wheels = _wheels(folder, version, torch, extra, steps)
    context = _context(folder, wheels)
    build = ["docker", "build", "--network", "none"]
    for argument in (f"PYTHON_IMAGE={base}", f"TORCH={torch}", f"EXTRA={extra}"):
        build += ["--build-arg", argument]
    for target in TARGETS:
        name = f"{PREFIX}-{target}"
        before = output_of("docker", "images", "--quiet", name)
        steps.run(
            f"building {target}, without a network",
            [*build, "--target", target, "--tag", name, context],
        )
        if before and before != output_of("docker", "images", "--quiet", name):
            output_of("docker", "rmi", before)  # or every run leaves gigabytes behind


def _base_image(folder: Path, steps: Steps) -> str:
    wanted = os.environ.get("PYTHON_IMAGE")
    for image in (wanted,) if wanted else (OWN_BASE, PUBLIC_BASE):
        if output_of("docker", "image", "inspect", image) is not None:
            return image
    public = wanted or PUBLIC_BASE
    say(f"pulling {public}")
    if output_of("docker", "pull", public, timeout_s=PULL_WITHIN_S) is not None:
        return public
    if wanted:
        raise CannotRun(f"PYTHON_IMAGE={wanted} is neither here nor to be pulled")
    _make_base(folder, steps)
    return OWN_BASE


def _make_base(folder: Path, steps: Steps) -> None:
    """Where no registry answers: Debian's own Python on a minimal Debian."""
    if os.geteuid() != 0:
        raise CannotRun(
            f"{PUBLIC_BASE} cannot be pulled, and only root can make a base image with "
            "debootstrap: set PYTHON_IMAGE to an image that is here, or run this as root"
        )
    if not shutil.which("debootstrap"):
        install(steps, "debootstrap", "debian-archive-keyring")
    root = folder / "base"
    shutil.rmtree(root, ignore_errors=True)
    mirror = os.environ.get("DEBIAN_MIRROR") or "http://deb.debian.org/debian"
    packages = "python3,python3-venv,ca-certificates"
    steps.run(
        f"no registry answers: making a base image with debootstrap ({SUITE}, about a minute)",
        ["debootstrap", "--variant=minbase", f"--include={packages}", SUITE, root, mirror],
    )
    for clutter in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man"):
        shutil.rmtree(root / clutter, ignore_errors=True)
    steps.run(
        "importing it",
        ["sh", "-c", 'tar -C "$0" -c . | docker import - "$1"', root, OWN_BASE],
    )
    shutil.rmtree(root)


def _wheels(folder: Path, version: str, torch: str, extra: str, steps: Steps) -> Path:
    """Gather the wheels of all dependencies, once for each set of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        torch,
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"][extra],
        *project["project"]["optional-dependencies"]["otel"],
        *project["build-system"]["requires"],
    ]
    key = hashlib.sha256("\n".join([version, *wanted]).encode()).hexdigest()[:12]
    wheels = folder / f"wheels-{key}"
    if wheels.exists():
        return wheels
    for stale in folder.glob("wheels-*"):
        shutil.rmtree(stale)
    begun = folder / "wheels-begun"
    steps.run(
        f"gathering wheels for Python {version} (some 300 MB with a CPU build of torch)",
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"),
            *("--only-binary", ":all:", "--python-version", version, "--dest", begun, *wanted),
        ],
    )
    begun.rename(wheels)
    return wheels


def _context(folder: Path, wheels: Path) -> Path:
    """Lay out what the Dockerfile copies, as it is now: others may edit the tree meanwhile."""
    context = folder / "context"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir()
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, context)
    for name in ("services", "shared"):
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(wheels, context / "wheels", copy_function=os.link)
    # The build has no network to fetch a compiler over. Without one here either, torch computes.
    build = str(context / "shared" / "engine" / "native" / "build.py")
    output_of(sys.executable, build, timeout_s=COMPILE_WITHIN_S)
    return context
