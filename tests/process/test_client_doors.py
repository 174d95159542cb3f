"""The clients' doors of a gateway process: what it refuses to start with, what it takes while it
runs, and that a broken file or a flood disturbs nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hyperframe.frame import PingFrame, PriorityFrame

from services.gateway.front.auth import hash_key
from services.gateway.front.quota import KeyLimits
from shared import wire
from shared.address import Address
from shared.errors import Forbidden, QuotaExceeded, Unauthorized
from shared.rpc.methods import CHANGE_ROLE, LIST_MODELS, TOKENIZE
from shared.rpc.tcp import TcpNetwork
from shared.rpc.tls import GRPC, TlsFiles, client_context
from shared.runtime.service import EXIT_BAD_CONFIG
from tests.protocol.test_rpc_floods import flood
from tests.support.calls import call_unary
from tests.support.certificates import LAST_YEAR, Authority
from tests.support.command import pdmesh, run_pdmesh
from tests.support.process_mesh import ANY_PORT, ROLES, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx]


def settings_of(files: TlsFiles) -> dict[str, Any]:
    """Return a gateway's settings for these files."""
    return {"tls_cert": files.cert, "tls_key": files.key, **ANY_PORT}


def errors_of(process: ServiceProcess) -> list[dict[str, Any]]:
    """Return its log lines of level error."""
    return [json.loads(line) for line in process.log if '"level":"error"' in line]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("expired", "server.crt has expired: renew it"),
        ("missing", "cannot read"),
        ("other key", "is not the key of"),
        ("key file", "keys, line 2: expected name:sha256hex"),
    ],
)
async def test_a_broken_file_keeps_a_gateway_from_starting(
    tmp_path: Path, wrong: str, words: str
) -> None:
    """One line that names the file and says what to do, and the exit code of a wrong
    configuration."""
    authority = Authority(tmp_path)
    files = authority.sign("server", valid=LAST_YEAR if wrong == "expired" else None)
    settings = settings_of(files)
    if wrong == "missing":
        files.key.unlink()
    elif wrong == "other key":
        shutil.copy(authority.sign("other").key, files.key)
    elif wrong == "key file":
        settings["api_keys"] = tmp_path / "keys"
        settings["api_keys"].write_text(f"{hash_key('a', 'k')}\npasted-secret\n")
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start("gateway", **settings)
            assert await gateway.ended() == EXIT_BAD_CONFIG
            (error,) = errors_of(gateway)
            assert words in error["error"]
            assert not any("pasted-secret" in line for line in gateway.log)


class Client:
    """Asks one gateway over both doors, on a connection of its own each time."""

    def __init__(self, gateway: ServiceProcess, authority: Authority) -> None:
        self._ports = gateway.facts
        self._tls = client_context(authority.path)
        self._grpc_tls = client_context(authority.path, alpn=GRPC)

    async def ask(
        self, path: str, key: str, body: Any = None, *, url: str = ""
    ) -> tuple[int, dict[str, str], str]:
        """Return status, headers and text. body: None = GET."""
        where = url or f"https://127.0.0.1:{self._ports['http_port']}"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(
                "GET" if body is None else "POST", where + path, json=body, ssl=self._tls
            ) as answer,
        ):
            return answer.status, dict(answer.headers), await answer.text()

    async def models(self, key: str) -> None:
        """Call ListModels. Raises MeshError."""
        await self._call(LIST_MODELS, wire.ListModelsRequest(), key)

    async def tokenize(self, key: str) -> None:
        """Call Tokenize. Raises MeshError."""
        await self._call(TOKENIZE, wire.TokenizeRequest(text="a"), key)

    async def change_role(self, worker: str, key: str) -> None:
        """Call ChangeRole. Raises MeshError."""
        await self._call(CHANGE_ROLE, wire.ChangeRoleRequest(worker=worker, role="token"), key)

    async def _call(self, method: Any, request: Any, key: str) -> None:
        address = Address("127.0.0.1", self._ports["grpc_port"])
        network = TcpNetwork(client_tls=self._grpc_tls)
        metadata = {"authorization": f"Bearer {key}"}
        async with network.channel(address) as channel:
            await call_unary(channel, method, request, timeout_s=20, metadata=metadata)

    def certificate(self) -> bytes:
        """Return what a new connection is shown; blocks."""
        import socket

        place = ("127.0.0.1", self._ports["http_port"])
        with (
            socket.create_connection(place) as link,
            self._tls.wrap_socket(link, server_hostname="127.0.0.1") as tls,
        ):
            return tls.getpeercert(binary_form=True) or b""


async def test_only_a_key_with_the_right_moves_a_worker(tmp_path: Path) -> None:
    """Of two keys of a running gateway one may change roles, on both doors and by the command; the
    other is told what it lacks, until its line says that it may."""
    keys = tmp_path / "keys"
    ops = hash_key("ops", "k2", may="roles")
    keys.write_text(f"{hash_key('alice', 'k1')}\n{ops}\n")
    authority = Authority(tmp_path)
    async with process_mesh() as mesh:
        with mesh.explained():
            files = authority.sign("server")
            gateway = await mesh.start_gateway(**settings_of(files), api_keys=keys)
            for role in ("prefill", "prefill", "decode"):
                await mesh.add(role, movable=True)
            client = Client(gateway, authority)
            while True:
                view = json.loads((await client.ask("/cluster", "k1"))[2])
                if [it["state"] for it in view["workers"]] == ["usable"] * 3:
                    break
            first, second = [it for it in view["workers"] if it["role"] == "prefill"]
            path = f"/cluster/workers/{first['incarnation']}/role"
            status, _, said = await client.ask(path, "k1", {"role": "token"})
            assert status == 403
            assert "hash-key NAME --may roles" in json.loads(said)["error"]["message"]
            with pytest.raises(Forbidden):
                await client.change_role(first["incarnation"], "k1")
            view = json.loads((await client.ask("/cluster", "k1"))[2])
            assert {it["home"] for it in view["workers"][:2]} == {"prompt"}

            status, _, said = await client.ask(path, "k2", {"role": "token"})
            assert (status, json.loads(said)["home"]) == (200, "token")
            await client.ask(path, "k2", {"role": "prompt"})
            await client.change_role(second["incarnation"], "k2")
            keys.write_text(f"{hash_key('alice', 'k1', may='roles')}\n{ops}\n")
            status, _, said = await client.ask(path, "k1", {"role": "token"})
            assert json.loads(said)["error"]["code"] == "last_of_role"


@contextlib.asynccontextmanager
async def a_gateway(
    tmp_path: Path, **settings: Any
) -> AsyncIterator[tuple[ServiceProcess, Client, Authority]]:
    """A gateway with TLS, and a client that trusts it."""
    authority = Authority(tmp_path)
    async with process_mesh() as mesh:
        with mesh.explained():
            files = authority.sign("server")
            gateway = await mesh.start("gateway", **settings_of(files), **settings)
            await mesh.ready(gateway)
            yield gateway, Client(gateway, authority), authority


async def test_certificates_and_keys_change_while_both_doors_stay_open(tmp_path: Path) -> None:
    """A renewed certificate and a new key count at once; an expired one and a broken line change
    nothing, are one error each, and every client goes on."""
    keys = tmp_path / "keys"
    keys.write_text(hash_key("alice", "k1"))
    async with a_gateway(tmp_path, api_keys=keys) as (gateway, client, authority):
        first = await asyncio.to_thread(client.certificate)
        assert (await client.ask("/v1/models", "k1"))[0] == 200
        assert (await client.ask("/v1/models", ""))[0] == 401
        await client.models("k1")
        with pytest.raises(Unauthorized):
            await client.models("k2")

        authority.sign("server")
        keys.write_text(f"{hash_key('alice', 'k1')}\n{hash_key('bob', 'k2')}\n")
        second = await asyncio.to_thread(client.certificate)
        assert second != first
        await client.models("k2")
        assert errors_of(gateway) == []

        authority.sign("server", valid=LAST_YEAR)
        keys.write_text(f"{hash_key('bob', 'k2')}\npasted-secret\n")
        for key in ("k1", "k2"):
            assert (await client.ask("/v1/models", key))[0] == 200
            await client.models(key)
        assert await asyncio.to_thread(client.certificate) == second
        line, certificate = sorted(errors_of(gateway), key=lambda error: error["param"])
        assert certificate["error"].endswith("server.crt has expired: renew it")
        assert f"{keys}, line 2: expected" in line["error"]
        assert not any("pasted-secret" in said for said in gateway.log)
        with pytest.raises(aiohttp.ClientError):
            await client.ask("/health", "", url=f"http://127.0.0.1:{gateway.facts['http_port']}")
        await gateway.stop()


async def test_metrics_have_a_key_or_a_door_of_their_own(tmp_path: Path) -> None:
    """With one plain key from the environment; the key is in no log line and no answer."""
    async with a_gateway(tmp_path, api_key="k-secret", metrics_address="127.0.0.1:0") as (
        gateway,
        client,
        _,
    ):
        assert (await client.ask("/metrics", ""))[0] == 401
        status, _, text = await client.ask("/metrics", "k-secret")
        assert (status, "pdmesh_gateway_requests_total" in text) == (200, True)
        door = f"http://{gateway.facts['metrics_address']}"
        status, _, text = await client.ask("/metrics", "", url=door)
        assert (status, "pdmesh_gateway_requests_total" in text) == (200, True)
        assert (await client.ask("/v1/models", "k-secret", url=door))[0] == 404
        assert (await client.ask("/health", "", url=door))[0] == 200
        assert not any("k-secret" in line for line in gateway.log)


async def test_a_keys_limits_hold_on_both_doors_together(tmp_path: Path) -> None:
    """429 with Retry-After, RESOURCE_EXHAUSTED with the same error, and other keys go on."""
    keys = tmp_path / "keys"
    few = KeyLimits(requests_per_minute=2)
    keys.write_text(f"{hash_key('alice', 'k1', limits=few)}\n{hash_key('bob', 'k2')}\n")
    async with a_gateway(tmp_path, api_keys=keys) as (_, client, _):
        body = {"prompt": "a"}
        await client.ask("/tokenize", "k1", body)
        with contextlib.suppress(Exception):  # no model is served; it counts all the same
            await client.tokenize("k1")
        status, headers, text = await client.ask("/tokenize", "k1", body)
        assert (status, json.loads(text)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(headers["Retry-After"]) <= 30
        with pytest.raises(QuotaExceeded) as caught:
            await client.tokenize("k1")
        assert caught.value.retry_after_s > 0
        assert (await client.ask("/tokenize", "k2", body))[0] != 429


async def test_what_the_http_door_is_told_reaches_it() -> None:
    """Whose pages may ask, how many answers, and whether a request may bring its template."""
    page = "https://chat.example.org"
    settings = {"cors_origins": page, "max_choices": 2, "trust_templates": True}
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway(**settings)
            for role in ROLES:
                await mesh.add(role)
            await mesh.paired(gateway, 1)
            url = f"http://127.0.0.1:{gateway.facts['http_port']}/v1/chat/completions"
            told: dict[str, Any] = {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 1,
            }
            async with aiohttp.ClientSession(headers={"Origin": page}) as session:
                for fields, status in (
                    ({"n": 2, "chat_template": "{{ messages[0].content }}"}, 200),
                    ({"n": 3}, 400),
                ):
                    async with session.post(url, json=told | fields) as answer:
                        assert answer.status == status, await answer.text()
                        assert answer.headers["Access-Control-Allow-Origin"] == page


async def test_our_commands_speak_tls_with_the_gateway(tmp_path: Path) -> None:
    """With its authority and key; without the authority one line says which flag helps."""
    async with a_gateway(tmp_path, api_key="k1") as (gateway, _, authority):
        url = f"https://127.0.0.1:{gateway.facts['http_port']}"
        access = ("--url", url, "--tls-ca", str(authority.path), "--api-key", "k1")
        for words in (("models",), ("top", "--once")):
            assert await run_pdmesh(*words, *access)
        async with pdmesh("models", "--url", url, "--api-key", "k1") as command:
            assert await command.ended() == 1
        assert "--tls-ca" in command.err
        assert len(command.err.splitlines()) == 1


async def test_floods_of_frames_are_one_line_of_a_gateways_log() -> None:
    """Two kinds, 50,000 frames each, several times: the log has grown by one line, and the gateway
    answers."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway()
            address = Address("127.0.0.1", gateway.facts["grpc_port"])
            num_before = len(gateway.log)
            for frame in (PingFrame(0, opaque_data=b"12345678"), PriorityFrame(1, stream_weight=3)):
                for _ in range(2):
                    await flood(address, frame.serialize() * 50_000)
            async with TcpNetwork().channel(address) as channel:
                await call_unary(channel, LIST_MODELS, wire.ListModelsRequest())
            warnings = [line for line in gateway.log[num_before:] if '"level":"warning"' in line]
            assert len(warnings) == 1
            assert sum(map(len, gateway.log[num_before:])) < 4096
