"""What one message between two processes takes on this machine, by how long both have slept.

    python -m bench.handover.hops [--count 300] [--bytes 200]

Prints p50 in microseconds, from before ``send`` until the other process has read the bytes; a hop
of the hand-over is that and what its processes do.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import statistics
import time

PAUSES_S = (0.001, 0.005, 0.03)


def connected(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far


def answer(far: socket.socket) -> None:
    """Tell when each message was read, until the connection ends."""
    poll = select.epoll()
    poll.register(far, select.EPOLLIN)
    while True:
        poll.poll()
        if not far.recv(1 << 20):
            return
        far.sendall(time.monotonic_ns().to_bytes(8, "little"))


def measure(kind: str, pause_s: float, count: int, num_bytes: int) -> tuple[float, float]:
    """Medians of one way and of ``send`` alone, in microseconds."""
    near, far = connected(kind)
    child = os.fork()
    if not child:
        near.close()
        answer(far)
        os._exit(0)
    far.close()
    one_way: list[float] = []
    sends: list[float] = []
    for _ in range(count):
        time.sleep(pause_s)
        began_at = time.monotonic_ns()
        near.sendall(bytes(num_bytes))
        sends.append((time.monotonic_ns() - began_at) / 1e3)
        one_way.append((int.from_bytes(near.recv(8), "little") - began_at) / 1e3)
    near.close()
    os.waitpid(child, 0)
    return statistics.median(one_way), statistics.median(sends)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=300, help="messages of each kind and pause")
    parser.add_argument("--bytes", type=int, default=200, help="of a message")
    asked = parser.parse_args()
    for kind in ("tcp", "unix"):
        for pause_s in PAUSES_S:
            one_way, send = measure(kind, pause_s, asked.count, asked.bytes)
            print(
                f"{kind}, {pause_s * 1e3:g} ms apart: one way {one_way:.0f} us, {send:.0f} in send"
            )


if __name__ == "__main__":
    main()
