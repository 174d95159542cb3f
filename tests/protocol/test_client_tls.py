"""Both of the clients' doors over TLS and real sockets, before a scripted mesh: with our own
clients and with grpcio's, which wants ALPN."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from services.cli.client import NO_ACCESS, Access, CannotRun, RunningGateway
from services.cli.generate import Answer, stream_answer
from services.gateway.grpc.door import Inference
from shared import wire
from shared.address import Address
from shared.errors import WorkerLost
from shared.rpc.methods import LIST_MODELS
from shared.rpc.tcp import TcpNetwork
from shared.rpc.tls import GRPC, ServerTls, TlsFiles, client_context
from tests.support.calls import call_unary
from tests.support.certificates import Authority
from tests.support.scripted_mesh import MODEL, ScriptedMesh, front_door, http_gateway, saying

ALERT_BYTES = 7
"""All that TLS says before it hangs up."""

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def grpc_gateway(files: TlsFiles) -> AsyncIterator[Address]:
    """Serve a scripted mesh over gRPC and TLS."""
    front = front_door(ScriptedMesh())
    here = Address("127.0.0.1", 0)
    async with TcpNetwork().serve(
        here, [Inference(front).servicer()], tls=ServerTls(files)
    ) as server:
        yield server.address
    front.text.close()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


async def listed(url: str, access: Access) -> Any:
    """What a gateway serves."""
    return await RunningGateway(url=url, access=access).ask("/v1/models")


async def said(url: str, access: Access, answer: Answer) -> str:
    """Stream one answer to its end."""
    await stream_answer(RunningGateway(url=url, access=access), HI, answer)
    return answer.text


async def test_an_answer_streams_over_tls(authority: Authority) -> None:
    """Text, usage and end as without, for a client that knows the authority."""
    text = "the cat sat on the mat " * 30
    tls = ServerTls(authority.sign("server"))
    async with http_gateway(ScriptedMesh(saying(text)), tls=tls) as url:
        answer = Answer()
        got = await said(url, Access(tls_ca=authority.path), answer)
    assert got.strip() == text.strip()
    assert answer.finish_reason == "stop"
    assert answer.usage["completion_tokens"] > 0


async def test_who_sends_a_head_that_is_too_large_can_read_so(authority: Authority) -> None:
    """Though it looks for an answer only when all is sent, as most clients do."""
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nX: %b\r\n\r\n" % (b"y" * 4_000_000)
    async with http_gateway(ScriptedMesh(), tls=ServerTls(authority.sign("server"))) as url:
        host, port = url.removeprefix("https://").split(":")
        trusts = ssl.create_default_context(cafile=authority.path)

        def ask() -> bytes:
            with (
                socket.create_connection((host, int(port))) as plain,
                trusts.wrap_socket(plain, server_hostname=host) as client,
            ):
                client.sendall(head)
                return client.recv(1 << 16)

        answer = await asyncio.to_thread(ask)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"bad_http" in answer


@pytest.mark.parametrize(
    ("access", "change", "words"),
    [
        (lambda _: NO_ACCESS, lambda url: url, "not trusted .*--tls-ca"),
        (lambda ca: Access(tls_ca=ca), lambda url: url.replace("127.0.0.1", "localhost"),
         "not trusted .*[Hh]ostname mismatch"),
        (lambda _: NO_ACCESS, lambda url: url.replace("https", "http"), "is it https:"),
    ],
    ids=["stranger", "another name", "no TLS"],
)  # fmt: skip
async def test_a_client_that_does_not_fit_is_told_what_to_do(
    authority: Authority,
    access: Callable[[Path], Access],
    change: Callable[[str], str],
    words: str,
) -> None:
    """An authority nobody named, another host's certificate, and plain HTTP."""
    async with http_gateway(ScriptedMesh(), tls=ServerTls(authority.sign("server"))) as url:
        with pytest.raises(CannotRun, match=words):
            await listed(change(url), access(authority.path))


async def test_with_a_client_authority_both_doors_want_a_certificate(
    authority: Authority, tmp_path: Path
) -> None:
    """A client with one of this authority is served, one without or of another is not."""
    files = authority.sign("server", client_ca=authority.path)
    mine, theirs = authority.sign("mine"), Authority(tmp_path, "others").sign("theirs")
    async with http_gateway(ScriptedMesh(), tls=ServerTls(files)) as url:
        known = Access(tls_ca=authority.path, tls_client_cert=mine.cert, tls_client_key=mine.key)
        assert (await listed(url, known))["data"][0]["id"] == MODEL.name
        with pytest.raises(CannotRun, match="--tls-client-cert"):
            await listed(url, Access(tls_ca=authority.path))
        stranger = Access(
            tls_ca=authority.path, tls_client_cert=theirs.cert, tls_client_key=theirs.key
        )
        with pytest.raises(CannotRun):
            await listed(url, stranger)
    async with grpc_gateway(files) as address:
        right = client_context(authority.path, mine.cert, mine.key, alpn=GRPC)
        async with TcpNetwork(client_tls=right).channel(address) as channel:
            reply = await call_unary(channel, LIST_MODELS, wire.ListModelsRequest())
        assert reply.models[0].name == MODEL.name
        for wrong in (None, client_context(authority.path, alpn=GRPC)):
            async with TcpNetwork(client_tls=wrong).channel(address) as channel:
                with pytest.raises(WorkerLost):
                    await call_unary(channel, LIST_MODELS, wire.ListModelsRequest(), timeout_s=5)


async def test_grpcio_speaks_to_us_over_tls(authority: Authority) -> None:
    """Its ALPN is answered, without which it refuses a server."""
    async with grpc_gateway(authority.sign("server", "localhost")) as address:
        credentials = grpc.ssl_channel_credentials(authority.path.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{address.port}", credentials) as channel:
            call = channel.unary_unary(LIST_MODELS.path)
            reply = wire.ListModelsResponse.parse(await call(b"", timeout=10))
    assert reply.models[0].name == MODEL.name


async def test_half_a_handshake_is_no_log_line_and_stops_nobody(
    authority: Authority, capfd: pytest.CaptureFixture[str]
) -> None:
    """Strangers that speak plain HTTP, garbage or nothing to a TLS port cost nobody else
    anything."""
    async with http_gateway(ScriptedMesh(), tls=ServerTls(authority.sign("server"))) as url:
        host, port = url.removeprefix("https://").split(":")
        silent = await asyncio.open_connection(host, int(port))
        for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 8):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            assert len(await reader.read()) <= ALERT_BYTES
            writer.close()
        context = client_context(authority.path)
        async with (
            aiohttp.ClientSession() as session,
            session.get(url + "/health", ssl=context) as response,
        ):
            assert response.status == 200
        silent[1].close()
    assert "Traceback" not in capfd.readouterr().err
