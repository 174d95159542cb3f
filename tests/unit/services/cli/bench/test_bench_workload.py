"""What ``pdmesh bench`` will send: the same for the same seed, open-loop, and counted where it was
changed."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections import deque
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from services.cli.bench.endpoints import Description
from services.cli.bench.flags import BenchFlags
from services.cli.bench.measurement import Measurement
from services.cli.bench.open_loop import run_open_loop
from services.cli.bench.prompts import Prompts
from services.cli.bench.sources import SHAPES, Trace, fixed
from services.cli.bench.workload import (
    PLANNED_AT_ONCE,
    Ask,
    Fit,
    Load,
    Workload,
    plan,
    planning,
)
from shared.errors import InvalidRequest

TRACE = Trace(
    "t",
    tuple(Ask(num_input=100 * n, num_output=n, due_s=2.0 * (n - 1)) for n in range(1, 6)),
)


def test_the_same_seed_is_the_same_plan() -> None:
    """And another one is another."""
    load = Load(rate=5.0, duration_s=20.0, seed=3)
    assert plan(SHAPES["chat"], load) == plan(SHAPES["chat"], load)
    other = Load(rate=5.0, duration_s=20.0, seed=4)
    assert plan(SHAPES["chat"], load) != plan(SHAPES["chat"], other)


def test_lengths_do_not_depend_on_the_rate() -> None:
    """So that the runs of a sweep differ in nothing else."""
    slow = plan(SHAPES["code"], Load(rate=1.0, num_requests=50))
    fast = plan(SHAPES["code"], Load(rate=9.0, num_requests=50))
    assert [a.num_input for a in slow.asks] == [a.num_input for a in fast.asks]
    assert slow.asks[-1].due_s == pytest.approx(9 * fast.asks[-1].due_s)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float, variation: float) -> None:
    """Of gamma-distributed gaps, deviation over mean is 1 / sqrt(shape)."""
    load = Load(rate=10.0, num_requests=20_000, burstiness=burstiness)
    due = [0.0, *(ask.due_s for ask in plan(fixed(1, 1), load).asks)]
    gaps = [after - before for before, after in pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05)


def test_a_metronome_and_all_at_once() -> None:
    """The two ends of burstiness and of the rate."""
    even = plan(fixed(1, 1), Load(rate=4.0, num_requests=3, burstiness=math.inf))
    assert [ask.due_s for ask in even.asks] == [0.25, 0.5, 0.75]
    assert even.arrivals == "even"
    at_once = plan(fixed(1, 1), Load(rate=math.inf, num_requests=3))
    assert [ask.due_s for ask in at_once.asks] == [0.0, 0.0, 0.0]


def test_nothing_arrives_after_the_duration() -> None:
    """Whichever comes first, duration or number, ends a plan."""
    load = Load(rate=10.0, duration_s=5.0)
    asks = plan(fixed(1, 1), load).asks
    assert 30 < len(asks) < 70
    assert all(ask.due_s < 5.0 for ask in asks)


def test_a_trace_keeps_its_times_and_is_stretched_to_a_rate() -> None:
    """Alone it plays as it was; a rate changes all gaps by one factor."""
    assert [a.due_s for a in plan(TRACE, Load(rate=None)).asks] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert plan(TRACE, Load(rate=1.25)).asks[-1].due_s == pytest.approx(4.0)
    part = plan(TRACE, Load(rate=1.25, num_requests=3)).asks
    assert [ask.due_s for ask in part] == pytest.approx([0.0, 1.2, 2.4])  # 3 requests in 2.4 s
    assert plan(TRACE, Load(rate=1.25, num_requests=1)).asks[0].due_s == 0
    at_once = replace(TRACE, rows=[replace(row, due_s=0.0) for row in TRACE.rows])
    with pytest.raises(InvalidRequest, match="one instant"):
        plan(at_once, Load(rate=1.25))
    drawn = plan(TRACE, Load(rate=1.25, arrivals="poisson"))
    assert (drawn.arrivals, [a.num_input for a in drawn.asks]) == (
        "poisson",
        [100, 200, 300, 400, 500],
    )


def test_what_does_not_fit_is_counted() -> None:
    """A file's requests are cut to limits that are asked for and else left out; drawn ones are
    cut."""
    limited = plan(TRACE, Load(rate=None), Fit(max_input=250, max_total=300))
    assert [ask.num_input for ask in limited.asks] == [100, 200, 250, 250, 250]
    assert (limited.num_cut, limited.num_skipped) == (3, 0)
    small = plan(TRACE, Load(rate=None), Fit(max_total=202))
    assert [ask.due_s for ask in small.asks] == [0.0, 2.0]
    assert (small.num_cut, small.num_skipped) == (0, 3)
    drawn = plan(fixed(900, 400), Load(num_requests=2), Fit(max_total=500, is_cut_to_context=True))
    assert {(a.num_input, a.num_output) for a in drawn.asks} == {(250, 250)}
    assert drawn.num_cut == 2


def test_lengths_and_blocks_are_scaled_together() -> None:
    """Else a scaled trace would have another reuse."""
    scaled = plan(TRACE, Load(rate=None), Fit(scale=0.25))
    assert [ask.num_input for ask in scaled.asks] == [25, 50, 75, 100, 125]
    assert scaled.block_tokens == 128
    assert min(ask.num_output for ask in scaled.asks) == 1


def test_drawn_lengths_look_like_the_traces() -> None:
    """Medians and 90th percentiles of Azure's conversations."""
    rng = random.Random(0)
    asks = list(islice(SHAPES["chat"].asks(rng), 20_000))
    inputs = sorted(ask.num_input for ask in asks)
    outputs = sorted(ask.num_output for ask in asks)
    assert inputs[10_000] == pytest.approx(1020, rel=0.05)
    assert inputs[18_000] == pytest.approx(2734, rel=0.05)
    assert outputs[10_000] == pytest.approx(129, rel=0.05)
    assert max(outputs) <= 1000


def test_sessions_reuse_prefixes_as_the_trace_does() -> None:
    """About 37 % of Mooncake's blocks are a prefix that was there before."""
    known: set[int] = set()
    num_hits = num_blocks = 0
    for ask in islice(SHAPES["mooncake"].asks(random.Random(0)), 4000):
        assert len(ask.block_ids) == math.ceil(ask.num_input / 512)
        hits = 0
        while hits < len(ask.block_ids) and ask.block_ids[hits] in known:
            hits += 1
        num_hits += hits
        num_blocks += len(ask.block_ids)
        known.update(ask.block_ids)
    assert 0.30 < num_hits / num_blocks < 0.44


def test_equal_blocks_are_equal_tokens() -> None:
    """The prefix that two requests share is the same to the token, and ends where it should."""
    asks = (
        Ask(num_input=1100, num_output=1, block_ids=(7, 8, 9)),
        Ask(num_input=1300, num_output=1, block_ids=(7, 8, 10)),
        Ask(num_input=600, num_output=1, block_ids=(7, 8)),
    )
    prompts = Prompts(Workload(name="w", asks=asks), seed=5)
    first, second, third = (prompts.ids(index) for index in range(3))
    assert [len(first), len(second), len(third)] == [1100, 1300, 600]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert third == first[:600]
    assert all(100 <= token < 1000 for token in second)


def test_prompts_of_another_seed_share_nothing() -> None:
    """No prefix cache may help the next run."""
    workload = plan(SHAPES["mooncake"], Load(num_requests=5))
    one, two = Prompts(workload, seed=1), Prompts(workload, seed=2)
    assert one.ids(0) == Prompts(workload, seed=1).ids(0)
    assert all(one.ids(index)[:8] != two.ids(index)[:8] for index in range(5))


def test_words_are_as_many_as_the_tokenizer_needs() -> None:
    """Two tokens a word: half as many words as tokens."""
    asks = (Ask(num_input=300, num_output=1), Ask(num_input=1, num_output=1))
    prompts = Prompts(Workload(name="w", asks=asks), tokens_per_word=2.0)
    assert len(prompts.text(0).split()) == 150
    assert len(prompts.text(1).split()) == 1


class Preparing:
    """An endpoint that counts what is prepared for it."""

    description = Description(url="http://a", api="completions", model="m")
    num_prepared = 0

    def prepare(self, prompts: Prompts, index: int) -> bytes:
        self.num_prepared += 1
        return b""


async def test_ctrl_c_is_heard_while_prompts_are_made() -> None:
    """Those of a large run take a minute."""
    endpoint: Any = Preparing()
    workload = plan(fixed(1, 1), Load(rate=1.0, num_requests=1000))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(run_open_loop([endpoint], workload))
        await asyncio.sleep(0)
        running.cancel()
    assert endpoint.num_prepared < 1000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"input_len": 512}, "--input-len is of --synthetic fixed alone"),
        ({"output_len": 9, "synthetic": "fixed", "trace": Path("t")}, "--output-len is of"),
        ({"scale_lengths": math.inf}, "--scale-lengths must be at most 1000"),
        ({"burstiness": 1e-320}, "--burstiness must be at least 0.001"),
        ({"burstiness": 0.5, "trace": Path("t")}, "--burstiness is of drawn arrivals"),
        ({"burstiness": 0.5, "rate": math.inf, "requests": 3}, "--burstiness is of gaps"),
        ({"synthetic": "code", "trace": Path("t")}, "--synthetic and --trace are two answers"),
        ({"arrivals": "trace"}, "--arrivals trace needs a --trace"),
        ({"attainment": 0.5}, "--attainment is of --goodput alone"),
        ({"tolerance": 0.5, "rates": (1.0, 2.0)}, "--tolerance is of --goodput alone"),
    ],
)
def test_a_flag_that_would_do_nothing_or_too_much_is_refused(
    flags: dict[str, Any], words: str
) -> None:
    """Before anything is sent."""
    with pytest.raises(InvalidRequest, match=words):
        BenchFlags(**flags).check()
    (kept := BenchFlags(synthetic="fixed", output_len=9)).check()
    assert kept.source().name == "fixed 256+9"
    BenchFlags(trace=Path("t"), arrivals="poisson", burstiness=0.5).check()
    BenchFlags(rates=(1.0, math.inf), requests=3, burstiness=0.5).check()


async def test_a_signal_is_heard_while_a_run_is_planned() -> None:
    """A million requests take a quarter of a minute."""
    measurement = Measurement((), fixed(1, 1), BenchFlags())
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async with asyncio.TaskGroup() as tasks:
        others = tasks.create_task(turn())
        load = Load(rate=10.0, num_requests=20 * PLANNED_AT_ONCE)
        assert await measurement.plan(load) == plan(fixed(1, 1), load)
        others.cancel()
    assert turns >= 19


def test_what_is_left_out_takes_its_turns_too() -> None:
    """A trace of which next to nothing fits is read to its end."""
    trace = Trace("t", tuple(Ask(num_input=9, num_output=9) for _ in range(3 * PLANNED_AT_ONCE)))
    steps = planning(trace, Load(rate=None), Fit(max_total=1))
    assert sum(it is None for it in steps) == 3


def test_more_requests_than_memory_holds_are_not_even_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rate with some zeros too many is told at once; a simulation has its own limits."""
    monkeypatch.setattr("services.cli.bench.workload.MOST_REQUESTS", 1000)
    monkeypatch.setattr("services.cli.bench.workload.MOST_PROMPT_TOKENS", 5000)
    load = Load(rate=1e9, duration_s=1e-5)
    with pytest.raises(InvalidRequest, match="one run has more than 1,000 requests"):
        deque(planning(fixed(1, 1), load, is_to_be_sent=True), 0)
    with pytest.raises(InvalidRequest, match="or more than 5,000 prompt tokens"):
        deque(planning(fixed(10, 1), load, is_to_be_sent=True), 0)
    assert len(plan(fixed(1, 1), load).asks) > 5000
