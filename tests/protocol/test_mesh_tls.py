"""Services of one mesh over TLS and real sockets: who is let in, what the others are told, and that
renewed certificates are shown by both ends of the next connection."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.gateway.core.worker import Role
from services.gateway.workers.peers import WorkerSession
from shared.address import Address
from shared.config import GatewayConfig
from shared.errors import InvalidRequest, NotOfThisMesh, WorkerLost
from shared.ids import Incarnation
from shared.liveness import LivenessRule
from shared.membership.mesh_network import MeshNetwork
from shared.membership.mesh_tls import ServiceNetwork
from shared.mesh_secret import MeshSecret
from shared.rpc import call_server, heartbeat_stream, tls
from shared.rpc.methods import WORKER_SESSION
from shared.rpc.network import Network
from shared.rpc.stream import open_stream
from shared.rpc.tls import MeshTls, TlsFiles
from tests.protocol.test_gateway_session import Host
from tests.support.certificates import LAST_YEAR, Authority
from tests.support.echo_service import EchoService, reserve
from tests.support.routing import a_worker as a_worker_of


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def tls_of(files: TlsFiles, ca: Path) -> MeshTls:
    """Return the TLS of a service that is configured so."""
    config = GatewayConfig(mesh_tls_cert=files.cert, mesh_tls_key=files.key, mesh_tls_ca=ca)
    config.check()
    made = MeshTls.of(config)
    assert made is not None
    return made


def service(role: str, its_tls: MeshTls | None) -> Network:
    return MeshNetwork(
        ServiceNetwork(its_tls),
        MeshSecret("5a" * 32),
        random.randbytes,
        role=role,
        incarnation=Incarnation(1),
    )


@contextlib.asynccontextmanager
async def a_worker(its_tls: MeshTls | None) -> AsyncIterator[Address]:
    """Serve an echo where a decode worker would listen."""
    here = Address("127.0.0.1", 0)
    async with service("decode", its_tls).serve(here, EchoService().servicers) as server:
        yield server.address


async def ask(address: Address, its_tls: MeshTls | None) -> dict[str, Any]:
    """Dial as a gateway, and call a method; what the listener's certificate is. Raises
    MeshError."""
    async with (
        service("gateway", its_tls).channel(address) as channel,
        open_stream(channel, WORKER_SESSION) as stream,
    ):
        await stream.send(reserve(1))
        assert await stream.receive() is not None
        link = channel._channel.current._transport
        return link.get_extra_info("peercert") or {}


async def test_services_with_certificates_of_one_authority_prove_and_call(
    authority: Authority,
) -> None:
    """Each dials and listens with its own; what name the certificate has does not matter."""
    worker = tls_of(authority.sign("worker", "worker.example"), authority.path)
    async with a_worker(worker) as address:
        shown = await ask(address, tls_of(authority.sign("gateway"), authority.path))
    assert shown["subjectAltName"] == (("DNS", "worker.example"),)


async def test_ends_that_do_not_fit_are_told_where_and_what_to_do(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate of another authority at either end, one that has expired since, and none."""
    others = Authority(tmp_path, "others")
    trusts_both = tmp_path / "both.pem"
    trusts_both.write_bytes(authority.path.read_bytes() + others.path.read_bytes())
    ours = tls_of(authority.sign("ours"), authority.path)
    their_files = others.sign("theirs")
    both, theirs = tls_of(their_files, trusts_both), tls_of(their_files, others.path)
    monkeypatch.setattr(tls, "_require_valid_now", lambda *_: None)  # at its start it was valid
    expired = tls_of(authority.sign("expired", valid=LAST_YEAR), authority.path)
    for listens, dials, kind, words in (
        (ours, both, NotOfThisMesh, "hung up when it saw this process's certificate"),
        (ours, theirs, NotOfThisMesh, "does not trust its certificate .self-signed"),
        (both, ours, NotOfThisMesh, "does not trust its certificate .self-signed"),
        (ours, expired, NotOfThisMesh, "hung up when it saw this process's certificate"),
        (expired, ours, NotOfThisMesh, "does not trust its certificate .certificate has expired"),
        (None, ours, NotOfThisMesh, "there is no TLS with it .WRONG_VERSION_NUMBER"),
        (ours, None, WorkerLost, "hung up without a word; if it has TLS"),
    ):
        async with a_worker(listens) as address:
            with pytest.raises(kind, match=words) as refusal:
                await ask(address, dials)
            assert str(address) in refusal.value.message
            assert "--mesh-tls-cert" in refusal.value.message
            if listens is ours:
                await ask(address, ours)  # which goes on


async def test_a_listener_that_is_gone_is_lost_and_no_stranger(authority: Authority) -> None:
    """What may pass is tried again: nobody listens, or who listens hangs up amid the handshake."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    gateway = tls_of(authority.sign("gateway"), authority.path)
    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = Address(*server.sockets[0].getsockname())
    async with server:
        with pytest.raises(WorkerLost):
            await ask(address, gateway)
    with pytest.raises(WorkerLost, match="cannot be reached"):
        await ask(address, gateway)


async def test_both_ends_of_the_next_connection_show_renewed_certificates(
    authority: Authority, tmp_path: Path
) -> None:
    """Also if their authority is another one; a broken renewal changes nothing and is one line,
    however many connections follow."""
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.path.read_bytes())
    worker, gateway = (tls_of(authority.sign(name), trusted) for name in ("worker", "gateway"))
    async with a_worker(worker) as address:
        first = await ask(address, gateway)
        authority.sign("worker")
        second = await ask(address, gateway)
        assert second["serialNumber"] != first["serialNumber"]
        # Old certificates fit no new authority: both ends must have taken theirs anew.
        successor = Authority(tmp_path, "successor")
        for name in ("worker", "gateway"):
            successor.sign(name)
        trusted.write_bytes(successor.path.read_bytes())
        third = await ask(address, gateway)
        assert third["serialNumber"] != second["serialNumber"]
        successor.sign("gateway", valid=LAST_YEAR)
        with capture_logs() as lines:
            for _ in range(3):
                assert await ask(address, gateway) == third
        (line,) = (line for line in lines if line["log_level"] == "error")
        assert line["event"] == "the old certificate stays in use"
        assert "--mesh-tls-cert" in line["error"]
        assert "gateway.crt has expired: renew it" in line["error"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mesh_tls_cert": None}, "--mesh-tls-cert is missing: .*go together"),
        ({"mesh_tls_key": None}, "--mesh-tls-key is missing: .*go together"),
        ({"mesh_tls_ca": None}, "--mesh-tls-ca is missing: .*go together"),
        ({"mesh_tls_ca": Path("/no/ca")}, "--mesh-tls-ca: cannot read /no/ca"),
        ({"mesh_tls_key": Path("/no/key")}, "--mesh-tls-key: cannot read /no/key"),
        ({"mesh_tls_ca": "others"}, "--mesh-tls-cert: .* --mesh-tls-ca must name its authority"),
    ],
)
def test_what_is_wrong_with_the_files_is_a_sentence(
    authority: Authority, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """At a start, with the flag and what to do."""
    files = authority.sign("service")
    config = GatewayConfig(
        mesh_tls_cert=files.cert, mesh_tls_key=files.key, mesh_tls_ca=authority.path
    )
    if change == {"mesh_tls_ca": "others"}:
        change = {"mesh_tls_ca": Authority(tmp_path, "others").path}

    def start() -> None:
        changed = replace(config, **change)
        changed.check()
        MeshTls.of(changed)

    with pytest.raises(InvalidRequest, match=words):
        start()


def test_a_certificate_must_serve_both_ends(tmp_path: Path) -> None:
    """One that is for servers alone is refused at a start, not by whoever is dialled."""
    cert, key = tmp_path / "a.crt", tmp_path / "a.key"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=a -addext"
    wanted = ["extendedKeyUsage=serverAuth", "-out", cert, "-keyout", key]
    subprocess.run([*command.split(), *wanted], capture_output=True, check=True)
    with pytest.raises(InvalidRequest, match=r"--mesh-tls-cert: .*a\.crt is refused .*purpose"):
        tls_of(TlsFiles(cert=cert, key=key), cert)


async def test_a_connection_without_a_proof_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else strangers could take all that a door has; who has proven keeps it."""
    monkeypatch.setattr(call_server, "KNOWN_WITHIN_S", 0.2)
    async with (
        a_worker(None) as address,
        service("gateway", None).channel(address) as channel,
        open_stream(channel, WORKER_SESSION) as known,
    ):
        reader, writer = await asyncio.open_connection(address.host, address.port)
        async with asyncio.timeout(10):
            await reader.read()  # until it is closed
        writer.close()
        await known.send(reserve(1))
        assert await known.receive() is not None


async def test_a_worker_that_fell_silent_is_dialled_again_at_once(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS a connection's end waits for the other end's word, which does not come."""
    monkeypatch.setattr(heartbeat_stream, "IDLE", LivenessRule())  # as if somebody waited for it
    worker, gateway = (tls_of(authority.sign(it), authority.path) for it in ("worker", "gateway"))
    host, here = Host(LivenessRule(dead_after_s=30.0)), Address("127.0.0.1", 0)
    links: list[asyncio.StreamWriter] = []
    silent: set[asyncio.StreamWriter] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if writer not in silent:
                    writer.write(data)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to = server.address
        there_reader, there_writer = await asyncio.open_connection(to.host, to.port)
        links.extend((writer, there_writer))
        async with asyncio.TaskGroup() as both:
            both.create_task(pass_on(reader, there_writer))
            both.create_task(pass_on(there_reader, writer))

    async with (
        asyncio.timeout(20),
        service("decode", worker).serve(here, [host.servicer]) as server,
        await asyncio.start_server(relay, "127.0.0.1", 0) as between,
        asyncio.TaskGroup() as tasks,
    ):
        port = between.sockets[0].getsockname()[1]
        peer = a_worker_of(Role.DECODE, int(host.incarnation), host="127.0.0.1", port=port)
        network = service("gateway", gateway)
        session = WorkerSession(peer, network, Incarnation(7), lambda: None)
        running = tasks.create_task(session.run())
        await host.until(lambda: host.sessions)
        silent.update(links)
        began_at = asyncio.get_running_loop().time()
        await host.until(lambda: len(host.sessions) >= 2)
        took_s = asyncio.get_running_loop().time() - began_at
        running.cancel()
        await asyncio.wait([running])
        for link in links:
            link.transport.abort()
            with contextlib.suppress(ConnectionError):
                await link.wait_closed()
    assert took_s < 5
