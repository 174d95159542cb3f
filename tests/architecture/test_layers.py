"""What ARCHITECTURE.md promises about who imports whom, and what a process loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.house import ROOT

MAX_LINES = 500

HEAVY = ("torch", "numpy", "ucxx", "xxhash", "safetensors", "transformers", "rmm", "cuda")

LOAD_ALL = """
import importlib, json, pkgutil, sys
import services.gateway
for module in pkgutil.walk_packages(services.gateway.__path__, "services.gateway."):
    if not module.name.endswith(
        ("__main__", "index.holdings", "index.prefix_index", "index.key_table", "routing.columns")
    ):
        importlib.import_module(module.name)
for name in ("shared.rpc.tcp", "shared.log", "shared.config", "shared.runtime.service",
             "shared.runtime.platform", "shared.telemetry.lifetime"):
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize("name", ["services", "shared"])
def test_top_level_names_are_ours_alone(name: str) -> None:
    """Nothing else in this environment installs a package of the same name: pdmesh needs its
    own."""
    owners = metadata.packages_distributions().get(name, [])
    assert set(owners) <= {"pdmesh"}
    spec = find_spec(name)
    assert spec is not None
    places = {Path(place).resolve() for place in spec.submodule_search_locations or ()}
    assert places == {(ROOT / name).resolve()}


def test_gateway_loads_nothing_heavy() -> None:
    """All of the gateway's modules together load no engine, no transport and no array library, but
    the index of prefixes and the columns of workers, which nobody imports before there is a choice
    of workers."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD_ALL],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    loaded = json.loads(run.stdout)
    assert "services.gateway.app" in loaded
    assert "shared.rpc.tcp" in loaded
    assert [name for name in loaded if name.partition(".")[0] in HEAVY] == []
    assert [name for name in loaded if name.startswith("shared.transport")] == []


def test_no_file_is_too_long() -> None:
    """A module over the cap holds two things: it is time to take them apart."""
    long = {
        str(path.relative_to(ROOT)): num_lines
        for folder in ("services", "shared")
        for path in (ROOT / folder).rglob("*.py")
        if "wire" not in path.parts
        and (num_lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}
