"""The systemd units: systemd reads them without a word, and the services take what they set."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from services.cli.app import app
from shared.runtime.service import EXIT_BAD_CONFIG
from shared.settings import ROLES, read_config
from tests.support.house import ROOT

FOLDER = ROOT / "deploy/systemd"
UNITS = ("pdmesh-gateway.service", "pdmesh-prefill@0.service", "pdmesh-decode@3.service")
PROGRAM = "/opt/pdmesh/bin/pdmesh"
EXPOSURE = 25
"""Tenths: what `systemd-analyze security` calls OK ends at 40."""

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on the PATH"
)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The folder as systemd would have it, with a program that is there."""
    folder = tmp_path / "units"
    shutil.copytree(FOLDER, folder)
    for unit in folder.glob("*.service"):
        unit.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    return folder


def analyze(units: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze, which looks for units in that folder first."""
    return subprocess.run(
        ["systemd-analyze", *arguments],
        env={"SYSTEMD_UNIT_PATH": f"{units}:", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_reads_every_unit_without_a_word(units: Path, unit: str) -> None:
    """With what is common to all of them."""
    done = analyze(units, "verify", "--man=no", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_what_is_common_is_read_with_every_unit(units: Path) -> None:
    """Or the test above would see no mistake in it."""
    common = units / "pdmesh-.service.d/common.conf"
    common.write_text(common.read_text() + "Nonsense=1\n")
    for unit in UNITS:
        assert "Nonsense" in analyze(units, "verify", "--man=no", unit).stderr


@needs_systemd
@pytest.mark.parametrize("unit", UNITS)
def test_a_service_may_little(units: Path, unit: str) -> None:
    """As systemd itself counts it."""
    file = re.sub(r"@\d", "@", unit)
    done = analyze(
        units, "security", "--offline=true", f"--threshold={EXPOSURE}", str(units / file)
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("unit", UNITS)
def test_a_service_takes_what_its_unit_and_the_example_set(unit: str, tmp_path: Path) -> None:
    """And a drain is not cut off, nor a wrong configuration started again and again."""
    role = re.split(r"[-@.]", unit)[1]
    lines = [
        *_lines(FOLDER / re.sub(r"@\d", "@", unit)),
        *_lines(FOLDER / "pdmesh-.service.d/common.conf"),
    ]
    common = dict(line.split("=", 1) for line in lines if "=" in line)
    assert common["ExecStart"].split() == [PROGRAM, role]
    assert role in app
    environment = dict(
        one.split("=", 1)
        for line in lines
        if line.startswith("Environment=")
        for one in line.removeprefix("Environment=").split()
    )
    environment = {name: value.replace("%i", "3") for name, value in environment.items()}
    assert environment["PDMESH_CONFIG"] == "/etc/pdmesh/mesh.toml"
    config = read_config(ROLES[role], {**environment, "PDMESH_CONFIG": str(FOLDER / "mesh.toml")})
    assert config.drain_s < float(common["TimeoutStopSec"]) - 10
    assert str(config.mesh_secret_file) == "%d/mesh-secret"
    assert common["LoadCredential"].startswith("mesh-secret:")
    assert int(common["RestartPreventExitStatus"]) == EXIT_BAD_CONFIG
    assert common["KillMode"] == "mixed"


def test_services_of_one_host_have_ports_of_their_own() -> None:
    """For scrapes: the gateway's, and those of ten workers of either kind."""
    example = read_config(ROLES["gateway"], {"PDMESH_CONFIG": str(FOLDER / "mesh.toml")})
    ports = [int(example.metrics_address.rpartition(":")[2])]
    for role in ("prefill", "decode"):
        unit = (FOLDER / f"pdmesh-{role}@.service").read_text()
        (given,) = re.findall(r"METRICS_PORT=(\d+)%i", unit)
        ports += [int(f"{given}{number}") for number in range(10)]
    assert len({*ports}) == 21
    assert max(ports) < 65536


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_keep_their_devices(role: str) -> None:
    """No word of theirs closes devices, nor implies one that does: ProtectClock= allows the clock's
    alone where systemd is older than 253 (systemd/systemd 18142)."""
    files = (FOLDER / f"pdmesh-{role}@.service", FOLDER / "pdmesh-.service.d/common.conf")
    names = {line.partition("=")[0] for file in files for line in _lines(file)}
    assert not names & {"ProtectClock", "PrivateDevices", "DeviceAllow", "DevicePolicy"}


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if not line.startswith("#")]
