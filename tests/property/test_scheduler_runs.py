"""``Scheduler.advance`` is so many steps of ``plan`` and ``commit``: two schedulers that are told
the same, one of which skips, are the same after every event, blocks and KV events included."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import LocalProtocolError, NoCapacity
from shared.kv.events import KvEvent
from shared.kv.pool import BlockPool
from shared.schedule.budget import TokenBudget
from shared.schedule.plan import StepPlan
from shared.schedule.scheduler import SchedulePolicy, Scheduler
from shared.schedule.sequence import Sequence
from shared.step import RowResult
from tests.support.cores import a_sequence

MAX_LEN = 40
TEXTS = (tuple(range(1, 21)), (*range(1, 8), *range(30, 43)))
ADDS = st.tuples(
    st.builds(lambda text, stop: text[:stop], st.sampled_from(TEXTS), st.integers(1, 20)),
    st.integers(1, 30),
    st.sampled_from(["whole", "prompt", "ready"]),
)
EVENTS = st.lists(
    st.one_of(ADDS, st.integers(1, 12), st.sampled_from(["abort", "release"])), max_size=30
)


def token_after(tokens: list[int]) -> int:
    """Some token that depends on what was before."""
    return 1 + sum(tokens[-3:]) % 7


class Twin:
    """A scheduler and all that it has ever done."""

    def __init__(self, num_blocks: int, block_size: int, cached: bool, max_running: int) -> None:
        self.pool = BlockPool(num_blocks, block_size, cache_prefixes=cached)
        policy = SchedulePolicy(
            max_model_len=MAX_LEN, max_running=max_running, budget=TokenBudget(16)
        )
        self.scheduler = Scheduler(self.pool, policy)
        self.sequences: list[Sequence] = []
        self.heard: list[KvEvent] = []
        self.pool.listen(self.heard.append)

    def add(self, prompt: tuple[int, ...], num_output: int, kind: str) -> None:
        """Add a sequence of one of the three kinds, if there is room for it."""
        sequence = a_sequence(prompt, max_tokens=num_output, ignore_eos=True)
        try:
            if kind == "whole":
                self.scheduler.add(sequence)
            elif kind == "prompt":
                self.scheduler.add_prefill(sequence)
            else:
                if num_output < 2:
                    return
                sequence.chain = self.pool.new_chain()
                most = len(prompt)
                sequence.table = self.pool.acquire(
                    sequence.chain, prompt, most, max_hit_tokens=most
                )
                if sequence.table is None:
                    return
                sequence.num_computed_tokens = most
                sequence.tokens.append(token_after(sequence.tokens))
                self.scheduler.add_ready(sequence)
        except NoCapacity:
            return
        self.sequences.append(sequence)

    def end_one(self, how: str) -> None:
        """Abort the oldest that runs, or release the oldest prompt."""
        for seq in self.sequences:
            if how == "abort" and not seq.is_over:
                return self.scheduler.abort(seq)
            if how == "release" and seq.is_prefill_only and not seq.is_released:
                return self.scheduler.release(seq)

    def step(self) -> StepPlan:
        """Plan and commit one step."""
        plan = self.scheduler.plan()
        if not plan.is_empty:
            pairs = zip(plan.sequences, plan.rows, strict=True)
            results = [
                RowResult(-1 if row.sample is None else token_after(seq.tokens))
                for seq, row in pairs
            ]
            self.scheduler.commit(plan, results)
        return plan

    def join_within(self, num_steps: int, newcomer: tuple[tuple[int, ...], int, str]) -> None:
        """Skip so many steps, in the last of which somebody comes."""
        num_rows = len(self.scheduler.running)
        if num_steps > 1:
            self.skip(num_steps - 1)
        self.scheduler.begin_step(num_rows)
        before = len(self.sequences)
        self.add(*newcomer)
        self.skip(1, without=self.sequences[before:])

    def step_within(self, newcomer: tuple[tuple[int, ...], int, str]) -> None:
        """A step during which somebody comes."""
        plan = self.scheduler.plan()
        self.add(*newcomer)
        results = [RowResult(token_after(seq.tokens)) for seq in plan.sequences]
        self.scheduler.commit(plan, results)

    def skip(self, num_steps: int, without: Many[Sequence] = ()) -> list[Sequence]:
        """Advance over so many steps; returns whose answers ended."""
        running = [seq for seq in self.scheduler.running if seq not in without]
        answers: list[list[int]] = []
        for seq in running:
            tokens = list(seq.tokens)
            for _ in range(num_steps):
                tokens.append(token_after(tokens))
            answers.append(tokens[-num_steps:])
        return self.scheduler.advance(answers)

    def picture(self) -> object:
        """All that there is to see."""
        return (
            self.scheduler.statistics(),
            astuple(self.pool.statistics()),
            [
                (
                    seq.state,
                    seq.tokens,
                    seq.num_computed_tokens,
                    list(seq.block_table),
                    seq.table and seq.table.num_published,
                    seq.num_preemptions,
                )
                for seq in self.sequences
            ],
            self.heard,
        )


@given(
    num_blocks=st.integers(3, 24),
    block_size=st.integers(1, 4),
    cached=st.booleans(),
    max_running=st.integers(1, 5),
    events=EVENTS,
)
@settings(max_examples=300)
def test_advancing_is_stepping(
    num_blocks: int, block_size: int, cached: bool, max_running: int, events: list[object]
) -> None:
    """Whatever came before, k steps at once leave the same tokens, blocks, prefixes and claims."""
    stepping = Twin(num_blocks, block_size, cached, max_running)
    skipping = Twin(num_blocks, block_size, cached, max_running)
    for event in [*events, 50]:
        match event:
            case (prompt, num_output, kind) if num_output % 3 == 0 and (
                most := skipping.scheduler.runway()
            ):
                newcomer = (prompt, num_output, kind)  # type: ignore[assignment]
                num_steps = 1 + num_output % most
                for _ in range(num_steps - 1):
                    stepping.step()
                stepping.step_within(newcomer)  # type: ignore[arg-type]
                skipping.join_within(num_steps, newcomer)  # type: ignore[arg-type]
            case (prompt, num_output, kind):
                for twin in (stepping, skipping):
                    twin.add(prompt, num_output, kind)  # type: ignore[arg-type]
            case str():
                for twin in (stepping, skipping):
                    twin.end_one(event)
            case _:
                assert isinstance(event, int)
                left = event
                while left:
                    num_steps = min(left, skipping.scheduler.runway())
                    if num_steps:
                        skipping.skip(num_steps)
                        for _ in range(num_steps):
                            plan = stepping.step()
                            assert plan.admitted == plan.preempted == plan.failed == ()
                            assert plan.num_decode_rows == len(plan.rows) > 0
                    else:
                        num_steps = 1
                        assert skipping.step().rows == stepping.step().rows
                    left -= num_steps
                    assert skipping.picture() == stepping.picture()
        assert skipping.picture() == stepping.picture()
    for twin in (stepping, skipping):
        twin.scheduler.check_integrity()
        twin.pool.check_integrity(twin.scheduler.tables())


def test_the_runway_ends_where_an_answer_or_the_blocks_do() -> None:
    """It is as long as the shortest answer, which its last step ends, and as the free blocks."""
    twin = Twin(10, 4, True, 4)
    twin.add((1, 2, 3), 30, "ready")
    twin.add((4, 5, 6), 9, "ready")
    assert twin.scheduler.runway() == 8  # one of nine is there
    assert twin.skip(7) == []
    assert [seq.item.token_ids for seq in twin.skip(1)] == [(4, 5, 6)]
    assert twin.scheduler.runway() == 21  # of the other
    small = Twin(4, 4, True, 4)
    small.add((1, 2, 3), 30, "ready")
    assert small.scheduler.runway() == 13  # 16 positions
    with pytest.raises(LocalProtocolError, match="runway"):
        small.skip(14)


def test_a_token_that_may_end_an_answer_ends_the_runway() -> None:
    """Where tokens can end an answer nothing is known of the next step."""
    pool = BlockPool(10, 4)
    policy = SchedulePolicy(
        max_model_len=MAX_LEN, eos_token_ids=frozenset({2}), budget=TokenBudget(16)
    )
    scheduler = Scheduler(pool, policy)
    scheduler.add(a_sequence((1, 2), max_tokens=20))
    plan = scheduler.plan()
    scheduler.commit(plan, [RowResult(3)])
    assert scheduler.runway() == 0
