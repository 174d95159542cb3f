"""One end of a plain copy between two processes' memory, ordered about by ``pairs.py``: what the
machine itself does, without any transport.

The writer maps the receiver's tensor (on a device: cudaIpcOpenMemHandle, as UCX's cuda_ipc does)
and copies into it; nobody tells the other end, which looks at its bytes afterwards.
"""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251  (between our own two processes, as torch hands memory over)
import sys
import time
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # teaches the pickler tensors

MAX_BYTES = 64 << 20


def say(answer: Any) -> None:
    """Answer the parent."""
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Obey the parent."""
    if (core := int(sys.argv[2])) >= 0:
        os.sched_setaffinity(0, {core})
    device = sys.argv[3]
    torch.multiprocessing.set_sharing_strategy("file_system")  # names, which a pipe can carry
    own = torch.ones(MAX_BYTES, dtype=torch.uint8, device=device)

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    wait()
    say(bytes(ForkingPickler.dumps(own)).hex())
    theirs = pickle.loads(bytes.fromhex(json.loads(sys.stdin.readline())))
    say("")
    for line in sys.stdin:
        job = json.loads(line)
        num_bytes, count = job["num_bytes"], job["count"]
        if job["end"] == "receive":
            own[:num_bytes] = 0
            wait()
            say("posted")
            continue
        if job["end"] == "check":
            say(bool(own[:num_bytes].all()))
            continue
        times: list[float] = []
        began_at = time.perf_counter()
        for _ in range(count):
            sent_at = time.perf_counter()
            theirs[:num_bytes].copy_(own[:num_bytes])
            if job["is_latency"]:
                wait()
                times.append(time.perf_counter() - sent_at)
        wait()
        say({"seconds": time.perf_counter() - began_at, "each": times, "lane": "copy"})


if __name__ == "__main__":
    main()
