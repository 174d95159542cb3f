"""The gateway, put together: the one place where its parts meet.

    clients ── HTTP (http/)   ─┐                          ┌─ session to each prefill worker
                               ├─ FrontDoor ── mesh.py ── GatewayMesh ── Membership
    clients ── gRPC (grpc/)   ─┘                          └─ session to each decode worker
    workers ── gRPC, a port of their own ── registry.py: they join here

Nothing here decides: admission, routing and the life of a request are cores.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.gateway.core.routing.peer_table import OwnModel
from services.gateway.core.routing.routing import POLICIES
from services.gateway.front.auth import KeyRing
from services.gateway.front.frontdoor import ClientMetrics, FrontDoor
from services.gateway.front.quota import KeyLimits
from services.gateway.grpc.door import Inference
from services.gateway.http.door import serve_http, serve_metrics
from services.gateway.own_policy import load_policy
from services.gateway.text.text_model import TextModel
from services.gateway.workers.answer_metrics import AnswerMetrics
from services.gateway.workers.generation import GatewayMesh
from services.gateway.workers.membership import Membership
from services.gateway.workers.mesh_metrics import register_mesh_metrics
from services.gateway.workers.planning import Tell
from services.gateway.workers.registry import Registry
from shared.address import Address, parse_address
from shared.config import GatewayConfig
from shared.ids import Incarnation, new_incarnation
from shared.rpc.call_server import CallServer
from shared.rpc.tls import ServerTls, TlsFiles
from shared.runtime.loops import serve_until_stopped
from shared.runtime.platform import Platform
from shared.telemetry.loop_lag import watch_loop_lag
from shared.telemetry.process import register_process_metrics
from shared.telemetry.trace_export import tracing
from shared.tenants import read_tenants, require_keys

Ready = Callable[[Address, Address, Address, Address | None], None]
"""Takes the addresses of the HTTP API, of the gRPC API, where workers join, and of the listener for
scrapes."""

TAIL_S = 2.0
"""Longest wait, once no request runs any more, for the last bytes to reach their clients."""


@dataclass(slots=True, eq=False)
class Gateway:
    """One gateway; ``run`` is its life. Everything else here is for tests.

    text: the tokenizer of the model that the workers serve; it stays the caller's to close.
    defaults: the model's own sampling defaults. own_model: what ``text`` belongs to; workers with
    another one are refused. tell: see ``Planner.run``.
    """

    config: GatewayConfig
    platform: Platform
    text: TextModel
    defaults: Mapping[str, float]
    own_model: OwnModel | None = None
    tell: Tell = lambda _: None
    incarnation: Incarnation = field(init=False)
    mesh: GatewayMesh | None = field(init=False, default=None)
    members: Membership | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.incarnation = new_incarnation(self.platform.random_bytes)

    async def run(self, ready: Ready, stop: asyncio.Event) -> bool:
        """Serve until ``stop`` is set (then drain), or until cancelled (then do not). Returns False
        if the drain limit came first.

        ready: called once, when all doors are open.
        Raises OSError: a port is in use. InvalidRequest: the file of API keys or tenants, one for
        TLS, or a policy of one's own is unusable."""
        config, platform = self.config, self.platform
        load_policy(config.policy)
        async with contextlib.AsyncExitStack() as stack:
            tracer = await stack.enter_async_context(tracing("pdmesh-gateway", self.incarnation))
            mesh_network = platform.mesh_network("gateway", self.incarnation)
            members = self.members = await stack.enter_async_context(
                Membership(
                    mesh_network,
                    POLICIES[config.policy](),
                    self.incarnation,
                    platform.random_bytes,
                    self.own_model,
                    config.index_memory_mib << 20,
                ).running()
            )
            metrics = ClientMetrics()
            answers = AnswerMetrics(metrics.registry)
            keys = KeyRing(
                config.api_keys,
                plain_key=config.api_key,
                limits=KeyLimits(
                    requests_per_minute=config.key_requests_per_minute,
                    concurrent_requests=config.key_concurrent_requests,
                ),
            )
            tenants = read_tenants(config.tenants) if config.tenants is not None else {}
            require_keys(tenants, keys.names, config.tenants)
            mesh = self.mesh = GatewayMesh(members, config, (answers,), tenants)
            loop_lag = register_mesh_metrics(metrics.registry, mesh, members)
            register_process_metrics(metrics.registry, "gateway", self.incarnation)
            front = FrontDoor(
                config,
                mesh=mesh,
                text=self.text,
                random_bytes=platform.random_bytes,
                metrics=metrics,
                keys=keys,
                defaults=self.defaults,
                tracer=tracer,
                salt_key=platform.secret.derived("cache salt") if platform.secret else b"",
            )
            files = TlsFiles.given(config.tls_cert, config.tls_key, config.tls_client_ca)
            tls = None if files is None else ServerTls(files)
            registry = Registry(members, self.incarnation)
            server = await stack.enter_async_context(
                platform.network.serve(
                    Address(config.host, config.grpc_port),
                    [Inference(front).servicer()],
                    tls=tls,
                )
            )
            mesh_server = await stack.enter_async_context(
                mesh_network.serve(Address(config.mesh_host, config.mesh_port), [registry.servicer])
            )
            http = await stack.enter_async_context(
                serve_http(
                    front,
                    Address(config.host, config.http_port),
                    own_port=config.process_port,
                    drain_s=TAIL_S,
                    reuse_port=config.share_http_port,
                    tls=tls,
                    origins=config.origins,
                )
            )
            watched = None
            if config.metrics_address:
                address = parse_address(config.metrics_address, param="metrics_address")
                watched = await stack.enter_async_context(serve_metrics(front, address))
            ready(http, server.address, mesh_server.address, watched)

            planner = mesh.planner
            looks = [] if planner is None else [lambda: planner.run(self.tell)]

            async def say_readiness() -> None:
                while True:
                    changed = members.usability.next
                    server.set_ready(mesh.is_ready)
                    await changed.wait()

            return await serve_until_stopped(
                [say_readiness, lambda: watch_loop_lag(loop_lag.observe), *looks],
                stop=stop,
                drain=lambda: mesh.drain(config.drain_s),
                last_words=lambda: _say_goodbye(registry, mesh_server, server),
            )


async def _say_goodbye(registry: Registry, mesh_server: CallServer, server: CallServer) -> None:
    server.set_ready(False)
    registry.close()
    await mesh_server.drain(TAIL_S)
    await server.drain(TAIL_S)
