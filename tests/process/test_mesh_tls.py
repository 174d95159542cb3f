"""Real processes whose mesh has TLS: they answer, go on with renewed certificates, and whoever has
not the right one is told so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.address import Address
from shared.errors import WorkerLost
from shared.membership.mesh_tls import ServiceNetwork
from shared.rpc.methods import MESH_PROVE
from shared.rpc.stream import open_stream
from shared.runtime.service import EXIT_BAD_CONFIG, EXIT_FAILED
from tests.support.certificates import LAST_YEAR, Authority
from tests.support.process_mesh import ROLES, ProcessMesh, a_prompt, fake_ids, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx]


async def require_answers(mesh: ProcessMesh, gateway: ServiceProcess) -> None:
    """The mesh of one pair answers exactly."""
    await mesh.paired(gateway, 1)
    ids, _ = await mesh.ask_grpc(gateway, a_prompt(60), 9)
    assert ids == fake_ids(a_prompt(60), 9)


async def test_a_mesh_with_tls_answers_renews_and_refuses(tmp_path: Path) -> None:
    """Every door of the mesh is TLS. Running processes take certificates of a new authority for the
    worker that joins next. An expired and a foreign certificate end a worker with one sentence
    each, and the mesh goes on."""
    authority, others = Authority(tmp_path), Authority(tmp_path, "others")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(authority.path.read_bytes())

    def settings(name: str, ca: Path = trusted) -> dict[str, Path]:
        files = {"cert": tmp_path / f"{name}.crt", "key": tmp_path / f"{name}.key", "ca": ca}
        return {f"mesh_tls_{kind}": path for kind, path in files.items()}

    for name in ("gateway", *ROLES):
        authority.sign(name, f"{name}.example")
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await mesh.start_gateway(**settings("gateway"))
            prefill, decode = [await mesh.add(role, **settings(role)) for role in ROLES]
            await require_answers(mesh, gateway)
            for process, port in (
                (gateway, "mesh_port"),
                (prefill, "grpc_port"),
                (decode, "grpc_port"),
            ):
                address = Address("127.0.0.1", process.facts[port])
                with pytest.raises(WorkerLost, match="if it has TLS"):
                    async with (
                        ServiceNetwork(None).channel(address) as channel,
                        open_stream(channel, MESH_PROVE) as stream,
                    ):
                        await stream.receive()

            successor = Authority(tmp_path, "successor")
            for name in ("gateway", *ROLES):
                successor.sign(name, f"{name}.example")
            trusted.write_bytes(successor.path.read_bytes())
            await decode.end_at_once()
            await mesh.usable(gateway, 1)
            await mesh.add("decode", **settings("decode"))
            await require_answers(mesh, gateway)

            successor.sign("expired", valid=LAST_YEAR)
            others.sign("foreign")
            both = tmp_path / "both.pem"
            both.write_bytes(successor.path.read_bytes() + others.path.read_bytes())
            for name, ca, code, words in (
                ("expired", trusted, EXIT_BAD_CONFIG, "expired.crt has expired: renew it"),
                ("foreign", both, EXIT_FAILED, "hung up when it saw this process's certificate"),
            ):
                refused = await mesh.start("prefill", **settings(name, ca))
                assert await refused.ended() == code
                (line,) = [line for line in refused.log if '"level":"error"' in line]
                assert words in json.loads(line)["error"]
            await require_answers(mesh, gateway)
