"""What the clients of other people talk to: a mesh that runs somewhere, or one of our own doors
over a scripted mesh.

    PDMESH_HTTP=http://127.0.0.1:8000 PDMESH_GRPC=127.0.0.1:8001 pytest tests/interop

runs the same tests against a real mesh (``pdmesh up``). A test that must decide what the mesh says
is skipped then. PDMESH_API_KEY is sent if set.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from shared.rpc.tcp import TcpNetwork

from services.gateway.auth import KeyRing
from services.gateway.ingress import Inference
from shared.rpc.network import Address
from tests.support.scripted_mesh import ScriptedMesh, front_door, http_gateway


@dataclass(frozen=True)
class _Target:
    """mesh: None if a real one answers."""

    api_key: str
    mesh: ScriptedMesh | None

    def scripted(self) -> ScriptedMesh:
        """Return the scripted mesh, or skip the test."""
        if self.mesh is None:
            pytest.skip("needs a scripted mesh")
        return self.mesh


@dataclass(frozen=True)
class HttpTarget(_Target):
    """A gateway's base URL."""

    url: str


@dataclass(frozen=True)
class GrpcTarget(_Target):
    """A gateway's host:port."""

    address: str


API_KEY = os.environ.get("PDMESH_API_KEY", "none")


@pytest.fixture
async def http_target() -> AsyncIterator[HttpTarget]:
    """An HTTP gateway."""
    url = os.environ.get("PDMESH_HTTP")
    if url:
        yield HttpTarget(API_KEY, None, url.rstrip("/"))
        return
    mesh = ScriptedMesh()
    async with http_gateway(mesh) as own_url:
        yield HttpTarget(API_KEY, mesh, own_url)


@asynccontextmanager
async def grpc_gateway(mesh: ScriptedMesh, keys: KeyRing | None = None) -> AsyncGenerator[str]:
    """Serve a scripted mesh over gRPC on a free port; gives host:port."""
    front = front_door(mesh, keys=keys)
    try:
        handlers = [Inference(front).servicer()]
        async with TcpNetwork().serve(Address("127.0.0.1", 0), handlers) as server:
            yield str(server.address)
    finally:
        front.text.close()


@pytest.fixture
async def grpc_target() -> AsyncIterator[GrpcTarget]:
    """A gRPC gateway."""
    address = os.environ.get("PDMESH_GRPC")
    if address:
        yield GrpcTarget(API_KEY, None, address)
        return
    mesh = ScriptedMesh()
    async with grpc_gateway(mesh) as own_address:
        yield GrpcTarget(API_KEY, mesh, own_address)
