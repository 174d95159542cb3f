"""Later turns of a conversation: what is it worth that prefill fetches the answer's KV from decode?

    python -m bench.disaggregation.turns [--quick] [--at-once 1 3]

Apart with fetches, apart without (--share-prefixes off), and one colocated worker, which has the
answer's KV itself. Each gets the same conversations in turn; TTFT is the gateway's, from receipts.
README.md has the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.disaggregation.run import NUM_CORES, VOCAB, make_model, our_mesh, run_client
from bench.mesh import ask, channel_to
from bench.record import Record, arguments, ratios
from services.cli.bench.prompts import one_prompt

FETCHES, COMPUTES, COLOCATED = "apart, fetches", "apart, no fetches", "1 colocated"
SYSTEMS: dict[str, dict[str, Any]] = {
    FETCHES: {"num_colocated": 0},
    COMPUTES: {"num_colocated": 0, "share_prefixes": False},
    COLOCATED: {"num_colocated": 1},
}
THINK_S = 1.0
"""Between an answer and the next turn: a gateway hears of what was computed within 0.05 s."""


async def converse(channel: Any, asked: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """One conversation; the receipt of each of its turns."""
    receipts: list[dict[str, Any]] = []
    talk: list[int] = []
    for turn in range(asked.turns):
        length = asked.said if turn else asked.first
        talk += one_prompt(length, 100 * seed + turn, VOCAB - 100).ids(0)
        answer, receipt = await ask(channel, talk, asked.answer)
        receipts.append(receipt)
        talk += answer
        await asyncio.sleep(THINK_S)
    return receipts


async def converse_all(
    channel: Any, asked: argparse.Namespace, at_once: int, seed: int
) -> list[list[dict[str, Any]]]:
    places = asyncio.Semaphore(at_once)

    async def one(number: int) -> list[dict[str, Any]]:
        async with places:
            return await converse(channel, asked, seed + number)

    async with asyncio.TaskGroup() as tasks:
        talking = [tasks.create_task(one(number)) for number in range(asked.conversations)]
    return [task.result() for task in talking]


def row_of(conversations: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """What one system did: medians over the first turns and over the later ones, tokens by turn."""
    first = [receipts[0]["ttft_s"] for receipts in conversations]
    later = [receipt for receipts in conversations for receipt in receipts[1:]]
    return {
        "first_ttft_s": statistics.median(first),
        "later_ttft_s": statistics.median(it["ttft_s"] for it in later),
        "later_ttft_max_s": max(it["ttft_s"] for it in later),
        "later_tpot_s": statistics.median(it["tpot_s"] for it in later),
        "prompt_tokens": sum(it["prompt_tokens"] for it in later) / len(later),
        "cached_tokens": sum(it["cached_tokens"] for it in later) / len(later),
        "fetched_tokens": sum(it["fetched_tokens"] for it in later) / len(later),
        "fetch_s": statistics.median(it["fetch_s"] for it in later),
        "num_fetched": sum(it["fetched_tokens"] > 0 for it in later),
        "num_later": len(later),
    }


async def main(asked: argparse.Namespace) -> None:
    record = Record.of(__file__, asked)
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_model(folder)
        channels: dict[str, Any] = {}
        for name, settings in SYSTEMS.items():
            mesh = await stack.enter_async_context(our_mesh(folder, threads=NUM_CORES, **settings))
            channels[name] = await stack.enter_async_context(channel_to(mesh))
            await converse(channels[name], asked, 0)  # pays for what is made once
        for at_once in asked.at_once:
            found: dict[str, list[float]] = {name: [] for name in SYSTEMS}
            for repetition in range(asked.repetitions):
                seed = 10_000 * at_once + 100 * (1 + repetition)
                for name, channel in channels.items():
                    row = row_of(await converse_all(channel, asked, at_once, seed))
                    found[name].append(row["later_ttft_s"])
                    about = {"system": name, "at_once": at_once, "repetition": repetition}
                    record.add({**about, **row})
                    print(line(record.rows[-1]), flush=True)
            for name in (COMPUTES, COLOCATED):
                share = ratios(found[FETCHES], found[name])
                record.add({"at_once": at_once, "later_ttft_x": name, **share})
                print(f"{at_once} at once: later TTFT, {FETCHES} / {name}: {share['values']}")
    record.finish()


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['at_once']} at once  {row['system']:18} TTFT first {row['first_ttft_s'] * 1e3:6.1f} "
        f"later {row['later_ttft_s'] * 1e3:6.1f} ms (max {row['later_ttft_max_s'] * 1e3:.0f})  "
        f"TPOT {row['later_tpot_s'] * 1e3:5.1f} ms  of {row['prompt_tokens']:.0f} tokens "
        f"{row['cached_tokens']:.0f} cached, {row['fetched_tokens']:.0f} of them fetched in "
        f"{row['fetch_s'] * 1e3:.1f} ms ({row['num_fetched']} of {row['num_later']} turns)"
    )


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "one short repetition, prints only")
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 3], help="conversations")
    parser.add_argument("--conversations", type=int, default=6, help="of a repetition")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--first", type=int, default=400, help="tokens of the first turn's prompt")
    parser.add_argument("--said", type=int, default=60, help="tokens that each later turn adds")
    parser.add_argument("--answer", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--repetitions", type=int, default=2)
    asked = parser.parse_args()
    if asked.quick:
        asked.at_once, asked.conversations, asked.repetitions = [1], 2, 1
    return asked


if __name__ == "__main__":
    run_client(main(parse()))
