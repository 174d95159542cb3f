"""What a release is made of: the same bytes again, nothing but the project, and it runs, with the
kernels that it brings, where there is no compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from shared.engine.native.build import INSTRUCTIONS, NUMBERS, NotMade, _compiler, unsupported
from tests.support.house import ROOT
from tools.release import build, platform_tag

DEMO_CODE = "1986"
"""What `pdmesh demo` asks for."""

WITHOUT_A_LICENCE = {"protobuf"}
"""It says BSD in a field of older metadata alone, which the bill's maker leaves out."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Wheel and sdist of HEAD, and the wheel with kernels where they are made."""
    if not unsupported("avx2"):
        try:
            _compiler()
        except NotMade as error:
            pytest.skip(str(error))
    return build(tmp_path_factory.mktemp("release"), "HEAD")


@pytest.fixture(scope="module")
def wheel_with_kernels(built: list[Path]) -> Path:
    """The wheel for x86-64."""
    return built[2] if len(built) > 2 else pytest.skip("made on x86-64 alone")


@pytest.mark.slow
def test_the_same_commit_gives_the_same_bytes(built: list[Path], tmp_path: Path) -> None:
    """At another time, in another folder, with another mask of modes."""
    before = os.umask(0o077)
    try:
        again = build(tmp_path, "HEAD")
    finally:
        os.umask(before)
    for first, second in zip(built, again, strict=True):
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes(), first.name


@pytest.mark.slow
def test_a_wheel_has_the_project_its_licence_and_nothing_else(built: list[Path]) -> None:
    """No compiled file, which would fit one machine alone, and no test."""
    wheel, sdist = built[:2]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        head = HeaderParser().parsestr(archive.read(metadata).decode())
    tops = {name.split("/")[0] for name in names}
    assert {"services", "shared"} < tops
    assert len(tops) == 3
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    for needed in (
        "shared/engine/native/kernels.cpp",
        "shared/models/demo/model.safetensors",
        "services/gateway/http/page/index.html",
        "shared/wire/py.typed",
    ):
        assert needed in names
    assert [name for name in names if name.endswith("licenses/LICENSE")]
    assert head["License-Expression"] == "Apache-2.0"
    assert str(head.get_payload()).startswith("# pdmesh")
    with tarfile.open(sdist) as archive:
        assert {(one.uid, one.uname, one.mtime) for one in archive} == {
            (0, "", archive.getmembers()[0].mtime)
        }


@pytest.mark.slow
def test_a_wheel_with_kernels_is_the_other_and_them(
    built: list[Path], wheel_with_kernels: Path
) -> None:
    """Nothing else differs, and installers are told for which systems it is."""

    def files_of(wheel: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(wheel) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    plain, other = files_of(built[0]), files_of(wheel_with_kernels)
    kernels = {name for name in other if name.endswith(".so")}
    ways = [(numbers, by) for numbers in NUMBERS for by in INSTRUCTIONS]
    ways = [way for way in ways if way[0] == "bfloat16" or way[1] in ("avx512", "avx2")]
    assert {name.rsplit("-", 1)[0] for name in kernels} == {
        f"shared/engine/native/kernels-{numbers}-{by}" for numbers, by in ways
    }
    assert other.keys() - kernels == plain.keys()
    unequal = {name for name in plain if plain[name] != other[name]}
    assert {name.rsplit("/")[-1] for name in unequal} == {"RECORD", "WHEEL"}
    tag = wheel_with_kernels.stem.split("-", 2)[2]
    (said,) = (text for name, text in other.items() if name.endswith("/WHEEL"))
    assert f"Tag: {tag}\n" in said.decode()
    assert tag.startswith("py3-none-manylinux_2_")


ANSWERS = """
import hashlib, json, sys
import torch
from shared.engine.native import build, library
from shared.engine.torch_engine import TorchEngine
from shared.step import StepRow

found = {}
for numbers in build.NUMBERS:
    for name in build.usable_instructions(numbers):
        origin = library.load(getattr(torch, numbers), name).origin
        demo = build.HERE.parents[1] / "models" / "demo"
        engine = TorchEngine.load(demo, dtype=numbers, num_blocks=8, kernels=name)
        with torch.inference_mode():
            passed = engine.forward.run([StepRow(list(range(100)), 0, list(range(8)))], [], None)
            logits = engine.forward.logits(passed.hidden()).numpy().tobytes()
        found[f"{numbers} {name}"] = origin, hashlib.sha256(logits).hexdigest()
json.dump(found, sys.stdout)
"""
"""For each kind of kernels that this CPU has: where they are from, and a digest of what they make
of the demo model."""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(600)
def test_a_wheel_with_kernels_needs_no_compiler(wheel_with_kernels: Path, tmp_path: Path) -> None:
    """Installed where there is none, each kind of kernels that this CPU has is taken from the
    wheel; its answers are to the bit those of kernels compiled there."""
    if reason := unsupported("avx2"):
        pytest.skip(reason)
    site = tmp_path / "site"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-index", "--target", site, wheel_with_kernels),
        ],
        check=True,
    )

    def answers(path: str) -> dict[str, tuple[str, str]]:
        env = {"PATH": path, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", ANSWERS], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
            check=True,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    brought = answers("/nonexistent")
    assert {origin for origin, _ in brought.values()} == {"brought with pdmesh"}
    assert not (tmp_path / "cache").exists()
    for path in site.glob("shared/engine/native/*.so"):
        path.unlink()
    compiled = answers(os.environ["PATH"])
    assert {origin for origin, _ in compiled.values()} == {"compiled now"}
    assert {way: digest for way, (_, digest) in brought.items()} == {
        way: digest for way, (_, digest) in compiled.items()
    }


@pytest.mark.parametrize(
    ("names", "tag"),
    [
        ((b"libc.so.6", b"GLIBC_2.2.5"), "manylinux_2_17_x86_64"),
        ((b"libgcc_s.so.1", b"GLIBC_2.9", b"GLIBC_2.34"), "manylinux_2_34_x86_64"),
        ((b"libc.so.6", b"libstdc++.so.6", b"GLIBC_2.34"), ""),
        ((b"libgomp.so.1", b"GLIBC_2.34"), ""),
    ],
)
def test_for_which_systems_kernels_are(names: tuple[bytes, ...], tag: str, tmp_path: Path) -> None:
    """Those with the newest glibc that they name; a library that such a system need not have is
    refused."""
    library = tmp_path / "kernels.so"
    library.write_bytes(b"\x7fELF\0" + b"\0".join(names) + b"\0")
    if tag:
        assert platform_tag([library]) == tag
    else:
        with pytest.raises(ValueError, match=names[-2].decode().replace("+", r"\+")):
            platform_tag([library])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_release_installs_where_nothing_is_and_answers(tmp_path: Path) -> None:
    """`pip install pdmesh[worker]` from the wheel; bills say what came along, and its licences."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools/release.py", "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert DEMO_CODE in done.stderr
    bills = {path.name.split("-")[-1].split(".")[0]: path for path in tmp_path.glob("*.cdx.json")}
    found: dict[str, dict[str, str]] = {}
    for name, path in bills.items():
        bill = json.loads(path.read_text())
        assert bill["bomFormat"] == "CycloneDX"
        assert bill["metadata"]["component"]["name"] == "pdmesh"
        found[name] = {one["name"]: one["version"] for one in bill["components"]}
        missing = [one["name"] for one in bill["components"] if not one.get("licenses")]
        assert {*missing} <= WITHOUT_A_LICENCE
    assert "grpclib" in found["gateway"]
    assert not {"torch", "ucxx-cu13"} & found["gateway"].keys()
    assert {"torch", "ucxx-cu13"} <= found["worker"].keys()
    named = {line.split()[1] for line in done.stdout.splitlines()}
    assert named == {path.name for path in tmp_path.iterdir()} - {"SHA256SUMS"}
