"""Why a request went where it went, asked of a whole mesh."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from services.gateway.core.routing.decision_record import replay
from services.gateway.http.cluster_bodies import Explanation, RecentRequests
from shared.errors import InvalidRequest, NotFound
from shared.ids import RequestId
from tests.support.virtual_loop import virtual_time
from tests.support.whole_mesh import whole_mesh
from tests.support.worker_mesh import a_prompt


@virtual_time
async def test_a_request_is_explained_and_its_decision_replayed() -> None:
    """The record names the pair of the receipt, what was known of everybody, and what was expected;
    decided again it comes out the same."""
    async with whole_mesh(num_prefill=2, num_decode=2) as mesh:
        gateway = mesh.gateways[0].mesh
        answers = [await mesh.ask(a_prompt(40, seed=i), 4) for i in range(5)]
        keys = list(gateway._recent)
        assert len(keys) == len(answers)
        for key, answer in zip(keys, answers, strict=True):
            told = json.loads(json.dumps(gateway.explain(f"chatcmpl-{key.hex()}")))
            (decision,) = told["decisions"]
            assert told["ended"]
            assert told["receipt"]["ttft_s"] == answer.receipt["ttft_s"]
            assert (decision["prefill"], decision["decode"]) == (
                answer.receipt["prefill"],
                answer.receipt["decode"],
            )
            assert [len(decision[it]) for it in ("prefills", "decodes")] == [2, 2]
            assert decision["prediction"]["ttft_s"] == pytest.approx(
                answer.receipt["predicted_ttft_s"], abs=1e-3
            )
            assert replay(decision) == []


@virtual_time
async def test_a_score_that_is_a_sum_tells_its_terms() -> None:
    """As the door sends it: the beginning that one worker has, and what is left to compute."""
    async with whole_mesh(gateway={"policy": "local"}, num_prefill=2, num_decode=1) as mesh:
        gateway = mesh.gateways[0].mesh
        await mesh.ask(a_prompt(300), 4)
        await asyncio.sleep(1.0)
        answer = await mesh.ask(a_prompt(300), 4)
        told = json.loads(json.dumps(gateway.explain(list(gateway._recent)[-1].hex())))
        sent = msgspec.convert(told, Explanation)
        (decision,) = sent.decisions
        terms = {it["worker"]: it["terms"] for it in decision["prefills"]}
        assert all(it["wait"] + it["compute"] > 0 for it in terms.values())
        cached = {name: it["cached_tokens"] for name, it in terms.items()}
        assert sorted(cached.values()) == [0, 256]
        assert cached[answer.receipt["prefill"]] == 256
        assert decision["decodes"][0]["terms"] is None
        taken = answer.receipt["decision"]
        (row,) = (it for it in decision["prefills"] if it["worker"] == answer.receipt["prefill"])
        assert taken == {
            "policy": "local",
            "prefill": {"score": row["score"], "terms": row["terms"]},
            "decode": {"score": decision["decodes"][0]["score"], "terms": None},
        }
        assert replay(told["decisions"][0]) == []


@virtual_time
async def test_who_is_not_remembered_is_told_so() -> None:
    """Unknown ids and what is no id are errors with a remedy; old requests make room for new."""
    async with whole_mesh() as mesh:
        gateway = mesh.gateways[0].mesh
        with pytest.raises(NotFound, match="only its last 0"):
            gateway.explain("0" * 32)
        for wrong in ("", "chatcmpl-", "xyz", "0" * 31, "../cluster"):
            with pytest.raises(InvalidRequest, match="32 hexadecimal"):
                gateway.explain(wrong)
        await mesh.ask(a_prompt(10), 2)
        ((first, timeline),) = gateway._recent.items()
        for number in range(2000):
            gateway._remember(RequestId(number.to_bytes(16, "big")), timeline)
            if number == 1022:
                assert gateway.explain(first.hex())
        with pytest.raises(NotFound, match="only its last 1024"):
            gateway.explain(first.hex())


@virtual_time
async def test_the_last_requests_are_told_with_the_mesh_that_they_met() -> None:
    """As the door sends them: when each came, its receipt, how its end was; what workers are, and
    what they say of their steps."""
    limits = {"max_running": 64, "max_waiting": 8, "max_wait_s": 1.5, "max_pending_tokens": 999}
    async with whole_mesh(num_prefill=2, num_decode=1, gateway=limits) as mesh:
        gateway = mesh.gateways[0].mesh
        answers = [await mesh.ask(a_prompt(40, seed=i), 4) for i in range(3)]
        await asyncio.sleep(1.0)  # until workers have reported
        told = {"version": "1", **json.loads(json.dumps(gateway.recent()))}
        sent = msgspec.convert(told, RecentRequests)
        assert [it.receipt["ttft_s"] for it in sent.requests] == [
            it.receipt["ttft_s"] for it in answers
        ]
        assert all(it.ended and not it.error for it in sent.requests)
        arrived = [it.arrived_s for it in sent.requests]
        assert arrived == sorted(arrived)
        assert 0 < arrived[0] < arrived[-1] < sent.now_s
        assert [it.kind for it in sent.workers] == ["prefill", "prefill", "decode"]
        assert sum(it.taken for it in sent.workers if it.kind == "prefill") == 3
        assert all(it.blocks * it.block_size > 0 for it in sent.workers)
        assert set(sent.handover_s) == {"pair", "colocated"}
        assert (sent.policy, sent.decides) == ("conductor", True)
        assert {name: getattr(sent, name) for name in limits} == limits
        assert (sent.overload, sent.waiting) == ("off", 0)
