"""Flags from the records of ``shared/config.py``: names, defaults and help texts stand there and
nowhere else. A group of flags is the record that declares them."""

from __future__ import annotations

import ast
import errno
import functools
import inspect
import itertools
import socket
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec, TypeVar, get_args, get_type_hints

from cyclopts import Group, Parameter, Token

from services.cli.quantities import size
from services.gateway.front.auth import read_keys
from services.gateway.front.quota import KeyLimits
from services.gateway.own_policy import load_policy
from shared import config
from shared.address import parse_address
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig, ServiceConfig, WorkerConfig
from shared.engine.vllm.release import release
from shared.engine.vllm.settings import read_arguments, require_effect
from shared.errors import InvalidRequest, MeshError
from shared.listening import of_this_machine
from shared.object_reference import is_reference, load_object
from shared.quantity import unit_of
from shared.rpc.tls import MeshTls, TlsFiles, server_context

P = ParamSpec("P")
R = TypeVar("R")

GROUPS: Final = {
    GatewayConfig: Group("Gateway", sort_key=1),
    PrefillConfig: Group("Prefill", sort_key=2),
    DecodeConfig: Group("Decode", sort_key=3),
    WorkerConfig: Group("Worker", sort_key=4),
    ServiceConfig: Group("Every service", sort_key=5),
}

_WORKER_MODULES: Final = ("numpy", "ucxx", "xxhash")
_TORCH_MODULES: Final = ("torch", "safetensors")


class CannotRun(MeshError):
    """This machine or this installation lacks something; the message says what to do."""

    type = "cannot_run"


def config_flags(command: Callable[P, R]) -> Callable[P, R]:
    """Make the parameter ``config`` of a command, a service's record, into one flag a field."""
    kind = get_type_hints(command)["config"]
    spread(command, _grouped(kind))
    return command


def spread(command: Callable[..., Any], kind: type) -> None:
    """Make the parameter ``config`` of a command into one flag for each field of a record."""
    hints = get_type_hints(command, include_extras=True)
    command.__annotations__ = {**hints, "config": Annotated[kind, Parameter(name="*")]}
    # Where pydantic is imported, cyclopts checks that a default is of its type.
    command.__kwdefaults__ = {**(command.__kwdefaults__ or {}), "config": kind()}


def _grouped(kind: type[ServiceConfig]) -> type[ServiceConfig]:
    """Return the record with each field's group in its annotation."""
    hints = get_type_hints(kind, include_extras=True)
    for declared_by, group in GROUPS.items():
        if declared_by in kind.__mro__:
            for name in inspect.get_annotations(declared_by):
                said = Parameter(group=group, converter=flag_converter(name, hints[name]))
                hints[name] = Annotated[hints[name], said]
    parts = {"__annotations__": hints, "__doc__": kind.__doc__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), parts)


def field_texts(kind: type[ServiceConfig]) -> dict[str, str]:
    """Return what stands below the fields of a record, its ancestors' included."""
    return {
        name: text
        for record in reversed(kind.__mro__)
        for name, text in _texts_of_records().get(record.__name__, {}).items()
    }


@functools.cache
def _texts_of_records() -> dict[str, dict[str, str]]:
    """By record and field."""
    return {
        record.name: {
            ast.unparse(field.target): ast.literal_eval(text.value)
            for field, text in itertools.pairwise(record.body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
        for record in ast.parse(inspect.getsource(config)).body
        if isinstance(record, ast.ClassDef)
    }


def flag_converter(name: str, hint: Any) -> Callable[[Any, Sequence[Token]], Any] | None:
    """Return what reads the flag of a setting of that type, None = what reads any of that type."""
    if Path in (hint, *get_args(hint)):
        return _read_path
    return _read_size if unit_of(name) == "B" else None


def _read_path(_: Any, tokens: Sequence[Token]) -> Path | None:
    """An empty one is none, as an empty variable is: a path of no letters is the current folder."""
    return Path(tokens[0].value) if tokens[0].value.strip() else None


def _read_size(_: Any, tokens: Sequence[Token]) -> int:
    return size(tokens[0].keyword or "a size", tokens[0].value)


def require_free_port(host: str, port: int, flag: str, *, host_flag: str = "--host") -> None:
    """Raise CannotRun, naming the flag that helps, if no address of ``host`` is this machine's, or
    we cannot listen on this port of one."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CannotRun(
            f"cannot listen on {host}, which cannot be looked up ({error.strerror}): give an "
            f"address of this machine with {host_flag}"
        ) from None
    for family, kind, _, _, address in of_this_machine(found):
        try:
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:  # which takes IPv4's port, too, unless told not to
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            remedies = {
                errno.EADDRINUSE: f"choose another with {flag}, or end what holds it",
                errno.EACCES: f"choose one above 1023 with {flag}",
            }
            raise CannotRun(
                f"cannot listen on {address[0]} port {port} ({str(error.strerror).lower()}): "
                + remedies.get(
                    error.errno or 0, f"give another address of this machine with {host_flag}"
                )
            ) from None


def require_free_ports(gateway: GatewayConfig, *, http_flag: str = "--http-port") -> None:
    """Raise CannotRun, naming the flag that helps, if a port of a gateway's doors is taken."""
    if not gateway.share_http_port:
        require_free_port(gateway.host, gateway.http_port, http_flag)
    metrics = parse_address(gateway.metrics_address or "127.0.0.1:0", param="metrics_address")
    for host, first, flag, host_flag in (
        (gateway.host, gateway.grpc_port, "--grpc-port", "--host"),
        (gateway.mesh_host, gateway.mesh_port, "--mesh-port", "--mesh-host"),
        (gateway.host, gateway.process_port, "--process-port", "--host"),
        (metrics.host, metrics.port, "--metrics-address", "--metrics-address"),
    ):
        for port in range(first, first + (gateway.gateway_processes if first else 1)):
            require_free_port(host, port, flag, host_flag=host_flag)


def require_door_files(config: GatewayConfig) -> None:
    """Raise InvalidRequest if a file of keys or for TLS, or a policy of one's own, is unusable."""
    MeshTls.of(config)
    load_policy(config.policy)
    if config.api_keys is not None:
        read_keys(config.api_keys, KeyLimits())
    files = TlsFiles.given(config.tls_cert, config.tls_key, config.tls_client_ca)
    if files is not None:
        server_context(files)


def require_worker_modules(config: WorkerConfig) -> None:
    """Raise CannotRun, with the command that helps, if this is an installation for gateways, and
    InvalidRequest for settings that no worker on vLLM would take."""
    needs_torch = config.engine in ("torch", "vllm")
    wanted = (*_TORCH_MODULES, *_WORKER_MODULES) if needs_torch else _WORKER_MODULES
    missing = [module for module in wanted if find_spec(module) is None]
    if is_reference(config.engine):
        load_object(config.engine, "--engine")
    if config.engine == "vllm":
        require_effect(config)
        read_arguments(config.vllm_args)
        release()
    if missing:
        first = "torch first (pytorch.org), then " if "torch" in missing else ""
        raise CannotRun(
            f"workers need {', '.join(missing)}: install {first}pip install 'pdmesh[worker]'"
        )


def require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)
