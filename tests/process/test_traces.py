"""Traces across three real processes, as a collector gets them over OTLP: one trace a request, one
span a phase, whatever becomes of the request and of the collector."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.otlp_collector import Collector, otlp_collector
from tests.support.process_mesh import Answer, ProcessMesh, a_prompt, process_mesh
from tests.support.service_process import ServiceProcess, free_port

pytestmark = [pytest.mark.process, pytest.mark.ucx]

CLIENT_SPAN = "00f067aa0ba902b7"
CANARY = "xylophonist"
"""A word of the prompt that must appear nowhere."""

REQUEST = "POST /v1/completions"
WORKER_PHASES = {
    "pdmesh-prefill": {"prefill.queue", "prefill.compute", "prefill.push"},
    "pdmesh-decode": {"decode.reserve", "decode.receive", "decode.steps"},
}
ALL_SPANS = {REQUEST, "queue", "route", "attempt"}.union(*WORKER_PHASES.values())


def traceparent(trace_id: str, *, is_sampled: bool = True) -> dict[str, str]:
    """What an instrumented client sends."""
    return {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-{int(is_sampled):02x}"}


def a_trace_id(number: int) -> str:
    return f"{number:032x}"


@dataclass
class Bench:
    """A traced mesh."""

    mesh: ProcessMesh
    collector: Collector
    gateway: ServiceProcess
    prefill: ServiceProcess
    decode: ServiceProcess

    async def stopped(self) -> None:
        """End all processes well: whatever they have not exported yet must come now."""
        living = [each for each in (self.gateway, self.prefill, self.decode) if each.is_alive]
        for process in living:
            process.send(signal.SIGTERM)
        for process in living:
            assert await process.ended() == 0, process.name


@contextlib.asynccontextmanager
async def bench(
    monkeypatch: pytest.MonkeyPatch, *, endpoint: str = "", failpoints: str = "", attempts: int = 2
) -> AsyncGenerator[Bench]:
    """A mesh that traces to a collector, or to ``endpoint``. Spans are exported at the end alone,
    so that nothing arrives unless a service flushes."""
    async with otlp_collector() as collector, process_mesh("fake") as mesh:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint or collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
        with mesh.explained():
            gateway = await mesh.start_gateway(max_attempts=attempts, policy="round_robin")
            prefill = await mesh.add("prefill", token_budget=64)
            decode = await mesh.add("decode", fake_step_s=0.005, failpoints=failpoints)
            await mesh.paired(gateway, 1)
            yield Bench(mesh, collector, gateway, prefill, decode)


@dataclass
class Asked:
    """What one mesh was asked, and what the collector got of it."""

    collector: Collector
    over_http: Answer
    over_grpc: dict[str, Any]
    log: list[str]


ONE, OVER_GRPC, LEFT, CUT, UNSAMPLED = map(a_trace_id, range(1, 6))


@pytest.fixture(scope="module")
def asked() -> Asked:
    """Requests that their trace ids tell apart, one after the other."""

    async def run() -> Asked:
        with pytest.MonkeyPatch.context() as patch:
            async with bench(patch) as it:
                ask = functools.partial(it.mesh.ask, it.gateway)
                prompt = f"The {CANARY} lives in the garden. " * 40
                over_http = await ask(prompt, 8, headers=traceparent(ONE), logprobs=None)
                _, over_grpc = await it.mesh.ask_grpc(
                    it.gateway, a_prompt(100), 8, metadata=traceparent(OVER_GRPC)
                )
                await ask(a_prompt(70), 1000, leave_after=3, headers=traceparent(LEFT))
                await it.mesh.home([it.gateway], [it.prefill, it.decode])
                stop = over_http.text[len(over_http.text) // 2 :][:3]
                cut = await ask(prompt, 1000, stop=[stop], headers=traceparent(CUT))
                assert cut.finish_reasons == ["stop"]
                unsampled = traceparent(UNSAMPLED, is_sampled=False)
                for headers in (unsampled, {}, {"traceparent": "nonsense"}):
                    await ask(a_prompt(20), 4, headers=headers)
                await it.stopped()
                return Asked(it.collector, over_http, over_grpc, it.gateway.log)

    return asyncio.run(run())


def test_one_trace_goes_through_all_three_services(asked: Asked) -> None:
    """The client's trace id, the right parents, every phase, and not one word of the prompt."""
    collector = asked.collector
    for trace_id, receipt, request in (
        (ONE, asked.over_http.receipt, REQUEST),
        (OVER_GRPC, asked.over_grpc, "pdmesh.v1.Inference/Generate"),
    ):
        spans = collector.named(trace_id)
        assert set(spans) == (ALL_SPANS - {REQUEST}) | {request}
        assert len(collector.trace(trace_id)) == len(spans)
        assert [span.error for span in spans.values()] == [""] * len(spans)
        assert spans[request].parent_id == CLIENT_SPAN
        for name in ("queue", "route", "attempt"):
            assert spans[name].parent_id == spans[request].span_id
            assert spans[name].service == "pdmesh-gateway"
        for service, phases in WORKER_PHASES.items():
            for name in phases:
                assert spans[name].parent_id == spans["attempt"].span_id
                assert spans[name].service == service
        # The ids by which receipts and logs name the workers.
        assert spans["prefill.compute"].instance == receipt["prefill"]
        assert spans["decode.steps"].instance == receipt["decode"]
        assert spans["attempt"].attributes["pdmesh.prefill"] == receipt["prefill"]
        for span in spans.values():
            assert 0 < span.began_ns <= span.ended_ns <= spans[request].ended_ns + 10**9
        for before, after in (
            ("queue", "route"),
            ("route", "attempt"),
            ("prefill.queue", "prefill.compute"),
            ("decode.reserve", "decode.receive"),
            ("decode.receive", "decode.steps"),
        ):
            assert spans[before].began_ns <= spans[after].began_ns
        push = spans["prefill.push"].attributes
        assert push["pdmesh.bytes"] == receipt["transfer_bytes"]
        assert push["pdmesh.lane"] == receipt["lane"]
    about = collector.named(ONE)[REQUEST].attributes
    assert about["gen_ai.request.model"] == "fake"
    assert about["gen_ai.operation.name"] == "text_completion"
    assert about["gen_ai.usage.input_tokens"] == asked.over_http.receipt["prompt_tokens"]
    assert about["gen_ai.usage.output_tokens"] == 8
    assert about["gen_ai.response.finish_reasons"] == ("length",)
    assert about["http.response.status_code"] == 200
    lines = [json.loads(line) for line in asked.log if '"request"' in line]
    logged = {line["trace_id"] for line in lines if line.get("event") == "request"}
    assert {ONE, OVER_GRPC} <= logged
    assert collector.received
    assert CANARY.encode() not in collector.received
    assert asked.over_http.text.strip()[:12].encode() not in collector.received


def test_a_client_that_leaves_ends_its_spans(asked: Asked) -> None:
    """Its request and attempt are errors; the phase that was cut on a worker says so."""
    spans = asked.collector.named(LEFT)
    assert set(spans) == ALL_SPANS
    assert spans[REQUEST].error == spans["attempt"].error == "cancelled"
    assert spans["decode.steps"].attributes["pdmesh.cancelled"] is True
    assert spans["decode.steps"].error == ""


def test_an_answer_cut_by_a_stop_string_is_no_failure(asked: Asked) -> None:
    """The gateway cancels what decode still does; that is how such an answer ends."""
    spans = asked.collector.named(CUT)
    assert set(spans) >= {REQUEST, "attempt", "decode.steps"}
    assert {span.error for span in spans.values()} == {""}


def test_the_client_decides_what_is_sampled(asked: Asked) -> None:
    """What the client's trace does not sample is not traced anywhere; what has no parent is."""
    assert asked.collector.trace(UNSAMPLED) == []
    roots = [span for span in asked.collector.spans if not span.parent_id]
    assert [span.name for span in roots] == [REQUEST] * 2
    traces = {span.trace_id for span in asked.collector.spans}
    assert traces == {ONE, OVER_GRPC, LEFT, CUT, *(span.trace_id for span in roots)}
    assert len(traces) == 6


async def test_a_trace_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that dies fails its attempt, and the next attempt is a span of its own; a request
    that cannot be served is one span with an error."""
    async with bench(monkeypatch, failpoints="decode.mid_decode:5=kill") as it:
        spare = await it.mesh.add("decode")
        await it.mesh.paired(it.gateway, 2)
        traces = [a_trace_id(number) for number in range(1, 4)]
        # The armed worker has its share of them, until it dies.
        async with asyncio.TaskGroup() as tasks:
            for trace_id in traces:
                headers = traceparent(trace_id)
                tasks.create_task(it.mesh.ask(it.gateway, a_prompt(90), 64, headers=headers))
        refused = traceparent(a_trace_id(4))
        assert (await it.mesh.ask(it.gateway, "a", -1, headers=refused)).status == 400
        await it.stopped()
        await spare.stop()

        retried = 0
        for spans in map(it.collector.trace, traces):
            assert [span.error for span in spans if span.name == REQUEST] == [""]
            attempts = [span for span in spans if span.name == "attempt"]
            assert [span.attributes["pdmesh.attempt"] for span in attempts] == [1, 2][
                : len(attempts)
            ]
            assert [span.error for span in attempts] == ["worker_lost", ""][-len(attempts) :]
            steps = [span for span in spans if span.name == "decode.steps"]
            assert [span.parent_id for span in steps] == [attempts[-1].span_id]
            retried += len(attempts) == 2
        assert retried, "nobody was served by the worker that died"
        (span,) = it.collector.trace(a_trace_id(4))
        assert (span.name, span.error) == (REQUEST, "invalid_request")
        assert span.attributes["http.response.status_code"] == 400


async def test_a_request_for_which_there_is_no_worker_says_where_it_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the queue, since nobody could be asked: it was routed to nobody."""
    async with bench(monkeypatch) as it:
        await it.decode.kill()
        await it.mesh.paired(it.gateway, 0)
        headers = traceparent(a_trace_id(1))
        answer = await it.mesh.ask(it.gateway, a_prompt(20), 4, headers=headers)
        assert answer.status == 503
        await it.stopped()
        spans = it.collector.named(a_trace_id(1))
        assert set(spans) == {REQUEST, "queue"}
        assert spans["queue"].error == spans[REQUEST].error == "worker_lost"


async def test_the_sampler_is_the_operators_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """The standard variables hold: sampler, service name and further resource attributes."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with bench(monkeypatch) as it:
        await it.mesh.ask(it.gateway, a_prompt(20), 4, headers=traceparent(a_trace_id(1)))
        await it.stopped()
        assert it.collector.spans == []


async def test_a_dead_collector_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are answered, each process warns once, and ends as it should."""
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    async with bench(monkeypatch, endpoint=f"http://127.0.0.1:{free_port()}") as it:
        for number in range(12):
            answer = await it.mesh.ask(it.gateway, a_prompt(20, start=number), 4)
            answer.require_whole(4)
        await it.stopped()
        for process in (it.gateway, it.prefill, it.decode):
            lines = [json.loads(line) for line in process.log]
            warned = [line for line in lines if line["level"] in ("warning", "error")]
            assert [line["event"] for line in warned if "traces" in line["event"]] == [
                "traces lost"
            ], process.name
            assert not any(
                line.get("logger", "").startswith(("opentelemetry", "urllib3")) for line in lines
            )


async def test_a_collector_that_hangs_holds_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that accepts and never answers: requests are served, and the end is bounded."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    async with bench(monkeypatch) as it:
        it.collector.is_silent = True
        for _ in range(3):
            (await it.mesh.ask(it.gateway, a_prompt(20), 4)).require_whole(4)
        await it.stopped()
        for process in (it.gateway, it.prefill, it.decode):
            assert sum("traces lost" in line for line in process.log) == 1, process.name


async def test_a_wrong_setting_is_told_and_served_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are no reason not to serve."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    async with bench(monkeypatch) as it:
        (await it.mesh.ask(it.gateway, a_prompt(20), 4)).require_whole(4)
        assert "http/protobuf" in await it.gateway.said('"no traces"')
        await it.stopped()
        assert it.collector.spans == []
