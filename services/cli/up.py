"""``pdmesh up``: a mesh of processes on this machine, watched until Ctrl-C."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

from cyclopts import Group, Parameter

from services.cli.flags import (
    field_texts,
    flag_converter,
    require,
    require_door_files,
    require_free_ports,
    require_worker_modules,
    spread,
)
from services.cli.interrupts import Interrupts
from services.cli.machine import LocalShape, Share, find_gpus, shape_for, shares
from services.cli.scaling import LocalScaler
from services.cli.sources import ConfigFlag, with_config_file
from services.cli.status import LineView, LiveView, status_view, unblocked_console
from services.local import LocalMesh, Service, local_mesh, one_more, plan_services, wait_for_pair
from shared.bounds import OneOf, RoutingPolicyName, rules_of
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig, ServiceConfig
from shared.control_groups import granted_cores, num_cores
from shared.engine.models.registry import read_model_config
from shared.model_folder import ModelFolder, resolve_model
from shared.runtime.service import EXIT_OK
from shared.settings import field_types, read_settings

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
    """A local mesh: the flags that are up's own, or mean something of their own here; ``up_config``
    makes one. None = as each service has it from its variables, the file, or by default."""

    model: Annotated[str | None, _MESH] = None
    """A Hugging Face folder, a hub name, or 'demo' for the bundled model."""

    prefill: Annotated[int | None, _MESH] = None
    """Prefill workers. Without this and the next three flags one worker does both on a CPU or one
    GPU, and on several GPUs each has a worker that may be either; up says which and why."""

    decode: Annotated[int | None, _MESH] = None
    """Decode workers; one, if only --prefill is given, and the other way round."""

    colocated: Annotated[int | None, _MESH] = None
    """Workers that compute prompts and answers alike, in place of all prefill and decode
    workers."""

    workers: Annotated[int | None, _MESH] = None
    """Workers that may be either, in place of all others: half of them begin as prefill workers,
    and each does the other role's work, too, while the mesh needs it (--policy splitwise)."""

    policy: Annotated[RoutingPolicyName | str | None, _MESH] = None
    """How a request's pair of workers is chosen (docs/routing.md); package.module:Class is one of
    your own."""

    max_workers: Annotated[int | None, _MESH, Parameter(show_default="as many as it starts")] = None
    """With --planner act: most workers of all roles; this machine is divided among so many."""

    port: Annotated[int | None, _CLIENTS, Parameter(show_default="8000")] = None
    """Port of the OpenAI-compatible API; 0 = any free one."""

    grpc_port: Annotated[int | None, _CLIENTS, Parameter(show_default="--port plus 1")] = None
    """Port of the gRPC API."""

    host: Annotated[str | None, _CLIENTS] = None
    """Where clients may come from: 0.0.0.0 = anywhere. Give --tls-cert and a key then."""

    device: Annotated[str | None, _WORKERS] = None
    """cpu, cuda, cuda:N, or auto: cuda where torch sees one. With auto and cuda each worker gets a
    GPU of its own, in turn, out of those of CUDA_VISIBLE_DEVICES; cuda:N is for all of them."""

    gpu_memory_share: Annotated[float | None, _WORKERS] = None
    """Part of each GPU's memory for its workers, divided among those that share it."""

    log: Annotated[Path | None, _LOGS] = None
    """File for the services' logs; default: stderr, or on a terminal a temporary file, which is
    kept if something went wrong."""


_SETTINGS: Final = {
    _MESH: "planner planner_ttft_s planner_tpot_s planner_target tbt_target_s realtime "
    "chat_template tool_parser reasoning_parser",
    _CLIENTS: "gateway_processes model_name tls_cert tls_key tls_client_ca api_key api_keys "
    "cors_origins",
    _WORKERS: "engine vllm_args dtype exact threads kv_gib num_blocks block_size max_model_len "
    "token_budget cache_prefixes dram_cache ssd_cache ssd_cache_size cache_policy transfer_mode",
    _LOGS: "log_level drain_s",
}
"""The services' settings that are flags of up, too, in their words."""


def _words(rule: OneOf) -> Any:
    """Return the type of a flag: its words are offered, and checked unless there are more."""
    words = Literal[rule.words]
    return words | str if rule.own else words


def _with_settings() -> type[UpConfig]:
    """Return the record with a field for each of these, and with what a flag that is not given
    comes down to."""
    kinds = (GatewayConfig, DecodeConfig, PrefillConfig)
    defaults = {field.name: field.default for kind in kinds for field in dataclasses.fields(kind)}
    types = {name: hint for kind in kinds for name, hint in field_types(kind).items()}
    rules = {name: rule for kind in kinds for name, rule in rules_of(kind).items()}
    texts = {name: text for kind in kinds for name, text in field_texts(kind).items()}
    hints = get_type_hints(UpConfig, include_extras=True)
    for group, names in _SETTINGS.items():
        for name in names.split():
            rule, kind = rules.get(name), types[name]
            hint = _words(rule) if isinstance(rule, OneOf) else kind
            said = Parameter(help=texts[name], converter=flag_converter(name, kind))
            hints[name] = Annotated[hint | None, group, said]  # type: ignore[valid-type]
    for name, hint in hints.items():
        if name not in ("port", "grpc_port", "colocated") and defaults.get(name) not in (None, ""):
            hints[name] = Annotated[hint, Parameter(show_default=str(defaults[name]))]
    fields = [(name, hint, None) for name, hint in hints.items()]
    space = {"__module__": __name__}  # cyclopts takes what is of the standard library as it is
    return make_dataclass(
        "UpConfig", fields, bases=(UpConfig,), namespace=space, frozen=True, kw_only=True
    )


_UpFlags = _with_settings()


def up_config(**flags: Any) -> UpConfig:
    return _UpFlags(**flags)


OPEN_DOORS: Final = dict.fromkeys(
    (
        *("PDMESH_API_KEY", "PDMESH_API_KEYS"),
        *("PDMESH_KEY_REQUESTS_PER_MINUTE", "PDMESH_KEY_CONCURRENT_REQUESTS"),
        *("PDMESH_TLS_CERT", "PDMESH_TLS_KEY", "PDMESH_TLS_CLIENT_CA"),
    ),
    "",
)
"""Variables of a gateway without keys and TLS: of a mesh that asks itself."""

_OWN_FIELDS: Final = (
    *("prefill", "decode", "colocated", "workers"),
    *("port", "log", "grpc_port", "host"),
)


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """What is to be started. gateway: its configuration, which ``services`` holds as variables.
    why_shape: why it has these workers, if nobody asked for them. crowding: that threads are more
    than cores, '' if not. new_worker: makes one more, of a role."""

    services: list[Service]
    gateway: GatewayConfig
    why_shape: str
    crowding: str
    new_worker: Callable[[str], Service]


def up(
    *,
    config: UpConfig = UpConfig(),
    file: ConfigFlag = None,
) -> int:
    """Run a mesh on this machine: one gateway, some prefill and decode workers.

    Prints the URL when a request can be served. Workers that crash are restarted. The first Ctrl-C
    finishes what is in hand, the second ends at once; nothing is left running, not even after
    kill -9.
    """
    plan = plan_mesh(config, with_config_file(file))
    services = plan.services
    console = unblocked_console()
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
        if plan.why_shape:
            view.say(f"shape: {plan.why_shape} (--prefill 1 --decode 1: apart)")
        if plan.crowding:
            view.say(plan.crowding)

        async def main() -> None:
            def change(mesh: LocalMesh) -> None:
                # The first change comes before anything is started.
                interrupts.at_once = mesh.kill
                view.show(mesh)

            scaler = LocalScaler(plan.new_worker, plan.gateway.max_workers, view.say)
            async with local_mesh(
                services,
                log=log,
                drain_s=plan.gateway.drain_s,
                on_change=change,
                on_wish=scaler.wish,
            ) as mesh:
                await wait_for_pair(mesh.ready_url, PAIR_WITHIN_S)
                _say_ready(view, mesh, has_keys=plan.gateway.has_keys)
                await asyncio.Event().wait()

        interrupts.on_first = lambda: view.say(
            "stopping when what is in hand is finished; Ctrl-C again: at once"
        )
        code = interrupts.run(main)
        is_clean = not any(service.num_restarts for service in services)
    if is_clean and log is not None and log != config.log:
        log.unlink()
    # To be told to end, by systemd or a container, is the regular end.
    return EXIT_OK if code == 128 + signal.SIGTERM else code


spread(up, _UpFlags)


def plan_mesh(config: UpConfig, environment: Mapping[str, str]) -> MeshPlan:
    """Return the processes of this mesh, after all checks that need no process.

    environment: variables, and the file that PDMESH_CONFIG names, for what the flags leave open.
    Raises InvalidRequest: a flag, a variable or the file is wrong. ModelError: there is no such
    model. MeshError: a port is taken, or a package is missing.
    """
    _require_numbers(config)
    # Of decode it says whether, and of ours how many, which ``config`` has.
    environment = {name: it for name, it in environment.items() if name != "PDMESH_COLOCATED"}
    shape, gpus = _shape(config, environment)
    if shape.workers and config.policy is None:
        # The one policy of ours that moves workers between the roles.
        config = dataclasses.replace(config, policy="splitwise")
    gateway = _gateway(config, environment)
    if gateway.tls_client_ca is not None and not gateway.metrics_address:
        # We have no client's certificate, and must hear when it is ready.
        gateway = dataclasses.replace(gateway, metrics_address="127.0.0.1:0")
    here = "127.0.0.1"
    places: dict[str, Any] = {"host": here, "advertise": here, "port": 0, "metrics_port": 0}
    places |= {"movable": True} if shape.workers else {}
    prefill = _with(PrefillConfig, config, environment, gateway=here, **places)
    decode = _with(
        DecodeConfig, config, environment, gateway=here, colocated=shape.colocated > 0, **places
    )
    for worker in (prefill, decode):
        require_worker_modules(worker)
    require_door_files(gateway)
    require_free_ports(gateway, http_flag="--port")
    folder = resolve_model(gateway.model)  # a hub name is downloaded here, once
    if "torch" in (prefill.engine, decode.engine):
        read_model_config(ModelFolder(folder))  # before the gateway finds fault with its tokenizer
    num_prompt = shape.prefill or shape.workers // 2
    num_answer = shape.decode or shape.colocated or shape.workers - num_prompt
    workers = [*[prefill] * num_prompt, *[decode] * num_answer]
    most = _most_workers(config, gateway, len(workers))
    gateway = dataclasses.replace(gateway, max_workers=most if gateway.planner == "act" else 0)
    devices = [w.device for w in workers] + [prefill.device] * (most - len(workers))
    parts = shares(devices, num_cores=num_cores(), gpus=gpus)
    sized = [_sized(worker, part) for worker, part in zip(workers, parts, strict=False)]
    services = plan_services(
        gateway,
        [worker for worker in sized if isinstance(worker, PrefillConfig)],
        [worker for worker in sized if isinstance(worker, DecodeConfig)],
    )
    taken = list(zip(services[1:], parts, strict=False))
    for service, part in taken:
        if part.gpus:
            service.env["CUDA_VISIBLE_DEVICES"] = part.gpus

    def new_worker(role: str) -> Service:
        here = {id(service) for service in services}
        # Whose process has ended for good is in ``services`` no longer, and its share is free.
        taken[:] = [(service, part) for service, part in taken if id(service) in here]
        free = Counter(parts)  # workers that share a device have equal parts
        free.subtract(part for _, part in taken)
        part = next((part for part in parts if free[part] > 0), parts[-1])
        made = one_more(services, _sized(prefill if role == "prefill" else decode, part))
        if part.gpus:
            made.env["CUDA_VISIBLE_DEVICES"] = part.gpus
        taken.append((made, part))
        return made

    return MeshPlan(services, gateway, shape.why, "" if gpus else _crowding(sized), new_worker)


def _crowding(workers: Sequence[PrefillConfig | DecodeConfig]) -> str:
    computing = [one for one in workers if one.engine != "fake" and one.device in ("auto", "cpu")]
    threads = sum(one.threads for one in computing)
    if threads <= num_cores():
        return ""
    return (
        f"warning: {threads} compute threads on {granted_cores():g} cores wait for each other, and "
        "steps take longer: fewer --threads or fewer workers"
    )


def _most_workers(config: UpConfig, gateway: GatewayConfig, num_workers: int) -> int:
    """Return for how many workers this machine is divided."""
    require(
        config.max_workers is None or gateway.planner == "act",
        "--max-workers is the most that --planner act may want: give that, too",
    )
    most = gateway.max_workers or num_workers
    require(
        most >= num_workers or gateway.planner != "act",
        f"--max-workers {most} is less than the {num_workers} that it starts with: give at least "
        "as many, or start with fewer (--workers, --prefill, --decode, --colocated)",
    )
    return max(most, num_workers) if gateway.planner == "act" else num_workers


def _require_numbers(config: UpConfig) -> None:
    leasts = {"prefill": 1, "decode": 1, "colocated": 0, "workers": 0, "max_workers": 1}
    for name, least in leasts.items():
        number = getattr(config, name)
        require(
            number is None or least <= number <= MAX_WORKERS,
            f"--{name.replace('_', '-')} must be {least}..{MAX_WORKERS}",
        )
    apart = ("prefill", "decode")
    for name, others in (("workers", apart), ("colocated", (*apart, "workers"))):
        for other in others:
            require(
                not (getattr(config, name) and getattr(config, other)),
                f"--{other} and --{name} are two answers to one question: give one",
            )


def _shape(config: UpConfig, environment: Mapping[str, str]) -> tuple[LocalShape, list[str]]:
    """Return how many workers of which kind, as asked or as fits this machine, and the GPUs that
    they may have."""
    told = [_with(kind, config, environment) for kind in (PrefillConfig, DecodeConfig)]
    has_choice = any(one.engine != "fake" and one.device in ("auto", "cuda") for one in told)
    gpus = find_gpus(environment) if has_choice else []
    if config.colocated:
        shape = LocalShape(colocated=config.colocated)
    elif config.workers:
        shape = LocalShape(workers=config.workers)
    elif config.prefill or config.decode:
        shape = LocalShape(prefill=config.prefill or 1, decode=config.decode or 1)
    else:
        computes = any(one.engine != "fake" for one in told)
        num_gpus = len(gpus) or int(any(one.device.startswith("cuda:") for one in told))
        shape = shape_for(computes=computes, cores=granted_cores(), num_gpus=num_gpus)
    return shape, gpus


def _gateway(config: UpConfig, environment: Mapping[str, str]) -> GatewayConfig:
    """The gRPC port follows the HTTP port unless somebody has set it; the mesh's is any free
    one."""
    settings = read_settings(GatewayConfig, environment)
    host = config.host if config.host is not None else settings["host"].value
    port = config.port if config.port is not None else settings["http_port"].value
    require(0 <= port < 65536, "--port must be a port, 0..65535")
    grpc_port = config.grpc_port
    if grpc_port is None and settings["grpc_port"].origin != "default":
        grpc_port = settings["grpc_port"].value
    if grpc_port is None:
        grpc_port = port + 1 if port else 0
    mesh = settings["mesh_port"]  # our own workers are told which it is
    places = {
        "host": host,
        "http_port": port,
        "grpc_port": grpc_port,
        "mesh_port": 0 if mesh.origin == "default" else mesh.value,
    }
    return _with(GatewayConfig, config, environment, **places)


def _with(
    kind: type[Config], config: UpConfig, environment: Mapping[str, str], **places: Any
) -> Config:
    """Return a service's configuration: of our flags those that were given and it knows, the rest
    from the environment."""
    values = {name: setting.value for name, setting in read_settings(kind, environment).items()}
    for field in dataclasses.fields(config):
        given = getattr(config, field.name)
        if field.name in values and field.name not in _OWN_FIELDS and given is not None:
            values[field.name] = given
    made = kind(**{**values, **places})
    made.check()
    return made


def _sized(worker: PrefillConfig | DecodeConfig, part: Share) -> PrefillConfig | DecodeConfig:
    return dataclasses.replace(
        worker,
        threads=worker.threads or part.threads,
        gpu_memory_share=worker.gpu_memory_share / part.num_sharers,
    )


def _say_ready(view: LineView | LiveView, mesh: LocalMesh, *, has_keys: bool) -> None:
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    key = " -H 'Authorization: Bearer YOUR-KEY'" if has_keys else ""
    url = mesh.http_url
    where = "" if url.endswith(":8000") else f" --url {url}"
    lines: Sequence[str] = (
        "",
        f"ready: {url}/ (a page, in a browser)",
        f"       {url}/v1 (OpenAI's API), {mesh.grpc_target} (gRPC)",
        f"try:   curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        f"-d '{body}'",
        f"or:    pdmesh chat{where}",
        f"       pdmesh top{where}",
        "",
    )
    view.say("\n".join(lines))
