"""How fast a worker loads its weights, as a share of reading the same file, and when it is ready.

    python -m bench.startup.run [--quick] [--mib 1024]

Fresh processes in turn: one that reads the checkpoint into memory, one that loads it as a worker
does, and whole workers. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.record import PROJECT, Record, ratios, spread
from shared.runtime.parent import PARENT_FD

HERE = Path(__file__).parent
HIDDEN, MLP, HEADS, KV_HEADS = 1024, 3072, 16, 4
ROLES = ("prefill", "decode")
KV_GIB = "0.25"
READY_WITHIN_S = 120.0


def make_model(folder: Path, mib: int) -> None:
    """Write a random Llama in bfloat16 of about this size."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    per_layer = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN * KV_HEADS // HEADS)
    per_layer += 2 * 3 * HIDDEN * MLP
    config = transformers.LlamaConfig(
        vocab_size=1280,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=max(1, (mib << 20) // per_layer),
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100GB")


def read(path: Path) -> float:
    """Seconds to read the file into fresh memory, in pieces, as `cp` would."""
    began_at = time.perf_counter()
    content = bytearray(path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        view = memoryview(content)
        done = 0
        while done < len(content):
            done += file.readinto(view[done : done + (16 << 20)])
    return time.perf_counter() - began_at


def load(folder: Path, kernels: str) -> float:
    """Seconds to load it into an engine with a small pool, torch being imported."""
    from shared.engine.torch_engine import TorchEngine

    began_at = time.perf_counter()
    TorchEngine.load(folder, device="cpu", num_blocks=16, kernels=kernels)
    return time.perf_counter() - began_at


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
                word = ours.recv(4096)
                took_s = time.perf_counter() - began_at
            finally:
                worker.terminate()
    facts = json.loads(word or b"{}")
    if not facts or "error" in facts:
        raise RuntimeError(f"{role} did not start: {facts.get('error', 'it ended')}")
    return took_s


def in_fresh_process(*arguments: str) -> float:
    """Run one of the two above."""
    command = [sys.executable, "-m", "bench.startup.run", "--end", *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="256 MiB and 3 repetitions")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--record", action="store_true", help="write results of a quick run too")
    parser.add_argument("--end", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.end:
        what, place = asked.end
        seconds = read(Path(place)) if what == "read" else load(Path(place), what)
        print(json.dumps(seconds))
        return
    if asked.quick:
        asked.mib, asked.repetitions = 256, 3
    record = Record(HERE, asked.quick)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, asked.mib)
        path = folder / "model.safetensors"
        gigabytes = os.path.getsize(path) / 1e9
        took: dict[str, list[float]] = {"read": [], "native": [], "torch": []}
        for repetition in range(asked.repetitions + 1):  # the first one warms the page cache
            for what, values in took.items():
                place = str(path if what == "read" else folder)
                seconds = in_fresh_process(what, place)
                if repetition:
                    values.append(seconds)
        for role in ROLES:
            seconds = [seconds_to_ready(role, folder) for _ in range(asked.repetitions)]
            row = {"what": f"{role}: exec to ready", "gigabytes": gigabytes, "s": spread(seconds)}
            record.rows.append(row)
            print(f"{role:8} ready after {row['s']['median']:.2f} s")
        for what, values in took.items():
            rates = spread([gigabytes / one for one in values])
            record.rows.append({"what": what, "gigabytes": gigabytes, "gb_per_s": rates})
            print(f"{what:8} {rates['median']:.2f} GB/s [{rates['min']:.2f} .. {rates['max']:.2f}]")
        for kernels in ("native", "torch"):
            share = ratios(took["read"], took[kernels])
            record.goal(10, f"weights, {kernels} kernels: share of read speed", share, ">=", 0.7)
    record.finish(write=True if asked.record else None)


if __name__ == "__main__":
    main()
