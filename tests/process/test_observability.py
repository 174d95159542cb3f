"""What operators see of a mesh of real processes that has served: receipts that add up, metrics
that are documented, and a dashboard whose every query has an answer."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.support.house import ROOT
from tests.support.process_mesh import Answer, ProcessMesh, a_prompt, process_mesh
from tests.support.prometheus_server import BINARY, Query, dashboard_queries, prometheus
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.process, pytest.mark.ucx, pytest.mark.asyncio(loop_scope="module")]

DOCS = ROOT / "docs"
METRICS_PAGE = DOCS / "metrics.md"
PHASES = ("queue_s", "route_s", "retry_s", "prefill_queue_s", "prefill_s", "handover_s")
ALWAYS = {
    *PHASES, "ttft_s", "predicted_ttft_s", "predicted_cached_tokens", "e2e_s",
    "first_step_s", "tpot_s", "transfer_s", "transfer_exposed_s",
    "reserve_wait_s", "transfer_bytes", "gb_per_s", "lane", "mode", "prefill", "decode",
    "prefill_pool", "decode_pool", "decision", "attempts", "cached_tokens", "decode_cached_tokens",
    "fetched_tokens", "fetched_bytes", "fetch_s", "fetched_from",
    "dram_tokens", "ssd_tokens", "load_s",
    "prompt_tokens", "output_tokens", "errors",
}  # fmt: skip
"""What a receipt has of an answer of at least two tokens."""

HAVE_DATA_WITHIN_S = 180.0


@dataclass
class Bench:
    """A mesh with two decode workers, one of which dies at the first request that it decodes."""

    mesh: ProcessMesh
    gateway: ServiceProcess
    workers: list[ServiceProcess]
    num_asked: int = 0
    answers: list[Answer] = field(default_factory=list)

    async def serve(self) -> None:
        """Traffic of every kind: fresh and cached prompts, at once, and a refusal."""
        self.num_asked += 1
        fresh = a_prompt(300, start=self.num_asked)
        async with asyncio.TaskGroup() as tasks:
            asking = [
                tasks.create_task(self.mesh.ask(self.gateway, prompt, 12))
                for prompt in (fresh, fresh, a_prompt(200), a_prompt(40, start=self.num_asked))
            ]
        for task in asking:
            task.result().require_whole(12)
            self.answers.append(task.result())
        assert (await self.mesh.ask(self.gateway, "a", -1)).status == 400

    def targets(self) -> dict[str, list[str]]:
        """Where Prometheus finds all that live."""
        found: dict[str, list[str]] = {}
        for process in (self.gateway, *self.workers):
            if process.is_alive:
                job = f"pdmesh-{process.name.partition('-')[0]}"
                found.setdefault(job, []).append(urlsplit(process.metrics_url).netloc)
        return found

    async def scrape(self) -> str:
        """The text of one living process of each service."""
        texts: list[str] = []
        async with aiohttp.ClientSession() as client:
            for addresses in self.targets().values():
                async with client.get(f"http://{addresses[0]}/metrics") as response:
                    texts.append(await response.text())
        return "".join(texts)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    """A mesh that has served everything there is, a request whose worker died included."""
    async with process_mesh("fake") as mesh:
        gateway = await mesh.start_gateway()
        prefill = await mesh.add("prefill", token_budget=128)
        victim = await mesh.add("decode", failpoints="decode.mid_decode:2=kill")
        decode = await mesh.add("decode", fake_step_s=0.002)
        await mesh.paired(gateway, 2)
        bench = Bench(mesh, gateway, [prefill, victim, decode])
        with mesh.explained():
            while victim.is_alive:
                await bench.serve()
            await bench.serve()
        yield bench


async def test_every_receipt_adds_up(bench: Bench) -> None:
    """Over real processes: the phases are the time to the first token, to the microsecond, which is
    less than the client waited; and each field is there."""
    with bench.mesh.explained():
        began_at = asyncio.get_running_loop().time()
        answer = await bench.mesh.ask(bench.gateway, a_prompt(400, start=99), 2)
        waited_s = answer.arrived_at[0] - began_at
        _, over_grpc = await bench.mesh.ask_grpc(bench.gateway, a_prompt(50, start=98), 2)
    assert 0 < answer.receipt["ttft_s"] < waited_s
    retried = [a.receipt for a in bench.answers if a.receipt["attempts"] > 1]
    assert retried, "nobody was served by the worker that died"
    for receipt in (answer.receipt, over_grpc, *(a.receipt for a in bench.answers)):
        assert set(receipt) == ALWAYS
        assert sum(receipt[name] for name in PHASES) == pytest.approx(receipt["ttft_s"], abs=1e-9)
        # Each is rounded to a microsecond, and hand-over takes what that leaves.
        assert all(receipt[name] >= -5e-6 for name in PHASES)
        assert receipt["ttft_s"] <= receipt["e2e_s"]
        assert len(receipt["errors"]) == receipt["attempts"] - 1
        if receipt["transfer_bytes"]:
            assert receipt["lane"]
            assert receipt["gb_per_s"] > 0
        else:
            assert receipt["decode_cached_tokens"] > 0
    assert all(set(receipt["errors"]) == {"worker_lost"} for receipt in retried)


async def test_every_field_of_a_receipt_is_explained() -> None:
    """docs/observability.md has a row for each, and no other."""
    rows = _table("| field | is |")
    told = [name for row in rows for name in re.findall(r"\w+", row.split("|")[1])]
    assert sorted(told) == sorted(ALWAYS)


def _table(head: str) -> list[str]:
    """The rows of a table of docs/observability.md."""
    page = (DOCS / "observability.md").read_text()
    return page.partition(head)[2].partition("\n\n")[0].strip().splitlines()[1:]


async def test_every_answer_has_its_id_in_a_header(bench: Bench) -> None:
    """The id in the response, which the gateway's log has beside the receipt."""
    url = f"http://127.0.0.1:{bench.gateway.facts['http_port']}/v1/completions"
    body = {"prompt": "a", "max_tokens": 2}
    async with aiohttp.ClientSession() as client, client.post(url, json=body) as response:
        request_id = response.headers["x-request-id"]
    line = await bench.gateway.said(f'"request_id":"{request_id}".*"receipts"')
    assert '"handover_s"' in line


@pytest.mark.quick
async def test_metrics_add_up_like_receipts(bench: Bench) -> None:
    """The phases' histograms sum to TTFT's, and count the same answers."""
    await bench.mesh.home([bench.gateway], [])
    samples = {
        (sample.name, sample.labels.get("phase", "")): sample.value
        for family in text_string_to_metric_families(await bench.scrape())
        for sample in family.samples
    }
    ttft = "pdmesh_gateway_time_to_first_token"
    phases = [name.removesuffix("_s") for name in PHASES]
    total = sum(samples[f"{ttft}_phase_seconds_sum", phase] for phase in phases)
    assert total == pytest.approx(samples[f"{ttft}_seconds_sum", ""])
    counts = {samples[f"{ttft}_phase_seconds_count", phase] for phase in phases}
    assert counts == {samples[f"{ttft}_seconds_count", ""]}
    gaps = samples["pdmesh_gateway_inter_token_latency_seconds_count", ""]
    tokens = samples["pdmesh_gateway_generation_tokens_total", ""]
    assert gaps == tokens - samples[f"{ttft}_seconds_count", ""]


@pytest.mark.quick
async def test_every_metric_is_documented_and_exists(bench: Bench) -> None:
    """A metric without a row fails, as does a row without a metric; types and labels are told."""
    found: dict[str, tuple[str, set[str]]] = {}
    silent: set[str] = set()  # labelled, of what is switched off: nothing tells its labels
    for family in text_string_to_metric_families(await bench.scrape()):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        found[name] = (family.type, labels)
        if not family.samples:
            silent.add(name)
    rows = re.findall(
        r"^\| `([\w{},]+)` \| (counter|gauge|histogram) \| ((?:`\w+`(?:, )?)*) *\| \S.* \|$",
        METRICS_PAGE.read_text(),
        re.MULTILINE,
    )
    told: dict[str, tuple[str, set[str]]] = {}
    for pattern, kind, labels in rows:
        for role in ("prefill", "decode") if "{" in pattern else ("",):
            name = pattern.replace("{prefill,decode}", role)
            assert name not in told, f"{name} has two rows"
            told[name] = (kind, set(re.findall(r"\w+", labels)))
    assert told.keys() == found.keys()
    for name, (kind, labels) in told.items():
        assert found[name] == (kind, set() if name in silent else labels), name


async def test_every_query_of_the_dashboard_names_what_exists(bench: Bench) -> None:
    """Without a Prometheus at hand: names of metrics, and the labels that are asked for."""
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(await bench.scrape()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    queries = dashboard_queries()
    assert len(queries) > 50
    for query in queries:
        names = set(re.findall(r"\b(?:pdmesh|process)_\w+", re.sub(r'"[^"]*"', '""', query[1])))
        assert names, query
        assert names <= set(labels), query
        known = {"instance", "job"}.union(*(labels[name] for name in names))
        wanted = set(re.findall(r"(\w+) *(?:=|!=|=~|!~) *\"", query.expression))
        for group in re.findall(r"by \(([^)]*)\)", query.expression):
            wanted |= set(re.findall(r"\w+", group))
        assert wanted | set(query.legend_labels) <= known, query


@pytest.mark.skipif(BINARY is None, reason="needs prometheus; names and labels are checked without")
async def test_every_panel_of_the_dashboard_has_data(bench: Bench, tmp_path: Path) -> None:
    """A real Prometheus scrapes the mesh and evaluates every query: there are numbers, and what a
    legend shows."""
    missing = dashboard_queries()
    with bench.mesh.explained():
        async with prometheus(bench.targets(), tmp_path) as server:
            alerts = [
                row.partition("`")[2].rpartition("`")[0] for row in _table("| alert | expression |")
            ]
            assert len(alerts) > 3
            for alert in alerts:
                await server.query(alert.replace("\\|", "|"))  # it is PromQL
            try:
                async with asyncio.timeout(HAVE_DATA_WITHIN_S):
                    while missing:
                        await bench.serve()
                        missing = [each for each in missing if not await _has_data(server, each)]
            except TimeoutError:
                raise AssertionError(f"no data: {missing}") from None


async def _has_data(server: object, query: Query) -> bool:
    series = await server.query(query.expression)  # type: ignore[attr-defined]
    has_numbers = any(not math.isnan(float(each["value"][1])) for each in series)
    has_labels = all(name in each["metric"] for each in series for name in query.legend_labels)
    return has_numbers and has_labels
