"""Where a scheduler's sequences stand: who waits, who computes, who only keeps its blocks."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from shared.errors import InvariantViolated
from shared.kv.pool import BlockPool, BlockTable
from shared.schedule.sequence import Sequence, SequenceEvent, SequenceState

_arrival = attrgetter("arrival")


class Queues:
    """waiting, running and held are in order of arrival. computing: those of the running ones whose
    prompt, or what is recomputed, is not computed yet. stalled: those that lack a block for their
    next token."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.computing: list[Sequence] = []
        self.held: list[Sequence] = []
        self.stalled: list[Sequence] = []
        self._next_arrival = 0

    def take_in(self, sequence: Sequence, event: SequenceEvent) -> None:
        """It is the newest from now on."""
        sequence.move(event)
        sequence.arrival = self._next_arrival
        self._next_arrival += 1

    def let_in(self, sequence: Sequence) -> None:
        """A waiting one has its blocks and computes."""
        sequence.move(SequenceEvent.ADMITTED)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_arrival)
        insort(self.computing, sequence, key=_arrival)

    def put_back(self, sequence: Sequence) -> None:
        """A running one waits again, where it stood."""
        sequence.move(SequenceEvent.PREEMPTED)
        self.leave_running(sequence)
        insort(self.waiting, sequence, key=_arrival)

    def leave_running(self, sequence: Sequence) -> None:
        """A running one stands nowhere."""
        self.running.remove(sequence)
        if sequence in self.computing:
            self.computing.remove(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Take a sequence that ended out of the queues; its blocks go unless a push may need
        them."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        else:
            self.leave_running(sequence)
        if sequence.is_prefill_only and not sequence.is_released:
            sequence.move(SequenceEvent.KEPT)
            self.held.append(sequence)
        else:
            self.finish(sequence)

    def let_go(self, sequence: Sequence) -> None:
        """End one that is held."""
        if sequence.state is SequenceState.HELD:
            self.held.remove(sequence)
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """End one that stands nowhere, and give its blocks back."""
        sequence.move(SequenceEvent.ENDED)
        if sequence.table is not None:
            self._pool.release(sequence.table)
            sequence.table = None
        self.update_claim()

    def update_claim(self) -> None:
        """Tell the pool what is spoken for, so that new reservations do not overtake who is here
        already."""
        if not (self.waiting or self.stalled):
            self._pool.claim(0)
            return
        # Not all that wait: together they would claim the pool, and a queue would end reservations.
        ready = [seq for seq in self.waiting if not seq.is_awaiting]
        waiting = [*ready[:1], *(seq for seq in ready[1:] if seq.num_preemptions)]
        stalled = sum(seq.state is SequenceState.RUNNING for seq in self.stalled)
        num_claimed = sum(self._pool.num_blocks_for(seq.num_tokens) for seq in waiting) + stalled
        # Prompts whose KV goes elsewhere may wait for who makes reservations here: one has room.
        yields = ready and ready[0].is_prefill_only and (self.held or self.computing)
        self._pool.claim(
            num_claimed, self._pool.num_blocks_for(ready[0].num_tokens) if yields else 0
        )

    def tables(self) -> list[BlockTable]:
        """Every block table that a sequence holds."""
        return [seq.table for seq in (*self.running, *self.held) if seq.table is not None]

    def check_integrity(self) -> None:
        """Raise InvariantViolated unless every sequence is in one place and holds the blocks its KV
        needs, and those that compute prompts are the running ones that do not decode."""
        prompts = [seq for seq in self.running if not (seq.is_decoding or seq.is_over)]
        # One whose last token alone was not cached decodes at once: it leaves at the next commit.
        if [seq for seq in self.computing if not (seq.is_decoding or seq.is_over)] != prompts:
            raise InvariantViolated("what computes prompts is not what runs and does not decode")
        places = ((SequenceState.WAITING, self.waiting), (SequenceState.RUNNING, self.running))
        for state, queue in places:
            arrivals = [seq.arrival for seq in queue]
            if arrivals != sorted(set(arrivals)):
                raise InvariantViolated(f"{state.value} sequences are not in order of arrival")
            for seq in queue:
                has_blocks = seq.table is not None
                if seq.state is not state or has_blocks != (state is SequenceState.RUNNING):
                    raise InvariantViolated(f"{seq!r} stands among the {state.value} ones")
        for seq in (*self.running, *self.held):
            num_covered = len(seq.block_table) * self._pool.block_size
            if seq.table is not None and num_covered < seq.num_computed_tokens:
                raise InvariantViolated(
                    f"blocks for {num_covered} tokens hold KV of {seq.num_computed_tokens}"
                )
