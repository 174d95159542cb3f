"""One end of a NIXL transfer, run by the interpreter of NIXL's own environment.

One-sided writes with a notification each, out of a pool and
into one: each of those in flight has a place of its own, as KV has, of one piece or of several that
lie apart (a descriptor each). The receiver counts notifications and notifies back. Progress thread
off: with it on, a message takes 16 ms here.
"""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from typing import Any

import nixl_cu12 as nixl  # pyright: ignore[reportMissingImports]
import numpy as np

from bench.transfer.end import jobs, keep_answers_apart, other_address, pin, say, send

WINDOW = 32
POOL_BYTES = 256 << 20


class End:
    """An agent, its one registered pool and its one peer."""

    def __init__(self, name: str, error_handling: str, num_pieces: int) -> None:
        settings = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl.nixl_agent(name, settings)
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": error_handling})
        self.pool = np.ones(POOL_BYTES, np.uint8)
        self._num_pieces = num_pieces
        self._address = int(self.pool.ctypes.data)
        self._agent.register_memory([(self._address, POOL_BYTES, 0, "")], "DRAM")
        self._peer = ""
        self._peer_address = 0

    def address(self) -> str:
        """What the other end needs."""
        metadata = self._agent.get_agent_metadata()
        return json.dumps({"metadata": metadata.hex(), "address": self._address})

    def connect(self, address: str) -> None:
        peer = json.loads(address)
        name = self._agent.add_remote_agent(bytes.fromhex(peer["metadata"]))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._peer_address = peer["address"]

    def prepare(self, num_bytes: int, place: int) -> Any:
        """A write into one of the places of such messages, to be started as often as wanted."""
        piece, stride = num_bytes // self._num_pieces, num_places(num_bytes)
        offsets = [(idx * stride + place) * piece for idx in range(self._num_pieces)]
        here, there = (
            self._agent.get_xfer_descs([(base + offset, piece, 0) for offset in offsets], "DRAM")
            for base in (self._address, self._peer_address)
        )
        return self._agent.initialize_xfer("WRITE", here, there, self._peer, b"d")

    def release(self, handle: Any) -> None:
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
        self._agent.send_notif(self._peer, b"a")

    def num_notified(self) -> int:
        """How many notifications came since the last call; drives progress."""
        return sum(len(notes) for notes in self._agent.get_new_notifs().values())

    def wait(self, count: int) -> None:
        while count > 0:
            if come := self.num_notified():
                count -= come
            else:
                os.sched_yield()


def num_places(num_bytes: int) -> int:
    """How many messages of this size have a place of their own."""
    return min(WINDOW, POOL_BYTES // num_bytes)


def write(end: End, num_bytes: int, count: int) -> None:
    """Write so often, a window at most at once; return when the other end has all."""
    window = min(WINDOW, count, num_places(num_bytes))
    handles = [end.prepare(num_bytes, place) for place in range(window)]
    idle, busy, started = deque(handles), [], 0
    while started < count or busy:
        while idle and started < count:
            handle = idle.popleft()
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
    name, core, error_handling, num_pieces = sys.argv[1:]
    pin(core)
    end = End(name, error_handling, int(num_pieces))
    end.connect(other_address(end.address()))
    for job in jobs():
        num_bytes, count = job["num_bytes"], job["count"]
        if job["end"] != "receive":
            send(job, lambda num_bytes, count: write(end, num_bytes, count), "")
            continue
        end.pool[:] = 0
        say("posted")
        rounds = count if job["is_latency"] else 1
        for _ in range(rounds):
            end.wait(count // rounds)
            end.notify()
        end.num_notified()
        num_written = 1 if job["is_latency"] else min(count, num_places(num_bytes))
        if np.count_nonzero(end.pool) != num_written * num_bytes:
            sys.exit("the bytes did not arrive")


if __name__ == "__main__":
    keep_answers_apart()  # NIXL and its UCX log to standard output
    main()
