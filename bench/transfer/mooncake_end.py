"""One end of a Mooncake transfer engine, run by the interpreter of its own environment.

One-sided writes; the engine tells the writer that they are done, and the other end only looks at
its bytes afterwards.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

from bench.transfer.end import keep_answers_apart, obey, other_address, pin

WINDOW = 32
MAX_BYTES = 64 << 20


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
        peer = json.loads(address)
        self._peer, self._peer_address = peer["name"], peer["address"]

    def write(self, num_bytes: int, count: int) -> None:
        """Write so often, in batches of a window, and wait."""
        while count > 0:
            size = min(WINDOW, count)
            here, there = [self._address] * size, [self._peer_address] * size
            if size == 1:
                done = self._engine.transfer_sync_write(self._peer, *here, *there, num_bytes)
            else:
                done = self._engine.batch_transfer_sync_write(
                    self._peer, here, there, [num_bytes] * size
                )
            if done:
                sys.exit("Mooncake failed")
            count -= size


def main() -> None:
    pin(sys.argv[2])
    end = End()
    end.connect(other_address(end.address()))
    obey(end.buffer, end.write, "tcp", lambda: None)


if __name__ == "__main__":
    keep_answers_apart()  # the engine logs to standard output
    main()
