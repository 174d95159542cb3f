"""How long from prefill's token 1 to the client, and from there to token 2?

    python -m bench.handover.run [--quick] [--stages] [--engines demo fake] [--repetitions 5]
                                 [--priorities ordinary realtime]

Gateway, prefill and decode as real processes; this process is their only client and stamps bytes as
they arrive, on the clock that all processes of one Linux machine share. What the numbers mean:
README.md beside this file.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from bench.cpu import QUIET_CORES, cpu_s, machine_cpu_s
from bench.mesh import REALTIME, a_mesh, add_priorities
from bench.plots import Bars, Pictures
from bench.record import Record, arguments, grouped, spread
from bench.servers import shown_log
from services.local import LocalMesh
from shared.config import DecodeConfig, PrefillConfig
from shared.model_folder import ModelFolder, resolve_model
from shared.telemetry.definitions import percentiles

MAX_TOKENS = 24
WARM_UP_ANSWERS = 60
NUM_BLOCKS = 512
"""So few that all of their memory is there when the warm-up ends, as in a worker that has run for a
while (shared/engine/memory/resident.py)."""
GOAL_MS = 2.0
VLLM_GOAL_MS = 3.0
P99_FACTOR = 2.0
FAKE_STEP_S = 0.005
ENGINES: dict[str, dict[str, Any]] = {
    "demo": {"threads": 1},
    "fake": {"threads": 1, "engine": "fake", "fake_step_s": FAKE_STEP_S},
    "vllm": {"threads": 1, "engine": "vllm", "vllm_args": "enforce_eager=true"},
}
"""vllm: if asked for, with the interpreter that ``make setup-vllm`` makes."""

BY_DEFAULT = ("demo", "fake")
LOADS = {"unloaded": 0.0, "loaded": 8.0}
"""Answers a second, on average (Poisson); 0 = one after the other, with pauses."""

PAUSE_S = 0.03
MOST_TRIES = 3
"""If others used the machine meanwhile."""

STAGES = (
    ("prefill has token 1 -> gateway lets it go", "sampled", "emitted"),
    ("gateway lets it go -> its text is on its way", "emitted", "written"),
    ("its text is on its way -> client has it", "written", "client 1"),
    ("prefill has token 1 -> prefill says how many frames", "sampled", "committed"),
    ("prefill has token 1 -> decode has placed the last frame", "sampled", "last frame placed"),
    ("last frame placed -> sequence is in the batch", "last frame placed", "joined"),
    ("in the batch -> decode's step is done", "joined", "stepped"),
    ("decode's step is done -> gateway lets token 2 go", "stepped", "emitted 2"),
    ("gateway lets token 2 go -> client has it", "emitted 2", "client 2"),
)


@dataclass
class Answer:
    """Stamps of one answer at the client, in seconds of the shared clock."""

    asked_at: float
    request_id: str = ""
    arrived_at: list[float] = field(default_factory=list)

    @property
    def later_gap_s(self) -> float:
        """What a decode step of this answer took, seen from here."""
        gaps = [after - before for before, after in pairwise(self.arrived_at[1:])]
        return statistics.median(gaps)

    @property
    def second_gap_s(self) -> float:
        return self.arrived_at[1] - self.arrived_at[0]


# --- the client: a socket and a clock, nothing between them ---------------------------------------


class Client:
    """Asks over connections that stay open."""

    def __init__(self, mesh: LocalMesh, seed: int) -> None:
        host, _, port = mesh.http_url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._random = random.Random(seed)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._vocab_size = ModelFolder(resolve_model("demo")).vocab_size
        self._body = {
            "max_tokens": MAX_TOKENS,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0.0,
            "logprobs": 0,  # so that a token whose text is not complete yet is told as well
        }

    def _request(self) -> bytes:
        pick = self._random
        prompt = [pick.randrange(5, self._vocab_size) for _ in range(pick.randrange(100, 500))]
        body = json.dumps({**self._body, "prompt": prompt}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        return f"{head}Content-Type: application/json\r\n\r\n".encode() + body

    async def ask(self) -> Answer:
        """One answer to its end."""
        request = self._request()
        # One that the gateway has closed, as it was idle for long, is nobody's.
        while self._idle and (self._idle[-1][0].at_eof() or self._idle[-1][1].is_closing()):
            self._idle.pop()[1].close()
        reader, writer = (
            self._idle.pop() if self._idle else await asyncio.open_connection(*self._address)
        )
        answer = Answer(time.monotonic())
        writer.write(request)
        received = told = b""
        while not received.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 16)
            now = time.monotonic()
            if not data:
                sys.exit(f"the gateway hung up: {received[-500:]!r}")
            received += data
            *events, told = (told + data).split(b"\n\n")
            for event in events:
                _, _, body = event.partition(b"data: {")
                if body:
                    said = json.loads(b"{" + body)
                    if "error" in said:  # nothing that the bench measures: too few cores, mostly
                        sys.exit(f"an answer broke: {said['error']}")
                    choice = said["choices"][0]
                    answer.arrived_at += [now] * len((choice["logprobs"] or {}).get("tokens", ()))
        head = received.partition(b"\r\n\r\n")[0].decode().lower()
        if not head.startswith("http/1.1 200") or len(answer.arrived_at) != MAX_TOKENS:
            sys.exit(f"{len(answer.arrived_at)} tokens: {received[:1000]!r}")
        answer.request_id = head.partition("x-request-id: ")[2].partition("\r")[0]
        self._idle.append((reader, writer))
        return answer

    async def ask_many(self, seconds: float, per_s: float) -> list[Answer]:
        """For so long, one after the other or, at a rate, each in its own time."""
        answers: list[Answer] = []
        end_at = time.monotonic() + seconds

        async def ask() -> None:
            answers.append(await self.ask())

        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < end_at:
                if per_s:
                    tasks.create_task(ask())
                    await asyncio.sleep(self._random.expovariate(per_s))
                else:
                    await ask()
                    await asyncio.sleep(PAUSE_S)
        return answers

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


# --- what the mesh tells --------------------------------------------------------------------------


def moments(log: Path) -> dict[str, dict[str, list[float]]]:
    """request id -> moment -> times."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in log.read_bytes().splitlines():
        if b'"at_s"' in line and b'"request_id"' in line:
            entry = json.loads(line)
            found[entry["request_id"]][entry["event"]].append(entry["at_s"])
    return found


def ms(values: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    p50, p99 = percentiles(values, (50, 99))
    return {"p50_ms": p50 * 1e3, "p99_ms": p99 * 1e3, "count": len(values)}


def handover(answers: list[Answer], told: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The two waits of the question over one repetition."""
    to_client = [a.arrived_at[0] - told[a.request_id]["sampled"][-1] for a in answers]
    step = statistics.median(a.later_gap_s for a in answers)
    return {
        "to_client": ms(to_client),
        "second": ms([a.second_gap_s for a in answers]),
        "second_beyond_step": ms([a.second_gap_s - a.later_gap_s for a in answers]),
        "step_ms": step * 1e3,
        "answers": len(answers),
    }


def stages(answers: list[Answer], told: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Where the time of both waits goes, stage by stage."""
    spent: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        of = told[answer.request_id]
        at = {name: times[0] for name, times in of.items()}
        at["last frame placed"] = of["frame placed"][-1]
        at["emitted 2"] = of["emitted"][1]
        at["client 1"], at["client 2"] = answer.arrived_at[:2]
        for text, start, stop in STAGES:
            spent[text].append(at[stop] - at[start])
    return {text: ms(values) for text, values in spent.items()}


async def ask_in_quiet(
    client: Client, seconds: float, per_s: float, pids: list[int]
) -> tuple[list[Answer], float]:
    """Ask until others left the machine alone meanwhile, or so often; the quietest try, and the
    cores that others used."""
    tries: list[tuple[float, list[Answer]]] = []
    while len(tries) < MOST_TRIES and all(others > QUIET_CORES for others, _ in tries):
        before, began_at = machine_cpu_s() - sum(map(cpu_s, pids)), time.monotonic()
        answers = await client.ask_many(seconds, per_s)
        others_s = machine_cpu_s() - sum(map(cpu_s, pids)) - before
        tries.append((others_s / (time.monotonic() - began_at), answers))
    others, answers = min(tries, key=lambda one: one[0])
    return answers, others


async def measure(
    engine: str, priority: str, seconds: float, repetitions: int, *, all_tell: bool
) -> list[Any]:
    """One mesh; the loads in turn, as often as asked.

    Prefill logs its moments, for only it knows when it has token 1; the others if ``all_tell``,
    since that costs them time.
    """
    rows: list[Any] = []
    level = "debug" if all_tell else "info"
    common: dict[str, Any] = {"log_format": "json", "realtime": priority == REALTIME}
    worker = {"num_blocks": NUM_BLOCKS, **common, **ENGINES[engine]}
    prefill = PrefillConfig(log_level="debug", **worker)
    decode = DecodeConfig(log_level=level, **worker)
    with shown_log() as log:
        async with a_mesh([prefill], [decode], log=log, log_level=level, **common) as mesh:
            client = Client(mesh, seed=1)
            for _ in range(WARM_UP_ANSWERS):
                await client.ask()
            pids = [os.getpid(), *(service.pid for service in mesh.services)]
            for repetition in range(repetitions):
                for load, per_s in LOADS.items():
                    answers, others = await ask_in_quiet(client, seconds, per_s, pids)
                    await asyncio.sleep(0.2)  # the last lines
                    told = moments(log)
                    row = {"case": f"{engine}, {load}, {priority}", "repetition": repetition}
                    row |= {"cores_of_others": others, **handover(answers, told)}
                    if all_tell:
                        row["stages"] = stages(answers, told)
                    rows.append(row)
            client.close()
    return rows


# --- the report -----------------------------------------------------------------------------------


def report(record: Record, rows: list[Any]) -> None:
    """One line a case, and the goals."""
    for case, of in grouped(rows, "case").items():

        def over(name: str, quantile: str, of: list[Any] = of) -> dict[str, Any]:
            return spread([row[name][f"{quantile}_ms"] for row in of])

        others = max(row["cores_of_others"] for row in of)
        step_ms = statistics.median(row["step_ms"] for row in of)
        num_answers = sum(row["answers"] for row in of)
        print(f"{case}: a decode step {step_ms:.2f} ms, {num_answers} answers, ", end="")
        print(f"others used {others:.1f} cores at most")
        goal_ms = goal_of(case)
        whole = spread([row["second"]["p99_ms"] / (row["step_ms"] + goal_ms) for row in of])
        for what, measured, bound in (
            ("token 1 to the client, p50 ms", over("to_client", "p50"), goal_ms),
            ("token 1 to the client, p99 ms", over("to_client", "p99"), goal_ms * P99_FACTOR),
            ("token 2 beyond a step, p50 ms", over("second_beyond_step", "p50"), goal_ms),
            (f"token 2, p99 / (a step + {goal_ms:g} ms)", whole, P99_FACTOR),
        ):
            record.goal(6, f"{case}: {what}", measured, "<=", bound)


def goal_of(case: str) -> float:
    """What a wait may take beside a step, in ms."""
    return VLLM_GOAL_MS if case.startswith("vllm") else GOAL_MS


def pictures_of(rows: Sequence[Any]) -> Pictures:
    """Both waits, p50 and p99 of each case."""
    panels: list[Bars] = []
    goals = {goal_of(case) for case in grouped(rows, "case")}
    goal = goals.pop() if len(goals) == 1 else None
    for name, title in (
        ("to_client", "token 1 to the client (CPU)"),
        ("second_beyond_step", "token 2 beyond a step (CPU)"),
    ):
        bars = {
            quantile: {
                case.replace(", ", ",\n"): spread([row[name][f"{quantile}_ms"] for row in of])
                for case, of in grouped(rows, "case").items()
            }
            for quantile in ("p50", "p99")
        }
        panels.append(Bars(title, "ms", bars, goal))
    return {"": panels}


def show_stages(rows: list[Any]) -> None:
    """Medians over the repetitions."""
    for case, of in grouped(rows, "case").items():
        print(f"{case}: p50 and p99 in ms, every process telling its moments")
        for text, _, _ in STAGES:
            told = [row["stages"][text] for row in of]
            p50, p99 = (statistics.median(one[f"p{q}_ms"] for one in told) for q in (50, 99))
            print(f"  {text:58} {p50:7.2f} {p99:7.2f}")


def main() -> None:
    parser = arguments(__doc__, "one short repetition, not recorded")
    parser.add_argument("--stages", action="store_true", help="only where the time goes")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=BY_DEFAULT)
    parser.add_argument("--seconds", type=float, default=10.0, help="of one load")
    parser.add_argument("--repetitions", type=int, default=5)
    add_priorities(parser)
    chosen = parser.parse_args()
    seconds, repetitions = chosen.seconds, chosen.repetitions
    if chosen.quick:
        seconds, repetitions = min(seconds, 3.0), 1
    record = Record.of(__file__, chosen)
    for engine in chosen.engines:
        for priority in chosen.priorities:
            work = measure(engine, priority, seconds, repetitions, all_tell=chosen.stages)
            record.rows += uvloop.run(work)
    if chosen.stages:
        show_stages(record.rows)
    else:
        report(record, record.rows)
        record.finish(pictures_of)


if __name__ == "__main__":
    main()
