"""One end of a Mooncake transfer engine, run by the interpreter of its own environment.

Speaks the JSON lines of ``pairs.py``. One-sided writes; the engine tells the writer that they are
done, and the other end only looks at its bytes afterwards. Imports nothing of pdmesh.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

WINDOW = 32
MAX_BYTES = 64 << 20


def say(answer: Any) -> None:
    """Answer the parent, past the engine's own words on standard output."""
    os.write(ANSWERS, (json.dumps(answer) + "\n").encode())


class End:
    """An engine, its one registered buffer and its one peer."""

    def __init__(self) -> None:
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            sys.exit("Mooncake's engine did not start")
        self.buffer = np.ones(MAX_BYTES, np.uint8)
        self._address = int(self.buffer.ctypes.data)
        if self._engine.register_memory(self._address, MAX_BYTES):
            sys.exit("Mooncake's engine did not register the buffer")
        self._peer = ""
        self._peer_address = 0

    def address(self) -> str:
        """What the other end needs."""
        name = f"127.0.0.1:{self._engine.get_rpc_port()}"
        return json.dumps({"name": name, "address": self._address})

    def connect(self, address: str) -> None:
        """Learn the other end."""
        peer = json.loads(address)
        self._peer, self._peer_address = peer["name"], peer["address"]

    def write(self, num_bytes: int) -> None:
        """Write once and wait."""
        done = self._engine.transfer_sync_write(
            self._peer, self._address, self._peer_address, num_bytes
        )
        if done:
            sys.exit("Mooncake failed")

    def write_all(self, num_bytes: int, count: int) -> None:
        """Write ``count`` times, in batches of a window."""
        while count > 0:
            size = min(WINDOW, count)
            done = self._engine.batch_transfer_sync_write(
                self._peer,
                [self._address] * size,
                [self._peer_address] * size,
                [num_bytes] * size,
            )
            if done:
                sys.exit("Mooncake failed")
            count -= size


def main() -> None:
    """Obey the parent."""
    core = int(sys.argv[2])
    if core >= 0:
        os.sched_setaffinity(0, {core})
    end = End()
    say(end.address())
    end.connect(json.loads(sys.stdin.readline()))
    say("")
    for line in sys.stdin:
        job = json.loads(line)
        num_bytes, count = job["num_bytes"], job["count"]
        if job["end"] == "receive":
            end.buffer[:num_bytes] = 0
            say("posted")
            continue
        if job["end"] == "check":
            say(bool(end.buffer[:num_bytes].all()))
            continue
        times = []
        began_at = time.perf_counter()
        if job["is_latency"]:
            for _ in range(count):
                sent_at = time.perf_counter()
                end.write(num_bytes)
                times.append(time.perf_counter() - sent_at)
        else:
            end.write_all(num_bytes, count)
        say({"seconds": time.perf_counter() - began_at, "each": times, "lane": "tcp"})


ANSWERS = os.dup(1)
os.dup2(2, 1)  # the engine logs to standard output

if __name__ == "__main__":
    main()
