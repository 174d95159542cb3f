"""Two processes that move bytes for a measurement: ours, a peer's, or ucx_perftest's.

An end is a program (``our_end.py``, ``nixl_end.py``, ``mooncake_end.py``): it prints its address,
reads the other's, and then obeys one JSON line after the other. This module starts and orders
them; what is compared with what is ``run.py``'s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.compiler import compile_c
from bench.ends import End
from tests.support.service_process import free_port

HERE = Path(__file__).parent

WINDOW = 32
"""Messages in flight, as in perftest's tag_bw."""

TIMEOUT_S = 120.0
GB = 1e9

Cores = tuple[int, int]
"""Core of the sender and of the receiver, -1 = wherever the kernel likes."""


class Pair:
    """A sender and a receiver of one kind."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        cores: Cores,
        *extra: str,
        is_checked_after: bool = False,
    ) -> None:
        """command: of an end; its arguments are a name, a core and ``extra``. is_checked_after:
        the receiver does not look at its bytes by itself."""
        self._is_checked_after = is_checked_after
        self.source, self.target = (
            End([*command, name, str(core), *extra], environment)
            for name, core in zip(("source", "target"), cores, strict=True)
        )
        self._next_tag = 1
        try:
            addresses = self.source.answer(), self.target.answer()
            self.source.tell(addresses[1])
            self.target.tell(addresses[0])
            self.source.answer()
            self.target.answer()
        except BaseException:
            self.close()
            raise

    def stream(self, num_bytes: int, count: int) -> dict[str, Any]:
        """Push ``count`` messages, a window at once; time until the receiver has them all."""
        answer = self._run(num_bytes, count, is_latency=False)
        return {
            "gb_per_s": num_bytes * count / answer["seconds"] / GB,
            "sender_cores": answer.get("cores"),
            "lane": answer["lane"],
        }

    def one_by_one(self, num_bytes: int, count: int) -> list[float]:
        """Push ``count`` messages, each when the last was answered; seconds of each."""
        return self._run(num_bytes, count, is_latency=True)["each"]

    def _run(self, num_bytes: int, count: int, *, is_latency: bool) -> dict[str, Any]:
        job = {
            "num_bytes": num_bytes,
            "count": count,
            "tag": self._next_tag,
            "is_latency": is_latency,
        }
        self._next_tag += 3 * count
        self.target.tell({**job, "end": "receive"})
        posted = self.target.answer()
        self.source.tell({**job, "end": "send", "posted": posted})
        answer = self.source.answer()
        if self._is_checked_after:
            self.target.tell({**job, "end": "check"})
            if not self.target.answer():
                raise RuntimeError("the bytes did not arrive")
        return answer

    def close(self) -> None:
        self.source.close()
        self.target.close()


def our_pair(environment: Mapping[str, str], cores: Cores, how: str) -> Pair:
    """Our Transport. how: "windows" where processes share memory, or "messages"; each, followed by
    " as served", as the mesh uses them; or "cuda": messages of a device's memory."""
    return Pair([sys.executable, "-m", "bench.transfer.our_end"], environment, cores, how)


def written_buffers(folder: Path) -> dict[str, str]:
    """Environment that has ucx_perftest send memory which was written (``written.c``); compiled
    into ``folder``."""
    flags = ("-shared", "-fPIC", "-isystem", str(ucx_root() / "include"))
    library = compile_c(HERE / "written.c", folder / "written.so", *flags)
    return {"LD_PRELOAD": str(library)}


def copying_pair(device: str, cores: Cores) -> Pair:
    """A plain copy from one process's memory into another's."""
    command = [sys.executable, "-m", "bench.transfer.memcpy_end"]
    return Pair(command, without_ucx(), cores, device, is_checked_after=True)


def measure_perftest(
    environment: Mapping[str, str],
    cores: Cores,
    num_bytes: int,
    count: int,
    *,
    test: str = "tag_bw",
    memory: str = "host",
) -> float:
    """GB/s of ``ucx_perftest -t TEST`` with error handling on (-e), both ends busy-polling.

    test: "tag_bw", messages; "ucp_put_bw", writes into one buffer of the other end's. memory:
    "host" or "cuda", of both ends' buffers.

    One that ends in an error is told and run again, twice at most: now and then its server does not
    come up. Raises RuntimeError: its last words.
    """
    for _ in range(2):
        try:
            return _run_perftest(environment, cores, num_bytes, count, test, memory)
        except RuntimeError as error:
            print(f"ucx_perftest, {num_bytes} bytes, once more: {error}", file=sys.stderr)
    return _run_perftest(environment, cores, num_bytes, count, test, memory)


def _run_perftest(
    environment: Mapping[str, str],
    cores: Cores,
    num_bytes: int,
    count: int,
    test: str,
    memory: str,
) -> float:
    root = ucx_root()
    port = free_port()
    command = [
        str(root / "bin" / "ucx_perftest"), "-t", test, "-e", "-f", "-v", "-p", str(port),
        "-s", str(num_bytes), "-n", str(count), "-w", str(max(2, count // 10)), "-O", str(WINDOW),
        "-m", memory,
    ]  # fmt: skip
    environment = {**environment, "LD_LIBRARY_PATH": str(root / "lib")}
    pins = [["-c", str(core)] if core >= 0 else [] for core in cores]
    with tempfile.TemporaryFile("w+") as words:
        server = subprocess.Popen(
            [*command, *pins[1]], env=environment, stdout=words, stderr=subprocess.STDOUT
        )
        try:
            _wait_listening(server, port)
            client = subprocess.run(
                [*command, *pins[0], "127.0.0.1"],
                env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
            )  # fmt: skip
            server.wait(TIMEOUT_S)
        except (subprocess.SubprocessError, TimeoutError) as error:
            server.kill()
            server.wait()  # then all its words are there
            words.seek(0)
            said = f"{words.read()}\n{getattr(error, 'stderr', None) or ''}".strip()
            raise RuntimeError(f"{error}: {' | '.join(said.splitlines()[-3:])}") from error
        finally:
            server.kill()
            server.wait()
    # CSV: iterations, latency (percentile, average, overall), MB/s (average, overall), messages/s
    fields = client.stdout.strip().splitlines()[-1].split(",")
    return float(fields[5]) * (1 << 20) / GB


def _wait_listening(server: subprocess.Popen[bytes], port: int) -> None:
    """Wait until it listens, without connecting: perftest serves one client only."""
    wanted = f":{port:04X} 00000000:0000 0A"
    until = time.monotonic() + 10
    while wanted not in Path("/proc/net/tcp").read_text():
        if server.poll() is not None:
            raise TimeoutError(f"its server ended with {server.returncode} before it listened")
        if time.monotonic() > until:
            raise TimeoutError("its server does not listen")
        time.sleep(0.01)


def ucx_root() -> Path:
    """Where the libucx wheel lies."""
    spec = find_spec("libucx")
    if spec is None or spec.origin is None:
        sys.exit("libucx is not installed: pip install '.[worker]'")
    return Path(spec.origin).parent


def without_ucx() -> dict[str, str]:
    """Our environment, in which nobody has chosen anything for UCX."""
    return {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
