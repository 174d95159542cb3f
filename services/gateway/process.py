"""The gateway as a process: platform, signals, exit code."""

from __future__ import annotations

from services.gateway.app import serve_gateway
from shared.config import GatewayConfig
from shared.rpc.network import Address
from shared.runtime.platform import real_platform
from shared.runtime.service import Process, run_service


def run_gateway(config: GatewayConfig) -> int:
    """Run one gateway as this process until a signal, and return the exit code (``service.py``).

    Logs must be configured. Whatever keeps it from starting or ends it is one line on stderr.
    """

    async def main(process: Process) -> None:
        def ready(http: Address, grpc: Address) -> None:
            process.ready(http_port=http.port, grpc_port=grpc.port)

        await serve_gateway(config, real_platform(), ready, process.stop)

    return run_service("gateway", main, drain_s=config.drain_s)
