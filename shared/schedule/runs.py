"""Equal steps in a row: while every running sequence decodes and none can end, come, go or lack a
block, each step is the one before with one more token. How many of them follow, and what they do to
the pool, is known without planning any."""

from __future__ import annotations

from collections.abc import Sequence as Many

from shared.kv.pool import BlockPool
from shared.schedule.sequence import Sequence


def num_equal_steps(
    running: Many[Sequence], pool: BlockPool, max_model_len: int, *, has_end_tokens: bool
) -> int:
    """Return how many steps of one token for each of these follow before one can end or lack a
    block.

    has_end_tokens: whether the model has tokens that end an answer.
    """
    most = max_model_len
    for seq in running:
        sampling = seq.item.sampling
        is_counted = sampling.ignore_eos or not has_end_tokens
        if not is_counted or sampling.stop_token_ids or seq.guide is not None:
            return 0  # which token comes may end it
        if not seq.is_decoding:
            return 0
        most = min(most, seq.num_remaining_tokens - 1, max_model_len - seq.num_tokens - 1)
    if not running or most <= 0:
        return 0
    free = pool.num_available
    if num_blocks_for(most, running, pool) <= free:
        return most
    least = 0
    while most - least > 1:
        middle = (least + most) // 2
        if num_blocks_for(middle, running, pool) <= free:
            least = middle
        else:
            most = middle
    return least


def num_blocks_for(num_steps: int, running: Many[Sequence], pool: BlockPool) -> int:
    """Return how many blocks so many steps take. The last step's token needs none yet."""
    return sum(
        max(0, pool.num_blocks_for(len(seq.tokens) + num_steps - 1) - len(seq.block_table))
        for seq in running
    )


def take_steps(running: Many[Sequence], answers: Many[Many[int]], pool: BlockPool) -> None:
    """Give each sequence its tokens, its blocks and its published prefixes, as so many steps would.

    answers: of each sequence equally many tokens, at most ``num_equal_steps``. Blocks are taken and
    published in the order in which the steps would do it, so that each gets the same ones.
    """
    size, num_steps = pool.block_size, len(answers[0])
    # (step, is it published, whose): of a step, all blocks are taken before any is published.
    events: list[tuple[int, bool, int]] = []
    for idx, seq in enumerate(running):
        assert seq.table is not None
        num_tokens = len(seq.tokens)
        first = len(seq.table.blocks) * size - num_tokens + 2
        events += [(step, False, idx) for step in range(first, num_steps + 1, size)]
        first = max(1, (seq.table.num_published + 1) * size - num_tokens + 1)
        events += [(step, True, idx) for step in range(first, num_steps + 1, size)]
    starts = [len(seq.tokens) for seq in running]
    for seq, tokens in zip(running, answers, strict=True):
        seq.tokens.extend(tokens)
        seq.num_computed_tokens += num_steps
    for step, is_published, idx in sorted(events):
        seq, num_computed = running[idx], starts[idx] + step - 1
        assert seq.table is not None
        assert seq.chain is not None
        if is_published:
            pool.publish(seq.table, seq.chain, seq.tokens, num_computed)
        else:
            pool.grow(seq.table, num_computed)
