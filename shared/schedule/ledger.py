"""Checks of a scheduler's queues, for tests and for a simulation's end."""

from __future__ import annotations

from collections.abc import Sequence as Many

from shared.errors import InvariantViolated
from shared.schedule.sequence import Sequence, SequenceState


def check_queues(
    waiting: Many[Sequence],
    running: Many[Sequence],
    computing: Many[Sequence],
    held: Many[Sequence],
    block_size: int,
) -> None:
    """Raise InvariantViolated unless every sequence is in one place and holds the blocks its KV
    needs, and those that compute prompts are the running ones that do not decode."""
    prompts = [seq for seq in running if not (seq.is_decoding or seq.is_over)]
    if [seq for seq in computing if not seq.is_over] != prompts:
        raise InvariantViolated("what computes prompts is not what runs and does not decode")
    for state, queue in ((SequenceState.WAITING, waiting), (SequenceState.RUNNING, running)):
        arrivals = [seq.arrival for seq in queue]
        if arrivals != sorted(set(arrivals)):
            raise InvariantViolated(f"{state.value} sequences are not in order of arrival")
        for seq in queue:
            has_blocks = seq.table is not None
            if seq.state is not state or has_blocks != (state is SequenceState.RUNNING):
                raise InvariantViolated(f"{seq!r} stands among the {state.value} ones")
    for seq in (*running, *held):
        num_covered = len(seq.block_table) * block_size
        if seq.table is not None and num_covered < seq.num_computed_tokens:
            raise InvariantViolated(
                f"blocks for {num_covered} tokens hold KV of {seq.num_computed_tokens}"
            )
