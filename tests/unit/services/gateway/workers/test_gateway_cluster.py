"""What GET /cluster says: the window of the last minute, workers, and the route."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from services.gateway.core.admission.admission import AdmissionStatistics
from services.gateway.core.routing.expectations import Expectations
from services.gateway.core.routing.peer_table import PeerTable
from services.gateway.core.window import (
    MAX_PAIRS,
    MAX_READERS,
    NUM_BINS,
    SECONDS,
    Histogram,
    LastMinute,
    ReadPrompts,
    Summary,
)
from services.gateway.core.worker import Role, Worker, WorkerStatus
from services.gateway.front.auth import KeyRing, hash_key
from services.gateway.mesh import ServedModel
from services.gateway.workers.cluster import cluster_body
from shared.ids import Incarnation
from shared.kv.layout import KvLayout
from shared.model_spec import ModelSpec
from shared.predict.transfer import KvLink
from shared.version import VERSION
from tests.support.http_client import gateway
from tests.support.scripted_mesh import ScriptedMesh

LAYOUT = KvLayout(dtype="float32", num_layers=2, num_kv_heads=2, head_dim=8)
WITHIN = 0.02


def a_link(source: int, destination: int, lane: str) -> KvLink:
    return KvLink(Incarnation(source), Incarnation(destination), lane)


PAIR = a_link(0xA, 0xB, "sysv")


def transfer(window: LastMinute, now: float, pair: KvLink = PAIR, num_bytes: int = 1000) -> None:
    window.transferred(now, pair, num_bytes=num_bytes, transfer_s=1e-6, exposed_s=0.002)


# --- histograms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("percent", [10, 50, 90, 99])
def test_percentiles_are_those_of_the_sorted_values_to_two_percent(percent: int) -> None:
    """Nearest rank, over five decades."""
    source = random.Random(3)
    values = [10 ** source.uniform(-5, 0) for _ in range(5000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[len(values) * percent // 100 - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=WITHIN)


def test_one_value_is_every_percentile_of_itself() -> None:
    """A single answer is shown as it was."""
    histogram = Histogram()
    histogram.add(0.0731)
    assert histogram.percentile(50) == histogram.percentile(99)
    assert histogram.percentile(50) == pytest.approx(0.0731, rel=WITHIN)


def test_values_beyond_the_bins_count_in_the_outermost() -> None:
    """Nothing is too small or too large to be counted, and memory stays bounded."""
    histogram = Histogram()
    histogram.add(0.0)
    histogram.add(1e12)
    assert histogram.count == 2
    assert histogram.percentile(50) == pytest.approx(1e-6)
    assert histogram.percentile(99) > 1e4
    for exponent in range(-2000, 2000):
        histogram.add(1.02**exponent)
    assert len(histogram._bins) <= NUM_BINS


# --- the window -----------------------------------------------------------------------------------


def test_an_answer_counts_its_tokens_once_and_its_gaps() -> None:
    """TTFT is from the request's arrival; tokens that came together share their gap."""
    window = LastMinute(100.0)
    window.first_token(100.75, 0.25, 7)
    window.later_tokens(100.85, 2, 0.1)  # two gaps of 50 ms
    window.later_tokens(101.05, 1, 0.2)  # one of 200 ms
    window.ended(101.05, has_failed=False)
    summary = window.summary(102.0)
    assert (summary.num_ended, summary.num_failed) == (1, 0)
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (7, 4)
    assert (summary.ttft_s.count, summary.itl_s.count) == (1, 3)
    assert summary.ttft_s.percentile(50) == pytest.approx(0.25, rel=WITHIN)
    assert summary.itl_s.percentile(50) == pytest.approx(0.05, rel=WITHIN)
    assert summary.itl_s.percentile(90) == pytest.approx(0.2, rel=WITHIN)
    assert summary.covered_s == pytest.approx(2.0)
    assert summary.output_tokens_each_s[-2:] == [3, 1]


def test_first_tokens_that_come_together_have_no_gap_between_them() -> None:
    """The first batch gives a TTFT, and a gap of nothing for each token after the first."""
    window = LastMinute(0.0)
    window.first_token(0.5, 0.5, 1)
    window.later_tokens(0.5, 2, 0.0)
    summary = window.summary(1.0)
    assert (summary.num_output_tokens, summary.ttft_s.count, summary.itl_s.count) == (3, 1, 2)
    assert summary.itl_s.percentile(99) == pytest.approx(1e-6)


def test_prompts_are_added_up_by_worker() -> None:
    """Over seconds, as long as these are in the window; what is beyond many workers is left out."""
    window = LastMinute(0.0)
    for at in (1.0, 2.5):
        window.read(at, 0xA, ReadPrompts(100, 60))
    window.read(2.5, 0xB, ReadPrompts(40, 0))
    told = window.summary(3.0).prompts
    assert told == {0xA: ReadPrompts(200, 120), 0xB: ReadPrompts(40, 0)}
    assert window.summary(1.0 + SECONDS).prompts[0xA] == ReadPrompts(100, 60)
    for worker in range(2 * MAX_READERS):
        window.read(200.0, worker, ReadPrompts(1, 1))
    assert len(window.summary(200.0).prompts) == MAX_READERS


def test_a_second_is_forgotten_when_the_window_has_passed_it() -> None:
    """Exactly SECONDS after the second in which it happened."""
    window = LastMinute(0.0)
    window.ended(10.9, has_failed=True)
    window.ended(11.1, has_failed=False)
    transfer(window, 10.9)
    last = window.summary(10.0 + SECONDS - 0.01)
    assert (last.num_ended, last.num_failed, list(last.transfers)) == (2, 1, [PAIR])
    later = window.summary(10.0 + SECONDS)
    assert (later.num_ended, later.num_failed, list(later.transfers)) == (1, 0, [])
    assert window.summary(11.0 + SECONDS).num_ended == 0


def test_a_second_of_the_ring_is_emptied_before_its_next_use() -> None:
    """What is counted a minute later does not add to what was there."""
    window = LastMinute(0.0)
    window.ended(5.0, has_failed=True)
    window.ended(5.0 + SECONDS, has_failed=False)
    summary = window.summary(5.5 + SECONDS)
    assert (summary.num_ended, summary.num_failed) == (1, 0)
    assert summary.covered_s == pytest.approx(SECONDS - 0.5)


def test_transfers_are_told_apart_by_pair_and_lane() -> None:
    """Counts and bytes are exact; rates come from the bytes and the time of each."""
    window = LastMinute(0.0)
    other = a_link(0xA, 0xB, "tcp")
    transfer(window, 1.0, num_bytes=4000)
    transfer(window, 2.0, num_bytes=1000)
    transfer(window, 2.0, other)
    found = window.summary(3.0).transfers
    assert list(found) == [PAIR, other]
    assert (found[PAIR].count, found[PAIR].num_bytes) == (2, 5000)
    assert found[PAIR].gb_per_s.percentile(10) == pytest.approx(1.0, rel=WITHIN)
    assert found[PAIR].gb_per_s.percentile(99) == pytest.approx(4.0, rel=WITHIN)
    assert found[PAIR].exposed_s.percentile(50) == pytest.approx(0.002, rel=WITHIN)
    assert found[other].count == 1


def test_pairs_beyond_the_bound_are_counted_together() -> None:
    """A second keeps at most MAX_PAIRS pairs, and says how many transfers it did not list."""
    window = LastMinute(0.0)
    for number in range(MAX_PAIRS + 5):
        transfer(window, 1.0, a_link(number, 0xB, "tcp"))
    transfer(window, 1.0, a_link(0, 0xB, "tcp"))
    summary = window.summary(1.5)
    assert len(summary.transfers) == MAX_PAIRS
    assert summary.num_unlisted_transfers == 5
    assert summary.transfers[a_link(0, 0xB, "tcp")].count == 2


def test_the_window_agrees_with_a_list_of_everything() -> None:
    """Random traffic over several minutes, looked at now and then."""
    source = random.Random(5)
    window = LastMinute(0.0)
    ends: list[tuple[float, bool]] = []
    now = 0.0
    for _ in range(3000):
        now += source.expovariate(4.0)
        has_failed = source.random() < 0.1
        window.ended(now, has_failed=has_failed)
        ends.append((now, has_failed))
        if source.random() < 0.05:
            now += source.choice([0.0, 0.3, 20.0, 70.0])
            summary = window.summary(now)
            recent = [failed for at, failed in ends if int(at) > int(now) - SECONDS]
            assert (summary.num_ended, summary.num_failed) == (len(recent), sum(recent))


# --- the view -------------------------------------------------------------------------------------


def a_worker(role: Role, incarnation: int, **fields: object) -> Worker:
    status = WorkerStatus(
        num_running=2,
        num_waiting=1,
        pending_tokens=300,
        free_blocks=60,
        reserved_blocks=30,
        quarantined_blocks=10,
        step_s=0.0123,
        paired=frozenset({Incarnation(0xB)}) if role is Role.PREFILL else frozenset(),
    )
    worker = Worker(
        role=role,
        incarnation=Incarnation(incarnation),
        host="10.0.0.5",
        port=8001,
        model=ModelSpec(
            name="m",
            fingerprint=b"f",
            vocab_size=10,
            max_model_len=64,
            dtype="float32",
            engine="torch",
        ),
        layout=LAYOUT,
        num_blocks=100,
        block_size=16,
        status=status,
        is_connected=True,
    )
    for name, value in fields.items():
        setattr(worker, name, value)
    return worker


def a_body(table: PeerTable, summary: Summary, *, reason: str = "") -> dict[str, object]:
    return cluster_body(
        incarnation=Incarnation(0xCAFE),
        not_ready_reason=reason,
        uptime_s=12.3456,
        model=ServedModel(name="m", vocab_size=10, max_model_len=64, created=1),
        table=table,
        expectations=Expectations(),
        prefixes=None,
        now=0.0,
        counts=AdmissionStatistics(3, 2, {"slo_ttft": 1}),
        summary=summary,
    )


def test_the_view_says_what_workers_reported_and_what_the_window_saw() -> None:
    """Every field, for one pair of workers and one transfer."""
    table = PeerTable()
    table.join(a_worker(Role.DECODE, 0xB))
    table.join(a_worker(Role.PREFILL, 0xA))
    window = LastMinute(0.0)
    window.first_token(9.5, 0.5, 20)
    window.later_tokens(9.6, 1, 0.1)
    transfer(window, 9.5)
    window.ended(9.7, has_failed=False)
    window.read(9.7, 0xA, ReadPrompts(20, 16))
    window.read(9.8, 0xA, ReadPrompts(10, 0))
    near = pytest.approx
    assert a_body(table, window.summary(10.0)) == {
        "ready": True,
        "not_ready_reason": "",
        "uptime_s": 12.346,
        "model": {"id": "m", "max_model_len": 64},
        "gateway": {
            "incarnation": "000000000000cafe",
            "running": 3,
            "queued": 2,
            "refused": 1,
            "refusals": {"slo_ttft": 1},
        },
        "workers": [
            {
                "incarnation": incarnation,
                "role": role,
                "home": home,
                "pool": home,
                "prompts": {
                    "tokens": tokens,
                    "cached_tokens": cached,
                    "fetched_tokens": 0,
                    "dram_tokens": 0,
                    "ssd_tokens": 0,
                },
                "prefixes": None,
                "moves": False,
                "address": "10.0.0.5:8001",
                "state": "usable",
                "running": 2,
                "waiting": 1,
                "pending_tokens": 300,
                "blocks": {"total": 100, "free": 60, "reserved": 30, "quarantined": 10},
                "step_s": 0.0123,
                "prediction": {
                    "known": False,
                    "believed": True,
                    "queue_s": 0.0,
                    "prompt_step_error": 0.0,
                    "answer_step_error": 0.0,
                    "ttft_error": None,
                },
                "paired": paired,
            }
            for role, home, incarnation, paired, tokens, cached in (
                ("prefill", "prompt", "000000000000000a", ["000000000000000b"], 30, 16),
                ("decode", "token", "000000000000000b", [], 0, 0),
            )
        ],
        "window": {
            "seconds": 60,
            "requests": 1,
            "failed": 0,
            "output_tokens": 2,
            "prompt_tokens": 20,
            "output_tokens_per_s": 0.2,
            "prompt_tokens_per_s": 2.0,
            "output_tokens_each_s": [0] * 58 + [2],
            "ttft_s": near({"p50": 0.5, "p90": 0.5, "p99": 0.5}, rel=WITHIN),
            "itl_s": near({"p50": 0.1, "p90": 0.1, "p99": 0.1}, rel=WITHIN),
            "unlisted_transfers": 0,
        },
        "transfers": [
            {
                "prefill": "000000000000000a",
                "decode": "000000000000000b",
                "lane": "sysv",
                "count": 1,
                "bytes": 1000,
                "gb_per_s": near({"p50": 1.0, "p10": 1.0}, rel=WITHIN),
                "exposed_s": near({"p50": 0.002, "p99": 0.002}, rel=WITHIN),
            }
        ],
        "hot_prefixes": [],
        "planner": None,
    }


def test_without_traffic_there_are_no_percentiles() -> None:
    """Nothing measured is null, not 0."""
    body = a_body(PeerTable(), LastMinute(0.0).summary(5.0), reason="no decode worker has joined")
    assert (body["ready"], body["not_ready_reason"]) == (False, "no decode worker has joined")
    window = body["window"]
    assert isinstance(window, dict)
    assert (window["ttft_s"], window["itl_s"], window["output_tokens_per_s"]) == (None, None, 0)


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "usable"),
        ({"is_silent": True}, "suspect"),
        ({"is_connected": False}, "connecting"),
        ({"is_connected": False, "is_silent": True}, "connecting"),
        ({"status": WorkerStatus(is_draining=True), "is_silent": True}, "draining"),
    ],
)
def test_a_workers_state_is_one_word(fields: dict[str, object], state: str) -> None:
    """What it means for the next request; a worker that drains does so whatever else is wrong."""
    worker = a_worker(Role.DECODE, 1, **fields)
    assert worker.standing.value == state
    assert (state == "usable") == worker.is_usable


async def test_the_route_needs_a_key_and_is_never_cached(tmp_path: Path) -> None:
    """GET /cluster tells addresses and load: with keys, only to who has one."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret"))
    async with gateway(ScriptedMesh(), KeyRing(path)) as client:
        status, _, body = await client.ask("GET", "/cluster")
        assert (status, body["error"]["code"]) == (401, "missing_api_key")
        key = {"Authorization": "Bearer secret"}
        status, headers, body = await client.ask("GET", "/cluster", headers=key)
    assert (status, headers["Cache-Control"]) == (200, "no-store")
    assert (body["version"], body["ready"]) == (VERSION, True)
