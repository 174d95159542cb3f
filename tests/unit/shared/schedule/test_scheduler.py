"""The scheduler core, rule by rule, with the exact fake engine behind it where tokens matter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest

from shared.engine.fake import FakeModel
from shared.errors import InvariantViolated, LocalProtocolError, NoBlocks, NoCapacity
from shared.request import FinishReason
from shared.schedule.plan import NewToken, StepPlan
from shared.schedule.sequence import Sequence, SequenceState
from shared.step import RowResult
from tests.support.cores import MODEL, Worker, a_sequence, answer_of
from tests.support.fake_reference import fake_answer, fake_prompt_logprobs


def commit(worker: Worker, plan: StepPlan, token: int = 7) -> None:
    """Commit a plan with the same token in every row."""
    worker.scheduler.commit(plan, [RowResult(token)] * len(plan.rows))


def spans(plan: StepPlan) -> list[tuple[int, int]]:
    """What each row computes: positions [start, stop)."""
    return [(row.start, row.stop) for row in plan.rows]


def decoding(worker: Worker, num: int, *, prompt: int = 4, max_tokens: int = 50) -> list[Sequence]:
    """Add sequences, each with its own prompt, and step until they have one token each."""
    sequences = [
        a_sequence(tuple(range(i + 1, i + 1 + prompt)), max_tokens=max_tokens, ignore_eos=True)
        for i in range(num)
    ]
    for sequence in sequences:
        worker.scheduler.add(sequence)
    worker.step()
    assert [len(answer_of(sequence)) for sequence in sequences] == [1] * num
    return sequences


# --- prompts ------------------------------------------------------------------------------------


def test_short_prompts_share_a_step() -> None:
    """Prompts are batched while they fit into the token budget."""
    worker = Worker(token_budget=20)
    for prompt in (6, 6, 6):
        worker.scheduler.add_prefill(a_sequence(prompt))
    plan = worker.scheduler.plan()
    assert spans(plan) == [(0, 6), (0, 6), (0, 6)]
    assert plan.num_prefill_tokens == 18


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_samples() -> None:
    """Chunked prefill: the budget is filled exactly, the next prompt gets what is left."""
    worker = Worker(token_budget=8)
    first, second = a_sequence(12), a_sequence((20, 21, 22, 23, 24, 25))
    worker.scheduler.add_prefill(first)
    worker.scheduler.add_prefill(second)

    plan = worker.scheduler.plan()
    assert [(row.start, len(row.token_ids)) for row in plan.rows] == [(0, 8)]
    assert plan.rows[0].sample is None
    worker.scheduler.commit(plan, [RowResult(-1)])
    assert worker.scheduler.statistics().pending_tokens == 10

    plan = worker.scheduler.plan()
    assert plan.sequences == (first, second)
    assert spans(plan) == [(8, 12), (0, 4)]
    assert plan.rows[0].sample is not None
    assert plan.rows[1].sample is None


def test_nobody_overtakes() -> None:
    """A short prompt does not pass a long one that lacks blocks."""
    worker = Worker(num_blocks=4)
    holder = a_sequence(8)
    worker.scheduler.add_prefill(holder)
    worker.step()
    worker.scheduler.add_prefill(a_sequence(tuple(range(20, 32))))
    worker.scheduler.add_prefill(a_sequence(tuple(range(40, 42))))
    assert worker.scheduler.plan().is_empty
    worker.scheduler.release(holder)
    assert len(worker.scheduler.plan().rows) == 2


def test_a_prompt_larger_than_the_pool_is_refused_at_once() -> None:
    """It would wait for ever."""
    worker = Worker(num_blocks=2)
    with pytest.raises(NoCapacity):
        worker.scheduler.add_prefill(a_sequence(9))
    worker.scheduler.add_prefill(a_sequence(8))
    with pytest.raises(NoCapacity):
        worker.scheduler.add(a_sequence(8, max_tokens=2))
    worker.scheduler.add(a_sequence(8, max_tokens=1))


def test_a_cached_prefix_is_not_computed_again() -> None:
    """Admission starts behind the hit, but always computes the last token."""
    worker = Worker()
    for expected in ((0, 8), (4, 8)):
        sequence = a_sequence(8, max_tokens=1)
        worker.scheduler.add_prefill(sequence)
        plan = worker.scheduler.plan()
        assert spans(plan) == [expected]
        assert plan.admitted == (sequence,)
        assert sequence.num_cached_tokens == expected[0]
        commit(worker, plan)


def test_a_chunk_is_found_only_after_its_commit() -> None:
    """A prompt planned beside an equal one computes all of it."""
    worker = Worker()
    worker.scheduler.add_prefill(a_sequence(9))
    worker.scheduler.add_prefill(a_sequence(9))
    assert spans(worker.scheduler.plan()) == [(0, 9), (0, 9)]


def test_a_long_beginning_of_several_prompts_is_computed_once() -> None:
    """They came together, but are let in one step after the other: only what shares a step is
    computed for each."""
    worker = Worker(token_budget=8)
    beginning = tuple(range(1, 25))
    for own in (30, 40, 50):
        worker.scheduler.add_prefill(a_sequence((*beginning, own)))
    rows: list[tuple[int, int]] = []
    while not (plan := worker.scheduler.plan()).is_empty:
        rows += spans(plan)
        commit(worker, plan)
    assert rows == [(0, 8), (8, 16), (16, 24), (24, 25), (24, 25), (24, 25)]


def test_only_full_blocks_are_found() -> None:
    """A block of which one token is missing may not be shared."""
    worker = Worker(token_budget=7)
    worker.scheduler.add_prefill(a_sequence(8))
    for num_cached in (1, 2):
        worker.step()
        assert worker.pool.statistics().num_cached == num_cached


def test_prefill_keeps_its_blocks_until_released() -> None:
    """After its token it is not planned any more, but its KV may still be being pushed."""
    worker = Worker(cache_prefixes=False)
    sequence = a_sequence(8, max_tokens=5)
    worker.scheduler.add_prefill(sequence)
    (token,) = worker.step()
    assert (token.sequence, token.index, token.finish_reason) == (sequence, 0, FinishReason.NONE)
    assert sequence.state is SequenceState.HELD
    assert worker.scheduler.plan().is_empty
    assert not worker.scheduler.unfinished
    assert worker.pool.num_held == 2
    for _ in range(2):
        worker.scheduler.release(sequence)
        assert worker.pool.num_held == 0


def test_prefill_says_when_its_token_ends_the_answer() -> None:
    """With one token asked for there is nothing to push; the blocks still wait for release."""
    worker = Worker()
    sequence = a_sequence(max_tokens=1)
    worker.scheduler.add_prefill(sequence)
    (token,) = worker.step()
    assert token.finish_reason is FinishReason.LENGTH
    assert sequence.state is SequenceState.HELD


def test_an_aborted_prefill_keeps_its_blocks_until_released() -> None:
    """Stopping the computation does not stop the sends that read its blocks."""
    worker = Worker(token_budget=4)
    sequence = a_sequence(8)
    worker.scheduler.add_prefill(sequence)
    worker.step()
    worker.scheduler.abort(sequence)
    assert worker.scheduler.plan().is_empty
    assert worker.pool.num_held == 2
    worker.scheduler.release(sequence)
    assert worker.pool.num_held == 0
    assert sequence.state is SequenceState.FINISHED


def test_only_prefill_sequences_are_released() -> None:
    """Others own their blocks until they end; taking them away is ``abort``."""
    worker = Worker()
    sequence = a_sequence()
    worker.scheduler.add(sequence)
    with pytest.raises(LocalProtocolError):
        worker.scheduler.release(sequence)


@pytest.mark.parametrize("budget", [3, 5, 64])
def test_prompt_logprobs_are_whole_however_the_prompt_is_cut(budget: int) -> None:
    """They are gathered over the chunks and come with the first token, once."""
    worker = Worker(token_budget=budget)
    sequence = a_sequence(11, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    worker.scheduler.add(sequence)
    tokens = worker.run()
    first, *rest = tokens[0].prompt_logprobs
    assert math.isnan(first.logprob)
    assert rest == fake_prompt_logprobs(range(1, 12), 2, model=MODEL)
    assert [token.prompt_logprobs for token in tokens[1:]] == [(), ()]


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    """Cached KV has no logits: the prompt is computed again."""
    worker = Worker()
    worker.scheduler.add(a_sequence(9, max_tokens=1))
    worker.step()
    worker.scheduler.add(a_sequence(9, max_tokens=1, prompt_logprobs=0))
    assert spans(worker.scheduler.plan()) == [(0, 9)]


def test_a_later_attempt_goes_on_with_the_next_index() -> None:
    """It computes prompt and answer so far, and samples once, after all of it."""
    worker = Worker(token_budget=8)
    first = a_sequence(7, max_tokens=9, temperature=0.5, ignore_eos=True)
    expected = fake_answer(range(1, 8), first.sampling, model=MODEL)[0]
    retry = a_sequence(
        7, answered=tuple(expected[:4]), max_tokens=9, temperature=0.5, ignore_eos=True
    )
    worker.scheduler.add(retry)
    assert worker.step() == ()
    tokens = worker.run()
    assert [(token.index, token.token_id) for token in tokens] == list(enumerate(expected))[4:]


def test_prompt_logprobs_survive_a_preemption() -> None:
    """A prompt that lost its blocks half way starts its list again."""
    worker = Worker(num_blocks=4, token_budget=5, cache_prefixes=False)
    old = a_sequence(4, max_tokens=6, ignore_eos=True)
    young = a_sequence(12, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    worker.scheduler.add(old)
    worker.scheduler.add(young)
    tokens = worker.run()
    assert young.num_preemptions == 1
    (first,) = [token for token in tokens if token.sequence is young and token.index == 0]
    assert list(first.prompt_logprobs[1:]) == fake_prompt_logprobs(range(1, 13), 0, model=MODEL)


def test_a_later_attempt_owes_no_prompt_logprobs() -> None:
    """The client got them with the first token of an earlier attempt."""
    worker = Worker()
    worker.scheduler.add(a_sequence(5, answered=(9, 9), max_tokens=3, prompt_logprobs=1))
    assert worker.scheduler.plan().rows[0].prompt_logprobs is None


def test_missing_prompt_logprobs_are_noticed() -> None:
    """An engine that returns too few is wrong, not short."""
    worker = Worker()
    worker.scheduler.add(a_sequence(5, prompt_logprobs=1))
    plan = worker.scheduler.plan()
    with pytest.raises(InvariantViolated):
        worker.scheduler.commit(plan, [RowResult(7)])


# --- decoding -----------------------------------------------------------------------------------


def test_decoding_is_never_stalled_by_prompts() -> None:
    """Every running sequence gets its token first; prompt chunks take the rest of the budget."""
    worker = Worker(token_budget=8)
    running = decoding(worker, 2)
    worker.scheduler.add(a_sequence(tuple(range(40, 52))))
    plan = worker.scheduler.plan()
    assert plan.sequences[:2] == tuple(running)
    assert spans(plan) == [(4, 5), (4, 5), (0, 6)]
    assert (plan.num_decode_rows, plan.num_prefill_tokens) == (2, 6)


def test_a_prompt_is_not_starved_by_decoding() -> None:
    """Even if decode rows use up the budget, the first prompt advances by a token."""
    worker = Worker(token_budget=1)
    for prompt in ((1,), (2,), (3, 4, 5)):
        worker.scheduler.add(a_sequence(prompt, max_tokens=9, ignore_eos=True))
    worker.step()
    worker.step()
    assert spans(worker.scheduler.plan()) == [(2, 3), (1, 2), (0, 1)]


def test_a_step_has_at_most_max_running_rows() -> None:
    """The oldest run; the others wait for a place, even with their KV ready."""
    worker = Worker(max_running=2)
    donor = Worker(max_running=8)
    for sequence in decoding(donor, 3):
        worker.scheduler.add_ready(handed_over(sequence, donor, worker))
    assert [sequence.arrival for sequence in worker.scheduler.plan().sequences] == [0, 1]


def handed_over(sequence: Sequence, donor: Worker, taker: Worker) -> Sequence:
    """Copy a sequence with one token, and its KV, to another worker."""
    copy, num_tokens = Sequence(sequence.item), len(sequence.item.token_ids)
    chain = taker.pool.new_chain()
    table = taker.pool.acquire(chain, copy.tokens, num_tokens, max_hit_tokens=num_tokens)
    assert table is not None
    layers = donor.engine.layout.num_layers
    frame = donor.engine.new_buffer(num_tokens * donor.engine.layout.token_bytes)
    donor.engine.gather(sequence.block_table, 0, num_tokens, 0, layers, frame)
    taker.engine.scatter(table.blocks, 0, num_tokens, 0, layers, frame)
    copy.tokens.append(sequence.tokens[num_tokens])
    copy.table, copy.chain, copy.num_computed_tokens = table, chain, num_tokens
    return copy


def test_a_sequence_goes_on_where_its_kv_was_taken() -> None:
    """A decode worker continues the very answer that the prefill worker began."""
    prefill, decode = Worker(block_size=4), Worker(block_size=3)
    sequence = a_sequence(10, max_tokens=12, ignore_eos=True)
    prefill.scheduler.add_prefill(sequence)
    prefill.step()
    copy = handed_over(sequence, prefill, decode)
    decode.scheduler.add_ready(copy)
    tokens = decode.run()
    assert answer_of(copy) == fake_answer(range(1, 11), copy.sampling, model=MODEL)[0]
    assert [token.index for token in tokens] == list(range(1, 12))
    assert decode.pool.num_held == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda sequence: setattr(sequence, "table", None),
        lambda sequence: setattr(sequence, "num_computed_tokens", 3),
        lambda sequence: sequence.tokens.pop(),
    ],
)
def test_a_ready_sequence_must_be_ready(spoil: Callable[[Sequence], None]) -> None:
    """It brings blocks, and KV of all tokens but the last."""
    donor, worker = Worker(), Worker()
    copy = handed_over(decoding(donor, 1)[0], donor, worker)
    spoil(copy)
    with pytest.raises(LocalProtocolError):
        worker.scheduler.add_ready(copy)


def test_what_a_ready_sequence_brings_is_cached() -> None:
    """The next reservation with the same prompt finds it."""
    donor, worker = Worker(), Worker()
    (sequence,) = decoding(donor, 1, prompt=8)
    worker.scheduler.add_ready(handed_over(sequence, donor, worker))
    table = worker.pool.acquire(
        worker.pool.new_chain(), sequence.item.token_ids, 8, max_hit_tokens=8
    )
    assert table is not None
    assert table.num_hit_tokens == 8


def test_a_sequence_ends_at_end_of_sequence_and_frees_its_blocks() -> None:
    """The finish reason is decided in one place and the blocks go in the same step."""
    model = FakeModel(vocab_size=64, eos_every=5, num_layers=2, num_kv_heads=1, head_dim=8)
    worker = Worker(model=model)
    sequence = a_sequence(8, max_tokens=200)
    worker.scheduler.add(sequence)
    last = worker.run()[-1]
    assert last.finish_reason is FinishReason.STOP
    assert last.token_id == 0
    assert sequence.state is SequenceState.FINISHED
    assert worker.pool.num_held == 0
    expected = fake_answer(range(1, 9), sequence.sampling, model=model)
    assert (answer_of(sequence), FinishReason.STOP) == expected


def test_history_goes_to_the_engine_only_when_asked_for() -> None:
    """Penalties see prompt and answer; without them nothing is copied."""
    worker = Worker()
    for penalty in (1.0, 1.5):
        sequence = a_sequence(4, max_tokens=3, repetition_penalty=penalty, ignore_eos=True)
        worker.scheduler.add(sequence)
        worker.step()
        sample = worker.scheduler.plan().rows[-1].sample
        assert sample is not None
        assert sample.index == 1
        if penalty == 1.0:
            assert (sample.prompt, sample.output) == ((), ())
            worker = Worker()
        else:
            assert (sample.prompt, sample.output) == ([1, 2, 3, 4], answer_of(sequence))


# --- abort --------------------------------------------------------------------------------------


def test_an_abort_between_steps_frees_at_once() -> None:
    """Nothing uses the blocks, so nothing is waited for."""
    worker = Worker(cache_prefixes=False)
    (sequence,) = decoding(worker, 1)
    for _ in range(2):
        worker.scheduler.abort(sequence)
        assert worker.pool.num_held == 0
    assert not worker.scheduler.unfinished


def test_an_abort_during_a_step_frees_at_commit() -> None:
    """The running step still writes those blocks; its token goes nowhere."""
    worker = Worker()
    first, second = decoding(worker, 2)
    plan = worker.scheduler.plan()
    worker.scheduler.abort(first)
    assert worker.pool.num_held == 4
    outcome = worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    assert [token.sequence for token in outcome.tokens] == [second]
    assert worker.pool.num_held == 2
    assert len(answer_of(first)) == 1
    worker.check()


def test_a_release_during_a_step_frees_at_commit() -> None:
    """Cancel and settled push while the chunk computes: the blocks outlive the step."""
    worker = Worker(token_budget=4)
    sequence = a_sequence(8)
    worker.scheduler.add_prefill(sequence)
    plan = worker.scheduler.plan()
    worker.scheduler.release(sequence)
    assert worker.pool.num_held == 2
    assert worker.scheduler.commit(plan, worker.engine.step(plan.rows)).tokens == ()
    assert worker.pool.num_held == 0
    assert sequence.state is SequenceState.FINISHED


def test_a_waiting_sequence_is_aborted_without_a_trace() -> None:
    """It held nothing."""
    worker = Worker()
    for add in (worker.scheduler.add, worker.scheduler.add_prefill):
        sequence = a_sequence()
        add(sequence)
        worker.scheduler.abort(sequence)
    worker.scheduler.release(sequence)
    assert worker.scheduler.plan().is_empty
    assert not worker.scheduler.unfinished
    assert worker.scheduler.statistics().num_held == 0


def test_what_an_aborted_step_computed_is_cached() -> None:
    """The KV is right, so the next one with that prefix may have it."""
    worker = Worker()
    sequence = a_sequence(8)
    worker.scheduler.add(sequence)
    plan = worker.scheduler.plan()
    worker.scheduler.abort(sequence)
    worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    worker.scheduler.add(a_sequence(9))
    assert spans(worker.scheduler.plan()) == [(8, 9)]


# --- room ---------------------------------------------------------------------------------------


def test_the_newest_gives_way_and_later_goes_on_exactly() -> None:
    """Out of blocks: the newest is recomputed, nobody's answer changes, no token comes twice."""
    worker = Worker(num_blocks=6)
    sequences = decoding(worker, 2, prompt=8, max_tokens=12)
    tokens = worker.run()
    assert worker.scheduler.statistics().num_preemptions > 0
    assert sequences[0].num_preemptions == 0
    for sequence in sequences:
        prompt = sequence.item.token_ids
        assert answer_of(sequence) == fake_answer(prompt, sequence.sampling, model=MODEL)[0]
        assert [t.index for t in tokens if t.sequence is sequence] == list(range(1, 12))


def test_what_is_recomputed_may_be_cached_but_for_its_last_token() -> None:
    """It gave way to one with the same text: let in again it has one token to compute."""
    worker = Worker(num_blocks=7, block_size=3)
    older, newer = (
        a_sequence(13, max_tokens=5 + is_older, ignore_eos=True, temperature=0.0)
        for is_older in (4, 0)
    )
    worker.scheduler.add(older)
    worker.step()
    worker.scheduler.add(newer)
    plan = worker.scheduler.plan()
    while newer not in plan.admitted or not newer.num_preemptions:
        worker.scheduler.commit(plan, worker.engine.step(plan.rows))
        plan = worker.scheduler.plan()
    assert spans(plan)[-1] == (newer.num_tokens - 1, newer.num_tokens)
    worker.scheduler.check_integrity()
    worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    worker.run()
    assert answer_of(newer) == answer_of(older)[:5]


def test_preemption_is_bounded() -> None:
    """One that gave way often enough runs again only when nobody can make it give way."""
    worker = Worker(num_blocks=7, max_preemptions=1, cache_prefixes=False)
    sequences = decoding(worker, 3, prompt=4, max_tokens=20)
    worker.run()
    assert max(sequence.num_preemptions for sequence in sequences) == 1
    assert [len(answer_of(sequence)) for sequence in sequences] == [20, 20, 20]


def test_who_gives_way_is_not_let_in_again_in_the_same_plan() -> None:
    """Even if what it needs now is less than what it held."""
    worker, donor = Worker(num_blocks=8, cache_prefixes=False), Worker()
    old, young = (handed_over(sequence, donor, worker) for sequence in decoding(donor, 2))
    assert young.table is not None
    worker.pool.grow(young.table, 28)
    worker.scheduler.add_ready(old)
    worker.scheduler.add_ready(young)
    plan = worker.scheduler.plan()
    assert plan.sequences == (old,)
    assert plan.preempted == (young,)
    commit(worker, plan)
    assert worker.scheduler.plan().admitted == (young,)


def test_a_prefill_sequence_never_gives_way() -> None:
    """Its blocks may be being sent."""
    worker = Worker(num_blocks=3, cache_prefixes=False)
    old = a_sequence(4, max_tokens=20, ignore_eos=True)
    pushed = a_sequence(tuple(range(40, 48)))
    worker.scheduler.add(old)
    worker.scheduler.add_prefill(pushed)
    worker.step()
    assert worker.scheduler.plan().is_empty
    assert worker.scheduler.statistics().num_stalled == 1
    worker.scheduler.release(pushed)
    worker.run()
    assert len(answer_of(old)) == 9  # all that fits into the pool


def test_a_prefill_sequence_does_not_give_way_half_way_either() -> None:
    """Its first chunks may be being sent while the later ones are computed."""
    worker = Worker(num_blocks=4, token_budget=5, cache_prefixes=False)
    worker.scheduler.add(a_sequence(4, max_tokens=6, ignore_eos=True))
    pushed = a_sequence(12)
    worker.scheduler.add_prefill(pushed)
    worker.step()
    plan = worker.scheduler.plan()
    assert plan.sequences == (pushed,)
    assert plan.preempted == ()
    assert worker.scheduler.statistics().num_stalled == 1


def test_an_answer_that_outgrows_the_whole_pool_fails() -> None:
    """Alone and without room, it can never go on; another worker may have more."""
    worker = Worker(num_blocks=3)
    (sequence,) = decoding(worker, 1, prompt=4, max_tokens=100)
    while not (plan := worker.scheduler.plan()).is_empty:
        worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    (failure,) = plan.failed
    assert failure.sequence is sequence
    assert isinstance(failure.error, NoBlocks)
    assert sequence.num_tokens == 13  # KV of 12 tokens fits
    assert worker.pool.num_held == 0


def test_who_gives_way_and_fits_nowhere_any_more_fails_at_once() -> None:
    """Put back it would wait for ever, and all who came later behind it."""
    donor, worker = Worker(), Worker(num_blocks=3)
    older, newer = (a_sequence(size, max_tokens=4, ignore_eos=True) for size in (8, 12))
    later = a_sequence(5, max_tokens=2, ignore_eos=True)
    for sequence in (older, newer):
        donor.scheduler.add_prefill(sequence)
    donor.run()
    worker.scheduler.add_ready(older := handed_over(older, donor, worker))
    # Two of its three blocks are those of the older one.
    worker.scheduler.add_ready(newer := handed_over(newer, donor, worker))
    worker.scheduler.add(later)
    plan = worker.scheduler.plan()
    assert [failure.sequence for failure in plan.failed] == [newer]
    assert list(plan.sequences) == [older]
    worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    worker.run()
    assert later.state is older.state is SequenceState.FINISHED
    assert worker.pool.num_held == 0


def test_without_room_for_a_token_the_oldest_waits_for_those_who_hold_it() -> None:
    """Reservations hold the rest: it neither fails nor gives way, and their successors stay out."""
    worker = Worker(num_blocks=4, cache_prefixes=False)
    lease = worker.pool.acquire(worker.pool.new_chain(), range(12), 12, max_hit_tokens=0)
    assert lease is not None
    sequence = a_sequence(4, max_tokens=3, ignore_eos=True)
    worker.scheduler.add(sequence)
    plan = worker.scheduler.plan()
    worker.scheduler.commit(plan, worker.engine.step(plan.rows))
    assert worker.scheduler.plan().is_empty
    assert worker.pool.keep_free_for_newcomers == 1
    worker.pool.release(lease)
    worker.run()
    assert len(answer_of(sequence)) == 3
    assert worker.pool.keep_free_for_newcomers == 0


def test_a_prompt_for_others_yields_its_room_to_answers_while_another_has_some() -> None:
    """That one may wait for room at a worker whose prompts wait for room here."""
    worker = Worker(num_blocks=4, cache_prefixes=False)
    first, second = a_sequence(12), a_sequence(8)
    for sequence in (first, second):
        worker.scheduler.add_prefill(sequence)
    worker.step()
    assert worker.pool.keep_free_for_newcomers == 2
    assert worker.pool.keep_free_for_answers == 0
    lease = worker.pool.acquire(worker.pool.new_chain(), range(4), 4, max_hit_tokens=0)
    assert lease is not None
    worker.scheduler.release(first)
    assert worker.pool.keep_free_for_answers == 2
    worker.pool.release(lease)
    worker.run()


def test_a_preempted_sequence_claims_its_room() -> None:
    """New reservations do not overtake who had room before them."""
    worker = Worker(num_blocks=6, cache_prefixes=False)
    first, _ = decoding(worker, 2, prompt=8, max_tokens=30)
    while not worker.scheduler.statistics().num_waiting:
        worker.step()
    assert worker.pool.statistics().num_claimed > 0
    worker.scheduler.abort(first)
    worker.step()
    assert worker.pool.statistics().num_claimed == 0


# --- misuse -------------------------------------------------------------------------------------


def test_steps_are_serial() -> None:
    """A plan is committed before the next one is made, and once."""
    worker = Worker()
    worker.scheduler.add(a_sequence())
    plan = worker.scheduler.plan()
    with pytest.raises(LocalProtocolError):
        worker.scheduler.plan()
    with pytest.raises(LocalProtocolError):
        worker.scheduler.commit(plan, [])
    commit(worker, plan)
    with pytest.raises(LocalProtocolError):
        commit(worker, plan)


def test_a_sequence_is_added_once() -> None:
    """It has one place."""
    worker = Worker()
    sequence = a_sequence()
    worker.scheduler.add(sequence)
    with pytest.raises(LocalProtocolError):
        worker.scheduler.add(sequence)


def test_a_policy_that_never_runs_anything_is_refused() -> None:
    """A limit of zero is a mistake."""
    with pytest.raises(LocalProtocolError):
        Worker(max_running=0)


# --- the step after the running one ---------------------------------------------------------------


def a_ready(worker: Worker, prompt: tuple[int, ...]) -> Sequence:
    """Add a sequence whose KV came from elsewhere."""
    ready = a_sequence(prompt, max_tokens=9, ignore_eos=True)
    chain, count = worker.pool.new_chain(), len(prompt)
    ready.table = worker.pool.acquire(chain, prompt, count, max_hit_tokens=0)
    ready.chain, ready.num_computed_tokens = chain, count
    ready.tokens.append(7)
    worker.scheduler.add_ready(ready)
    return ready


def two_steps(worker: Worker) -> tuple[StepPlan, StepPlan]:
    """Plan a step and the one after it."""
    plan, following = worker.scheduler.plan(), worker.scheduler.plan_next()
    assert following is not None
    return plan, following


def run_ahead(worker: Worker, plan: StepPlan) -> tuple[list[NewToken], StepPlan | None]:
    """Run a plan while the next is planned; return its tokens and the next, its tokens filled
    in."""
    following = worker.scheduler.plan_next()
    results = worker.engine.step(plan.rows)
    for token_ids, source in following.to_come if following is not None else ():
        token_ids[0] = results[source].token_id
    outcome = worker.scheduler.commit(plan, results)
    worker.check()
    return list(outcome.tokens), following


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_answers_planned_ahead_are_the_reference_s(ignore_eos: bool) -> None:
    """Every token once and in order, whether an answer ends by its length or by surprise; and
    nothing is held when all have ended."""
    model = FakeModel(vocab_size=50, max_model_len=512, eos_every=5, num_layers=2)
    worker = Worker(model=model)
    sequences = [
        a_sequence(tuple(range(i + 1, i + 5)), max_tokens=6 + 5 * i, ignore_eos=ignore_eos)
        for i in range(4)
    ]
    for sequence in sequences:
        worker.scheduler.add(sequence)
    tokens = list(worker.step())
    num_ahead = 0
    while worker.scheduler.unfinished:
        plan = worker.scheduler.plan()
        following: StepPlan | None = plan
        while following is not None:
            plan = following
            new, following = run_ahead(worker, plan)
            tokens += new
            num_ahead += following is not None
    assert num_ahead > 5
    for sequence in sequences:
        expected, reason = fake_answer(sequence.item.token_ids, sequence.sampling, model=model)
        own = [token for token in tokens if token.sequence is sequence]
        assert [token.token_id for token in own] == expected
        assert [token.index for token in own] == list(range(len(expected)))
        assert own[-1].finish_reason is reason
    assert worker.pool.num_held == 0


def test_an_answer_that_ends_while_its_next_row_is_planned_keeps_its_blocks_until_then() -> None:
    """The row is still to be computed: its blocks may not be anybody else's before."""
    worker = Worker(num_blocks=4)
    first, second = decoding(worker, 2)
    plan, following = two_steps(worker)
    assert following.sequences == (first, second)
    first.item = dataclasses.replace(
        first.item, sampling=dataclasses.replace(first.sampling, stop_token_ids=frozenset({7}))
    )
    outcome = worker.scheduler.commit(plan, [RowResult(7), RowResult(8)])
    assert [it.sequence for it in outcome.tokens if it.finish_reason] == [first]
    assert worker.pool.num_held == 4
    worker.check()
    worker.scheduler.abort(first)  # in any state, also now
    outcome = worker.scheduler.commit(following, [RowResult(9), RowResult(9)])
    assert [token.sequence for token in outcome.tokens] == [second]
    assert worker.pool.num_held == 2
    assert answer_of(first)[1:] == [7]
    worker.check()


def test_blocks_of_an_aborted_answer_wait_for_every_step_that_was_planned() -> None:
    """Both may write them."""
    worker = Worker()
    first, second = decoding(worker, 2)
    plan, following = two_steps(worker)
    worker.scheduler.abort(first)
    for step, num_held in ((plan, 4), (following, 2)):
        assert worker.pool.num_held == 4
        commit(worker, step)
        assert worker.pool.num_held == num_held
        worker.check()
    assert len(answer_of(first)) == 1
    assert len(answer_of(second)) == 3


def test_a_block_that_an_aborted_answer_filled_for_nothing_is_never_found() -> None:
    """The row planned ahead computed a token that the answer never got."""
    worker = Worker()
    (first,) = decoding(worker, 1)
    for _ in range(2):
        commit(worker, worker.scheduler.plan())
    plan, following = two_steps(worker)  # of position 6; the row after it fills the second block
    assert following.rows[0].stop == 8
    worker.scheduler.abort(first)
    commit(worker, plan)
    commit(worker, following)
    assert worker.pool.statistics().num_cached == 1
    assert worker.pool.num_held == 0


def test_an_answer_that_is_sure_to_end_has_no_row_in_the_step_after() -> None:
    """By its length it is known; no row is computed for nothing."""
    worker = Worker(model=dataclasses.replace(MODEL, max_model_len=6))
    (short,) = decoding(worker, 1, max_tokens=2)
    longest = a_sequence((9, 8, 7, 6, 5), answered=(), max_tokens=50, ignore_eos=True)
    worker.scheduler.add(longest)
    worker.scheduler.commit(worker.scheduler.plan(), [RowResult(7)] * 2)
    assert short.is_over
    assert longest.is_over  # max_model_len
    for worker in (Worker(), Worker(model=dataclasses.replace(MODEL, max_model_len=6))):
        by_length = worker.scheduler._policy.max_model_len == 6
        (short,) = decoding(worker, 1, max_tokens=9 if by_length else 2)
        plan = worker.scheduler.plan()
        assert plan.sequences == (short,)
        assert worker.scheduler.plan_next() is None


def test_a_step_planned_ahead_is_no_larger_than_others_and_leaves_no_place_empty() -> None:
    """Who is sure to end, or has ended, takes nobody's place in it."""
    worker = Worker(max_running=2)
    first, second = decoding(worker, 2)
    third, fourth = (a_ready(worker, (40 + i, 41 + i, 42 + i)) for i in (0, 10))
    plan = worker.scheduler.plan()
    assert plan.sequences == (first, second)
    following = worker.scheduler.plan_next()
    assert following is not None
    assert following.sequences == (first, second)
    worker.scheduler.abort(first)
    worker.scheduler.withdraw()
    following = worker.scheduler.plan_next()
    assert following is not None
    assert following.sequences == (second, third)
    commit(worker, plan)
    commit(worker, following)
    assert worker.scheduler.plan().sequences == (second, third)
    assert len(answer_of(fourth)) == 1


def test_an_abort_during_the_step_after_keeps_nobody_from_being_planned_ahead() -> None:
    """Its row has KV of all its tokens: it is no answer under way any more."""
    worker = Worker()
    first, second = decoding(worker, 2)
    plan, _following = two_steps(worker)
    worker.scheduler.abort(first)
    commit(worker, plan)
    after = worker.scheduler.plan_next()
    assert after is not None
    assert after.sequences == (second,)


def test_who_finds_room_in_a_step_planned_ahead_claims_none_any_more() -> None:
    """Else the pool would keep blocks back for somebody who runs."""
    worker = Worker(num_blocks=5)
    older = a_sequence(4, max_tokens=50, ignore_eos=True)
    newer = a_sequence(tuple(range(20, 27)), max_tokens=50, ignore_eos=True)
    worker.scheduler.add(older)
    worker.scheduler.add(newer)
    lease = worker.pool.acquire(worker.pool.new_chain(b"x"), [1], 1, max_hit_tokens=0)
    assert lease is not None
    for _ in range(2):
        commit(worker, worker.scheduler.plan())
    plan = worker.scheduler.plan()
    assert plan.sequences == (older,)
    assert worker.scheduler.statistics().num_stalled == 1
    worker.pool.release(lease)
    following = worker.scheduler.plan_next()
    assert following is not None
    assert following.sequences == (older, newer)
    assert worker.scheduler.statistics().num_stalled == 0
    assert worker.pool.statistics().num_claimed == 0


@pytest.mark.parametrize("why", ["prompt chunk", "waiting", "penalties", "pool", "nobody"])
def test_what_needs_more_than_tokens_is_not_planned_ahead(why: str) -> None:
    """The step after waits for the results then, and asking for one has spoilt nothing."""
    worker = Worker(num_blocks=4, max_running=2)
    first, second = decoding(worker, 2)
    if why == "waiting":
        worker.scheduler.add(a_sequence((30, 31), max_tokens=2))
    if why == "penalties":
        changed = dataclasses.replace(first.sampling, repetition_penalty=1.5)
        first.item = dataclasses.replace(first.item, sampling=changed)
    if why == "pool":  # two blocks of four each: the ninth token is one too many
        for _ in range(3):
            commit(worker, worker.scheduler.plan())
    if why == "prompt chunk":
        worker.scheduler.abort(second)
        worker.scheduler.add(a_sequence((30, 31), max_tokens=2))
    plan = worker.scheduler.plan()
    if why == "nobody":
        worker.scheduler.abort(first)
        worker.scheduler.abort(second)
    assert worker.scheduler.plan_next() is None
    commit(worker, plan)
    worker.check()
    assert worker.scheduler.plan().is_empty == (why == "nobody")


def test_a_newcomer_has_a_row_in_the_step_after_once_that_is_planned_again() -> None:
    """Taken back, a plan leaves nothing behind; who was aborted meanwhile is gone."""
    worker = Worker()
    (first,) = decoding(worker, 1)
    plan, following = two_steps(worker)
    ready = a_ready(worker, (40, 41, 42, 43))
    worker.scheduler.withdraw()
    following = worker.scheduler.plan_next()
    assert following is not None
    assert following.sequences == (first, ready)
    assert [source for _, source in following.to_come] == [0]
    assert following.rows[1].token_ids == ready.tokens[-1:]
    worker.scheduler.abort(ready)
    assert ready.table is not None
    worker.scheduler.withdraw()
    assert ready.state is SequenceState.FINISHED
    commit(worker, plan)
    worker.check()
    assert worker.scheduler.plan().sequences == (first,)


def test_planning_ahead_out_of_turn_is_a_mistake_of_the_caller() -> None:
    """Of nothing that runs, twice, or taken back when there is none."""
    worker = Worker()
    decoding(worker, 1)
    with pytest.raises(LocalProtocolError):
        worker.scheduler.plan_next()
    with pytest.raises(LocalProtocolError):
        worker.scheduler.withdraw()
    plan, following = two_steps(worker)
    with pytest.raises(LocalProtocolError):
        worker.scheduler.plan_next()
    with pytest.raises(LocalProtocolError):
        commit(worker, following)
    commit(worker, plan)
    with pytest.raises(LocalProtocolError):
        worker.scheduler.plan()


# --- prefixes on their way ------------------------------------------------------------------------


def test_who_awaits_its_prefix_keeps_its_place_and_holds_nobody_up() -> None:
    """Others pass it; when the prefix has ended it is the next, with what the cache has by then."""
    worker = Worker(token_budget=64, block_size=4)
    first, second, third = (a_sequence(tuple(range(i, i + 8))) for i in (1, 20, 40))
    for sequence in (first, second, third):
        worker.scheduler.add_prefill(sequence)
    worker.scheduler.await_prefix(first, 4)
    assert first.num_expected_tokens == 4
    plan = worker.scheduler.plan()
    assert plan.sequences == (second, third)
    commit(worker, plan)
    assert not worker.scheduler.plan().rows
    other = a_sequence(tuple(range(60, 68)))
    worker.scheduler.add_prefill(other)
    worker.scheduler.prefix_ended(first)
    worker.scheduler.prefix_ended(first)
    assert first.num_expected_tokens == 0
    plan = worker.scheduler.plan()
    assert plan.sequences == (first, other)
    commit(worker, plan)
    for sequence in (first, second, third, other):
        worker.scheduler.release(sequence)
    worker.scheduler.check_integrity()


@pytest.mark.parametrize("is_pushed", [True, False])
def test_who_passes_a_prompt_leaves_it_room(is_pushed: bool) -> None:
    """A prompt whose KV goes elsewhere has room there before who passes it has, and keeps what it
    needs here; of a whole request nobody waits for what it holds."""
    worker = Worker(token_budget=64, block_size=4, num_blocks=8)
    first, second, third = (a_sequence(tuple(range(i, i + 12)), max_tokens=1) for i in (1, 20, 40))
    add = worker.scheduler.add_prefill if is_pushed else worker.scheduler.add
    add(first)
    worker.scheduler.await_prefix(first, 4)
    for sequence in (second, third):
        worker.scheduler.add_prefill(sequence)
    plan = worker.scheduler.plan()
    assert plan.sequences == ((second,) if is_pushed else (second, third))
    commit(worker, plan)
    worker.scheduler.prefix_ended(first)
    assert (first in worker.scheduler.plan().sequences) is is_pushed


def test_who_awaits_its_grammar_holds_nobody_up() -> None:
    """Nor is it let in while its prefix is on its way."""
    worker = Worker(token_budget=64, block_size=4)
    first, second = (a_sequence(tuple(range(i, i + 8))) for i in (1, 20))
    for sequence in (first, second):
        worker.scheduler.add_prefill(sequence)
    worker.scheduler.await_prefix(first, 4)
    worker.scheduler.await_grammar(first)
    worker.scheduler.prefix_ended(first)
    plan = worker.scheduler.plan()
    assert plan.sequences == (second,)
    commit(worker, plan)
    assert not worker.scheduler.plan().rows
    worker.scheduler.grammar_ended(first)
    plan = worker.scheduler.plan()
    assert plan.sequences == (first,)
    commit(worker, plan)
    for sequence in (first, second):
        worker.scheduler.release(sequence)
    worker.scheduler.grammar_ended(first)
    worker.scheduler.check_integrity()


def test_an_answer_that_awaits_its_grammar_holds_nobody_up() -> None:
    """It came with its KV; it has a row from the first plan after its grammar is there."""
    donor, worker = Worker(), Worker()
    first, second = (handed_over(it, donor, worker) for it in decoding(donor, 2))
    for sequence in (first, second):
        worker.scheduler.add_ready(sequence)
    worker.scheduler.await_grammar(first)
    plan = worker.scheduler.plan()
    assert plan.sequences == (second,)
    assert worker.scheduler.plan_next() is None
    worker.scheduler.grammar_ended(first)
    commit(worker, plan)
    plan = worker.scheduler.plan()
    assert plan.sequences == (first, second)
    commit(worker, plan)
    worker.scheduler.check_integrity()


def test_who_awaits_its_prefix_may_be_aborted() -> None:
    """Its client leaves; the end of the prefix comes later and changes nothing."""
    worker = Worker()
    sequence = a_sequence(8)
    worker.scheduler.add_prefill(sequence)
    worker.scheduler.await_prefix(sequence, 4)
    worker.scheduler.release(sequence)
    worker.scheduler.prefix_ended(sequence)
    assert not worker.scheduler.plan().rows
    assert not worker.scheduler.unfinished
