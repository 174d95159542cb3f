"""KV that others drove out of a worker's pool: how soon is token 1 where a tier below has it?

    python -m bench.sessions.tiers [--quick] [--models demo 87m] [--tokens 1600]

A prompt is computed, driven out by another, and asked for again: its second TTFT beside its first,
within a repetition, from host memory and from disk. README.md has the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop

from bench.disaggregation.run import VOCAB, make_model
from bench.mesh import a_mesh, ask, channel_to
from bench.record import Record, arguments, ratios, span
from services.cli.bench.prompts import one_prompt
from shared.config import DecodeConfig, PrefillConfig
from shared.model_folder import DEMO_FOLDER
from tests.support.process_mesh import parse_gauges
from tests.support.service_process import free_port

MODELS: Final = ("demo", "87m")
TIERS: Final = ("dram", "ssd")
BLOCK_SIZE: Final = 16
TIER_BYTES: Final = 1 << 30
WARM_UP: Final = 3
"""Prompts of these first repetitions teach the worker how long its steps and loads take."""
STORED_WITHIN_S: Final = 60.0


class Worker:
    """The prefill worker of a mesh: what is asked of it, and what it has stored."""

    def __init__(self, channel: Any, metrics_port: int, tier: str, num_tokens: int) -> None:
        self._channel = channel
        self._url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._tier = tier
        self._num_tokens = num_tokens

    async def computed(self, seed: int) -> dict[str, Any]:
        """Ask for a prompt that is new; its receipt, when its blocks have been copied down."""
        wanted = await self._stored() + self._num_tokens // BLOCK_SIZE
        receipt = await self.asked(seed)
        async with asyncio.timeout(STORED_WITHIN_S):
            while await self._stored() < wanted:
                await asyncio.sleep(0.05)
        return receipt

    async def asked(self, seed: int) -> dict[str, Any]:
        prompt = one_prompt(self._num_tokens, seed, VOCAB - 100).ids(0)
        _, receipt = await ask(self._channel, prompt, 2)
        return receipt

    async def _stored(self) -> float:
        async with aiohttp.ClientSession() as session, session.get(self._url) as answer:
            gauges = parse_gauges(await answer.text())
        return gauges[f"tier_blocks_stored_total:{self._tier}"]


@contextlib.asynccontextmanager
async def a_worker(folder: Path, tier: str, num_tokens: int) -> AsyncGenerator[Worker]:
    """Start a gateway, a decode worker, and a prefill worker whose pool holds one prompt."""
    common: dict[str, Any] = {"model": str(folder), "device": "cpu", "threads": 1}
    metrics_port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        room: dict[str, Any] = {"dram_cache": TIER_BYTES}
        if tier == "ssd":
            room = {"ssd_cache": scratch / "cache", "ssd_cache_size": TIER_BYTES}
        prefill = PrefillConfig(
            **common, **room, num_blocks=num_tokens // BLOCK_SIZE + 8, metrics_port=metrics_port
        )
        decode = DecodeConfig(**common, kv_gib=0.5, cache_prefixes=False)
        mesh = await stack.enter_async_context(a_mesh([prefill], [decode], model=str(folder)))
        channel = await stack.enter_async_context(channel_to(mesh))
        yield Worker(channel, metrics_port, tier, num_tokens)


async def measure(
    record: Record, model: str, folder: Path, tier: str, asked: argparse.Namespace
) -> None:
    """Note one model and tier: a value a repetition."""
    receipts: list[tuple[dict[str, Any], dict[str, Any]]] = []
    async with a_worker(folder, tier, asked.tokens) as worker:
        for repetition in range(WARM_UP + asked.repetitions):
            first = await worker.computed(2 * repetition)
            await worker.computed(2 * repetition + 1)  # drives it out
            again = await worker.asked(2 * repetition)
            if repetition >= WARM_UP:
                receipts.append((first, again))
    # Elsewhere the worker said that computing would be sooner.
    hits = [(first, again) for first, again in receipts if again[f"{tier}_tokens"]]
    about = {"model": model, "tier": tier, "tokens": asked.tokens, "asked": len(receipts)}
    computed_s, hit_s = ([one[which]["ttft_s"] for one in hits] for which in (0, 1))
    row = {**about, "hits": len(hits), "computed_s": computed_s, "hit_s": hit_s}
    if hits:
        row["ratio"] = ratios(hit_s, computed_s)
    record.add(row)
    print(line(row), flush=True)


def line(row: dict[str, Any]) -> str:
    found = f"{row['model']:5} {row['tier']:5} {row['hits']} of {row['asked']} came from there"
    if not row["hits"]:
        return found
    hit_ms, computed_ms = (
        sorted(row[name])[row["hits"] // 2] * 1e3 for name in ("hit_s", "computed_s")
    )
    ratio = span(row["ratio"], ".2f")
    return f"{found}: TTFT {hit_ms:.1f} ms, computed {computed_ms:.1f} ms, x {ratio}"


async def measure_all(record: Record, asked: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for model in asked.models:
            folder = DEMO_FOLDER
            if model != "demo":
                folder = Path(scratch) / model
                make_model(folder)
            for tier in asked.tiers:
                await measure(record, model, folder, tier, asked)


def main() -> None:
    asked = parse()
    record = Record.of(__file__, asked)
    uvloop.run(measure_all(record, asked))
    for row in record.rows:
        if row["tier"] == "dram" and row["hits"]:
            what = f"{row['model']}, {row['tokens']} tokens: TTFT of a DRAM hit / computed"
            record.goal(17, what, row["ratio"], "<=", 0.5)
    record.finish()


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "two repetitions, prints only")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=TIERS)
    parser.add_argument("--tokens", type=int, default=1600, help="of a prompt; whole blocks")
    parser.add_argument("--repetitions", type=int, default=0, help="default 9, quick 2")
    asked = parser.parse_args()
    asked.repetitions = asked.repetitions or (2 if asked.quick else 9)
    return asked


if __name__ == "__main__":
    main()
