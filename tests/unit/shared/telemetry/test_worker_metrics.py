"""A worker's numbers, and the door through which they are read."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from prometheus_client import generate_latest

from shared.telemetry.listener import serve_metrics
from shared.telemetry.worker import (
    DecodeMetrics,
    PairSpeed,
    PrefillMetrics,
    WorkerHoldings,
    WorkerStatus,
)


def test_gauges_are_read_when_scraped() -> None:
    """Nothing is counted for nobody: the load is asked at scrape time."""
    load = WorkerStatus()
    metrics = DecodeMetrics(lambda: load)
    assert b'pdmesh_decode_kv_blocks{state="free"} 0.0' in generate_latest(metrics.registry)
    assert b"pdmesh_decode_kv_cache_usage_ratio 0.0" in generate_latest(metrics.registry)
    load = WorkerStatus(free_blocks=5, reserved_blocks=12, quarantined_blocks=3, num_running=2)
    text = generate_latest(metrics.registry)
    assert b'pdmesh_decode_kv_blocks{state="free"} 5.0' in text
    assert b'pdmesh_decode_kv_blocks{state="reserved"} 12.0' in text
    assert b'pdmesh_decode_kv_blocks{state="quarantined"} 3.0' in text
    assert b"pdmesh_decode_kv_cache_usage_ratio 0.75" in text
    assert b"pdmesh_decode_requests_running 2.0" in text


def test_the_speed_of_each_pair_is_read_when_scraped() -> None:
    """A pair that fell back to a slow lane shows: its lane is a label, its speed the value."""
    metrics = PrefillMetrics(WorkerStatus)
    assert b"pdmesh_prefill_pairs 0.0" in generate_latest(metrics.registry)
    metrics.pairs = lambda: [PairSpeed(decode="a:1", lane="tcp", bytes_per_s=2e9)]
    text = generate_latest(metrics.registry)
    assert b"pdmesh_prefill_pairs 1.0" in text
    assert b'pdmesh_prefill_pair_bytes_per_second{decode="a:1",lane="tcp"} 2e+09' in text


def test_transfers_are_counted_by_lane() -> None:
    """Bytes, time, exposed time and speed; a prompt that was all cached has moved nothing."""
    metrics = PrefillMetrics(WorkerStatus)
    metrics.transferred(3000, transfer_s=0.002, exposed_s=0.001, lane="sysv")
    metrics.transferred(1000, transfer_s=0.002, exposed_s=0.002, lane="sysv")
    metrics.transferred(5, transfer_s=0.1, exposed_s=0.1, lane="tcp")
    metrics.transferred(0, transfer_s=0.0, exposed_s=0.0, lane="sysv")
    value = metrics.registry.get_sample_value
    sysv = {"lane": "sysv"}
    assert value("pdmesh_prefill_transfer_bytes_total", sysv) == 4000
    assert value("pdmesh_prefill_transfer_bytes_total", {"lane": "tcp"}) == 5
    assert value("pdmesh_prefill_transfer_seconds_sum", sysv) == pytest.approx(0.004)
    assert value("pdmesh_prefill_transfer_exposed_seconds_sum", sysv) == pytest.approx(0.003)
    assert value("pdmesh_prefill_transfer_bytes_per_second_sum", sysv) == pytest.approx(2e6)
    assert value("pdmesh_prefill_transfer_seconds_count", sysv) == 2


def test_what_is_held_open_is_read_when_scraped() -> None:
    """A leak shows from outside: sessions, endpoints, transfers, slots and tasks."""
    metrics = PrefillMetrics(WorkerStatus)
    assert b"pdmesh_prefill_endpoints 0.0" in generate_latest(metrics.registry)
    metrics.holdings = lambda: WorkerHoldings(
        sessions=1, endpoints=2, transfers=3, free_slots=4, tasks=5
    )
    text = generate_latest(metrics.registry).decode()
    names = ("sessions", "endpoints", "transfers_open", "staging_slots_free", "asyncio_tasks")
    for value, name in enumerate(names, start=1):
        assert f"pdmesh_prefill_{name} {value}.0" in text


def test_two_workers_in_one_process_have_numbers_of_their_own() -> None:
    """No global registry."""
    one = PrefillMetrics(WorkerStatus)
    two = PrefillMetrics(WorkerStatus)
    one.step_tokens.inc(7)
    assert b"pdmesh_prefill_step_tokens_total 7.0" in generate_latest(one.registry)
    assert b"pdmesh_prefill_step_tokens_total 0.0" in generate_latest(two.registry)


def test_a_late_loop_is_counted_and_doubted() -> None:
    """One observation goes to the histogram and to readiness; later it is ready again."""
    metrics = PrefillMetrics(WorkerStatus)
    assert not metrics.why_blocked
    metrics.observe_loop_lag(1.5)
    assert metrics.why_blocked == "the event loop stood still for 1.5 s"
    metrics.observe_loop_lag(0.0045)
    assert not metrics.why_blocked
    text = generate_latest(metrics.registry)
    assert b'pdmesh_prefill_loop_lag_seconds_bucket{le="0.004"} 0.0' in text
    assert b'pdmesh_prefill_loop_lag_seconds_bucket{le="0.005"} 1.0' in text
    assert b"pdmesh_prefill_loop_lag_seconds_count 2.0" in text


async def test_the_door_answers_metrics_health_and_readiness() -> None:
    """Health says alive, readiness says why not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reason = "no gateway joined yet"
    metrics = DecodeMetrics(WorkerStatus)
    async with (
        serve_metrics("127.0.0.1", port, metrics.registry, lambda: reason),
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client,
    ):
        async with client.get("/metrics") as response:
            assert "pdmesh_decode_requests_running" in await response.text()
        async with client.get("/health") as response:
            assert response.status == 200
        async with client.get("/ready") as response:
            assert (response.status, await response.text()) == (503, "no gateway joined yet\n")
        reason = ""
        async with client.get("/ready") as response:
            assert response.status == 200


async def test_what_is_no_http_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Anybody can send nonsense: it must not fill the log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    registry = DecodeMetrics(WorkerStatus).registry
    async with serve_metrics("127.0.0.1", port, registry, str):
        for nonsense in (b"GET / HTTP/1.1\r\n=\xff\x00\r\n\r\n", b"\x16\x03\x01\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(nonsense)
            answer = await reader.read()
            writer.close()
            await writer.wait_closed()
            assert answer.partition(b" ")[2].startswith(b"400 ")
    assert caplog.records == []


async def test_port_0_is_no_door() -> None:
    """A worker listens for operators only when asked to."""
    async with serve_metrics("256.0.0.1", 0, DecodeMetrics(WorkerStatus).registry, str):
        pass
