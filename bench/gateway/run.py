"""The gateway's own cost: CPU per token and request, added latency, start and memory.

    python -m bench.gateway.run                   # 5 repetitions, writes results/
    python -m bench.gateway.run --quick           # one repetition, under a minute
    python -m bench.gateway.run --streams 10000   # only this: so many streams at once, none lost
    python -m bench.gateway.run --growth          # only this: many workers, many streams
    python -m bench.gateway.run --tls             # only this: what TLS costs
    python -m bench.gateway.run --beside ../old   # only this: beside another checkout, in turns

Beside vllm-router, sglang-router and smg, where they are installed. What the numbers mean:
README.md beside this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.gateway.log_line import line_us
from bench.gateway.subjects import (
    ROUTERS,
    STEP_MS,
    Subject,
    Tools,
    http_backends,
    our_gateway,
    router,
    tools,
)
from bench.gateway.tls import certificate_settings, tls_figures
from bench.plots import Bars, Pictures
from bench.record import Record, arguments, ratios, span, spread
from shared.log import configure_logs

OURS = "pdmesh"
QUIET = "pdmesh, warning"
"""The same without a line a request: log level ``warning``, as the routers have ``error``."""
LINE_US = 20.0
"""What a request's line may cost."""
DIRECT = "direct"
OTHER_TREE = "other tree"
LIMIT_US = 8.0
ADDED_MS = 0.25
MANY = 10_000
PAIRS = 2, 64
STREAMS = 1, 64, 5_000
IDLE_S = 4.0
NOT_WORSE, PACED_NOT_WORSE = 1.1, 1.25
"""No peer may be better by more than this factor in any row, or in one of paced streams."""


@dataclass(frozen=True, slots=True)
class Load:
    """One load. figures: which of a run's figures are told, lower = better in all."""

    name: str
    kind: str
    connections: int
    max_tokens: int
    is_paced: bool
    window_s: float
    figures: tuple[str, ...]


_TOKEN = ("cpu_us_per_token",)
LOADS = (
    Load("64 streams, flat out", "stream", 64, 128, False, 1.5, _TOKEN),
    Load("1,024 streams, flat out", "stream", 1024, 128, False, 2.5, _TOKEN),
    Load(f"64 streams, a step every {STEP_MS} ms", "stream", 64, 128, True, 3.0, _TOKEN),
    Load(f"1,024 streams, a step every {STEP_MS} ms", "stream", 1024, 128, True, 3.0, _TOKEN),
    Load("unary, 64 connections", "unary", 64, 2, False, 1.5, ("cpu_us_per_request",)),
    Load("unary, 1 connection", "unary", 1, 2, False, 1.5, ("added_p50_ms", "added_p99_ms")),
    Load(
        "128-token stream, 1 connection", "stream", 1, 128, False, 1.5,
        ("first_p50_ms", "whole_p50_ms"),
    ),
)  # fmt: skip


class Client:
    """The load client, a program of its own."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    async def run(
        self,
        subject: Subject,
        load: Load,
        *,
        warm_s: float,
        window_s: float,
        open_per_s: float = 0.0,
    ) -> dict[str, Any]:
        """Put the load on the subject and return the client's figures."""
        subject.set_pace(is_paced=load.is_paced)
        child = await asyncio.create_subprocess_exec(
            self._tools.programs["client"],
            *(str(subject.port), self._tools.words, load.kind, str(load.connections)),
            *(str(load.max_tokens), str(warm_s), str(window_s), str(open_per_s)),
            *map(str, subject.pids),
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, self._tools.cores.others),
        )
        output, _ = await child.communicate()
        if child.returncode:
            sys.exit(f"{subject.name}, {load.name}: wrong or lost answers: {output.decode()}")
        return derived(json.loads(output))


def derived(figures: dict[str, Any]) -> dict[str, Any]:
    """Add what is told from the client's counts."""
    if figures["tokens"]:
        figures["cpu_us_per_token"] = figures["cpu_s"] / figures["tokens"] * 1e6
        figures["tokens_per_s"] = figures["tokens"] / figures["seconds"]
        figures["tokens_per_event"] = figures["tokens"] / max(1, figures["events"])
    if figures["answers"]:
        figures["cpu_us_per_request"] = figures["cpu_s"] / figures["answers"] * 1e6
        figures["answers_per_s"] = figures["answers"] / figures["seconds"]
    return figures


# --- beside the routers ---------------------------------------------------------------------------


async def compare(
    record: Record, repetitions: int, share: float, names: list[str], tree: Path | None = None
) -> None:
    """Measure every load on every subject, in turns; share: of the windows' length. tree: another
    checkout of this repository, whose gateway is one more subject."""
    async with contextlib.AsyncExitStack() as stack:
        kit = stack.enter_context(tools())
        backends = await stack.enter_async_context(http_backends(kit))
        ours = await stack.enter_async_context(our_gateway(kit))
        quiet = our_gateway(kit, name=QUIET, settings={"PDMESH_LOG_LEVEL": "warning"})
        subjects = [ours, await stack.enter_async_context(quiet)]
        for name in names:
            found = await stack.enter_async_context(router(name, backends, kit))
            subjects += [found] if found is not None else []
        if tree is not None:
            other = our_gateway(kit, name=OTHER_TREE, tree=tree)
            subjects.append(await stack.enter_async_context(other))
        port, pid = next(iter(backends.items()))
        direct = Subject(DIRECT, port, (pid,), (pid,))
        runs = await repeat(Client(kit), [direct, *subjects], repetitions, share)
    for load in LOADS:
        row = row_of(load, [subject.name for subject in subjects], runs)
        record.add(row)
        show(row)
        if tree is None:
            judge(record, load, row)


Runs = dict[tuple[str, str], list[dict[str, Any]]]
"""(load, subject) -> the client's figures of each repetition."""


async def repeat(client: Client, subjects: list[Subject], repetitions: int, share: float) -> Runs:
    """Every load on every subject, as often; the order of subjects turns."""
    runs: Runs = {(load.name, subject.name): [] for load in LOADS for subject in subjects}
    for repetition in range(repetitions):
        for load in LOADS:
            turn = repetition % len(subjects)
            for subject in subjects[turn:] + subjects[:turn]:
                # Alone it is what latencies are added to; paced, the limit: one `send` a token.
                if subject.name == DIRECT and load.connections > 1 and not load.is_paced:
                    continue
                window_s = load.window_s * share
                # Paced streams of one batch must not all begin in the window's first step.
                warm_s = 1.0 if load.is_paced else 0.4
                figures = await client.run(subject, load, warm_s=warm_s * share, window_s=window_s)
                runs[load.name, subject.name].append(figures)
            add_latencies(runs, load, subjects)
    return runs


def add_latencies(runs: Runs, load: Load, subjects: list[Subject]) -> None:
    """Take the back end's own latency away from what went through a subject, in one repetition."""
    if "added_p50_ms" not in load.figures:
        return
    direct = runs[load.name, DIRECT][-1]
    for subject in subjects:
        figures = runs[load.name, subject.name][-1]
        for name in ("p50", "p99"):
            figures[f"added_{name}_ms"] = figures[f"whole_{name}_ms"] - direct[f"whole_{name}_ms"]


def row_of(load: Load, names: list[str], runs: Runs) -> dict[str, Any]:
    """One load: figures of every subject, and ours over each peer's."""
    row: dict[str, Any] = {"load": load.name, "subjects": {}, "ours_over_theirs": {}}
    for name in [DIRECT, *names]:
        # A window of paced streams may hold no answer's end, and then no figure of answers.
        if measured := runs[load.name, name]:
            row["subjects"][name] = {
                figure: spread([run[figure] for run in measured])
                for figure in sorted(set.intersection(*map(set, measured)) - {"failed"})
            }
    for figure in load.figures:
        mine = runs[load.name, OURS]
        for name in names:
            # A busy host may let a window pass without a token.
            both = [
                (ours[figure], theirs[figure])
                for ours, theirs in zip(mine, runs[load.name, name], strict=True)
                if figure in ours and figure in theirs
            ]
            if name != OURS and both:
                found = row["ours_over_theirs"].setdefault(figure, {})
                found[name] = ratios(*zip(*both, strict=True))
    return row


def show(row: dict[str, Any]) -> None:
    print(row["load"])
    for name, figures in row["subjects"].items():
        told = [
            f"{figure} {span(figures[figure], '.3g')}"
            for figure in (
                *next(load.figures for load in LOADS if load.name == row["load"]),
                *("tokens_per_s", "tokens_per_event", "answers_per_s"),
            )
            if figure in figures
        ]
        print(f"  {name:14} {'  '.join(told)}", flush=True)
    for figure, ratios_of in row["ours_over_theirs"].items():
        if ratio := ratios_of.get(OTHER_TREE):
            print(f"  {figure}: over the other tree {span(ratio, '.3g')}", flush=True)


def judge(record: Record, load: Load, row: dict[str, Any]) -> None:
    ours = row["subjects"][OURS]
    if missing := [figure for figure in load.figures if figure not in ours]:
        sys.exit(f"{load.name}: not one {missing[0]} in a window; is the machine this busy?")
    if "cpu_us_per_token" in load.figures:
        what = f"CPU us/token, {load.name}"
        record.goal(7, what, ours["cpu_us_per_token"], "<=", LIMIT_US)
    if "added_p50_ms" in load.figures:
        record.goal(7, "unary, added p50 ms", ours["added_p50_ms"], "<=", ADDED_MS)
    for figure, ratios_of in row["ours_over_theirs"].items():
        if peers := {name: ratio for name, ratio in ratios_of.items() if name != QUIET}:
            best = max(peers.values(), key=lambda ratio: ratio["median"])
            what = f"{figure}, {load.name}: ours/best peer"
            bound = PACED_NOT_WORSE if load.is_paced else NOT_WORSE
            record.goal(7, what, best, "<=", bound)


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """CPU of a token and of a request, and latencies, of every subject."""
    compared = {row["load"]: row["subjects"] for row in rows if "subjects" in row}
    alone = "128-token stream, 1 connection"
    if alone not in compared:
        return {}  # how figures grow is a table
    names = [OURS, QUIET, *ROUTERS]

    def bars(*wanted: tuple[str, str, str]) -> dict[str, dict[str, Any]]:
        return {
            name: {
                group: compared[load][name][figure]
                for group, load, figure in wanted
                if name in compared[load]
            }
            for name in names
            if any(name in compared[load] for _, load, _ in wanted)
        }

    per_token = bars(
        *(
            (f"{count},\n{name}", f"{count} streams, {pace}", *_TOKEN)
            for name, pace in (("flat out", "flat out"), ("paced", f"a step every {STEP_MS} ms"))
            for count in ("64", "1,024")
        )
    )
    per_request = bars(("64 connections", "unary, 64 connections", "cpu_us_per_request"))
    added = bars(
        ("p50", "unary, 1 connection", "added_p50_ms"),
        ("p99", "unary, 1 connection", "added_p99_ms"),
    )
    stream = bars(("TTFT, p50", alone, "first_p50_ms"), ("whole, p50", alone, "whole_p50_ms"))
    return {
        "": [
            Bars("a token (CPU)", "us of a core", per_token, LIMIT_US),
            Bars("a request (CPU)", "us of a core", per_request),
            Bars("added to a unary answer (CPU)", "ms", added, ADDED_MS),
            Bars("a stream of 128 tokens (CPU)", "ms", stream),
        ]
    }


# --- start and memory -----------------------------------------------------------------------------


async def start_up(record: Record, repetitions: int) -> None:
    """From exec to a gateway that takes requests, and what it holds then."""
    with tools() as kit:
        seconds: list[float] = []
        mib: list[float] = []
        for _ in range(repetitions + 1):  # the first reads the files from disk
            async with our_gateway(kit) as ours:
                seconds.append(ours.ready_s)
                mib.append(ours.memory_mib())
    row = {"ready_s": spread(seconds[1:]), "memory_mib": spread(mib[1:])}
    record.add({"load": "start", **row})
    record.goal(10, "gateway: exec to a usable pair, s", row["ready_s"], "<", 1.0)
    record.goal(10, "gateway: resident memory with a pair, MiB", row["memory_mib"], "<", 80.0)


# --- a request's log line -------------------------------------------------------------------------


def log_line(record: Record) -> None:
    """What it takes of the loop."""
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        found = spread(line_us(Path(folder) / "log", 20))
    record.add({"load": "a request's log line", "cpu_us": found})
    record.goal(7, "a request's log line, CPU us", found, "<=", LINE_US)


# --- many streams ---------------------------------------------------------------------------------


async def many_streams(record: Record, count: int) -> None:
    """Open ``count`` streams that all live at once, and check every byte of all of them."""
    needed = count + 256
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < needed:
        sys.exit(f"{count} streams need a hard limit of open files of {needed}: ulimit -Hn")
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (needed, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    load = Load(f"{count} streams", "stream", count, 64, True, 0.0, ())
    with tools() as kit:
        async with our_gateway(kit, step_ms=1000) as ours:
            idle_mib = ours.memory_mib()
            most_mib = idle_mib
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(
                    Client(kit).run(ours, load, warm_s=0.0, window_s=0.0, open_per_s=count / 15)
                )
                while not running.done():
                    await asyncio.wait([running], timeout=0.5)
                    most_mib = max(most_mib, ours.memory_mib())
            figures = running.result()
    kib = (most_mib - idle_mib) * 1024 / count
    figures |= {"idle_mib": idle_mib, "most_mib": most_mib, "kib_per_stream": kib}
    record.add({"load": load.name, **figures})
    print(
        f"{figures['all_answers']} of {count} answers whole, {figures['most_open']} open at once, "
        f"{figures['whole_p50_ms'] / 1e3:.0f} s each; {idle_mib:.0f} MiB before, at most "
        f"{most_mib:.0f}, {kib:.1f} KiB a stream; "
        f"CPU {figures['cpu_us_per_token']:.1f} us/token"
    )
    record.goal(7, f"whole answers of {count} open streams", figures["all_answers"], ">=", count)
    record.goal(7, f"streams open at once, of {count}", figures["most_open"], ">=", count)


# --- growth ---------------------------------------------------------------------------------------


async def growth(record: Record, repetitions: int) -> None:
    """What a request, a token and a second without either cost with few workers and with many, in
    turns; then a token of few streams and of many."""
    loads = [
        load for load in LOADS if load.connections == 64 and (load.is_paced or load.kind == "unary")
    ]
    with tools() as kit:
        client = Client(kit)
        async with contextlib.AsyncExitStack() as stack:
            few, many = [
                await stack.enter_async_context(
                    our_gateway(kit, name=f"{num} + {num}", num_pairs=num)
                )
                for num in PAIRS
            ]
            await asyncio.sleep(5.0)  # all have joined, and sessions to all are up
            found: dict[str, dict[str, list[float]]] = {}
            for repetition in range(repetitions):
                for subject in (few, many) if repetition % 2 else (many, few):
                    told = {"idle, % of a core": 100 * await idle_share(subject)}
                    for load in loads:
                        figures = await client.run(
                            subject, load, warm_s=1.0, window_s=load.window_s
                        )
                        told |= {f"{load.name}, CPU us": figures[name] for name in load.figures}
                    for what, figure in told.items():
                        found.setdefault(what, {}).setdefault(subject.name, []).append(figure)
        for what, by_name in found.items():
            grown(
                record,
                f"{what}, {many.name} workers over {few.name}",
                by_name,
                (few.name, many.name),
                1.3,
            )
        whole: dict[str, list[float]] = {}
        beyond: dict[str, list[float]] = {}
        alone = our_gateway(kit, name="one stream")
        async with alone as one, our_gateway(kit, step_ms=1000) as ours:
            for _ in range(repetitions):
                for count in STREAMS:
                    # A token a second, alone, is nothing beside an idle gateway: 20 are something.
                    subject = one if count == 1 else ours
                    load = Load(f"{count} streams", "stream", count, 64, True, 8.0, _TOKEN)
                    idle = await idle_share(subject)
                    figures = await client.run(subject, load, warm_s=4.0, window_s=load.window_s)
                    whole.setdefault(load.name, []).append(figures["cpu_us_per_token"])
                    own_s = figures["cpu_s"] - idle * figures["seconds"]
                    beyond.setdefault(load.name, []).append(own_s / figures["tokens"] * 1e6)
        alone, few, most = list(whole)
        grown(record, "a token a second, CPU us, 5000 streams over 64", whole, (few, most), 1.5)
        what = "a token, CPU us beyond an idle gateway's, 5000 streams over 1"
        grown(record, what, beyond, (alone, most), 1.5)


async def idle_share(subject: Subject) -> float:
    """What a subject takes of a core while nobody asks anything."""
    spent_s, began_at = subject.cpu_s(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (subject.cpu_s() - spent_s) / (time.monotonic() - began_at)


def grown(
    record: Record, what: str, found: dict[str, list[float]], names: Sequence[str], limit: float
) -> None:
    """Note two figures, in the order of their names, and how much more the second is."""
    less, more = map(found.__getitem__, names)
    ratio = ratios(more, less)
    told = {name: spread(found[name]) for name in names}
    record.add({"load": what, "subjects": told, "ratio": ratio})
    print(what, *(f"{name}: {it['median']:.3g}" for name, it in told.items()), sep="; ", flush=True)
    record.goal(7, what, ratio, "<=", limit)


# --- TLS ------------------------------------------------------------------------------------------


async def tls_cost(record: Record, repetitions: int) -> None:
    """One gateway with TLS and one without, in turns, under the same client: CPU of a token and of
    a connection, and their ratios."""
    with tools() as kit:
        os.sched_setaffinity(0, kit.cores.others)
        settings = certificate_settings(kit.words.parent)
        async with (
            our_gateway(kit) as plain,
            our_gateway(kit, name="TLS", settings=settings) as encrypted,
        ):
            runs: dict[str, dict[str, list[float]]] = {}
            for repetition in range(repetitions):
                turn = repetition % 2
                pair = ((plain, "http"), (encrypted, "https"))
                for subject, scheme in (*pair[turn:], *pair[:turn]):
                    for what, figure in (await tls_figures(subject, scheme)).items():
                        runs.setdefault(what, {}).setdefault(subject.name, []).append(figure)
    for what, found in runs.items():
        ratio = ratios(found["TLS"], found[OURS])
        told = {name: spread(figures) for name, figures in found.items()}
        record.add({"load": what, "subjects": told, "tls_over_plain": ratio})
        without, with_tls = told[OURS]["median"], told["TLS"]["median"]
        print(f"{what}: {without:.3g} us without, {with_tls:.3g} with, ratio {span(ratio, '.2f')}")


# --- all of it ------------------------------------------------------------------------------------


def main() -> None:
    parser = arguments(__doc__, "one repetition, not recorded")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--streams", type=int, default=0, metavar="N", help="only this many at once"
    )
    parser.add_argument("--growth", action="store_true", help="only many workers, many streams")
    parser.add_argument("--tls", action="store_true", help="only what TLS costs")
    parser.add_argument(
        "--beside", type=Path, metavar="TREE", help="only beside the gateway of another checkout"
    )
    parser.add_argument("--peers", nargs="*", default=list(ROUTERS), choices=list(ROUTERS))
    chosen = parser.parse_args()
    configure_logs(service="bench", level="error")
    record = Record.of(__file__, chosen)
    repetitions = 1 if chosen.quick else chosen.repetitions
    if chosen.streams or chosen.tls:
        record.is_written = False
    if chosen.streams:
        asyncio.run(many_streams(record, chosen.streams))
    elif chosen.growth:
        asyncio.run(growth(record, repetitions))
    elif chosen.tls:
        asyncio.run(tls_cost(record, repetitions))
    elif chosen.beside:
        asyncio.run(compare(record, repetitions, 0.8, [], chosen.beside.resolve()))
    else:
        log_line(record)
        configure_logs(service="bench", level="error")
        asyncio.run(start_up(record, repetitions))
        asyncio.run(compare(record, repetitions, 0.5 if chosen.quick else 0.8, chosen.peers))
        if not chosen.quick:
            asyncio.run(many_streams(record, MANY))
    record.finish(pictures_of)


if __name__ == "__main__":
    main()
