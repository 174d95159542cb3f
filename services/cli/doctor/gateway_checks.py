"""What ``pdmesh doctor --gateway URL`` finds out about a running mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from services.cli.client import RunningGateway, told_otherwise
from services.cli.doctor.finding import Finding, absent, right, wrong
from services.cli.words import speed, uptime
from shared.errors import MeshError
from shared.lanes import STAGING, is_within_host
from shared.version import VERSION

ANSWERS_WITHIN_S: Final = 4.0


async def check_gateway(gateway: RunningGateway) -> list[Finding]:
    try:
        view = await gateway.ask("/cluster", limit_s=ANSWERS_WITHIN_S)
    except MeshError as error:
        return [wrong("gateway", error.message, "is the URL right, and the key?")]
    try:
        return judge_cluster(gateway.url, view)
    except (LookupError, TypeError, ValueError, AttributeError):
        error = told_otherwise(gateway.url, view)
        return [wrong("gateway", error.message, "run one release on all machines of a mesh")]


async def is_ours(port: int) -> bool:
    try:
        url = f"http://127.0.0.1:{port}"
        answer = await RunningGateway(url=url).ask("/health", limit_s=ANSWERS_WITHIN_S)
    except MeshError:
        return False
    return answer == {"status": "ok"}


def judge_cluster(url: str, view: Mapping[str, Any]) -> list[Finding]:
    findings = [right("gateway", f"{url}, version {view['version']}, {uptime(view['uptime_s'])}")]
    if view["version"] != VERSION:
        text = f"{view['version']} there, {VERSION} here"
        findings.append(wrong("release", text, "run one release on all machines of a mesh"))
    if view["ready"]:
        model: Any = view["model"] or {}
        text = f"serves {model.get('id')}, up to {model.get('max_model_len', 0):,} tokens"
        findings.append(right("ready", text))
    else:
        remedy = "pdmesh doctor on the workers' machines; their logs say why they do not join"
        findings.append(wrong("ready", f"no: {view['not_ready_reason']}", remedy))
    for worker in view["workers"]:
        name = f"{worker['role']} worker"
        text = f"{worker['address']} is {worker['state']}"
        if worker["state"] in ("usable", "draining"):
            findings.append(right(name, text))
        else:
            remedy = "can the gateway reach this address? else --advertise on the worker"
            findings.append(wrong(name, text, remedy))
    addresses = {worker["incarnation"]: worker["address"] for worker in view["workers"]}
    findings += [_pair(pair, addresses) for pair in view["transfers"]]
    if not view["transfers"]:
        text = "no KV in the last minute, so no lane is known: ask something and look again"
        findings.append(absent("pairs", text))
    return findings


def _pair(pair: Mapping[str, Any], addresses: Mapping[str, str]) -> Finding:
    ends = [addresses.get(pair[role], pair[role]) for role in ("prefill", "decode")]
    lane, rate = str(pair["lane"]), pair["gb_per_s"]
    rate_text = f", {speed(rate['p50'])}" if rate else ""
    text = f"{ends[0]} → {ends[1]}: lane {lane or 'unknown'}{rate_text}"
    hosts = {end.rpartition(":")[0] for end in ends}
    if lane and len(hosts) == 1 and not is_within_host(lane):
        remedy = "both are on one host: give their containers one IPC namespace"
        return wrong("pair", text, remedy)
    if len(hosts) == 1 and lane.startswith(STAGING):
        remedy = "KV of one device reaches another through the host: cuda_ipc must be in UCX_TLS,"
        remedy += " expandable_segments off, and containers in one PID namespace"
        return wrong("pair", text, remedy)
    return right("pair", text)
