"""Workers on hosts of their own, KV over TCP, and a network between them that drops, loses and
resets: every answer is the one that an undisturbed mesh gives, and nothing is held for anybody
afterwards."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.process.test_everything_at_once import has_pairs
from tests.support.any_request import a_request, ask_all
from tests.support.grammars import needs_library
from tests.support.network import Host, needs_networks, network
from tests.support.process_mesh import process_mesh

pytestmark = [pytest.mark.process, pytest.mark.ucx, needs_library, needs_networks]

ROLES = ("prefill", "prefill", "decode", "decode")
KINDS = ("silence", "deafness", "loss", "reset")
NUM_REQUESTS = 30


async def disturb(gateway: str, hosts: Sequence[Host], chance: random.Random) -> None:
    """Break the links of one host after the other to another one or the gateway, until
    cancelled; each kind in its turn."""
    for kind in itertools.cycle(KINDS):
        host = chance.choice(hosts)
        others = [gateway, *(it.address for it in hosts if it is not host)]
        host.break_link(chance.choice(others), kind)
        await asyncio.sleep(chance.choice([0.3, 1.5, 5.0]))
        host.mend_links()
        await asyncio.sleep(chance.uniform(0.2, 1.0))


@pytest.mark.parametrize(
    "times", [3, pytest.param(60, marks=[pytest.mark.timeout(1800), pytest.mark.nightly])]
)
async def test_a_network_that_fails_changes_no_answer(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten clients ask for each request several times, while link after link is broken."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with network(len(ROLES)) as (here, hosts):
        async with process_mesh("torch") as mesh:
            gateway = await mesh.start_gateway(host="0.0.0.0", mesh_host=here, max_wait_s=60.0)
            mesh.gateway_names = [f"{here}:{gateway.facts['mesh_port']}"]
            url = f"http://127.0.0.1:{gateway.facts['http_port']}"
            with mesh.explained():
                workers = [
                    await mesh.add(
                        role, prefix=host.prefix, host=host.address, allow_unencrypted_kv=True
                    )
                    for role, host in zip(ROLES, hosts, strict=True)
                ]
                for worker, host in zip(workers, hosts, strict=True):
                    worker.metrics_url = f"http://{host.address}:{worker.metrics_port}/metrics"
                await mesh.until(lambda: has_pairs(mesh, gateway))
                due: dict[int, list[Any]] = {}
                await ask_all(url, iter(range(NUM_REQUESTS)), due)
                numbers = [*range(NUM_REQUESTS)] * times
                random.Random(2).shuffle(numbers)
                got: dict[int, list[Any]] = {}
                async with asyncio.TaskGroup() as tasks:
                    disturbing = tasks.create_task(disturb(here, hosts, random.Random(1)))
                    await ask_all(url, iter(numbers), got)
                    disturbing.cancel()
                for host in hosts:
                    host.mend_links()
                for number, (right,) in due.items():
                    assert got[number] == [right] * times, a_request(number)
                await mesh.home([gateway], workers, limit_s=60.0)
