"""``pdmesh bench`` against servers: what it reports equals what was sent, to the request and the
token; what a server refuses is missed; a client that fell behind says so."""

from __future__ import annotations

import asyncio
import csv
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.cli.bench.endpoints import fit_of, open_endpoints
from services.cli.bench.open_loop import run_open_loop
from services.cli.bench.sources import fixed
from services.cli.bench.workload import Load, plan
from tests.support.command import pdmesh
from tests.support.house import ROOT
from tests.support.openai_mock import OpenAiMock, num_prompt_tokens, openai_mock
from tests.support.process_mesh import ProcessMesh, process_mesh
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.process

STOPPED_S = 0.6

FIXED = ("--synthetic", "fixed", "--input-len", "40", "--output-len", "12")


async def benched(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run a measurement; exit code, report, stderr."""
    async with pdmesh("bench", *arguments, "--json") as command:
        code = await command.ended()
    assert command.out, command.err
    return code, json.loads(command.out), command.err


def is_good(code: int, report: dict[str, Any]) -> bool:
    """Whether all is well but, on a machine that is busy with other tests, the client's lag."""
    return code == 0 or any(run["void"] for run in report["runs"])


async def a_mesh(mesh: ProcessMesh, **gateway_settings: Any) -> ServiceProcess:
    gateway = await mesh.start_gateway(**gateway_settings)
    for role in ("prefill", "decode"):
        await mesh.add(role)
    await mesh.paired(gateway, 1)
    return gateway


def http(gateway: ServiceProcess) -> str:
    return f"http://127.0.0.1:{gateway.facts['http_port']}"


@pytest.mark.ucx
async def test_counts_of_a_real_mesh_are_exact(tmp_path: Path) -> None:
    """Every request, every prompt and answer token. What shares block ids in a trace shares KV in
    the mesh; another run's prompts are new."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 0, "hash_ids": [0, 1]}, {"timestamp": 1000, "hash_ids": [0, 2]}]
    lengths = {"input_length": 1024, "output_length": 32}
    trace.write_text("".join(json.dumps({**line, **lengths}) + "\n" for line in lines))
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await a_mesh(mesh)
            url = http(gateway)
            code, report, _ = await benched(
                url, *FIXED, "--rate", "30", "--requests", "20", "--output", str(tmp_path)
            )
            flags = ("--trace", str(trace), "--scale-lengths", "0.125", "--warmup", "0")
            replays = [await benched(url, *flags) for _ in range(2)]
        assert is_good(code, report)
        (run,) = report["runs"]
        assert run["ends"] == {"complete": 20}
        assert (run["input_tokens"], run["output_tokens"]) == (20 * 40, 20 * 12)
        assert (run["num_short"], run["num_missed"], run["cached_tokens"]) == (0, 0, 0)
        assert run["ttft_s"]["count"] == 20
        assert [found["api"] for found in report["endpoints"]] == ["completions"]
        assert {found["counts"] for found in report["endpoints"]} == {"in every message"}
        assert {found["prompts"] for found in report["endpoints"]} == {"token ids"}
        rows = list(csv.DictReader((tmp_path / "requests.csv").read_text().splitlines()))
        assert [row["url"] for row in rows] == [url] * 20
        assert {(row["input"], row["output"], row["end"]) for row in rows} == {
            ("40", "12", "complete")
        }
        assert all(float(row["ttft_s"]) > 0 for row in rows)
        assert json.loads((tmp_path / "report.json").read_bytes()) == report
        assert "<svg" in (tmp_path / "report.svg").read_text()
    for code, replay, _ in replays:
        assert is_good(code, replay)
        (run,) = replay["runs"]
        assert run["workload"]["arrivals"] == "trace"
        assert (run["input_tokens"], run["output_tokens"]) == (2 * 128, 2 * 4)
        assert run["cached_tokens"] == 64


@pytest.mark.ucx
async def test_a_mesh_that_refuses_is_missed() -> None:
    """One request at a time is served, the rest refused at once."""
    async with process_mesh() as mesh:
        with mesh.explained():
            gateway = await a_mesh(mesh, max_running=1, max_waiting=0)
            flags = ("--rate", "inf", "--requests", "10", "--warmup", "0")
            code, report, _ = await benched(http(gateway), *FIXED, *flags)
    assert is_good(code, report)
    (run,) = report["runs"]
    num_complete = run["ends"]["complete"]
    assert run["ends"] == {"complete": num_complete, "refused": 10 - num_complete}
    assert 0 < num_complete < 10
    assert run["num_missed"] == 10 - num_complete
    assert run["attainment"] <= num_complete / 10


@pytest.mark.quick
async def test_a_server_that_is_not_pdmesh() -> None:
    """Neither ids nor counts nor a fixed length: words, one token a chunk; and it is said."""
    async with openai_mock(OpenAiMock(usage="")) as mock:
        code, report, _ = await benched(mock.url, *FIXED, "--rate", "50", "--requests", "10")
    assert is_good(code, report)
    (run,), (found,) = report["runs"], report["endpoints"]
    assert (found["model"], found["api"], found["prompts"]) == ("mock", "completions", "words")
    assert (found["counts"], found["is_length_fixed"]) == ("one a message", False)
    assert (run["ends"], run["output_tokens"]) == ({"complete": 10}, 120)
    for body in mock.bodies:
        assert isinstance(body["prompt"], str)
        assert not {"ignore_eos", "min_tokens", "stream_options"} & set(body)


async def test_counts_at_the_end_and_words_as_the_tokenizer_has_them() -> None:
    """A chat-only server with chunks of three tokens and two tokens a word: lengths come out as
    asked, and tokens as it counted."""
    mock = OpenAiMock(usage="last", has_completions=False, chunk_tokens=3)
    async with openai_mock(mock):
        code, report, _ = await benched(mock.url, *FIXED, "--rate", "50", "--requests", "6")
    assert is_good(code, report)
    (run,), (found,) = report["runs"], report["endpoints"]
    assert (found["api"], found["tokens_per_word"]) == ("chat", 2.0)
    assert (run["output_tokens"], run["input_tokens"]) == (6 * 12, 6 * 40)
    assert {num_prompt_tokens(body) for body in mock.bodies[-6:]} == {40}


async def test_every_way_to_miss_is_told_apart() -> None:
    """Refused, cut and broken answers are counted by kind, with the server's own words; what broke
    makes the exit code 1, what was refused does not."""
    fates = {6: "refuse", 7: "cut", 8: "break", 9: "refuse"}
    mock = OpenAiMock("every", takes_ids=True, is_strict=False, interval_s=0.01)
    mock.fate = lambda number: fates.get(number, "")
    flags = ("--rate", "50", "--requests", "10", "--warmup", "0", "--slo-tpot", "5s")
    async with openai_mock(mock):
        code, report, _ = await benched(mock.url, *FIXED, *flags, "--slo-ttft", "5s")
        mock.fate = lambda number: "refuse" if number % 2 else ""
        other_code, other, _ = await benched(mock.url, *FIXED, *flags)
    assert is_good(other_code, other)
    assert other["runs"][0]["ends"] == {"complete": 5, "refused": 5}
    assert code == 1
    (run,) = report["runs"]
    assert run["ends"] == {"complete": 6, "refused": 2, "cut": 2}
    assert run["attainment"] == 0.6
    assert run["errors"]["HTTP 503: too busy"] == 2
    assert run["errors"]["the worker is gone"] == 1


async def test_an_answer_that_never_ends_is_given_up() -> None:
    """After --timeout; it is missed."""
    mock = OpenAiMock("every", takes_ids=True, is_strict=False)
    mock.fate = lambda number: "stall" if number == 2 else ""  # the first one probes
    async with openai_mock(mock):
        flags = ("--rate", "inf", "--requests", "1", "--warmup", "0", "--timeout", "300ms")
        code, report, _ = await benched(mock.url, *FIXED, *flags)
    assert (code, report["runs"][0]["ends"]) == (1, {"timeout": 1})


async def test_a_client_that_was_late_voids_its_run() -> None:
    """It is stopped for a while amid a run, as a machine that is too busy would: VOID, exit code
    1, and a TTFT that counts from when requests were due."""
    mock = OpenAiMock("every", takes_ids=True, is_strict=False)
    async with openai_mock(mock):
        flags = ("--rate", "20", "--requests", "40", "--warmup", "0", "--json")
        async with pdmesh("bench", mock.url, *FIXED, *flags) as command:
            await mock.until(5)
            command.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            command.process.send_signal(signal.SIGCONT)
            code = await command.ended()
    report = json.loads(command.out)
    (run,) = report["runs"]
    assert code == 1
    assert any("requests left late" in reason for reason in run["void"])
    assert any("answers were read late" in reason for reason in run["void"])
    assert run["client"]["dispatch_lag_s"]["max"] > 0.4
    assert run["ttft_s"]["max"] > 0.4


async def test_ctrl_c_ends_a_run_and_reports_what_there_is(tmp_path: Path) -> None:
    """130, with a table and the files; what had not ended is neither good nor missed."""
    mock = OpenAiMock("every", takes_ids=True, is_strict=False)
    mock.fate = lambda number: "stall" if number == 3 else ""
    async with openai_mock(mock):
        flags = ("--rate", "20", "--requests", "100", "--warmup", "0", "--output", str(tmp_path))
        async with pdmesh("bench", mock.url, *FIXED, *flags) as command:
            await mock.until(4)
            command.process.send_signal(signal.SIGINT)
            code = await command.ended()
    assert code == 130, command.err
    assert "interrupted" in command.out
    (run,) = json.loads((tmp_path / "report.json").read_bytes())["runs"]
    assert run["is_interrupted"]
    assert run["num_missed"] == 0
    assert run["ends"]["unfinished"] >= 1


async def test_programs_have_the_same_loop() -> None:
    """Two servers in turn, one of which knows no ids; a run says its rate and where each request
    went; without ignore_eos nobody is asked for a length that the model does not want."""
    one = OpenAiMock("every", takes_ids=True, is_strict=False)
    other = OpenAiMock("last")
    async with (
        openai_mock(one),
        openai_mock(other),
        open_endpoints([one.url, other.url], ignore_eos=False) as endpoints,
    ):
        workload = plan(fixed(30, 5), Load(rate=200.0, num_requests=6), fit_of(endpoints))
        run = await run_open_loop(endpoints, workload, prompt_seed=1)
    assert run.rate == 200.0
    assert [record.url for record in run.records] == [one.url, other.url] * 3
    assert [record.num_output for record in run.records] == [5] * 6
    assert [record.num_prompt for record in run.records] == [30] * 6
    assert not any("ignore_eos" in body for body in one.bodies + other.bodies)


def test_ctrl_c_while_the_server_is_silent() -> None:
    """130, and not a word."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, "-m", "services.cli", "bench", url]
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            connection, _ = silent.accept()
            with connection:
                assert connection.recv(1)
                process.send_signal(signal.SIGINT)
                assert process.communicate(timeout=60) == (b"", b"")
            assert process.returncode == 130


async def test_a_run_that_cannot_begin_leaves_those_before_it() -> None:
    """The sweep's first run is reported; the second one's trouble is a line, and the exit code."""
    async with openai_mock(OpenAiMock("every", takes_ids=True, is_strict=False)) as mock:
        flags = ("--rates", "20,0.001", "--duration", "300ms")
        code, report, err = await benched(mock.url, *FIXED, *flags)
    assert (code, [run["rate"] for run in report["runs"]]) == (1, [20])
    assert err.startswith("pdmesh: no request of fixed 40+12 is left to be sent at 0.001/s")
    assert err.count("\n") == 1


async def test_a_sweep_and_a_search() -> None:
    """A run for each rate; a search ends with a goodput that attained, below a rate that missed."""
    mock = OpenAiMock("every", takes_ids=True, is_strict=False)
    async with openai_mock(mock):
        flags = ("--rates", "20,40", "--duration", "300ms")
        _, report, _ = await benched(mock.url, *FIXED, *flags)
        assert [run["rate"] for run in report["runs"]] == [20, 40]
        assert report["goodput"] is None
        # From some request on it serves nobody.
        num_before = len(mock.bodies)
        mock.fate = lambda number: "" if number < num_before + 140 else "refuse"
        flags = ("--goodput", "--rate", "100", "--requests", "50", "--warmup", "0")
        slo = ("--slo-ttft", "60s", "--slo-tpot", "60s", "--tolerance", "0.6")
        _, report, _ = await benched(mock.url, *FIXED, *flags, *slo)
    found = report["goodput"]
    if not any(run["void"] for run in report["runs"]):
        assert (found["rate"], found["lowest_miss"]) == (200, 300)
        assert [tried["rate"] for tried in found["tried"]] == [100, 200, 400, 300]
