"""What the clients of other people talk to, each test twice: our own doors over a scripted mesh,
and `pdmesh up` with its three processes and the bundled model.

    PDMESH_HTTP=http://127.0.0.1:8000 PDMESH_GRPC=127.0.0.1:8001 pytest tests/interop

takes a mesh that runs somewhere instead of starting one. A test that must decide what the mesh says
runs on the scripted one alone. PDMESH_API_KEY is sent if set.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from services.gateway.front.auth import KeyRing
from services.gateway.grpc.door import Inference
from shared.address import Address
from shared.rpc.tcp import TcpNetwork
from tests.support.client_environments import NoClient, Say, node_client, python_client
from tests.support.command import kept_up
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


_READY = re.compile(r"(http://\S+)/v1 \(OpenAI's API\), (\S+) \(gRPC\)")


@contextmanager
def pdmesh_up(*options: str) -> Generator[tuple[str, str]]:
    """Run `pdmesh up` with these options; gives HTTP URL and gRPC address."""
    # It is not alone: a thread for each core, and memory for each worker, is for who has them.
    small = ("--device", "cpu", "--threads", "1", "--kv-gib", "0.25")
    with kept_up("--port", "0", "--prefill", "1", *small, *options) as up:
        found = _READY.search(up.out)
        assert found is not None, up.out
        yield found[1], found[2]


@pytest.fixture(scope="session")
def running_mesh() -> Iterator[tuple[str, str]]:
    """HTTP URL and gRPC address of `pdmesh up`, or of the mesh that the environment names."""
    url, address = os.environ.get("PDMESH_HTTP"), os.environ.get("PDMESH_GRPC")
    if url and address:
        yield url.rstrip("/"), address
        return
    with pdmesh_up() as addresses:
        yield addresses


@pytest.fixture(scope="session")
def exact_mesh() -> Iterator[str]:
    """HTTP URL of a mesh in float32, in which no batch changes a token or a visible digit of a
    logprob: for tests that compare numbers."""
    with pdmesh_up("--dtype", "float32") as (url, _):
        yield url


@pytest.fixture(params=["scripted", pytest.param("up", marks=pytest.mark.process)])
def mesh_kind(request: pytest.FixtureRequest) -> str:
    """Which of the two meshes a test talks to."""
    return request.param


@pytest.fixture
async def http_target(mesh_kind: str, request: pytest.FixtureRequest) -> AsyncIterator[HttpTarget]:
    """An HTTP gateway."""
    if mesh_kind == "up":
        url, _ = request.getfixturevalue("running_mesh")
        yield HttpTarget(API_KEY, None, url)
        return
    mesh = ScriptedMesh()
    async with http_gateway(mesh) as own_url:
        yield HttpTarget(API_KEY, mesh, own_url)


@pytest.fixture
async def client(http_target: HttpTarget) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's, as its documentation makes it, but for retries."""
    async with AsyncOpenAI(
        base_url=http_target.url + "/v1", api_key=http_target.api_key, max_retries=0
    ) as made:
        yield made


@pytest.fixture
async def model(client: AsyncOpenAI) -> str:
    """The model that is served."""
    return (await client.models.list()).data[0].id


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
async def grpc_target(mesh_kind: str, request: pytest.FixtureRequest) -> AsyncIterator[GrpcTarget]:
    """A gRPC gateway."""
    if mesh_kind == "up":
        _, address = request.getfixturevalue("running_mesh")
        yield GrpcTarget(API_KEY, None, address)
        return
    mesh = ScriptedMesh()
    async with grpc_gateway(mesh) as own_address:
        yield GrpcTarget(API_KEY, mesh, own_address)


Find = Callable[[str], Path]


def _finder(make: Callable[[str, Say], Path], request: pytest.FixtureRequest) -> Find:
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(words: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n[clients] {words}", flush=True)

    def find(name: str) -> Path:
        try:
            return make(name, say)
        except NoClient as failure:
            pytest.fail(str(failure))

    return find


@pytest.fixture(scope="session")
def client_bin(request: pytest.FixtureRequest) -> Find:
    """Gives the ``bin`` folder of a client's own environment, made on first use: minutes for the
    large ones, told to whoever watches."""
    return _finder(python_client, request)


@pytest.fixture(scope="session")
def node_modules(request: pytest.FixtureRequest) -> Find:
    """Gives the ``node_modules`` of a Node client, likewise."""
    return _finder(node_client, request)
