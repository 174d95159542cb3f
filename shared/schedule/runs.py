"""Equal steps in a row: while every running sequence decodes and none can come, go or lack a block,
each step is the one before with one more token. How many of them follow, and what they do to
the pool, is known without planning any."""

from __future__ import annotations

from collections.abc import Sequence as Many

from shared.kv.pool import BlockPool
from shared.schedule.sequence import Sequence


def num_equal_steps(
    running: Many[Sequence], pool: BlockPool, max_model_len: int, *, has_end_tokens: bool
) -> int:
    """Return how many steps, of one token for each of these (all decode), follow until one of them
    lacks a block or has ended. The last step may end an answer, by its length.

    has_end_tokens: whether the model has tokens that end an answer.
    """
    most = max_model_len
    for seq in running:
        item, num_tokens = seq.item, len(seq.tokens)
        sampling, num_prompt = item.sampling, item.num_prompt_tokens
        is_counted = sampling.ignore_eos or not has_end_tokens
        if not is_counted or sampling.stop_token_ids or seq.guide is not None:
            return 0  # which token comes may end it
        left = min(sampling.max_tokens + num_prompt, max_model_len) - num_tokens
        if left < most:
            most = left
    if not running or most <= 0:
        return 0
    free = pool.num_available
    # As many for each as the one that needs most could need: nearly always there are as many.
    if len(running) * (most // pool.block_size + 1) <= free:
        return most
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
    size, total = pool.block_size, 0
    for seq in running:
        assert seq.table is not None
        num = -(-(len(seq.tokens) + num_steps - 1) // size) - len(seq.table.blocks)
        if num > 0:
            total += num
    return total


def take_steps(running: Many[Sequence], answers: Many[Many[int]], pool: BlockPool) -> None:
    """Give each sequence its tokens, its blocks and its published prefixes, as so many steps would.

    answers: of each sequence equally many tokens, at most ``num_equal_steps``. Blocks are taken and
    published in the order in which the steps would do it, so that each gets the same ones.
    """
    size, num_steps = pool.block_size, len(answers[0])
    # (step, is it published, whose): of a step, all blocks are taken before any is published.
    events: list[tuple[int, bool, int]] = []
    for idx, (seq, tokens) in enumerate(zip(running, answers, strict=True)):
        table, num_tokens = seq.table, len(seq.tokens)
        assert table is not None
        # Step n (from 1 on) computes the token at position num_tokens + n - 2, which needs a new
        # block from the table's end on; after it num_tokens + n - 1 have KV.
        first = len(table.blocks) * size - num_tokens + 2
        if first <= num_steps:
            events += [(step, False, idx) for step in range(first, num_steps + 1, size)]
        first = max(1, (table.num_published + 1) * size - num_tokens + 1)
        if first <= num_steps:
            events += [(step, True, idx) for step in range(first, num_steps + 1, size)]
        seq.tokens.extend(tokens)
        seq.num_computed_tokens += num_steps
    for step, is_published, idx in sorted(events):
        seq = running[idx]
        num_computed = len(seq.tokens) - num_steps + step - 1
        assert seq.table is not None
        if is_published:
            pool.publish(seq.table, seq.chain, seq.tokens, num_computed)
        else:
            pool.grow(seq.table, num_computed)
