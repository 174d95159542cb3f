"""``pdmesh plan paper mooncake``: fetch or recompute, pipelines, and how often a cache hits."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final

import orjson
from cyclopts import Parameter

from services.cli.plan.view import progress, show_tables
from services.cli.sources import JsonFlag
from services.planner.core.cache_replay import POLICIES, BlockCache, Policy, replay
from services.planner.core.paper_table import PaperRow, PaperTable
from services.planner.paper_runs import (
    FAST25_CAPACITIES,
    FAST25_HIT_RATES,
    REPLAY_NOTE,
    mooncake_scheduling_tables,
    mooncake_tables,
)
from services.planner.traces import read_blocks, read_mooncake
from services.sim.asks import BLOCK_TOKENS
from shared.errors import InvalidRequest

MOST_BLOCKS: Final = 10**15


def mooncake(
    *,
    replay_file: Annotated[Path | None, Parameter(name="--replay")] = None,
    policy: Policy = "lru",
    blocks: str = "inf",
    data: Path | None = None,
    as_json: JsonFlag = False,
) -> None:
    """Mooncake (arXiv 2407.00079, FAST'25): when a fetch pays, and what one global cache hits.

    With --replay: the share of a trace's blocks that a cache of so many blocks would have had,
    counting each request's leading blocks up to the first that is missing.

    Parameters
    ----------
    replay_file
        JSONL with timestamp, input_length, output_length, hash_ids, as Mooncake publishes it.
    policy
        Which block goes: lru, the one used longest ago; lfu, the one used least since it came in
        (of equals the one used longest ago); length-aware, like lfu, but of equals the latest in
        its request.
    blocks
        Capacity in blocks of 512 tokens, or inf.
    data
        Folder with the public FAST'25 traces (mooncake_fast25_conversation_trace.jsonl,
        mooncake_fast25_synthetic_trace.jsonl): shows scheduling and overload on the first, and
        the hit rates of both, all policies.
    """
    if replay_file is None:
        if (policy, blocks) != ("lru", "inf"):
            raise InvalidRequest("--policy and --blocks need --replay TRACE.jsonl: what is hit?")
        tables = mooncake_tables()
        if data is not None:
            conversation = read_mooncake(data, "conversation")
            tables += [*mooncake_scheduling_tables(conversation), _hit_rates(data)]
        else:
            hint = "hit rates of the public traces: --data DIR, or --replay TRACE.jsonl for one"
            tables[-1] = replace(tables[-1], notes=[hint])
        show_tables(tables, as_json=as_json)
        return
    if data is not None:
        raise InvalidRequest("--data is of the public traces, --replay of one: give one of them")
    capacity = _capacity(blocks)
    trace = read_blocks(replay_file)
    if num_odd := sum(len(it.block_ids) != -(-it.num_input // BLOCK_TOKENS) for it in trace):
        print(
            f"pdmesh: {num_odd} of {len(trace)} lines have another number of hash_ids "
            "than their input_length has blocks of 512 tokens; the ids count",
            file=sys.stderr,
        )
    with progress(f"{policy}, {blocks} blocks", len(trace)) as on_progress:
        cache = BlockCache(capacity, policy)
        found = replay((line.block_ids for line in trace), cache, on_progress)
    if as_json:
        told = {"policy": policy, "blocks": capacity, "hit_rate": found.hit_rate}
        print(orjson.dumps(told | asdict(found)).decode())
        return
    print(f"hit rate {found.hit_rate:.4f}")
    print(
        f"{policy}, {blocks} blocks: {found.num_hits:,} of {found.num_blocks:,} blocks of "
        f"{found.num_requests:,} requests; {found.num_distinct:,} distinct, "
        f"{found.num_evicted:,} evicted"
    )


def _hit_rates(folder: Path) -> PaperTable:
    rows: list[PaperRow] = []
    for name, expected in FAST25_HIT_RATES.items():
        lines = read_mooncake(folder, name)
        for policy in POLICIES:
            with progress(f"{name}, {policy}", len(lines)) as on_progress:
                for idx, capacity in enumerate(FAST25_CAPACITIES):
                    cache = BlockCache(capacity, policy)
                    found = replay((line.block_ids for line in lines), cache, on_progress)
                    size = f"{capacity:,}" if capacity else "inf"
                    theirs = f"{expected[policy][idx]:.4f}" if policy in expected else ""
                    what = f"{name}, {policy}, {size} blocks"
                    rows.append(PaperRow(what, theirs, found.hit_rate, 4))
    return PaperTable("Mooncake FAST'25 traces: hit rate of one global cache", rows, [REPLAY_NOTE])


def _capacity(blocks: str) -> int | None:
    if blocks.strip().lower() == "inf":
        return None
    digits = blocks.replace(",", "").replace("_", "")
    is_whole = digits.isascii() and digits.isdigit() and len(digits) <= len(str(MOST_BLOCKS))
    if not is_whole or not 1 <= int(digits) <= MOST_BLOCKS:
        raise InvalidRequest(
            f"--blocks must be a whole number from 1 to {MOST_BLOCKS:,}, or inf, not {blocks!r}"
        )
    return int(digits)
