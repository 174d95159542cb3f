"""The Helm chart as Helm renders it, and Kubernetes' schemas to hold that against.

Helm and kubectl are those on the PATH, else those inside of a Python package; the schemas are in a
package, too. Both are fetched on first use (``client_environments.py``).
"""

from __future__ import annotations

import functools
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.client_environments import NoClient, python_client
from tests.support.house import ROOT

CHART = ROOT / "deploy/helm/pdmesh"
PINS = ROOT / "tests/deploy"
KUBERNETES = ("1.31", "1.37")
"""Oldest release that the chart says it runs on, and the newest whose schemas are at hand."""

OPERATORS = ("keda.sh", "monitoring.coreos.com")

Manifest = dict[str, Any]


class Refused(Exception):
    """Helm rendered nothing; the message is what an administrator reads."""


@functools.cache
def program(name: str) -> str:
    """Return the path of ``helm`` or ``kubectl``; the test is skipped where there is none."""
    if found := shutil.which(name):
        return found
    try:
        programs = python_client("helm", folder_of_pins=PINS, options=["--no-deps"])
    except NoClient as error:
        pytest.skip(f"no {name}: {error}")
    program = programs / name
    if not program.exists():
        (package,) = programs.parent.glob("lib/*/site-packages/aws_cdk/*/_jsii/*.tgz")
        with tarfile.open(package) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = zipfile.ZipFile(io.BytesIO(layer.read())).read(f"{name}/{name}")
        partial = program.with_suffix(".partial")
        partial.write_bytes(content)
        partial.chmod(0o755)
        partial.rename(program)
    return str(program)


def render(values: Manifest | None = None, *, release: str = "pdmesh") -> list[Manifest]:
    """Return every object of a release with these values.

    Raises Refused: Helm, the schema or the chart does not take them.
    """
    return [
        one for one in yaml.safe_load_all(_rendered(yaml.safe_dump(values or {}), release)) if one
    ]


@functools.cache
def _rendered(values: str, release: str) -> str:
    done = subprocess.run(
        [program("helm"), "template", release, str(CHART), "--namespace", "llm", "--values", "-"],
        input=values,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.returncode:
        raise Refused(done.stderr)
    return done.stdout


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the one object of that kind and name."""
    (found,) = (m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


def pod_of(workload: Manifest) -> Manifest:
    """Return the pod that a Deployment or StatefulSet makes."""
    return workload["spec"]["template"]["spec"]


def variables(workload: Manifest) -> dict[str, str]:
    """Return the environment of its only container; what comes from elsewhere as its path."""
    (container,) = pod_of(workload)["containers"]
    found: dict[str, str] = {}
    for one in container["env"]:
        assert one["name"] not in found, f"{one['name']} is there twice"
        source = one.get("valueFrom", {})
        (found[one["name"]],) = (
            [one["value"]]
            if "value" in one
            else [path for ref in source.values() for path in ref.values()]
        )
    return found


def schema_errors(manifests: list[Manifest], release: str, folder: Path) -> str:
    """Return what Kubernetes of that release would refuse, as its schemas say; '' = nothing.

    Fields that a release does not know are errors; what operators add to Kubernetes is not looked
    at. The test is skipped where there are no schemas.
    """
    try:
        programs = python_client("kubernetes-validate", folder_of_pins=PINS)
    except NoClient as error:
        pytest.skip(f"no schemas: {error}")
    own = [one for one in manifests if one["apiVersion"].partition("/")[0] not in OPERATORS]
    file = folder / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(own))
    done = subprocess.run(
        [programs / "kubernetes-validate", "--strict", "-k", release, file],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode or done.stdout.count(" passed ") == len(own)
    return done.stdout + done.stderr if done.returncode else ""
