"""How long does a client wait when something dies?

    python -m bench.faults.run [--quick] [--faults 200] [--limit 1200] [--kinds kill,stop]
    python -m bench.faults.run --trace stop --roles decode --phases transfer [--verbose]

Real processes over TCP and UCX, the fake engine with steps of 10 ms, and always a spare. A
failpoint in the victim decides the instant. ``--trace`` hits once and prints where the time went,
phase by phase. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp

from bench.cpu import other_work
from bench.record import Record, arguments
from services.gateway.text.text_model import TextModel
from shared.model_folder import ModelFolder, resolve_model
from shared.telemetry.definitions import percentiles
from tests.support.process_mesh import Answer, ProcessMesh, a_prompt, fake_ids, process_mesh
from tests.support.service_process import ServiceProcess, free_port

ROLES = ("prefill", "decode")
STEP_S = 0.01
NUM_TOKENS = 16
PROMPT_TOKENS = 600
SETTINGS: dict[str, dict[str, Any]] = {
    "prefill": {"token_budget": 64, "fake_step_s": STEP_S, "transfer_mode": "layerwise"},
    "decode": {"fake_step_s": STEP_S},
}
FAILPOINTS = {
    "prefill": {"prefill": "before_first_frame", "decode": "before_grant"},
    "transfer": {"prefill": "mid_push:5", "decode": "mid_push:3"},
    "decode": {"prefill": "", "decode": "mid_decode:5"},
}
"""Phase of the request -> failpoint in the victim; '' = hit from here, amid the answer."""

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
KINDS = ("kill", "stop", "overlap", "gateway", "load")
"""overlap: within OVERLAP_S of a kill the worker to which its work would go next, or one of the
other role, is killed or stopped. load: no fault at all, and no process may be suspected while all
cores are busy."""

OVERLAP_S = 0.3
HAS_BEGUN = 4
SEEN_WITHIN_S = 0.02
"""From a failpoint's act until it is seen here: others may have noticed it before."""

LOAD_S = 60.0
NUM_STREAMS = 8
BEYOND_RECOMPUTE_S, OVERLAPPING_S, STOPPED_S, RESTARTED_S = 0.3, 1.5, 2.0, 1.2


@dataclass(frozen=True, slots=True)
class Cell:
    """What is hit, how and when."""

    kind: str
    role: str = ""
    phase: str = ""


@dataclass(slots=True)
class Hit:
    """One fault and what its client saw. at, waited_s: loop time, the longest pause after it."""

    cell: Cell
    at: float
    waited_s: float
    attempts: int


class Faults:
    """One mesh: a gateway and two workers of each role that nobody harms, and a victim a fault."""

    def __init__(self, mesh: ProcessMesh, seed: int, log_level: str) -> None:
        self.mesh = mesh
        self.random = random.Random(seed)
        self._log_level = log_level
        self._ports = {name: free_port() for name in ("http_port", "grpc_port", "mesh_port")}
        self._num_prompts = 0
        text = TextModel.load(ModelFolder(resolve_model("demo")))
        self._name_of = lambda token_id: text.piece(token_id).completion_name

    async def start(self) -> None:
        """Start what stays."""
        self.gateway = await self._start_gateway()
        self.unharmed = [await self._start(role) for role in ROLES for _ in range(2)]
        await self.mesh.ready(*self.unharmed)
        await self.mesh.paired(self.gateway, 4)

    async def _start_gateway(self) -> ServiceProcess:
        # By the default policy the next request goes to whoever is quickest, and not to the victim.
        return await self.mesh.start_gateway(
            policy="least_loaded", log_level=self._log_level, **self._ports
        )

    async def _start(self, role: str, failpoint: str = "") -> ServiceProcess:
        return await self.mesh.start(
            role, failpoints=failpoint, log_level=self._log_level, **SETTINGS[role]
        )

    async def _join(
        self, role: str, failpoint: str = "", others: Sequence[ServiceProcess] = ()
    ) -> ServiceProcess:
        """Start one worker more and wait until it takes work; the next request is its."""
        worker = await self._start(role, failpoint)
        await self.mesh.ready(worker)
        roles = [one.name.partition("-")[0] for one in (worker, *others)]
        await self.mesh.paired(
            self.gateway, (2 + roles.count("prefill")) * (2 + roles.count("decode"))
        )
        return worker

    async def ask(self, num_tokens: int = NUM_TOKENS, **options: Any) -> Answer:
        """Ask something new and read all of it. Raises AssertionError: one token is wrong."""
        self._num_prompts += 1
        prompt = a_prompt(PROMPT_TOKENS + self._num_prompts % 64, start=self._num_prompts)
        answer = await self.mesh.ask(self.gateway, prompt, num_tokens, **options)
        answer.require_whole(num_tokens)
        truth = fake_ids(prompt, num_tokens)
        assert answer.tokens == [self._name_of(token_id) for token_id in truth], "a wrong token"
        return answer

    async def recompute(self) -> float:
        """Seconds to the first token of an answer that nothing disturbs."""
        now = asyncio.get_running_loop().time
        began_at = now()
        answer = await self.ask()
        return answer.arrived_at[0] - began_at

    async def hit(self, cell: Cell) -> Hit:
        """Start a victim, have it hit, and read its client's answer to the end."""
        action = "stop" if cell.kind == "stop" else "kill"
        point = FAILPOINTS[cell.phase][cell.role]
        armed = f"{cell.role}.{point}={action}" if point else ""
        others: list[ServiceProcess] = []
        if cell.kind == "overlap":
            others = [await self._join(self.random.choice(ROLES))]
            for _ in range(3):
                await (
                    self.ask()
                )  # it was the newest, and is now the one chosen longest ago: the next
        victim = await self._join(cell.role, armed, others)
        has_begun = asyncio.Event()

        def watch(answer: Answer) -> None:
            if len(answer.tokens) >= HAS_BEGUN:
                has_begun.set()

        loop = asyncio.get_running_loop()
        later: list[asyncio.TimerHandle] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(self.ask(on_token=watch))
                if point:
                    hit_at = await victim.acted(f"{cell.role}.{point.partition(':')[0]}")
                else:
                    await has_begun.wait()
                    hit_at = loop.time()
                    victim.send(SIGNALS[action])
                for other in others:
                    number = self.random.choice((signal.SIGKILL, signal.SIGSTOP))
                    delay_s = self.random.random() * OVERLAP_S
                    later.append(loop.call_later(delay_s, other.send, number))
        finally:
            for timer in later:
                timer.cancel()
            for process in (victim, *others):
                await process.end_at_once()
                self.mesh.processes.remove(process)
        answer = asked.result()
        times = [hit_at, *(at for at in answer.arrived_at if at > hit_at)]
        waited_s = max(after - before for before, after in pairwise(times))
        await self.mesh.paired(self.gateway, 4)
        return Hit(cell, hit_at, waited_s, answer.receipt["attempts"])

    async def restart_gateway(self) -> Hit:
        """Kill the gateway amid an answer, start another in its place, and ask until it answers."""
        loop = asyncio.get_running_loop()
        has_begun = asyncio.Event()

        async def ask_and_be_cut_off() -> None:
            with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                await self.ask(1000, on_token=lambda _: has_begun.set())

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask_and_be_cut_off())
            await has_begun.wait()
            await self.gateway.kill()
        self.mesh.processes.remove(self.gateway)
        self.mesh.gateway_names.clear()
        began_at = loop.time()
        async with asyncio.TaskGroup() as tasks:
            starting = tasks.create_task(self._start_gateway())
            self.gateway.facts = {**self._ports}
            while True:
                try:
                    answer = await self.ask(4)
                    break
                except (aiohttp.ClientError, ConnectionError, AssertionError):
                    await asyncio.sleep(0.01)
        self.gateway = starting.result()
        await self.mesh.paired(self.gateway, 4)
        return Hit(Cell("gateway"), began_at, answer.arrived_at[0] - began_at, 1)

    def suspicions(self) -> list[str]:
        """What the processes said of peers that they gave up or suspect."""
        return [
            f"{process.name}: {line}"
            for process in self.mesh.processes
            for line in process.log
            if '"worker suspected"' in line or "silent" in line
        ]

    async def load(self, seconds: float) -> tuple[int, int]:
        """Keep every core busy with streams and with as many hogs as there are cores; return how
        many answers were read, all right, and how often anybody was suspected."""
        before = len(self.suspicions())
        ends_at = time.monotonic() + seconds
        num_answers = 0

        async def stream() -> None:
            nonlocal num_answers
            while time.monotonic() < ends_at:
                await self.ask(64)
                num_answers += 1

        with other_work(len(os.sched_getaffinity(0))):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(NUM_STREAMS):
                    tasks.create_task(stream())
        return num_answers, len(self.suspicions()) - before


PHASES = {
    "worker session lost": "given up: its session ended",
    "worker left": "given up: its membership ended",
    "worker suspected": "suspected",
    "worker joined": "the first worker has joined",
    "arrived": "the next request arrived",
    "routed": "placed anew",
    "queued": "prefill has it",
    "opened": "decode has room",
    "sampled": "recomputed",
    "emitted": "the gateway lets the token go",
}
"""First line of a log after the hit -> what it ends."""


async def trace(cell: Cell, seed: int, *, is_whole: bool) -> None:
    """Hit once and print what ended when, from the hit to the client's next token; or every moment
    of every process."""
    async with process_mesh() as mesh:
        faults = Faults(mesh, seed, "debug")
        await faults.start()
        for _ in range(4):
            await faults.recompute()
        hit = await (faults.restart_gateway() if cell.kind == "gateway" else faults.hit(cell))
        lines = [(process.name, line) for process in mesh.processes for line in process.log]
    moments: list[tuple[float, str, str]] = []
    for name, line in lines:
        event = json.loads(line) if line.startswith("{") else {}
        at_s = event.get("at_s", 0.0) - hit.at
        if -SEEN_WITHIN_S <= at_s <= hit.waited_s:
            moments.append((at_s, name, event["event"]))
    print(" ".join(filter(None, ("s after", cell.kind, cell.role, cell.phase))), "| process | what")
    seen: set[str] = set()
    for at_s, name, what in sorted(moments):
        if is_whole or (what in PHASES and what not in seen):
            seen.add(what)
            print(f"{at_s:9.4f}  {name:12} {what if is_whole else PHASES[what]}")
    print(f"{hit.waited_s:9.4f}  client       the next token")


async def campaign(asked: argparse.Namespace, record: Record) -> None:
    """Hit cell after cell in turns, until each has had its faults or the time is over."""
    ends_at = time.monotonic() + asked.limit
    cells = [
        Cell(kind, role, phase)
        for kind in asked.kinds
        if kind in ("kill", "stop", "overlap")
        for role in asked.roles
        for phase in asked.phases
    ]
    if "gateway" in asked.kinds:
        cells.append(Cell("gateway"))
    hits: dict[Cell, list[Hit]] = {cell: [] for cell in cells}
    alone: list[float] = []
    async with process_mesh() as mesh:
        faults = Faults(mesh, asked.seed, "info")
        await faults.start()
        for _ in range(4):
            await faults.recompute()
        if "load" in asked.kinds:
            num_answers, num_suspicions = await faults.load(min(asked.load_s, asked.limit))
            record.add({"kind": "load", "answers": num_answers, "suspicions": num_suspicions})
            print(f"load: {num_answers} answers, {num_suspicions} suspicions")
            record.goal(11, "suspicions under full load", num_suspicions, "<=", 0)
        for turn in range(asked.faults):
            if turn and (not cells or time.monotonic() > ends_at):
                break
            alone.append(await faults.recompute())
            for cell in cells:
                if time.monotonic() > ends_at:
                    break
                is_gateway = cell.kind == "gateway"
                with mesh.explained():
                    found = await (faults.restart_gateway() if is_gateway else faults.hit(cell))
                hits[cell].append(found)
                if asked.verbose:
                    print(turn, cell.kind, cell.role, cell.phase, f"{found.waited_s:.3f} s",
                          found.attempts, flush=True)  # fmt: skip
    recompute_s = statistics.median(alone)
    print(f"recompute alone: {recompute_s:.3f} s (median of {len(alone)})")
    bounds = {"kill": BEYOND_RECOMPUTE_S + recompute_s, "stop": STOPPED_S,
              "overlap": OVERLAPPING_S, "gateway": RESTARTED_S}  # fmt: skip
    for cell, found in hits.items():
        waited = [hit.waited_s for hit in found]
        if not waited:
            continue
        p50, p99 = percentiles(waited, (50, 99))
        name = " ".join(filter(None, (cell.kind, cell.role, cell.phase)))
        print(f"{name:24} {len(waited):4} faults: p50 {p50:.3f}  p99 {p99:.3f} s")
        record.add(
            {"kind": cell.kind, "role": cell.role, "phase": cell.phase, "faults": len(waited),
             "p50_s": p50, "p99_s": p99, "recompute_s": recompute_s,
             "waited_s": [float(f"{one:.4g}") for one in waited]}
        )  # fmt: skip
        record.goal(11, f"{name}: p99 s", p99, "<=", bounds[cell.kind])


def words_of(known: Collection[str], text: str) -> tuple[str, ...]:
    """Split at commas. Raises ArgumentTypeError: a word is not known."""
    words = tuple(text.split(","))
    if unknown := [word for word in words if word not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return words


def main() -> None:
    parser = arguments(__doc__, "3 faults a cell, 10 s of load")
    parser.add_argument("--faults", type=int, default=200, help="faults a kind, role and phase")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds; then no new fault")
    parser.add_argument("--load-s", type=float, default=LOAD_S, help="seconds of full load")
    for flag, known in (("--kinds", KINDS), ("--roles", ROLES), ("--phases", (*FAILPOINTS,))):
        parser.add_argument(flag, type=partial(words_of, known), default=known)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="each fault; each moment")
    parser.add_argument("--trace", choices=KINDS[:-1], help="hit once and print phase by phase")
    asked = parser.parse_args()
    if asked.trace:
        asyncio.run(trace(Cell(asked.trace, asked.roles[-1], asked.phases[-1]), asked.seed,
                          is_whole=asked.verbose))  # fmt: skip
        return
    if asked.quick:
        asked.faults, asked.load_s = min(asked.faults, 3), min(asked.load_s, 10.0)
    # A gateway that restarts finds its modules compiled, as wherever pip has installed it.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    record = Record.of(__file__, asked)
    asyncio.run(campaign(asked, record))
    record.finish()


if __name__ == "__main__":
    main()
