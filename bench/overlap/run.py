"""What a layer-wise push hides: time between the last layer's compute and decode's last ack.

    python -m bench.overlap.run [--quick] [--lanes sysv tcp] [--layer-mib 1 4 16] [--layer-ms 10]

Two processes, production's pusher and receiver over real UCX and gRPC, 32 layers of modelled
compute on the compute thread. Modes take turns: compute alone, layer-wise, serialized, and what the
pusher chooses itself. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # compute is one thread here: read before numpy

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import structlog
import uvloop

from bench.overlap.engine import ModelledEngine
from bench.plots import Bars, Panel, Pictures
from bench.record import Record, arguments, ratios, span, spread
from bench.transfer.pairs import without_ucx
from bench.transfer.run import LANES, about_ucx
from shared.address import Address
from shared.engine.worker import ThreadCompute
from shared.errors import MeshError
from shared.ids import Incarnation, LeaseToken, MeshPeer, RequestId
from shared.rpc.tcp import TcpNetwork
from shared.transfer.effects import HandOver
from shared.transfer.messages import TransferKey
from shared.transfer.plan import DEFAULT_GROUP_BYTES, TransferMode
from shared.transport.settings import UcxSettings
from shared.transport.ucxx import open_ucx
from shared.worker.pairs import PairTable
from shared.worker.process import SWITCH_INTERVAL_S
from shared.worker.pusher import Pusher
from shared.worker.receiver import KvReceiver, LeaseTerms

NUM_LAYERS = 32
KV_SHARE = 0.15
"""Of a layer's compute: KV is written then, attention and MLP follow (``kv_share.py``)."""

LAYER_MIB = (1, 4, 16)
TOKENS_PER_MIB = 256  # 8 KV heads of 128 in bf16: 4 KiB a token and layer
ROW = 5
PREFILL, DECODE = Incarnation(1), Incarnation(2)
MODES = ("compute", "layerwise", "serialized", "auto")


# --- decode: a process that grants everything -----------------------------------------------------


class OpenHouse:
    """A lease book with room for one transfer at a time, and always."""

    def __init__(self, engine: ModelledEngine, num_tokens: int) -> None:
        self._terms = LeaseTerms(
            num_tokens=num_tokens, skip_tokens=0, block_table=engine.block_table()
        )

    def attach(self, key: TransferKey, source: Incarnation) -> LeaseTerms:
        return self._terms

    def source_lost(self, source: Incarnation, error: MeshError) -> None:
        pass

    def placed(self, receive: HandOver) -> None:
        pass

    def failed(self, key: TransferKey, error: MeshError) -> None:
        print(f"transfer failed: {error!r}", file=sys.stderr)

    def quarantined(self, key: TransferKey) -> None:
        pass

    def release(self, key: TransferKey) -> None:
        pass


async def serve_decode(num_tokens: int) -> None:
    """Receive until standard input ends; each line asks for the digest of what is in the pool."""
    modelled = ModelledEngine(num_layers=NUM_LAYERS, num_tokens=num_tokens, seed=None)
    engine: Any = modelled
    transport: Any = await open_ucx()
    compute = ThreadCompute(engine, name="decode")
    random_bytes = random.Random(1).randbytes
    receiver = KvReceiver(
        engine=engine,
        compute=compute,
        transport=transport,
        leases=OpenHouse(modelled, num_tokens),
        random_bytes=random_bytes,
    )
    pairs = PairTable(
        incarnation=DECODE,
        engine=engine,
        compute=compute,
        transport=transport,
        network=TcpNetwork(),
        sink=receiver,
        random_bytes=random_bytes,
    )
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await receiver.open()
    serving = TcpNetwork().serve(Address("127.0.0.1", 0), [pairs.servicer])
    async with background(pairs.run, receiver.run), serving as server:
        print(server.address.port, flush=True)
        while await reader.readline():
            digest = engine.digest(engine.block_table(), num_tokens)
            engine.clear()
            print(digest, flush=True)
    pipe.close()
    receiver.close()
    await transport.close()
    await compute.close()


@contextlib.asynccontextmanager
async def background(*works: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Run endless works beside the block, and cancel them at its end."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_endless(work)) for work in works]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def _endless(work: Callable[[], Awaitable[None]]) -> None:
    await work()


# --- prefill: this process ------------------------------------------------------------------------


class Prefill:
    """Runs prompts in one mode or the other."""

    def __init__(
        self, engine: ModelledEngine, compute: ThreadCompute, pusher: Pusher, num_tokens: int
    ) -> None:
        self._engine, self._compute, self._pusher = engine, compute, pusher
        self._num_tokens = num_tokens
        self._numbers = itertools.count(1)
        self._table = engine.block_table()
        self.compute_s = 0.0  # of an undisturbed step: the prediction in mode "auto"

    async def run(self, mode: str) -> dict[str, Any]:
        """Compute one prompt, pushing as the mode says; times in seconds."""
        began_at = time.perf_counter()
        if mode == "compute":
            await self._compute.begin([], (), lambda num_layers: None).results()
            return {"compute_s": self._engine.last_layer_at - began_at}
        request_id = RequestId(next(self._numbers).to_bytes(16, "little"))
        handle = self._pusher.begin(
            TransferKey(request_id, 0, LeaseToken(bytes(16))),
            DECODE,
            num_tokens=self._num_tokens,
            block_table=lambda: self._table,
        )
        self._pusher.mode = TransferMode(mode)
        self._pusher.step_planned([(handle, 0, self._num_tokens)], self.compute_s)
        await self._compute.begin([], (), handle.layers_ready).results()
        handle.commit(1)
        stats = await handle.wait()
        acked_at = time.perf_counter()
        if mode != "auto" and stats.mode != mode:
            sys.exit(f"asked for {mode}, got {stats.mode}")
        return {
            "compute_s": self._engine.last_layer_at - began_at,
            "exposed_s": acked_at - self._engine.last_layer_at,
            "total_s": acked_at - began_at,
            "mode": stats.mode,
            "frames": stats.num_frames,
            "lane": stats.lane,
            "gb_per_s": stats.num_bytes / stats.transfer_s / 1e9,
        }


async def measure(
    num_tokens: int, layer_s: float, kv_share: float, repetitions: int
) -> dict[str, Any]:
    """Measure all modes, taking turns; check every push's bytes."""
    decode = subprocess.Popen(
        [sys.executable, "-m", "bench.overlap.run", "--decode", str(num_tokens)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert decode.stdin is not None
    assert decode.stdout is not None
    engine: Any = ModelledEngine(
        num_layers=NUM_LAYERS, num_tokens=num_tokens, seed=1, kv_share=kv_share
    )
    expected = engine.digest(engine.block_table(), num_tokens)
    engine.calibrate(layer_s)
    transport: Any = await open_ucx()
    compute = ThreadCompute(engine, name="prefill")
    pusher = Pusher(engine=engine, compute=compute)
    paired = asyncio.Event()
    pairs = PairTable(
        incarnation=PREFILL,
        engine=engine,
        compute=compute,
        transport=transport,
        network=TcpNetwork(),
        source=pusher,
        group_bytes=DEFAULT_GROUP_BYTES,
        random_bytes=random.Random(2).randbytes,
        on_change=paired.set,
    )
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    try:
        port = int(decode.stdout.readline())
        async with background(pusher.run, pairs.run):
            pairs.set_peers([MeshPeer(DECODE, Address("127.0.0.1", port))])
            await paired.wait()
            prefill = Prefill(engine, compute, pusher, num_tokens)
            for repetition in range(repetitions + 1):
                for mode in MODES:
                    result = await prefill.run(mode)
                    if mode == "compute":
                        prefill.compute_s = result["compute_s"]
                    else:
                        decode.stdin.write("digest\n")
                        decode.stdin.flush()
                        if int(decode.stdout.readline()) != expected:
                            sys.exit("the bytes that arrived are not the bytes that were sent")
                    if repetition:  # the first one warms up
                        results[mode].append(result)
    finally:
        decode.stdin.close()
        await transport.close()
        await compute.close()
        decode.wait(20)
    return summary(results)


def summary(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians and spreads of every mode, in milliseconds; ratios within a repetition."""

    def of(mode: str, key: str) -> list[float]:
        return [one[key] * 1e3 for one in results[mode]]

    row: dict[str, Any] = {
        "lane": results["layerwise"][0]["lane"],
        "compute": {"compute_ms": spread(of("compute", "compute_s"))},
    }
    layer_ms = [compute_ms / NUM_LAYERS for compute_ms in of("compute", "compute_s")]
    for mode in MODES[1:]:
        exposed_ms = of(mode, "exposed_s")
        row[mode] = {
            "exposed_ms": spread(exposed_ms),
            "total_ms": spread(of(mode, "total_s")),
            "compute_ms": spread(of(mode, "compute_s")),
            "frames": results[mode][0]["frames"],
            "modes": sorted({one["mode"] for one in results[mode]}),
            "exposed_over_serialized": ratios(exposed_ms, of("serialized", "exposed_s")),
            "exposed_over_layer": ratios(exposed_ms, layer_ms),
        }
    return row


def show(row: dict[str, Any]) -> None:
    alone = row["compute"]["compute_ms"]["median"]
    print(
        f"{row['lane']}: {NUM_LAYERS} layers of {row['layer_mib']} MiB, compute alone "
        f"{alone:.1f} ms, {alone / NUM_LAYERS:.1f} ms a layer, KV written at {row['kv_share']:g}"
    )
    for mode in MODES[1:]:
        exposed, total = row[mode]["exposed_ms"], row[mode]["total_ms"]
        slower = row[mode]["compute_ms"]["median"] / alone - 1
        print(
            f"  {mode:10}  exposed {span(exposed, '.2f')} ms   total {total['median']:7.1f} ms   "
            f"compute {slower:+.1%}   ({', '.join(row[mode]['modes'])})",
            flush=True,
        )


def main() -> None:
    parser = arguments(__doc__, "2 repetitions, not recorded")
    parser.add_argument("--lanes", nargs="+", choices=list(LANES), default=list(LANES))
    parser.add_argument(
        "--layer-mib", nargs="+", type=int, help="KV of a layer, MiB (1 4 16; quick: 1 16)"
    )
    parser.add_argument("--layer-ms", type=float, default=10.0, help="compute of a layer")
    parser.add_argument(
        "--kv-share",
        nargs="+",
        type=float,
        metavar="SHARE",
        help="of a layer's compute, when its KV is written and may leave; goals are of the first "
        f"(default: {KV_SHARE:g}, as in our engine, and 1: at the layer's end; quick: the former)",
    )
    parser.add_argument("--repetitions", type=int, default=0)
    parser.add_argument("--decode", type=int, metavar="TOKENS", help=argparse.SUPPRESS)
    parser.add_argument("--prefill", type=int, metavar="TOKENS", help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=1.0, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    structlog.configure(  # standard output belongs to the results
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as workers do
    repetitions = chosen.repetitions or (2 if chosen.quick else 7)
    sizes = chosen.layer_mib or ((1, 16) if chosen.quick else LAYER_MIB)
    shares = chosen.kv_share or ([KV_SHARE] if chosen.quick else [KV_SHARE, 1.0])
    if chosen.decode:
        uvloop.run(serve_decode(chosen.decode))
    elif chosen.prefill:
        layer_s = chosen.layer_ms / 1e3
        print(json.dumps(uvloop.run(measure(chosen.prefill, layer_s, chosen.share, repetitions))))
    else:
        about = {"layers": NUM_LAYERS, "layer_ms": chosen.layer_ms}
        record = Record.of(__file__, chosen, **about_ucx(), **about)
        for lane, layer_mib, share in itertools.product(chosen.lanes, sizes, shares):
            row = measure_apart(lane, layer_mib, share)
            record.add(row)
            show(row)
            if share == shares[0]:
                note_goals(record, row)
        record.finish(pictures_of)


def pictures_of(rows: Sequence[dict[str, Any]]) -> Pictures:
    """Exposed time over the size of a layer, one panel a lane and moment at which KV is written;
    of engines.py's runs bars."""
    if "engine" in rows[0]:
        bars = {
            mode: {f"{row['engine']},\n{row['tokens']}": row["exposed_ms"][mode] for row in rows}
            for mode in ("auto", "serialized")
        }
        return {"": [Bars("exposed after token 1 (CPU)", "ms", bars)]}
    panels: list[Panel] = []
    for lane, share in dict.fromkeys((row["lane"], row.get("kv_share", 1.0)) for row in rows):
        of = [row for row in rows if (row["lane"], row.get("kv_share", 1.0)) == (lane, share)]
        lines = {
            mode: [(row["layer_mib"], row[mode]["exposed_ms"]) for row in of]
            for mode in ("auto", "layerwise", "serialized")
        }
        x, y = "MiB of KV a layer", "exposed ms after the last layer"
        title = f"{lane}, KV written at {share:g} of a layer (CPU)"
        panels.append(Panel(title, x, y, lines))
    return {"": panels}


def measure_apart(lane: str, layer_mib: int, kv_share: float) -> dict[str, Any]:
    """Measure in a process of its own: UCX reads its environment once."""
    environment = without_ucx()
    UcxSettings(tls=LANES[lane]).apply_to(environment)
    tokens = str(layer_mib * TOKENS_PER_MIB)
    command = [
        sys.executable, "-m", "bench.overlap.run", *sys.argv[1:],
        "--prefill", tokens, "--share", str(kv_share),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {"layer_mib": layer_mib, "kv_share": kv_share, **json.loads(done.stdout)}


def note_goals(record: Record, row: dict[str, Any]) -> None:
    """What the production setting, auto, leaves exposed."""
    name = f"{row['lane']}, 32 x {row['layer_mib']} MiB: exposed"
    record.goal(ROW, f"{name} / one layer's time", row["auto"]["exposed_over_layer"], "<=", 1.0)
    share = row["auto"]["exposed_over_serialized"]
    record.goal(ROW, f"{name} / serialized", share, "<=", 0.05)


if __name__ == "__main__":
    main()
