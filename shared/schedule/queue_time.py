"""How long prompts that wait will take: the steps that the scheduler would plan for them, added up.

Pure: no prompt is touched. What it cannot know it leaves out: prompts that come later, and what
those that wait will find in the prefix cache beyond what was there when they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from shared.predict.step_time import PredictStep, attended
from shared.schedule.budget import StepBudget
from shared.schedule.sequence import Sequence, SequenceState

MAX_STEPS = 256
"""Steps that are followed one by one; what is left is taken to go on at the same speed."""


def queue_left_s(
    sequences: Iterable[Sequence], budget: StepBudget, predict: PredictStep, done_s: float
) -> float:
    """Return the seconds until every prompt of these, a scheduler's in order of arrival, is
    computed; answers that run have their next token in every step. done_s: of the running step, if
    it has prompts, what has passed, and not more than it is predicted to take."""
    waiting: deque[tuple[int, int]] = deque()  # of each prompt the tokens [start, stop) without KV
    num_decodes = num_attended = 0
    for sequence in sequences:
        if sequence.is_decoding:
            num_decodes += 1
            num_attended += sequence.num_tokens
        else:
            waits = sequence.state is SequenceState.WAITING
            start = sequence.num_expected_tokens if waits else sequence.num_computed_tokens
            waiting.append((start, sequence.num_tokens))
    num_done, num_steps, seconds = 0, 0, 0.0
    while waiting and num_steps < MAX_STEPS:
        tokens, positions = num_decodes, num_attended
        begun: list[tuple[int, int]] = []  # each prompt has one chunk in a step
        while waiting:
            start, stop = waiting[0]
            room = budget.room(tokens, positions, start)
            # A step's first prompt is never refused, as ``Draft.room`` has it.
            if tokens == num_decodes:
                room = max(room, budget.least(num_decodes, num_attended, start), 1)
            if room <= 0:
                break
            size = min(room, stop - start)
            tokens, positions = tokens + size, positions + attended(start, start + size)
            waiting.popleft()
            if start + size < stop:
                begun.append((start + size, stop))
        waiting.extendleft(reversed(begun))
        num_done += tokens - num_decodes
        num_steps, seconds = num_steps + 1, seconds + predict(tokens, positions)
    num_left = sum(stop - start for start, stop in waiting)
    return max(0.0, seconds * (num_done + num_left) / max(1, num_done) - done_s)
