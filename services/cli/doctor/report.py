"""``pdmesh doctor``: is everything here that a mesh needs, and if not, what to do."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Final

import orjson
from cyclopts import Group, Parameter
from rich.console import Console

from services.cli.client import NO_ACCESS, Access, require_url
from services.cli.doctor import machine_checks as checks
from services.cli.doctor import vllm_checks
from services.cli.doctor.finding import Finding, lines_of
from services.cli.doctor.gateway_checks import check_gateway, is_ours
from services.cli.doctor.link import Link, measure_link
from services.cli.interrupts import Interrupts
from services.cli.machine import find_gpus
from services.cli.sources import JsonFlag
from services.local import our_code
from shared.config import GatewayConfig
from shared.errors import MeshError
from shared.runtime.realtime import is_allowed
from shared.runtime.service import EXIT_FAILED, EXIT_OK

LIMIT_S: Final = 19.0
"""Of all measurements together; what has not come by then is said so."""

LINK_WITHIN_S: Final = 6.0

_GATEWAY_FLAG: Final = Parameter(
    group=Group("Gateway", sort_key=2), show_env_var=False, show_default=False
)

Sections = dict[str, list[Finding]]


def doctor(
    *,
    gateway: Annotated[str, _GATEWAY_FLAG] = "",
    access: Access = NO_ACCESS,
    as_json: JsonFlag = False,
) -> int:
    """Check this machine for what a mesh needs, and say what to do about what is wrong.

    Each line is ✓ (right), ✗ (wrong, with what to do) or – (not here, and it does not matter). The
    speed of UCX is measured between two processes. Exit code 1: at least one ✗.

    Parameters
    ----------
    gateway
        URL of a running gateway to look at, too: its workers and how their KV moves.
    """
    if gateway:
        require_url(gateway, "--gateway")
    sections: Sections = {}

    async def main() -> int:
        sections.update(await examine(gateway, access))
        return EXIT_OK

    interrupts = Interrupts()
    interrupts.at_once = lambda: os._exit(128 + signal.SIGINT)
    console = Console(highlight=False, soft_wrap=True)
    with Console(stderr=True).status("measuring, up to 20 s") as status:
        if not sys.stderr.isatty():
            status.stop()
        code = interrupts.run(main)
    if code:
        return code
    findings = [finding for found in sections.values() for finding in found]
    num_wrong = sum(finding.is_wrong for finding in findings)
    if as_json:
        body = {
            "ok": not num_wrong,
            "sections": {name: [f.as_dict() for f in found] for name, found in sections.items()},
        }
        print(orjson.dumps(body, option=orjson.OPT_INDENT_2).decode())
    else:
        width = max(len(finding.name) for finding in findings)
        for name, found in sections.items():
            console.print(name, style="bold")
            console.print(lines_of(found, width))
        one = "1 thing needs" if num_wrong == 1 else f"{num_wrong} things need"
        console.print(f"{one} attention" if num_wrong else "all is well")
    return EXIT_FAILED if num_wrong else EXIT_OK


async def examine(gateway: str, access: Access) -> Sections:
    """Look at everything; the measurements come one after the other, so as not to disturb each
    other."""
    limit_at = asyncio.get_running_loop().time() + LIMIT_S
    shared, shared_error = await _measure({}, limit_at)
    tcp, tcp_error = await _measure({"UCX_TLS": "tcp,self"}, limit_at)
    facts, torch_error = await _probe_torch(limit_at)
    devices = checks.rdma_devices()
    memlock, soft, hard = checks.limits()
    link_findings = [checks.check_ucx(shared or tcp)]
    if checks.is_ucx_installed():
        link_findings += [
            checks.check_shared_memory_lane(shared, shared_error),
            checks.check_tcp_lane(tcp, tcp_error),
        ]
    link_findings.append(checks.check_rdma(devices, shared or tcp))
    sections: Sections = {
        "Installation": [
            checks.check_python(),
            checks.check_pdmesh(),
            checks.check_uvloop(),
            checks.check_torch(facts, torch_error),
            vllm_checks.check_vllm(
                facts,
                has_amx=vllm_checks.has_amx(),
                has_numa=vllm_checks.has_numa(),
                compiler=vllm_checks.find_compiler(),
            ),
        ],
        "Link between workers": link_findings,
        "GPU": [
            checks.check_gpu(facts, len(await asyncio.to_thread(find_gpus, os.environ))),
            checks.check_cuda_ipc(facts, shared or tcp),
        ],
        "Limits of this machine": [
            *checks.check_ports(await _ports()),
            checks.check_sysv(),
            checks.check_dev_shm(),
            checks.check_memlock(memlock, bool(devices)),
            checks.check_open_files(soft, hard),
            checks.check_realtime(is_allowed()),
        ],
    }
    if gateway:
        sections[f"Mesh at {gateway}"] = await check_gateway(gateway, access)
    return sections


async def _measure(environment: Mapping[str, str], limit_at: float) -> tuple[Link | None, str]:
    if not checks.is_ucx_installed():
        return None, ""
    now = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(min(limit_at, now + LINK_WITHIN_S)):
            return await measure_link(environment), ""
    except TimeoutError:
        return None, f"no answer within {LINK_WITHIN_S:g} s"
    except MeshError as error:
        return None, error.message


async def _probe_torch(limit_at: float) -> tuple[dict[str, Any] | None, str]:
    """Return what torch can do, or None and why it says nothing ('' = it is not installed)."""
    if find_spec("torch") is None:
        return None, ""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "shared.engine.probe"),
        env={**os.environ, **our_code()},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout_at(limit_at):
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
    taken = {
        port: checks.why_taken(port)
        for port in (config.http_port, config.grpc_port, config.mesh_port)
    }
    # The gateway that has the first one has the others, too.
    if taken[config.http_port] and await is_ours(config.http_port):
        return {port: "pdmesh" if by else "" for port, by in taken.items()}
    return taken
