"""How fast a worker loads its weights, as a share of reading the same file, and when it is ready.

    python -m bench.startup.run [--quick] [--mib 1024]

Fresh processes in turn: one that reads the checkpoint into memory, one that loads it as a worker
does, each into memory that the machine has at hand and into memory as it is found; and whole
workers. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.engine.model import write_llama
from bench.record import PROJECT, Record, arguments, ratios, span, spread
from shared.engine.memory import huge_pages
from shared.engine.torch_engine import TorchEngine
from shared.runtime.parent import PARENT_FD

HIDDEN, MLP, HEADS, KV_HEADS = 1024, 3072, 16, 4
ROLES = ("prefill", "decode")
KV_GIB = "0.25"
READY_WITHIN_S = 120.0
WEIGHTS = "model.safetensors"
PIECE = 16 << 20
TRIES = 4
SETTLES_AFTER_S = 4.0
"""Linux tells a virtual machine's host of free huge pages 2 s after they became free."""
WHAT = ("read", "native", "torch")
MEMORY = ("at hand", "as found")


def make_model(folder: Path, mib: int) -> None:
    """Write a random Llama in bfloat16 of about this size."""
    per_layer = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV_HEADS // HEADS)
    per_layer += 2 * 3 * HIDDEN * MLP
    write_llama(
        folder,
        vocab_size=1280,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=max(1, (mib << 20) // per_layer),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )


def back_memory(num_bytes: int) -> None:
    """Write to so many bytes of huge pages and free them, until that has become quick, at most
    ``TRIES`` times: what is mapped next is memory that the machine has at hand. A virtual machine's
    host takes free memory back within seconds, and gives it again when it is written to, which is
    no property of who loads."""
    slowest_s = 0.0
    for _ in range(TRIES):
        began_at = time.perf_counter()
        octets = huge_pages.zeros(num_bytes)
        octets[:: mmap.PAGESIZE] = 1
        del octets
        took_s = time.perf_counter() - began_at
        if took_s < slowest_s / 2:
            return
        slowest_s = max(slowest_s, took_s)


def read(path: Path) -> float:
    """Seconds to read the file in pieces into memory of the kind that packed weights get."""
    began_at = time.perf_counter()
    content = huge_pages.zeros(path.stat().st_size).data
    with path.open("rb", buffering=0) as file:
        done = 0
        while done < len(content):
            done += file.readinto(content[done : done + PIECE])
    return time.perf_counter() - began_at


def load(folder: Path, kernels: str) -> float:
    """Seconds to load it into an engine with a small pool."""
    began_at = time.perf_counter()
    # The dtype of the file, so that both read the same and torch converts nothing.
    engine = TorchEngine.load(
        folder, device="cpu", dtype="bfloat16", num_blocks=16, kernels=kernels
    )
    took_s = time.perf_counter() - began_at
    engine.close()
    return took_s


def seconds_to_ready(role: str, folder: Path) -> float:
    """Seconds from exec until a worker with this checkpoint says that it is ready; then it is
    stopped. Its gateway does not exist: it would join it next.

    Raises RuntimeError: it ended, or said something else, and what.
    """
    ours, theirs = socket.socketpair()
    ours.settimeout(READY_WITHIN_S)
    with ours, theirs:
        environment = {
            **os.environ,
            "PDMESH_MODEL": str(folder),
            "PDMESH_KV_GIB": KV_GIB,
            PARENT_FD: str(theirs.fileno()),
        }
        began_at = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", f"services.{role}"],
            cwd=PROJECT,
            env=environment,
            pass_fds=(theirs.fileno(),),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as worker:
            theirs.close()
            try:
                with ours.makefile("rb") as cord:
                    # Parts of a start are told, too; the first word that is none ends it.
                    words = map(json.loads, cord)
                    facts = next((word for word in words if "part" not in word), {})
                took_s = time.perf_counter() - began_at
            finally:
                worker.terminate()
    if not facts or "error" in facts:
        raise RuntimeError(f"{role} did not start: {facts.get('error', 'it ended')}")
    return took_s


def seconds_to(what: str, memory: str, folder: Path) -> float:
    """Run ``read`` or ``load`` here, torch being imported."""
    path = folder / WEIGHTS
    time.sleep(SETTLES_AFTER_S)
    if memory == "at hand":
        back_memory(path.stat().st_size * 5 // 4)
    return read(path) if what == "read" else load(folder, what)


def in_fresh_process(*arguments: str) -> float:
    """Run the above in one."""
    command = [sys.executable, "-m", "bench.startup.run", "--end", *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = arguments(__doc__, "256 MiB, once")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--end", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.end:
        what, memory, place = asked.end
        print(json.dumps(seconds_to(what, memory, Path(place))))
        return
    if asked.quick:
        asked.mib, asked.repetitions = min(asked.mib, 256), 1
    record = Record.of(__file__, asked)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, asked.mib)
        gigabytes = os.path.getsize(folder / WEIGHTS) / 1e9
        took = {(what, memory): list[float]() for memory in MEMORY for what in WHAT}
        # A repetition before the first warms the page cache; a small file just written is there.
        for repetition in range(1 if asked.quick else 0, asked.repetitions + 1):
            for (what, memory), values in took.items():
                seconds = in_fresh_process(what, memory, str(folder))
                if repetition:
                    values.append(seconds)
        for role in ROLES:
            seconds = [seconds_to_ready(role, folder) for _ in range(asked.repetitions)]
            row = {"what": f"{role}: exec to ready", "gigabytes": gigabytes, "s": spread(seconds)}
            record.add(row)
            print(f"{role:8} ready after {row['s']['median']:.2f} s")
        for (what, memory), values in took.items():
            rates = spread([gigabytes / one for one in values])
            row = {"what": what, "memory": memory, "gigabytes": gigabytes, "gb_per_s": rates}
            record.add(row)
            print(f"{what:8} memory {memory}: {span(rates, '.2f')} GB/s")
        for memory in MEMORY:
            for kernels in ("native", "torch"):
                share = ratios(took["read", memory], took[kernels, memory])
                goal = f"weights, {kernels} kernels, memory {memory}: share of read speed"
                record.goal(10, goal, share, ">=", 0.7)
    record.finish()


if __name__ == "__main__":
    main()
