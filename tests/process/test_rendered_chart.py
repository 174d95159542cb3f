"""The pods of the Helm chart as processes: their variables, their secret, their probes, a rollout.

No cluster is there; what of a pod is a process runs here as the manifests say, at other addresses.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.chart import Manifest, find, pod_of, render, variables
from tests.support.process_mesh import Answer, ProcessMesh, a_prompt, process_mesh
from tests.support.service_process import ServiceProcess, free_port

pytestmark = [pytest.mark.process, pytest.mark.ucx]

NUM_TOKENS = 150
VALUES: Manifest = {
    "settings": {"engine": "fake", "fake_step_s": 0.02, "num_blocks": 256},
    "prefill": {"settings": {"staging_mib": 16}},
    "decode": {"settings": {"staging_mib": 16}},
}


class Pods:
    """What the manifests say of each role, and the pods that were started."""

    def __init__(self, mesh: ProcessMesh, folder: Path) -> None:
        manifests = render(VALUES)
        self._mesh = mesh
        self._workloads = {
            role: find(manifests, "Deployment", f"pdmesh-{role}")
            for role in ("gateway", "prefill", "decode")
        }
        self._gateway = f"127.0.0.1:{free_port()}"
        secret = find(manifests, "Secret", "pdmesh-secret")["data"]["mesh-secret"]
        (folder / "mesh-secret").write_text(base64.b64decode(secret).decode())
        self._folder = folder

    async def start(self, role: str) -> ServiceProcess:
        """Start a pod and wait until the kubelet would call it started."""
        metrics_port = free_port()
        # What the cluster's network, DNS and kubelet make of a pod's variables.
        here = {
            "POD_IP": "127.0.0.1",
            "PDMESH_HOST": "127.0.0.1",
            "PDMESH_ADVERTISE": "127.0.0.1",
            "PDMESH_PORT": "0",
            "PDMESH_METRICS_PORT": str(metrics_port),
            "PDMESH_METRICS_ADDRESS": f"127.0.0.1:{metrics_port}",
            "PDMESH_GATEWAY": self._gateway,
            "PDMESH_THREADS": "1",
            "PDMESH_PROFILE_FILE": str(self._folder / "profiles"),
            "PDMESH_MESH_SECRET_FILE": str(self._folder / "mesh-secret"),
        }
        if role == "gateway":
            here |= {
                "PDMESH_MESH_HOST": "127.0.0.1",
                "PDMESH_MESH_PORT": self._gateway.rpartition(":")[2],
                "PDMESH_HTTP_PORT": "0",
                "PDMESH_GRPC_PORT": "0",
            }
        given = variables(self._workloads[role]) | here
        settings: dict[str, Any] = {
            name.removeprefix("PDMESH_").lower(): value
            for name, value in given.items()
            if name.startswith("PDMESH_")
        }
        pod = await self._mesh.start(role, mesh_secret="", **settings)
        await self._mesh.ready(pod)
        pod.metrics_port = metrics_port
        await self.probe(role, pod, "startup")
        return pod

    async def probe(self, role: str, pod: ServiceProcess, name: str) -> None:
        """Ask as the kubelet would, until the answer is 200."""
        (container,) = pod_of(self._workloads[role])["containers"]
        path = container[f"{name}Probe"]["httpGet"]["path"]

        async def is_fine() -> bool:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://127.0.0.1:{pod.metrics_port}{path}") as response,
            ):
                return response.status == 200

        await self._mesh.until(is_fine)


async def test_pods_become_ready_and_a_rollout_loses_no_token(tmp_path: Path) -> None:
    """Each by its probes; then a new decode pod is ready, the old one gets SIGTERM amid an answer
    and drains; likewise prefill; at last the gateway."""
    async with process_mesh() as mesh:
        with mesh.explained():
            pods = Pods(mesh, tmp_path)
            gateway = await pods.start("gateway")
            workers = {role: await pods.start(role) for role in ("prefill", "decode")}
            for role, pod in {"gateway": gateway, **workers}.items():
                await pods.probe(role, pod, "readiness")
            for role, old in workers.items():
                new = await pods.start(role)
                await pods.probe(role, new, "readiness")
                await _answered_while_it_ends(mesh, gateway, old)
                await pods.probe("gateway", gateway, "readiness")
            await _answered_while_it_ends(mesh, gateway, gateway)


async def _answered_while_it_ends(
    mesh: ProcessMesh, gateway: ServiceProcess, leaving: ServiceProcess
) -> None:
    """Several answers are on their way, on old pods and new ones; all are whole."""
    ends: list[asyncio.Task[None]] = []

    def stop_it(_: Answer) -> None:
        if not ends:
            ends.append(tasks.create_task(leaving.stop()))

    async with asyncio.TaskGroup() as tasks:
        answers = [
            tasks.create_task(
                mesh.ask(gateway, a_prompt(40 + number), NUM_TOKENS, on_token=stop_it)
            )
            for number in range(3)
        ]
    for answer in answers:
        answer.result().require_whole(NUM_TOKENS)
    assert ends
