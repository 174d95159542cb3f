"""``pdmesh doctor``: is everything here that a mesh needs, and if not, what to do."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from importlib.util import find_spec
from typing import Annotated, Any, Final, Literal

import orjson
from cyclopts import Group, Parameter

from services.cli.client import NO_ACCESS, Access, RunningGateway, require_url
from services.cli.doctor import machine_checks as checks
from services.cli.doctor.finding import Finding, lines_of
from services.cli.doctor.gateway_checks import check_gateway, is_ours
from services.cli.interrupts import run_interruptible
from services.cli.machine import find_gpus
from services.cli.sources import JsonFlag
from services.cli.words import plain_console, print_json
from shared.config import GatewayConfig
from shared.engine.native.build import TIMEOUT_S
from shared.engine.vllm.release import find_compiler
from shared.runtime.child import our_code
from shared.runtime.realtime import is_allowed
from shared.runtime.service import EXIT_FAILED, EXIT_OK

PROBE_WITHIN_S: Final = 15.0 + TIMEOUT_S
"""Of a library that is loaded: torch takes seconds, and its probe compiles kernels that no worker
has needed here before."""

_GATEWAY: Final = Group("Gateway", sort_key=2)

Sections = dict[str, list[Finding]]


def doctor(
    *,
    engine: Annotated[Literal["torch", "vllm"], Parameter(show_env_var=False)] = "torch",
    gateway: Annotated[str, Parameter(group=_GATEWAY, show_env_var=False, show_default=False)] = "",
    access: Access = NO_ACCESS,
    as_json: JsonFlag = False,
) -> int:
    """Check this machine for what a mesh needs, and say what to do about what is wrong.

    Each line is ✓ (right), ✗ (wrong, with what to do) or – (not here, and it does not matter). How
    fast KV moves is in a running mesh's receipts. Exit code 1: at least one ✗.

    Parameters
    ----------
    engine
        What workers here are to compute with; not to have vLLM is a fault with vllm alone.
    gateway
        URL of a running gateway to look at, too: its workers and how their KV moves.
    """
    if gateway:
        require_url(gateway, "--gateway")
    sections: Sections = {}

    async def main() -> None:
        sections.update(await examine(gateway, access, wants_vllm=engine == "vllm"))

    console = plain_console()
    with plain_console(stderr=True).status("looking") as status:
        if not sys.stderr.isatty():
            status.stop()
        code = run_interruptible(main)
    if code:
        return code
    findings = [finding for found in sections.values() for finding in found]
    num_wrong = sum(finding.is_wrong for finding in findings)
    if as_json:
        print_json({"ok": not num_wrong, "sections": sections})
    else:
        width = max(len(finding.name) for finding in findings)
        for name, found in sections.items():
            console.print(name, style="bold")
            console.print(lines_of(found, width), soft_wrap=True)
        one = "1 thing needs" if num_wrong == 1 else f"{num_wrong} things need"
        console.print(f"{one} attention" if num_wrong else "all is well")
    return EXIT_FAILED if num_wrong else EXIT_OK


async def examine(gateway: str, access: Access, *, wants_vllm: bool) -> Sections:
    torch, torch_error = await _probe("torch", "shared.engine.probe")
    ucx, ucx_error = await _probe("ucxx", "shared.transport.probe")
    devices = checks.rdma_devices()
    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    num_gpus = len(await asyncio.to_thread(find_gpus, os.environ))
    sections: Sections = {
        "Installation": [
            checks.check_pdmesh(),
            checks.check_torch(torch, torch_error),
            checks.check_kernels(torch),
            checks.check_ucx(ucx, ucx_error),
            checks.check_grammars(),
            checks.check_vllm(
                torch,
                is_wanted=wants_vllm,
                has_numa=checks.has_numa(),
                compiler=find_compiler(),
            ),
        ],
        "Devices": [
            checks.check_gpu(torch, num_gpus),
            checks.check_cuda_ipc(torch, ucx),
            checks.check_rdma(devices, ucx),
        ],
        "Limits of this machine": [
            *[checks.check_port(port, by) for port, by in (await _ports()).items()],
            checks.check_sysv(),
            checks.check_memlock(memlock, bool(devices)),
            checks.check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
            checks.check_realtime(is_allowed()),
        ],
    }
    if gateway:
        sections[f"Mesh at {gateway}"] = await check_gateway(
            RunningGateway(url=gateway, access=access)
        )
    return sections


async def _probe(package: str, module: str) -> tuple[dict[str, Any] | None, str]:
    """Return what a library can do, as a process of its own tells, or None and why it says nothing
    ('' = it is not installed)."""
    if find_spec(package) is None:
        return None, ""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module),
        env={**os.environ, **our_code()},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(PROBE_WITHIN_S):
            out, err = await process.communicate()
    except TimeoutError:
        return None, "it does not load in time"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        words = err.decode(errors="replace").strip().splitlines()
        return None, f"it cannot be loaded: {words[-1] if words else 'it crashed'}"
    return orjson.loads(out.splitlines()[-1]), ""


async def _ports() -> dict[int, str]:
    config = GatewayConfig()
    ports = (config.http_port, config.grpc_port, config.mesh_port)
    taken = {port: checks.why_taken(port) for port in ports}
    # The gateway that has the first one has the others, too.
    if taken[config.http_port] and await is_ours(config.http_port):
        return {port: "pdmesh" if by else "" for port, by in taken.items()}
    return taken
