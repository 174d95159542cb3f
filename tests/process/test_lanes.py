"""Which pairs workers enter, with real UCX: the lane that carries KV, and the host it leads to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from uuid import uuid4

import aiohttp
import orjson
import pytest

from shared.config import DecodeConfig, PrefillConfig
from tests.support.house import ROOT
from tests.support.process_mesh import ROLES, ProcessMesh, a_prompt, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx]

BOOT_ID = "/proc/sys/kernel/random/boot_id"


async def readiness(worker: ServiceProcess) -> tuple[int, str]:
    """Status and text of a worker's /ready."""
    url = worker.metrics_url.replace("/metrics", "/ready")
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def refuses(mesh: ProcessMesh, worker: ServiceProcess, *words: str) -> None:
    """Wait until a worker is not ready and says all of this."""

    async def says_why() -> bool:
        status, text = await readiness(worker)
        return status == 503 and all(word in text for word in words)

    await mesh.until(says_why)


async def require_no_pair(mesh: ProcessMesh, gateway: ServiceProcess) -> None:
    gauges = await mesh.gauges(gateway)
    assert gauges["pairs"] == 0
    assert gauges["ready"] == 0


def pair_ready(prefill: ServiceProcess) -> dict[str, str]:
    """What a prefill worker has logged of its pair."""
    (line,) = (line for line in prefill.log if '"event":"pair ready"' in line)
    return orjson.loads(line)


@pytest.mark.parametrize("strict", ROLES)
async def test_a_pair_on_another_lane_is_refused_by_whoever_requires_one(
    strict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX was left only tcp: the strict worker is not ready, names the lane found, those required
    and what to do, and the gateway has no pair."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            workers = [
                await mesh.add(role, require_lane="shm" if role == strict else "") for role in ROLES
            ]
            worker = workers[ROLES.index(strict)]
            words = ("would move over tcp/", "--require-lane is shm", "ipc: service:ipc")
            await refuses(mesh, worker, *words)
            await require_no_pair(mesh, gateway)


async def test_a_lane_that_nobody_refuses_is_named_wherever_one_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the receipt, /cluster, the workers' metrics and the log: the same one."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            prefill, decode = [await mesh.add(role) for role in ROLES]
            await mesh.paired(gateway, 1)
            answer = await mesh.ask(gateway, a_prompt(40), 8)
            answer.require_whole(8)
            lane = answer.receipt["lane"]
            assert lane.startswith("tcp/")
            assert pair_ready(prefill)["lane"] == lane
            async with aiohttp.ClientSession() as session:
                url = gateway.metrics_url.replace("/metrics", "/cluster")
                async with session.get(url) as response:
                    (pair,) = (await response.json())["transfers"]
                assert pair["lane"] == lane
                for worker in (prefill, decode):
                    async with session.get(worker.metrics_url) as response:
                        assert f'transfer_bytes_total{{lane="{lane}"}}' in await response.text()


async def test_a_pair_on_the_lane_that_both_require_serves() -> None:
    """On the usual lane strict workers are ready and answer."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            workers = [await mesh.add(role, require_lane="shm,cuda_ipc") for role in ROLES]
            await mesh.paired(gateway, 1)
            for worker in workers:
                assert await readiness(worker) == (200, "ready\n")
            answer = await mesh.ask(gateway, a_prompt(40), 8)
            answer.require_whole(8)
            assert answer.receipt["lane"] == "sysv"
            # Silently falling back to whole messages would cost a factor, and no answer.
            assert pair_ready(workers[0])["mode"] == "windows"
            # UCX prints its tables for us at its level debug, and for nobody else.
            lines = [line for worker in workers for line in worker.log if "UCX" in line]
            assert not [line for line in lines if "opening UCX" not in line]


def segments(process: ServiceProcess) -> list[int]:
    """Bytes of each System V segment that a process has made."""
    head, *rows = map(str.split, Path("/proc/sysvipc/shm").read_text().splitlines())
    maker, size = head.index("cpid"), head.index("size")
    return [int(row[size]) for row in rows if int(row[maker]) == process.pid]


async def test_shared_memory_is_what_the_page_of_containers_says() -> None:
    """Counted by the kernel, with the staging that workers have by default; whoever bounds a
    namespace reads the figures there."""
    page = (ROOT / "docs" / "compose.md").read_text()
    said = re.search(r"Two prefill and two decode workers hold (\d+) segments and (\d+) MiB", page)
    assert said
    staging = {"prefill": PrefillConfig().staging_mib, "decode": DecodeConfig().staging_mib}
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            workers = [await mesh.add(role, staging_mib=staging[role]) for role in ROLES]
            await mesh.paired(gateway, 1)
            found = [size for worker in workers for size in segments(worker)]
    assert (2 * len(found), round(2 * sum(found) / 2**20)) == (int(said[1]), int(said[2]))


def _on_another_host(folder: Path) -> list[str]:
    """A command that runs another with a kernel of another name."""
    boot_id = folder / "boot_id"
    boot_id.write_text(f"{uuid4()}\n")
    script = f'mount --bind {boot_id} {BOOT_ID} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


@pytest.mark.parametrize("careless", ["nobody", *ROLES, "both"])
async def test_kv_leaves_a_host_only_if_both_workers_were_told_that_it_may(
    careless: str, tmp_path: Path
) -> None:
    """Unless both have been told, whoever was not refuses the pair and names the flag."""
    elsewhere = _on_another_host(tmp_path)
    if subprocess.run([*elsewhere, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            prefill, decode = [
                await mesh.add(
                    role,
                    prefix=elsewhere if role == "decode" else (),
                    allow_unencrypted_kv=careless in (role, "both"),
                )
                for role in ROLES
            ]
            if careless == "both":
                await mesh.paired(gateway, 1)
                (await mesh.ask(gateway, a_prompt(40), 8)).require_whole(8)
                return
            wary = prefill if careless == "decode" else decode
            await refuses(mesh, wary, "does not encrypt", "--allow-unencrypted-kv")
            await require_no_pair(mesh, gateway)
