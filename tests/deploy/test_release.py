"""What a release is made of: the same bytes again, nothing but the project, and it runs."""

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

from tests.support.house import ROOT
from tools.release import build

DEMO_CODE = "1986"
"""What `pdmesh demo` asks for."""

WITHOUT_A_LICENCE = {"protobuf"}
"""It says BSD in a field of older metadata alone, which the bill's maker leaves out."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Wheel and sdist of HEAD."""
    return build(tmp_path_factory.mktemp("release"), "HEAD")


@pytest.mark.slow
def test_the_same_commit_gives_the_same_bytes(built: tuple[Path, Path], tmp_path: Path) -> None:
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
def test_a_wheel_has_the_project_its_licence_and_nothing_else(built: tuple[Path, Path]) -> None:
    """No compiled file, which would fit one machine alone, and no test."""
    wheel, sdist = built
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
