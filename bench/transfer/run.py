"""How much of UCX's own speed reaches our Transport, and how fast are the peers beside it?

    python -m bench.transfer.run [--quick] [--lanes sysv tcp] [--sizes ...] [--repetitions N]
    python -m bench.transfer.run --lanes cuda_ipc --pin -1 -1    # a device's memory

GB/s between two processes: ``ucx_perftest`` on the same lane with the same settings (``tag_bw`` for
messages, as it is and with a send buffer that was written; ``ucp_put_bw`` for windows), our
Transport, NIXL and Mooncake's engine, one after the other in every repetition, so that what
disturbs the machine disturbs all. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import peers
from bench.device import name_or_exit
from bench.plots import Panel, Pictures
from bench.record import Record, arguments, grouped, ratios, span, spread
from bench.transfer.pairs import (
    Cores,
    Pair,
    copying_pair,
    measure_perftest,
    our_pair,
    ucx_root,
    without_ucx,
    written_buffers,
)
from shared.telemetry.definitions import percentiles
from shared.transport.settings import UcxSettings

HOST_LANES = {"sysv": "sysv,self", "tcp": "tcp,self"}
CUDA = "cuda_ipc"
LANES = {**HOST_LANES, CUDA: UcxSettings().tls}
"""UCX_TLS of each. KV of a device goes with the settings of a worker, and its lane is named."""

SIZES = (256 << 10, 1 << 20, 8 << 20, 64 << 20)
ROW = 4

OURS, BY_MESSAGES, SERVED = "pdmesh", "pdmesh, by messages", "pdmesh, as served"
ANCHOR, WRITTEN, PUT = "ucx_perftest", "ucx_perftest, written", "ucx_perftest, ucp_put_bw"
COPY = "cudaMemcpy"
SHARE, CUDA_SHARE = 0.95, 0.9
"""Goals: of perftest's rate, in host memory and in a device's."""
SERVED_SHARE = 0.5
"""Goal of what a mesh does: each end copies and takes a digest, where ``ucp_put_bw`` copies once
and nobody reads it."""


@dataclass(frozen=True, slots=True)
class Rival:
    """A peer on one lane. variables: its best known settings; extra: of its end program, for NIXL
    how it handles errors and in how many pieces a message lies."""

    name: str
    peer: str
    lane: str
    variables: tuple[tuple[str, str], ...] = ()
    extra: tuple[str, ...] = ()

    def open(self, cores: Cores) -> Pair:
        """Start two of it."""
        python = str(peers.PEERS[self.peer].python)
        environment = without_ucx() | dict(self.variables)
        command = [python, "-m", f"bench.transfer.{self.peer}_end"]
        return Pair(
            command, environment, cores, *self.extra, is_checked_after=self.peer == "mooncake"
        )


# NIXL's mode is that of its UCX backend. "peer" notices a dead process, "none" does not.
_NIXL_TCP, _NIXL_SYSV = (("UCX_TLS", "tcp"),), (("UCX_MM_ERROR_HANDLING", "y"),)
RIVALS = (
    Rival("NIXL", "nixl", "tcp", _NIXL_TCP, ("peer", "1")),
    Rival("NIXL, 16 descriptors", "nixl", "tcp", _NIXL_TCP, ("peer", "16")),
    Rival("NIXL", "nixl", "sysv", _NIXL_SYSV, ("peer", "1")),
    Rival("NIXL, 16 descriptors", "nixl", "sysv", _NIXL_SYSV, ("peer", "16")),
    Rival("NIXL, no failure detection", "nixl", "sysv", (), ("none", "1")),
    Rival("Mooncake", "mooncake", "tcp", (("MC_TCP_ENABLE_CONNECTION_POOL", "1"),)),
)


HOW = {"sysv": "windows", CUDA: "cuda"}
"""How ours sends on a lane, if not by messages of host memory."""

OF_THIS_HOUSE = (OURS, BY_MESSAGES, SERVED)


class Lane:
    """One lane: everybody on it, and what they reached."""

    def __init__(
        self,
        name: str,
        cores: Cores,
        sizes: Sequence[int],
        batch_bytes: int,
        written: Mapping[str, str],
    ) -> None:
        """written: what makes perftest write its memory, see ``written_buffers``."""
        self.name = name
        self._cores = cores
        self.sizes = sizes
        self._batch_bytes = batch_bytes
        self.environment = without_ucx()
        UcxSettings(tls=LANES[name]).apply_to(self.environment)
        self._memory = "cuda" if name == CUDA else "host"
        self._anchors = {ANCHOR: ("tag_bw", self.environment)}
        if name != CUDA:
            self._anchors[WRITTEN] = ("tag_bw", {**self.environment, **written})
        if name == "sysv":
            self._anchors[PUT] = ("ucp_put_bw", {**self.environment, **written})
        self.speeds: dict[tuple[str, int], list[float]] = {}
        self.waits: dict[tuple[str, int], list[float]] = {}
        self.device = ""
        self._openers: dict[str, Callable[[], Pair]] = {
            OURS: lambda: our_pair(self.environment, cores, HOW.get(name, "messages"))
        }
        if name == "sysv":
            self._openers[BY_MESSAGES] = lambda: our_pair(self.environment, cores, "messages")
        if name == CUDA:
            self._openers[COPY] = lambda: copying_pair("cuda:0", cores)
        else:
            how = f"{HOW.get(name, 'messages')} as served"
            self._openers[SERVED] = lambda: our_pair(self.environment, cores, how)
        for rival in RIVALS:
            if rival.lane == name and peers.installed(rival.peer) is not None:
                self._openers[rival.name] = lambda rival=rival: rival.open(cores)

    @property
    def names(self) -> list[str]:
        """Ours first, then the peers."""
        return list(self._openers)

    def repeat(self) -> None:
        """One repetition: fresh processes, every size, everybody in turn."""
        with contextlib.ExitStack() as stack:
            pairs: dict[str, Pair] = {}
            for name, opener in self._openers.items():
                pairs[name] = opener()
                stack.callback(pairs[name].close)
            for num_bytes in self.sizes:
                count = self.messages_of(num_bytes)
                before = self._anchor_speeds(num_bytes, count)
                for name, pair in pairs.items():
                    pair.stream(num_bytes, max(2, count // 10))  # warm-up, as perftest has
                    result = pair.stream(num_bytes, count)
                    self.speeds.setdefault((name, num_bytes), []).append(result["gb_per_s"])
                    waits = pair.one_by_one(num_bytes, min(50, max(5, count // 10)))
                    self.waits.setdefault((name, num_bytes), []).extend(waits)
                    if name == OURS:
                        self.device = result["lane"]
                after = self._anchor_speeds(num_bytes, count)
                for name, speed in before.items():
                    mean = (speed + after[name]) / 2
                    self.speeds.setdefault((name, num_bytes), []).append(mean)

    def _anchor_speeds(self, num_bytes: int, count: int) -> dict[str, float]:
        return {
            name: measure_perftest(
                environment, self._cores, num_bytes, count, test=test, memory=self._memory
            )
            for name, (test, environment) in self._anchors.items()
        }

    def messages_of(self, num_bytes: int) -> int:
        """How many messages make one measurement."""
        return max(8, self._batch_bytes // num_bytes)

    def rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        ours = [name for name in self.names if name in OF_THIS_HOUSE]
        for num_bytes in self.sizes:
            for name in (OURS, *self._anchors, *self.names[1:]):
                theirs = self.speeds[name, num_bytes]
                p50, p99 = percentiles(self.waits.get((name, num_bytes), [0.0]), (50, 99))
                rows.append(
                    {
                        "lane": self.name,
                        "device": self.device,
                        "num_bytes": num_bytes,
                        "messages": self.messages_of(num_bytes),
                        "name": name,
                        "gb_per_s": spread(theirs),
                        "over_this": {
                            one: ratios(self.speeds[one, num_bytes], theirs) for one in ours
                        },
                        "one_by_one_p50_us": p50 * 1e6,
                        "one_by_one_p99_us": p99 * 1e6,
                    }
                )
        return rows


def note_goals(record: Record, rows: Sequence[dict[str, Any]]) -> None:
    """Against perftest every size is a goal: messages beside ``tag_bw``, windows beside
    ``ucp_put_bw``, and what a mesh does beside either. Against a peer, what a mesh does at the
    peer's best size is. A plain copy is a limit that nobody who tells the other end can reach."""
    for row in rows:
        lane, name, over = row["lane"], row["name"], row["over_this"]
        size = f"{lane} {show_bytes(row['num_bytes'])}"
        if name in (ANCHOR, WRITTEN):
            sends = " that sends written memory" if name == WRITTEN else ""
            ours, how = (BY_MESSAGES, ", by messages") if BY_MESSAGES in over else (OURS, "")
            share = CUDA_SHARE if lane == CUDA else SHARE
            record.goal(ROW, f"{size}{how}: share of ucx_perftest{sends}", over[ours], ">=", share)
        if name == PUT:
            record.goal(ROW, f"{size}: share of ucp_put_bw", over[OURS], ">=", SHARE)
        if name == (PUT if lane == "sysv" else WRITTEN) and SERVED in over:
            what = f"{size}, as served: share of {'ucp_put_bw' if name == PUT else 'ucx_perftest'}"
            record.goal(ROW, what, over[SERVED], ">=", SERVED_SHARE)
    for (lane, name), mine in grouped(rows, "lane", "name").items():
        if name in (*OF_THIS_HOUSE, ANCHOR, WRITTEN, PUT, COPY):
            continue
        worst = min(mine, key=lambda row: row["over_this"][SERVED]["median"])
        what = f"{lane}, as served: times {name}, at its best size"
        what += f" ({show_bytes(worst['num_bytes'])})"
        record.goal(ROW, what, worst["over_this"][SERVED], ">", 1.0)


def show_bytes(num_bytes: int) -> str:
    """256 KiB, 8 MiB."""
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def show(row: dict[str, Any]) -> str:
    speed = row["gb_per_s"]
    line = (
        f"{row['lane']:8} {show_bytes(row['num_bytes']):8} {row['name']:28}"
        f"{speed['median']:6.2f} GB/s [{speed['min']:5.2f} .. {speed['max']:5.2f}]"
    )
    for ours, ratio in row["over_this"].items():
        if row["name"] not in OF_THIS_HOUSE:
            line += f"  {ours} x {span(ratio, '.2f')}"
    if row["one_by_one_p50_us"]:
        p50, p99 = row["one_by_one_p50_us"], row["one_by_one_p99_us"]
        line += f"  one by one {p50:7.0f} / {p99:.0f} us"
    return line


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """GB/s over size, one panel a lane."""
    panels: list[Panel] = []
    for lane, own in grouped(rows, "lane").items():
        lines = {
            name: [(row["num_bytes"] / (1 << 20), row["gb_per_s"]) for row in of]
            for name, of in grouped(own, "name").items()
        }
        panels.append(
            Panel(lane if lane == CUDA else f"{lane} (CPU)", "MiB per message", "GB/s", lines)
        )
    return {"": panels}


def main() -> None:
    parser = arguments(__doc__, "few short repetitions, not recorded")
    parser.add_argument("--lanes", nargs="+", choices=list(LANES), default=list(HOST_LANES))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes")
    parser.add_argument("--repetitions", type=int, default=0)
    parser.add_argument(
        "--batch-mib",
        type=int,
        default=0,
        help="MiB moved per measurement (default: 4096, 128 with --quick)",
    )
    parser.add_argument(
        "--pin", nargs=2, type=int, default=(0, 1), metavar="CORE", help="-1 -1: do not pin"
    )
    chosen = parser.parse_args()
    about: dict[str, Any] = {}
    if CUDA in chosen.lanes:
        about["device"] = name_or_exit("cuda")
    repetitions = chosen.repetitions or (2 if chosen.quick else 9)
    batch_mib = chosen.batch_mib or (128 if chosen.quick else 4096)
    settings = {name: getattr(UcxSettings(), name) for name in UcxSettings.__slots__}
    about |= {**about_ucx(), "settings": settings, "pinned_to": chosen.pin}
    record = Record.of(__file__, chosen, **about)
    with tempfile.TemporaryDirectory(prefix="bench-transfer-") as folder:
        written = written_buffers(Path(folder))
        for name in chosen.lanes:
            lane = Lane(name, tuple(chosen.pin), chosen.sizes, batch_mib << 20, written)
            for _ in range(repetitions):
                lane.repeat()
            for row in lane.rows():
                record.add(row)
                print(show(row), flush=True)
    note_goals(record, record.rows)
    record.finish(pictures_of)


def about_ucx() -> dict[str, Any]:
    """Return its release, and this machine's way with tcp: bbr paces its own packets, cubic does
    not."""
    about = {"ucx": ucx_root() / "VERSION.txt"}
    about["tcp_congestion_control"] = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {name: path.read_text().strip() if path.exists() else "" for name, path in about.items()}


if __name__ == "__main__":
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    main()
