"""``pdmesh gateway``, ``prefill``, ``decode``: one service as this process, for meshes of several
hosts.

The gateway's machine has neither torch nor ucxx, so each command imports its service when it runs.
"""

from __future__ import annotations

import os

from services.cli.flags import (
    config_flags,
    require_door_files,
    require_free_port,
    require_free_ports,
    require_worker_modules,
)
from services.cli.sources import ConfigFlag
from services.decode.role import decode_launch
from services.prefill.role import prefill_launch
from shared.config import DecodeConfig, GatewayConfig, PrefillConfig, ServiceConfig, WorkerConfig
from shared.log import configure_logs
from shared.mesh_secret import mesh_secret
from shared.rpc.tls import MeshTls
from shared.settings import role_of
from shared.worker.launch import LaunchProfile


@config_flags
def gateway(*, config: GatewayConfig = GatewayConfig(), file: ConfigFlag = None) -> int:  # noqa: B008  (frozen)
    """Run one gateway: OpenAI's and Anthropic's APIs and gRPC, and the registry for workers.

    It needs the model's folder for the tokenizer, not for the weights. SIGTERM and Ctrl-C drain.
    """
    config.check()
    require_door_files(config)
    require_free_ports(config)
    mesh_secret(config, os.environ)
    _configure_logs(config)
    from services.gateway.process import run_gateway

    return run_gateway(config)


@config_flags
def prefill(*, config: PrefillConfig = PrefillConfig(), file: ConfigFlag = None) -> int:  # noqa: B008
    """Run one prefill worker: it computes prompts and pushes their KV to decode workers.

    It joins the gateway by itself, and again after the gateway's restart. SIGTERM and Ctrl-C drain.
    """
    return _run_worker(config, prefill_launch(config))


@config_flags
def decode(*, config: DecodeConfig = DecodeConfig(), file: ConfigFlag = None) -> int:  # noqa: B008
    """Run one decode worker: it takes KV over from prefill workers and generates.

    It joins the gateway by itself, and again after the gateway's restart. SIGTERM and Ctrl-C drain.
    """
    return _run_worker(config, decode_launch(config))


def _run_worker(config: WorkerConfig, launch: LaunchProfile) -> int:
    config.check()
    # For what they raise: a secret or a file that is wrong is told before a service is loaded.
    mesh_secret(config, os.environ)
    MeshTls.of(config)
    require_worker_modules(config)
    require_free_port(config.host, config.port, "--port")
    require_free_port(config.host, config.metrics_port, "--metrics-port")
    _configure_logs(config)
    from shared.worker.process import run_worker

    return run_worker(config, launch)


def _configure_logs(config: ServiceConfig) -> None:
    configure_logs(service=role_of(type(config)), level=config.log_level, form=config.log_format)
