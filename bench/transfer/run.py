"""How much of UCX's own speed reaches our Transport: GB/s between two processes.

    python -m bench.transfer.run [--quick] [--lanes sysv tcp] [--sizes ...] [--repetitions N]

Every repetition measures ``ucx_perftest -t tag_bw`` and our Transport one after the other, on the
same lane, with the same UCX settings and with failure detection in both, so that what disturbs the
machine disturbs both. Results go to ``results/<date>-<commit>-cpu<cores>.json``. What the numbers
mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from shared.transport.base import Outcome
from shared.transport.settings import UcxSettings

HERE = Path(__file__).parent
LANES = {"sysv": "sysv,self", "tcp": "tcp,self"}
SIZES = (256 << 10, 1 << 20, 8 << 20, 64 << 20)
WINDOW = 32  # messages in flight, as in perftest's tag_bw
TIMEOUT_S = 120.0
GB = 1e9

Cores = tuple[int, int]
"""Core of the sender and of the receiver, -1 = wherever the kernel likes."""


# --- our side: one process an end, ordered about by JSON lines ------------------------------------


async def serve_end() -> None:
    """Obey the parent: open, connect, then send or receive batches."""
    from shared.transport.ucxx import open_ucx

    transport = await open_ucx()
    say(transport.address.hex())
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    address = json.loads(await reader.readline())
    endpoint = await transport.connect(bytes.fromhex(address), lambda: None)
    say("")
    buffers: dict[int, np.ndarray] = {}
    ack = np.zeros(1, np.uint8)
    while line := await reader.readline():
        job = json.loads(line)
        num_bytes, count, tag = job["num_bytes"], job["count"], job["tag"]
        buffer = buffers.get(num_bytes)
        if buffer is None:
            buffer = buffers[num_bytes] = np.ones(num_bytes, np.uint8)
        if job["end"] == "receive":
            buffer[:] = 0
        in_flight: deque[Any] = deque()
        if job["end"] == "receive":
            posted = 0
            for _ in range(min(WINDOW, count)):
                in_flight.append(transport.receive(endpoint, buffer, num_bytes, tag + posted))
                posted += 1
            say("posted")
            while in_flight:
                await done(in_flight.popleft())
                if posted < count:
                    in_flight.append(transport.receive(endpoint, buffer, num_bytes, tag + posted))
                    posted += 1
            await done(endpoint.send(ack, 1, tag + count))
            if not buffer.all():
                sys.exit("the bytes did not arrive")
        else:
            answer = transport.receive(endpoint, ack, 1, tag + count)
            began_at = time.perf_counter()
            cpu_began = time.process_time()
            for index in range(count):
                if len(in_flight) == WINDOW:
                    await done(in_flight.popleft())
                in_flight.append(endpoint.send(buffer, num_bytes, tag + index))
            while in_flight:
                await done(in_flight.popleft())
            await done(answer)
            took_s = time.perf_counter() - began_at
            cpu_s = time.process_time() - cpu_began
            say({"seconds": took_s, "cpu_seconds": cpu_s, "lane": endpoint.lane})
    pipe.close()
    await transport.close()


async def done(operation: Any) -> None:
    """Wait for an operation; anything but success ends the measurement."""
    if await operation.settled() is not Outcome.DONE:
        sys.exit(f"{operation}")


def say(answer: Any) -> None:
    """Answer the parent."""
    print(json.dumps(answer), flush=True)


class End:
    """The parent's handle on one of our two processes."""

    def __init__(self, environment: dict[str, str], core: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.transfer.run", "--end", "--core", str(core)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
        )  # fmt: skip

    def tell(self, order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class OurPair:
    """Our Transport between two processes."""

    def __init__(self, environment: dict[str, str], cores: Cores) -> None:
        self.source, self.target = End(environment, cores[0]), End(environment, cores[1])
        addresses = self.source.answer(), self.target.answer()
        self.source.tell(addresses[1])
        self.target.tell(addresses[0])
        self.source.answer()
        self.target.answer()
        self._next_tag = 1

    def measure(self, num_bytes: int, count: int) -> dict[str, Any]:
        """Push ``count`` messages; time from the first post to the receiver's word."""
        job = {"num_bytes": num_bytes, "count": count, "tag": self._next_tag}
        self._next_tag += count + 1
        self.target.tell({**job, "end": "receive"})
        self.target.answer()
        self.source.tell({**job, "end": "send"})
        answer = self.source.answer()
        return {
            "gb_per_s": num_bytes * count / answer["seconds"] / GB,
            "sender_cores": answer["cpu_seconds"] / answer["seconds"],
            "lane": answer["lane"],
        }

    def close(self) -> None:
        self.source.close()
        self.target.close()


# --- the anchor -----------------------------------------------------------------------------------


def measure_perftest(
    environment: dict[str, str], cores: Cores, num_bytes: int, count: int
) -> float:
    """GB/s of ``ucx_perftest -t tag_bw`` with error handling on (-e), both ends busy-polling."""
    root = ucx_root()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(root / "bin" / "ucx_perftest"), "-t", "tag_bw", "-e", "-f", "-v", "-p", str(port),
        "-s", str(num_bytes), "-n", str(count), "-w", str(max(2, count // 10)), "-O", str(WINDOW),
    ]  # fmt: skip
    environment = environment | {"LD_LIBRARY_PATH": str(root / "lib")}
    pins = [["-c", str(core)] if core >= 0 else [] for core in cores]
    server = subprocess.Popen(
        [*command, *pins[1]], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_listening(port)
        client = subprocess.run(
            [*command, *pins[0], "127.0.0.1"],
            env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
        )  # fmt: skip
        server.wait(TIMEOUT_S)
    finally:
        server.kill()
        server.wait()
    # CSV: iterations, latency (percentile, average, overall), MB/s (average, overall), messages/s
    fields = client.stdout.strip().splitlines()[-1].split(",")
    return float(fields[5]) * (1 << 20) / GB


def wait_listening(port: int) -> None:
    """Wait until somebody listens, without connecting: perftest serves one client only."""
    wanted = f":{port:04X} 00000000:0000 0A"
    until = time.monotonic() + 10
    while wanted not in Path("/proc/net/tcp").read_text():
        if time.monotonic() > until:
            raise TimeoutError("ucx_perftest does not listen")
        time.sleep(0.01)


def ucx_root() -> Path:
    """Where the libucx wheel lies."""
    spec = find_spec("libucx")
    if spec is None or spec.origin is None:
        sys.exit("libucx is not installed: pip install '.[worker]'")
    return Path(spec.origin).parent


# --- the comparison -------------------------------------------------------------------------------


def compare(
    lane: str, cores: Cores, sizes: list[int], repetitions: int, batch_bytes: int
) -> list[dict[str, Any]]:
    """Measure one lane; one row a size. Each repetition has fresh processes on both sides."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("UCX_")}
    UcxSettings(tls=LANES[lane]).apply_to(environment)
    ours: dict[int, list[dict[str, Any]]] = {num_bytes: [] for num_bytes in sizes}
    theirs: dict[int, list[float]] = {num_bytes: [] for num_bytes in sizes}
    for _ in range(repetitions):
        pair = OurPair(environment, cores)
        try:
            for num_bytes in sizes:
                count = messages_of(num_bytes, batch_bytes)
                theirs[num_bytes].append(measure_perftest(environment, cores, num_bytes, count))
                pair.measure(num_bytes, max(2, count // 10))  # warm-up, as perftest has
                ours[num_bytes].append(pair.measure(num_bytes, count))
        finally:
            pair.close()
    rows = [
        {
            "lane": ours[num_bytes][0]["lane"],
            "num_bytes": num_bytes,
            "messages": messages_of(num_bytes, batch_bytes),
            "ours_gb_per_s": spread([one["gb_per_s"] for one in ours[num_bytes]]),
            "perftest_gb_per_s": spread(theirs[num_bytes]),
            "share": spread(
                [
                    one["gb_per_s"] / anchor
                    for one, anchor in zip(ours[num_bytes], theirs[num_bytes], strict=True)
                ]
            ),
            "sender_cores": statistics.median(one["sender_cores"] for one in ours[num_bytes]),
        }
        for num_bytes in sizes
    ]
    for row in rows:
        print(
            f"{row['lane']:8} {row['num_bytes'] >> 10:6} KiB  ours {show(row['ours_gb_per_s'])}"
            f"   perftest {show(row['perftest_gb_per_s'])}   share {show(row['share'])}",
            flush=True,
        )
    return rows


def messages_of(num_bytes: int, batch_bytes: int) -> int:
    """How many messages make one measurement."""
    return max(4, batch_bytes // num_bytes)


def spread(values: list[float]) -> dict[str, Any]:
    """Median, extremes and all values."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": [round(value, 4) for value in values],
    }


def show(figures: dict[str, Any]) -> str:
    """One line of it."""
    return f"{figures['median']:6.2f} [{figures['min']:5.2f} .. {figures['max']:5.2f}]"


def environment_record() -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    cpu_names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "commit": commit(),
        "cpu": cpu_names[0] if cpu_names else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "ucx": ucx_version(),
        "ucxx": installed_ucxx(),
        "load_before": os.getloadavg(),
        "settings": {field: getattr(UcxSettings(), field) for field in UcxSettings.__slots__},
    }


def commit() -> str:
    """Short name of the tree, with + if it was changed."""
    run = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+"]
    found = subprocess.run(run, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "none"


def ucx_version() -> str:
    """Version of the wheel."""
    return (ucx_root() / "VERSION.txt").read_text().strip()


def installed_ucxx() -> str:
    """Name and version of the UCXX wheel at hand."""
    for name in ("ucxx-cu13", "ucxx-cu12"):
        with contextlib.suppress(Exception):
            return f"{name} {version(name)}"
    return "unknown"


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="3 short repetitions, not recorded")
    parser.add_argument("--lanes", nargs="+", choices=list(LANES), default=list(LANES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--batch-mib", type=int, default=2048, help="MiB moved per measurement")
    parser.add_argument(
        "--pin", nargs=2, type=int, default=(0, 1), metavar="CORE", help="-1 -1: do not pin"
    )
    parser.add_argument("--core", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--end", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.end:
        if chosen.core >= 0:
            os.sched_setaffinity(0, {chosen.core})
        asyncio.run(serve_end())
        return
    repetitions, batch_mib = chosen.repetitions, chosen.batch_mib
    if chosen.quick:
        repetitions, batch_mib = 3, 512
    record = environment_record() | {
        "pinned_to": chosen.pin,
        "scheduler": {0: "other", 1: "fifo", 2: "rr"}.get(os.sched_getscheduler(0)),
    }
    rows = [
        row
        for lane in chosen.lanes
        for row in compare(lane, tuple(chosen.pin), chosen.sizes, repetitions, batch_mib << 20)
    ]
    record["load_after"] = os.getloadavg()
    if not chosen.quick:
        name = f"{datetime.date.today()}-{record['commit']}-cpu{record['cores']}.json"
        path = HERE / "results" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"environment": record, "rows": rows}, indent=1) + "\n")
        print(f"written to {path.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
