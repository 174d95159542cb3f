"""One end of a NIXL transfer, run by the interpreter of NIXL's own environment.

Speaks the JSON lines of ``pairs.py``. One-sided writes with a notification each; the receiver
counts those and notifies back. Progress thread off: with it on, a message takes 16 ms here.
Imports nothing of pdmesh.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import nixl_cu12 as nixl  # pyright: ignore[reportMissingImports]
import numpy as np

WINDOW = 32
MAX_BYTES = 64 << 20


def say(answer: Any) -> None:
    """Answer the parent, past NIXL's own words on standard output."""
    os.write(ANSWERS, (json.dumps(answer) + "\n").encode())


class End:
    """An agent, its one registered buffer and its one peer."""

    def __init__(self, name: str, error_handling: str) -> None:
        settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl.nixl_agent(name, settings)
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": error_handling})
        self.buffer = np.ones(MAX_BYTES, np.uint8)
        self._address = int(self.buffer.ctypes.data)
        self._agent.register_memory([(self._address, MAX_BYTES, 0, "")], "DRAM")
        self._peer = ""
        self._peer_address = 0

    def address(self) -> str:
        """What the other end needs."""
        metadata = self._agent.get_agent_metadata()
        return json.dumps({"metadata": metadata.hex(), "address": self._address})

    def connect(self, address: str) -> None:
        """Learn the other end."""
        peer = json.loads(address)
        name = self._agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._peer_address = peer["address"]

    def prepare(self, num_bytes: int) -> Any:
        """A write of the buffer's first bytes, to be started as often as wanted."""
        here = self._agent.get_xfer_descs([(self._address, num_bytes, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(self._peer_address, num_bytes, 0)], "DRAM")
        return self._agent.initialize_xfer("WRITE", here, there, self._peer, b"d")

    def release(self, handle: Any) -> None:
        """Forget a prepared write."""
        self._agent.release_xfer_handle(handle)

    def start(self, handle: Any) -> bool:
        """Start a prepared write; whether it is over already."""
        return self._agent.transfer(handle) == "DONE"

    def is_done(self, handle: Any) -> bool:
        """Whether a started write is over; drives progress."""
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            sys.exit("NIXL failed")
        return state == "DONE"

    def notify(self) -> None:
        """Tell the other end."""
        self._agent.send_notif(self._peer, b"a")

    def num_notified(self) -> int:
        """How many notifications came since the last call; drives progress."""
        return sum(len(notes) for notes in self._agent.get_new_notifs().values())

    def wait(self, count: int) -> None:
        """Wait for so many notifications."""
        while count > 0:
            if come := self.num_notified():
                count -= come
            else:
                os.sched_yield()


def send(end: End, num_bytes: int, count: int, window: int) -> None:
    """Write ``count`` times, ``window`` at once; return when the other end has all."""
    handles = [end.prepare(num_bytes) for _ in range(min(window, count))]
    idle, busy, started = list(handles), [], 0
    while started < count or busy:
        while idle and started < count:
            handle = idle.pop()
            started += 1
            (idle if end.start(handle) else busy).append(handle)
        done = [handle for handle in busy if end.is_done(handle)]
        if done:
            busy = [handle for handle in busy if handle not in done]
            idle += done
        else:
            os.sched_yield()
    end.wait(1)
    for handle in handles:
        end.release(handle)


def main() -> None:
    """Obey the parent."""
    name, core, error_handling = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if core >= 0:
        os.sched_setaffinity(0, {core})
    end = End(name, error_handling)
    say(end.address())
    end.connect(json.loads(sys.stdin.readline()))
    say("")
    for line in sys.stdin:
        job = json.loads(line)
        num_bytes, count = job["num_bytes"], job["count"]
        if job["end"] == "receive":
            end.buffer[:num_bytes] = 0
            say("posted")
            rounds = count if job["is_latency"] else 1
            for _ in range(rounds):
                end.wait(count // rounds)
                end.notify()
            end.num_notified()
            if not end.buffer[:num_bytes].all():
                sys.exit("the bytes did not arrive")
            continue
        times = []
        began_at = time.perf_counter()
        if job["is_latency"]:
            for _ in range(count):
                sent_at = time.perf_counter()
                send(end, num_bytes, 1, 1)
                times.append(time.perf_counter() - sent_at)
        else:
            send(end, num_bytes, count, WINDOW)
        say({"seconds": time.perf_counter() - began_at, "each": times, "lane": ""})


ANSWERS = os.dup(1)
os.dup2(2, 1)  # NIXL and its UCX log to standard output

if __name__ == "__main__":
    main()
