"""Does a process grow with what it has served?

    python -m bench.memory.run [--quick] [--requests 12000] [--kills]

Real processes, the bundled model, requests of all kinds that never repeat. What the numbers mean:
README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.record import Record, arguments
from tests.support.any_request import a_request
from tests.support.process_mesh import ProcessMesh, process_mesh
from tests.support.service_process import ServiceProcess

CLIENTS: Final = 12
SAMPLES: Final = 20
QUARTER: Final = SAMPLES // 4
"""Caches and allocators are warm after the first: the last is compared with the second."""
BOUND: Final = 1.05
KILL_EVERY_S: Final = 5.0
ANSWERED_WITHIN_S: Final = 120.0
SETTLES_WITHIN_S: Final = 1.0


def held(pid: int) -> dict[str, float]:
    """Memory of its own in MiB, KV pools and mapped files left out; open files; threads."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = next(line.split()[1] for line in lines if line.startswith("Anonymous:"))
    num = {what: len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task")}
    return {"mib": int(kib) / 1024, "open_files": num["fd"], "threads": num["task"]}


async def ask(session: aiohttp.ClientSession, url: str, number: int) -> int:
    """Send request ``number``, and return the answer's status. A fifth are streamed and left after
    a few events, a fifth streamed to their end, and one in twenty is refused."""
    request = a_request(number)
    chance = random.Random(number)
    how = chance.random()
    body = {**request.body, "stream": how < 0.4}
    if how > 0.95:
        body["max_tokens"] = -1
    async with session.post(url + request.path, json=body) as response:
        events = 0
        async for _ in response.content:
            events += 1
            if how < 0.2 and events > chance.randrange(12):
                response.close()
                break
        return response.status


async def ask_some(url: str, numbers: Iterator[int], statuses: dict[int, int]) -> None:
    """Ask for these, ``CLIENTS`` at once, and count what came back; 0 = a broken connection."""
    limit = aiohttp.ClientTimeout(total=ANSWERED_WITHIN_S)
    async with aiohttp.ClientSession(timeout=limit) as session, asyncio.TaskGroup() as tasks:

        async def client() -> None:
            for number in numbers:
                try:
                    status = await ask(session, url, number)
                except aiohttp.ClientError:
                    status = 0
                statuses[status] = statuses.get(status, 0) + 1

        for _ in range(CLIENTS):
            tasks.create_task(client())


async def kill(mesh: ProcessMesh, workers: list[ServiceProcess]) -> None:
    """Kill one of all workers but the first two and start one like it, again and again."""
    for at in itertools.cycle(range(2, len(workers))):
        await asyncio.sleep(KILL_EVERY_S)
        worker = workers[at]
        await worker.kill()
        workers[at] = await mesh.add(worker.name.split("-")[0])


async def measure(record: Record, asked: argparse.Namespace) -> None:
    """Ask, and look at every process ``SAMPLES`` times."""
    numbers = itertools.count()
    statuses: dict[int, int] = {}
    async with process_mesh("torch") as mesh:
        gateway = await mesh.start_gateway(max_wait_s=60.0)
        url = f"http://127.0.0.1:{gateway.facts['http_port']}"
        roles = ["prefill", "decode"] * (2 if asked.kills else 1)
        workers = [await mesh.add(role) for role in roles]
        await mesh.paired(gateway, len(roles) // 2)
        watched = {"gateway": gateway, "prefill": workers[0], "decode": workers[1]}
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in watched}
        async with asyncio.TaskGroup() as tasks:
            killing = tasks.create_task(kill(mesh, workers if asked.kills else []))
            for sample in range(1, SAMPLES + 1):
                await ask_some(url, itertools.islice(numbers, asked.requests // SAMPLES), statuses)
                await asyncio.sleep(SETTLES_WITHIN_S)
                for name, process in watched.items():
                    seen[name].append(held(process.pid))
                words = ", ".join(f"{name} {rows[-1]['mib']:.1f}" for name, rows in seen.items())
                print(f"{sample}/{SAMPLES} {statuses}, MiB: {words}", file=sys.stderr, flush=True)
            killing.cancel()
    case = "workers killed every 5 s" if asked.kills else "undisturbed"
    for name, rows in seen.items():
        row: dict[str, Any] = {"process": name, "case": case, "requests": asked.requests}
        record.add({**row, "statuses": statuses, "samples": rows})
        for what, words in (("mib", "memory"), ("open_files", "open files")):
            values = [it[what] for it in rows]
            grown = max(values[-QUARTER:]) / max(values[QUARTER : 2 * QUARTER])
            asks = f"{name}, {case}: {words} in the last quarter, x those in the second"
            record.goal(10, asks, grown, "<=", BOUND)


def main() -> None:
    parser = arguments(__doc__, "400 requests, prints only")
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument(
        "--kills", action="store_true", help="two pairs, one of which dies and dies"
    )
    asked = parser.parse_args()
    if asked.quick:
        asked.requests = min(asked.requests, 400)
    record = Record.of(__file__, asked)
    asyncio.run(measure(record, asked))
    record.finish()


if __name__ == "__main__":
    main()
