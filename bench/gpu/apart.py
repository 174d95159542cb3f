"""Prefill and decode as two processes on one device: are the tokens those of one process?

    python -m bench.gpu.apart [--quick] [--device cuda] [--model FOLDER]

Real processes, greedy answers in bfloat16, compared token by token with those of one colocated
worker, and as a control that worker's with its own of a second time. Without the device it
compares nothing and exits with 2. What the numbers mean: README.md beside this file.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from bench.device import add_device, name_or_exit
from bench.mesh import a_mesh, ask, channel_to
from bench.record import Record, arguments
from services.cli.bench.prompts import one_prompt
from services.local import LocalMesh
from shared.config import DEMO_MODEL, STEP_TOKENS, DecodeConfig, PrefillConfig

INTERRUPTED = 130
BLOCK_SIZE = 16
SHORTEST_PROMPT = 16
ONE, AGAIN, TWO = "one process", "one process, again", "two processes"
ALONE, TOGETHER = "one at a time", "all at once"

Answers = list[list[int]]
"""Token ids of each prompt's answer, in the prompts' order."""


class Agreement(NamedTuple):
    """How far answers equal others, place by place.

    first_median, first_earliest: 0-based place of the first token that differs, among the answers
    that do differ; None = none does.
    """

    share_tokens: float
    share_answers: float
    first_median: float | None
    first_earliest: int | None


def agreement(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Agreement:
    """Compare answers with others to the same prompts.

    Raises ValueError: there is none, or numbers of answers or of tokens are not the same.
    """
    if not any(answers):
        raise ValueError("nothing to compare")
    pairs = [
        [one == other for one, other in zip(answer, wanted, strict=True)]
        for answer, wanted in zip(answers, others, strict=True)
    ]
    firsts = [places.index(False) for places in pairs if not all(places)]
    return Agreement(
        share_tokens=sum(map(sum, pairs)) / sum(map(len, pairs)),
        share_answers=1 - len(firsts) / len(pairs),
        first_median=statistics.median(firsts) if firsts else None,
        first_earliest=min(firsts, default=None),
    )


def one_mesh(
    asked: argparse.Namespace, *, is_apart: bool
) -> AbstractAsyncContextManager[LocalMesh]:
    """Start a gateway with a prefill and a decode worker, or with one that does both.

    What would make a prompt be computed in other parts than its twin is off: cached prefixes, and
    a colocated worker's chunks by time. On a CPU threads are counted, for they split sums.
    """
    shared: dict[str, Any] = {"model": asked.model, "log_level": "error", "drain_s": 5.0}
    worker: dict[str, Any] = {
        **shared,
        "device": asked.device,
        "dtype": "bfloat16",
        "num_blocks": asked.prompts * (2 + (asked.longest + asked.tokens) // BLOCK_SIZE),
        "block_size": BLOCK_SIZE,
        "token_budget": STEP_TOKENS,
        "cache_prefixes": False,
        "threads": 1 if asked.device == "cpu" else 0,
    }
    prefills = [PrefillConfig(**worker)] if is_apart else []
    return a_mesh(prefills, [DecodeConfig(**worker, colocated=not is_apart)], **shared)


async def ask_all(
    mesh: LocalMesh, prompts: Sequence[Sequence[int]], num_tokens: int, *, at_once: int
) -> tuple[Answers, list[Any]]:
    """Ask for all answers, so many at a time; their token ids and their receipts."""
    places = asyncio.Semaphore(at_once)
    async with channel_to(mesh) as channel, asyncio.TaskGroup() as tasks:

        async def one(prompt: Sequence[int]) -> tuple[list[int], Any]:
            async with places:
                return await ask(channel, prompt, num_tokens)

        asking = [tasks.create_task(one(prompt)) for prompt in prompts]
    answers = [task.result() for task in asking]
    return [ids for ids, _ in answers], [receipt for _, receipt in answers]


async def measure(asked: argparse.Namespace, record: Record) -> None:
    """Both meshes, one after the other: each has the device to itself."""
    step = (asked.longest - SHORTEST_PROMPT) / max(asked.prompts - 1, 1)
    lengths = [SHORTEST_PROMPT + round(step * index) for index in range(asked.prompts)]
    prompts = [one_prompt(length, seed).ids(0) for seed, length in enumerate(lengths)]
    found: dict[tuple[str, str], Answers] = {}
    receipts: list[Any] = []
    ways = {ALONE: 1, TOGETHER: asked.prompts}
    async with one_mesh(asked, is_apart=False) as mesh:
        for who in (ONE, AGAIN):
            for way, at_once in ways.items():
                found[who, way], _ = await ask_all(mesh, prompts, asked.tokens, at_once=at_once)
    async with one_mesh(asked, is_apart=True) as mesh:
        for way, at_once in ways.items():
            found[TWO, way], told = await ask_all(mesh, prompts, asked.tokens, at_once=at_once)
            receipts += told
    moved = sum(receipt["transfer_bytes"] for receipt in receipts)
    lanes = sorted({receipt["lane"] for receipt in receipts})
    retries = sum(receipt["attempts"] - 1 for receipt in receipts)
    if not all(receipt["transfer_bytes"] for receipt in receipts):
        raise RuntimeError("an answer's KV was not handed over: nothing would be compared")
    record.rows.append({"transfer_bytes": moved, "lanes": lanes, "retries": retries})
    print(f"{asked.prompts} prompts of {lengths[0]} to {lengths[-1]} tokens, {asked.tokens} each")
    print(f"{moved / 1e6:.1f} MB of KV handed over by {', '.join(lanes)}; {retries} retries")
    pairs = [((who, way), (ONE, way)) for way in ways for who in (AGAIN, TWO)]
    for (who, way), against in [*pairs, ((ONE, TOGETHER), (ONE, ALONE))]:
        result = agreement(found[who, way], found[against])
        names = {"who": f"{who}, {way}", "against": ", ".join(against)}
        record.rows.append({**names, **result._asdict(), "num_answers": asked.prompts})
        print(line(names, result), flush=True)


def line(names: dict[str, str], result: Agreement) -> str:
    first = "none differs"
    if result.first_median is not None:
        first = f"first at {result.first_median:g} in the median, {result.first_earliest} earliest"
    return (
        f"{names['who']:33} against {names['against']:28} tokens equal {result.share_tokens:.4f}  "
        f"answers equal {result.share_answers:.3f}  {first}"
    )


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, "8 prompts to 256, 32 tokens each")
    add_device(parser)
    parser.add_argument("--model", default=DEMO_MODEL, help="folder; default: the bundled model")
    parser.add_argument("--prompts", type=int, default=32, help="how many")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    asked = parser.parse_args()
    if asked.quick:
        asked.prompts, asked.longest, asked.tokens = 8, 256, 32
    if asked.prompts < 1 or asked.tokens < 1 or asked.longest < SHORTEST_PROMPT:
        parser.error(f"at least 1 prompt, 1 token, and --longest {SHORTEST_PROMPT}")
    return asked


def main() -> None:
    asked = parse()
    name = name_or_exit(asked.device)
    about = {"device": name, "model": Path(asked.model).name, "dtype": "bfloat16"}
    record = Record.of(__file__, asked, **about)
    record.stem += "-apart"
    try:
        uvloop.run(measure(asked, record))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    record.finish()


if __name__ == "__main__":
    main()
