"""``pdmesh up``: a mesh of processes on this machine, watched until Ctrl-C."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from cyclopts import Group, Parameter
from rich.console import Console

from services.cli.flags import require, require_free_port, require_key_file, require_worker_modules
from services.cli.interrupts import Interrupts
from services.cli.machine import Share, find_gpus, num_cores, shares, weights_bytes
from services.cli.status import StatusView, status_view
from services.local import LocalMesh, Service, local_mesh, plan_services, wait_for_pair
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig, ServiceConfig
from shared.environment import config_from_environment
from shared.model_folder import resolve_model
from shared.runtime.service import EXIT_OK

MAX_WORKERS: Final = 64
PAIR_WITHIN_S: Final = 60.0
"""From all processes ready to the first pair ready: joins and one handshake."""

_MESH = Parameter(group=Group("Mesh", sort_key=1))
_CLIENTS = Parameter(group=Group("Clients", sort_key=2))
_WORKERS = Parameter(group=Group("Workers", sort_key=3))
_LOGS = Parameter(group=Group("Logs and end", sort_key=4))

Config = TypeVar("Config", bound=ServiceConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """A local mesh. What has no flag here is set by its variable, e.g. PDMESH_MAX_WAITING."""

    model: Annotated[str, _MESH] = "demo"
    """A Hugging Face folder, a hub name, or 'demo' for the bundled model."""

    prefill: Annotated[int, _MESH] = 1
    """Prefill workers."""

    decode: Annotated[int, _MESH] = 1
    """Decode workers."""

    policy: Annotated[Literal["least_loaded", "round_robin", "random"], _MESH] = "least_loaded"
    """How a request's pair of workers is chosen."""

    port: Annotated[int, _CLIENTS] = 8000
    """Port of the OpenAI-compatible API; 0 = any free one."""

    grpc_port: Annotated[int | None, _CLIENTS] = None
    """Port of the gRPC API; default: --port plus 1."""

    host: Annotated[str, _CLIENTS] = "127.0.0.1"
    """Where clients may come from: 0.0.0.0 = anywhere. There is no encryption."""

    model_name: Annotated[str, _CLIENTS] = ""
    """Name that clients use; default: the folder's name."""

    api_keys: Annotated[Path | None, _CLIENTS] = None
    """File of API keys (see pdmesh hash-key); without it every client is let in."""

    engine: Annotated[Literal["torch", "fake"], _WORKERS] = "torch"
    """fake: exact and deterministic nonsense without weights, for trying things out."""

    device: Annotated[str, _WORKERS] = "auto"
    """cpu, cuda, or auto: cuda where torch sees one. Several GPUs are dealt out in turn."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _WORKERS] = "auto"
    """auto: as the checkpoint says."""

    threads: Annotated[int, _WORKERS] = 0
    """CPU threads of each worker; 0 = the cores, divided."""

    kv_gib: Annotated[float, _WORKERS] = 0.0
    """KV memory of each worker in GiB; 0 = 1 GiB on CPU, most of its part of a GPU."""

    num_blocks: Annotated[int, _WORKERS] = 0
    """KV blocks of each worker; overrides --kv-gib; 0 = from memory."""

    block_size: Annotated[int, _WORKERS] = 16
    """Tokens a KV block."""

    max_model_len: Annotated[int, _WORKERS] = 0
    """Longest prompt plus answer in tokens; 0 = what the model was made for."""

    token_budget: Annotated[int, _WORKERS] = 2048
    """Most tokens a step computes; longer prompts are computed in chunks."""

    cache_prefixes: Annotated[bool, _WORKERS] = True
    """Keep KV of finished prompts for later ones with the same beginning."""

    transfer_mode: Annotated[Literal["auto", "layerwise", "serialized"], _WORKERS] = "auto"
    """layerwise: KV moves while later layers compute; serialized: after them."""

    log: Annotated[Path | None, _LOGS] = None
    """File for the services' logs; default: stderr, or on a terminal a temporary file, which is
    kept if something went wrong."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], _LOGS] = "info"
    """Least level that is logged."""

    drain_s: Annotated[float, _LOGS] = 30.0
    """Seconds to finish what is in hand after the first Ctrl-C."""


_OWN_FIELDS: Final = ("prefill", "decode", "port", "log", "grpc_port", "host")


def up(*, config: Annotated[UpConfig, Parameter(name="*")] = UpConfig()) -> int:
    """Run a mesh on this machine: one gateway, some prefill and decode workers.

    Prints the URL when a request can be served. Workers that crash are restarted. The first Ctrl-C
    finishes what is in hand, the second ends at once; nothing is left running, not even after
    kill -9.
    """
    services = plan_mesh(config)
    console = Console()
    interrupts = Interrupts()
    log = config.log
    if log is None and console.is_terminal:
        descriptor, name = tempfile.mkstemp(prefix="pdmesh-", suffix=".log")
        os.close(descriptor)
        log = Path(name)
    is_clean = False
    with status_view(console) as view:
        if log is not None:
            view.say(f"logs: {log}")

        async def main() -> int:
            def change(mesh: LocalMesh) -> None:
                interrupts.at_once = mesh.kill
                view.show(mesh)

            async with local_mesh(
                services, log=log, drain_s=config.drain_s, on_change=change
            ) as mesh:
                await wait_for_pair(mesh.http_url, PAIR_WITHIN_S)
                _say_ready(view, mesh, config)
                await asyncio.Event().wait()
            return EXIT_OK

        interrupts.on_first = lambda: view.say(
            "stopping when what is in hand is finished; Ctrl-C again: at once"
        )
        code = interrupts.run(main)
        is_clean = not any(service.num_restarts for service in services)
    if is_clean and log is not None and log != config.log:
        log.unlink()
    # To be told to end, by systemd or a container, is the regular end.
    return EXIT_OK if code == 128 + signal.SIGTERM else code


def plan_mesh(config: UpConfig) -> list[Service]:
    """Return the processes of this mesh, after all checks that need no process.

    Raises InvalidRequest: a flag is out of range. ModelError: there is no such model. MeshError: a
    port is taken, or a package is missing.
    """
    for name in ("prefill", "decode"):
        require(
            1 <= getattr(config, name) <= MAX_WORKERS,
            f"--{name} must be 1..{MAX_WORKERS}",
            param=name,
        )
    require(0 <= config.port < 65536, "--port must be a port, 0..65535", param="port")
    num_workers = config.prefill + config.decode
    grpc_port = config.grpc_port
    if grpc_port is None:
        grpc_port = config.port + 1 if config.port else 0
    gateway = _with(
        GatewayConfig, config, host=config.host, http_port=config.port, grpc_port=grpc_port
    )
    here = "127.0.0.1"
    places: dict[str, Any] = {"host": here, "advertise": here, "port": 0, "metrics_port": 0}
    prefill = _with(PrefillConfig, config, gateway=here, **places)
    decode = _with(DecodeConfig, config, gateway=here, **places)
    require_worker_modules(config.engine)
    require_free_port(config.host, config.port, "--port")
    require_free_port(config.host, grpc_port, "--grpc-port")
    require_key_file(config.api_keys)
    folder = resolve_model(config.model)  # a hub name is downloaded here, once
    if not gateway.model_name and "/" in config.model and not Path(config.model).is_dir():
        gateway = dataclasses.replace(gateway, model_name=config.model)
    has_choice = config.engine == "torch" and config.device in ("auto", "cuda")
    gpus = find_gpus(os.environ) if has_choice else []
    parts = shares(
        num_workers, num_cores=num_cores(), gpus=gpus, weights_bytes=weights_bytes(folder)
    )
    workers = [prefill] * config.prefill + [decode] * config.decode
    sized = [_sized(worker, part) for worker, part in zip(workers, parts, strict=True)]
    services = plan_services(
        gateway,
        [worker for worker in sized if isinstance(worker, PrefillConfig)],
        [worker for worker in sized if isinstance(worker, DecodeConfig)],
    )
    for service, part in zip(services[1:], parts, strict=True):
        if part.gpus:
            service.env["CUDA_VISIBLE_DEVICES"] = part.gpus
    return services


def _with(kind: type[Config], config: UpConfig, **places: Any) -> Config:
    """Return a service's configuration: of our flags those it knows, the rest from the
    environment."""
    known = {field.name for field in dataclasses.fields(kind)}
    ours = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name in known and field.name not in _OWN_FIELDS
    }
    made = dataclasses.replace(config_from_environment(kind, os.environ), **ours, **places)
    made.check()
    return made


def _sized(worker: PrefillConfig | DecodeConfig, part: Share) -> PrefillConfig | DecodeConfig:
    is_sized = worker.kv_gib or worker.num_blocks
    return dataclasses.replace(
        worker,
        threads=worker.threads or part.threads,
        kv_gib=worker.kv_gib if is_sized else part.kv_gib,
    )


def _say_ready(view: StatusView, mesh: LocalMesh, config: UpConfig) -> None:
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    key = " -H 'Authorization: Bearer YOUR-KEY'" if config.api_keys else ""
    url = mesh.http_url
    where = "" if url.endswith(":8000") else f" --url {url}"
    lines: Sequence[str] = (
        "",
        f"ready: {url}/v1 (OpenAI's API), {mesh.grpc_target} (gRPC)",
        f"try:   curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{body}'",
        f"or:    pdmesh generate 'Hello!'{where}",
        "",
    )
    view.say("\n".join(lines))
