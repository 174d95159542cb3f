"""What one API key may take: the bucket and the count alone, then through both doors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from services.gateway.front.auth import KeyRing, hash_key
from services.gateway.front.quota import KeyLimits, Quota
from services.gateway.grpc.door import Inference
from services.gateway.http.door import serve_metrics
from shared import wire
from shared.address import Address
from shared.errors import InvalidRequest, QuotaExceeded
from tests.support.http_client import gateway
from tests.support.scripted_mesh import ScriptedMesh, front_door, saying

ALICE = {"Authorization": "Bearer a"}
BOB = {"Authorization": "Bearer b"}


def ring(tmp_path: Path, **limits: int) -> KeyRing:
    """Alice has these limits; Bob has none."""
    path = tmp_path / "keys"
    path.write_text(f"{hash_key('alice', 'a', limits=KeyLimits(**limits))}\n{hash_key('bob', 'b')}")
    return KeyRing(path)


def test_a_minutes_worth_may_come_at_once_and_comes_back_evenly() -> None:
    """A token bucket: 60 a minute is 60 at once, then one a second; a refusal says when."""
    quota = Quota(KeyLimits(requests_per_minute=60))
    for _ in range(60):
        quota.take(1000.0)
    with pytest.raises(QuotaExceeded) as caught:
        quota.take(1000.25)
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.retry_after_s == pytest.approx(0.75)
    quota.take(1001.0)
    with pytest.raises(QuotaExceeded):
        quota.take(1001.5)
    for _ in range(60):
        quota.take(2000.0)
    with pytest.raises(QuotaExceeded):
        quota.take(2000.0)


def test_what_runs_at_once_is_bounded_until_it_is_released() -> None:
    """A refusal spends nothing; a hold gives back all that it took, once."""
    quota = Quota(KeyLimits(requests_per_minute=3, concurrent_requests=2))
    first = quota.take(0.0, 2)
    with pytest.raises(QuotaExceeded) as caught:
        quota.take(0.0)
    assert caught.value.code == "too_many_concurrent_requests"
    assert caught.value.retry_after_s > 0
    first.release()
    first.release()
    assert quota.num_running == 0
    quota.take(0.0)


def test_more_than_there_ever_is_is_the_requests_fault() -> None:
    """No waiting would help, so it is no quota error."""
    for limits in (KeyLimits(requests_per_minute=3), KeyLimits(concurrent_requests=3)):
        with pytest.raises(InvalidRequest, match="may ask for 3 answers"):
            Quota(limits).take(0.0, 4)


async def test_a_key_over_its_rate_gets_429_and_others_are_served(tmp_path: Path) -> None:
    """OpenAI's shape with Retry-After; looking at models or metrics costs nothing."""
    async with gateway(ScriptedMesh(), ring(tmp_path, requests_per_minute=2)) as client:
        for _ in range(5):
            status, _, _ = await client.ask("GET", "/v1/models", headers=ALICE)
            assert status == 200
        body = {"prompt": "a", "max_tokens": 1}
        for path in ("/v1/completions", "/tokenize"):
            await client.post(path, body, headers=ALICE)
        status, headers, answer = await client.ask(
            "POST", "/v1/completions", json=body, headers=ALICE
        )
        assert status == 429
        assert 1 <= int(headers["Retry-After"]) <= 30
        assert answer["error"]["type"] == "rate_limit_error"
        assert answer["error"]["code"] == "rate_limit_exceeded"
        await client.post("/v1/completions", body, headers=BOB)


async def test_a_key_has_so_many_requests_in_progress(tmp_path: Path) -> None:
    """Counted until the stream is over, also when its client hangs up; n answers count n times."""
    gate = asyncio.Semaphore(0)
    mesh = ScriptedMesh(saying("the cat", gate=gate))
    async with gateway(mesh, ring(tmp_path, concurrent_requests=2)) as client:
        body = {"prompt": "a", "stream": True}
        status, _, answer = await client.ask(
            "POST", "/v1/completions", json={**body, "n": 3}, headers=ALICE
        )
        assert (status, answer["error"]["param"]) == (400, "n")
        url = client.url + "/v1/completions"
        async with asyncio.TaskGroup() as tasks:

            async def hang_up() -> None:
                async with client.session.post(url, json={**body, "n": 2}, headers=ALICE) as answer:
                    await answer.read()

            hanging = tasks.create_task(hang_up())
            await mesh.wait_running(2)
            status, _, answer = await client.ask("POST", "/tokenize", json=body, headers=ALICE)
            assert status == 429
            assert answer["error"]["code"] == "too_many_concurrent_requests"
            hanging.cancel()
        await mesh.wait_running(0)
        await client.post("/tokenize", body, headers=ALICE)


class _Call:
    """A gRPC call's stream as far as Tokenize looks at it."""

    metadata = {"authorization": "Bearer a"}  # noqa: RUF012
    deadline_at = None

    def set_trailer(self, key: str, value: str) -> None:
        """Nobody reads them."""


async def test_the_grpc_door_has_the_same_limits(tmp_path: Path) -> None:
    """ListModels costs nothing; the error's status is RESOURCE_EXHAUSTED (test_rpc_tables.py)."""
    front = front_door(ScriptedMesh(), keys=ring(tmp_path, requests_per_minute=1))
    door, call = Inference(front), cast("Any", _Call())
    await door.list_models(wire.ListModelsRequest(), call)
    await door.tokenize(wire.TokenizeRequest(text="a"), call)
    with pytest.raises(QuotaExceeded):
        await door.tokenize(wire.TokenizeRequest(text="a"), call)
    front.text.close()


async def test_the_listener_for_scrapes_needs_no_key_and_serves_nothing_else(
    tmp_path: Path,
) -> None:
    """Metrics and probes, and no route that a client could use."""
    front = front_door(ScriptedMesh(), keys=ring(tmp_path))
    async with (
        serve_metrics(front, Address("127.0.0.1", 0)) as address,
        aiohttp.ClientSession(f"http://{address}") as session,
    ):
        statuses = {}
        for path in ("/metrics", "/health", "/ready", "/cluster", "/v1/models", "/", "/version"):
            async with session.get(path) as answer:
                statuses[path] = answer.status
                if answer.status == 404:
                    words = (await answer.json())["error"]["message"]
                    assert "here are /health, /ready, /metrics; clients" in words
        async with session.post("/tokenize", json={"prompt": "a"}) as answer:
            statuses["/tokenize"] = answer.status
    served = ("/metrics", "/health", "/ready")
    assert statuses == {path: 200 if path in served else 404 for path in statuses}
    front.text.close()
