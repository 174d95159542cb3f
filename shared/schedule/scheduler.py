"""One scheduler for prefill, decode and mixed workers: which tokens of which sequences run in the
next step.

Iteration-level scheduling (Orca, OSDI'22) with stall-free batching (Sarathi-Serve, OSDI'24,
Algorithm 3): every running sequence gets its next token first, then prompt chunks fill what is left
of the token budget, first come first served. What differs between the three uses is only how
sequences are added. It knows no network, no clock, no model; it never waits: ``plan`` -> run the
rows -> ``commit``. While a step of single tokens runs, the one after it may be planned already
(``plan_next``), so that a device goes from one to the next without waiting for this core: its rows
lack the tokens that are being sampled, and an answer that ends meanwhile is computed one row too
far, which nobody sees.

Out of blocks: the newest running sequence loses its blocks and is recomputed later (vLLM's
recompute preemption). The oldest never does, so somebody always finishes; one that lost its blocks
``max_preemptions`` times runs again only when it is the oldest, so nobody loses them more often.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from shared.errors import LocalProtocolError, NoBlocks, NoCapacity
from shared.kv.pool import BlockPool, BlockTable
from shared.request import FinishReason, finish_reason_of
from shared.schedule.budget import StepBudget
from shared.schedule.draft import Draft, collect_prompt_logprobs
from shared.schedule.plan import Failure, NewToken, SchedulerStatistics, StepOutcome, StepPlan
from shared.schedule.queues import Queues
from shared.schedule.runs import num_equal_steps, take_steps
from shared.schedule.sequence import Sequence, SequenceEvent, SequenceState
from shared.step import RowResult


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePolicy:
    """Limits of a step, and when an answer ends.

    max_running: most sequences in a step. budget: most tokens a step computes; decode rows are
    never dropped for it, and a prompt always advances by one token at least. max_preemptions: see
    the module's text.
    """

    max_model_len: int
    budget: StepBudget
    eos_token_ids: frozenset[int] = frozenset()
    max_running: int = 256
    max_preemptions: int = 2


class Scheduler:
    """Owns every sequence's place and blocks from ``add*`` until it finishes, fails or is
    released."""

    def __init__(self, pool: BlockPool, policy: SchedulePolicy) -> None:
        if policy.max_running < 1:
            raise LocalProtocolError("max_running must be at least 1")
        self._pool = pool
        self._policy = policy
        self._queues = Queues(pool)
        self._plan: StepPlan | None = None
        self._next: StepPlan | None = None
        self._num_steps = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0

    # --- adding --------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt that is computed here and decoded here (mixed worker).

        Raises NoCapacity: it does not fit into the whole pool.
        """
        # A second token needs room for the KV of the first.
        self._enqueue(sequence, sequence.num_tokens + int(sequence.num_remaining_tokens > 1))

    def add_prefill(self, sequence: Sequence) -> None:
        """Queue a prompt of which only the next token is wanted; its KV goes elsewhere.

        After that token (``NewToken``) it keeps its blocks until ``release``, never preempted.
        Raises NoCapacity: it does not fit into the whole pool.
        """
        self._enqueue(sequence, sequence.num_tokens)
        sequence.is_prefill_only = True

    def add_ready(self, sequence: Sequence) -> None:
        """Take a sequence that brings its blocks (``sequence.table``, ``chain``): KV of all tokens
        but the last is in them, the last token was sampled elsewhere. It runs from the next plan
        on."""
        if sequence.table is None or not sequence.is_decoding:
            raise LocalProtocolError("a ready sequence brings blocks with KV of all tokens but one")
        self._queues.take_in(sequence, SequenceEvent.READY)
        self._pool.publish(
            sequence.table, sequence.chain, sequence.tokens, sequence.num_computed_tokens
        )
        self._queues.running.append(sequence)  # at the end: it is the newest

    def _enqueue(self, sequence: Sequence, num_needed: int) -> None:
        if self._pool.num_blocks_for(num_needed) > self._pool.num_blocks:
            raise NoCapacity(
                f"{num_needed} tokens of KV do not fit into this worker's "
                f"{self._pool.num_blocks * self._pool.block_size}: shorten the prompt or give the "
                "worker more KV memory",
                code="kv_larger_than_pool",
            )
        self._queues.take_in(sequence, SequenceEvent.QUEUED)
        sequence.chain = self._pool.new_chain(sequence.item.cache_salt)
        self._expect_cached(sequence)
        self._queues.waiting.append(sequence)

    def await_prefix(self, sequence: Sequence, num_tokens: int) -> None:
        """KV of so many leading tokens is on its way into the prefix cache: do not let this prompt
        in before ``prefix_ended``. It keeps its place, and others that leave it room go on."""
        sequence.awaits_prefix = True
        sequence.num_expected_tokens = max(sequence.num_expected_tokens, num_tokens)

    def prefix_ended(self, sequence: Sequence) -> None:
        """All of it has come, or no more will. Allowed twice, and after the sequence has ended."""
        if sequence.awaits_prefix:
            sequence.awaits_prefix = False
            self._expect_cached(sequence)
            self._queues.update_claim()

    def await_grammar(self, sequence: Sequence) -> None:
        """Its grammar is being made ready, maybe for a second: it has no row, by which all rows of
        a step would wait for it, before ``grammar_ended``."""
        sequence.awaits_grammar = True

    def grammar_ended(self, sequence: Sequence) -> None:
        """It is ready, or will never be. Allowed after the sequence has ended."""
        sequence.awaits_grammar = False
        self._queues.update_claim()

    def _expect_cached(self, sequence: Sequence) -> None:
        sequence.num_expected_tokens = self._pool.num_cached_tokens(
            sequence.chain, sequence.tokens, sequence.most_cached_tokens
        )

    # --- removing ------------------------------------------------------------------------------

    def abort(self, sequence: Sequence) -> None:
        """Never run it again. Allowed in every state, also twice and after it finished.

        Its blocks are given back now, or at ``commit`` if a planned step uses them; those of an
        ``add_prefill`` sequence stay until ``release``, for they may still be being sent.
        """
        if sequence.state not in (SequenceState.WAITING, SequenceState.RUNNING):
            return
        sequence.is_aborted = True
        if not sequence.steps_in_flight:
            self._queues.retire(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give the blocks of an ``add_prefill`` sequence back: its KV is acknowledged, or nobody
        sends it any more.

        Aborts it if it still runs; then the blocks go at ``commit``. Allowed twice.
        """
        if not sequence.is_prefill_only:
            raise LocalProtocolError("only add_prefill sequences are released; abort others")
        sequence.is_released = True
        self.abort(sequence)
        self._queues.let_go(sequence)

    # --- planning ------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Decide the next step. A plan with rows must be committed before the next call; an empty
        one must not be.

        After an empty plan nothing changes until a sequence is added or released or the pool gets
        blocks back.
        """
        if self._plan is not None:
            raise LocalProtocolError("the last plan is not committed")
        draft = Draft(self._policy.budget)
        self._queues.stalled = []
        self._plan_decodes(draft)
        for sequence in self._queues.computing:  # prompts (and recomputes) under way, oldest first
            self._add_chunk(sequence, draft)
        # Who has just lost its room does not get it back in the same breath.
        if not draft.preempted:
            self._plan_admissions(draft)
        self._queues.update_claim()
        plan = draft.finished()
        if plan.rows:
            self._plan = plan
            for sequence in plan.sequences:
                sequence.steps_in_flight += 1
        return plan

    def plan_next(self) -> StepPlan | None:
        """Plan the step after the running one as if that ended no answer; None if more than its
        tokens must be known first, or if nobody needs one.

        Its rows may run once ``to_come`` is filled in; it is committed after the running one, or
        taken back by ``withdraw``. Answers that are sure to end with the running step have no row.
        Some may have got their next block even if there is no plan.
        """
        running = self._plan
        if running is None or self._next is not None:
            raise LocalProtocolError("one step at a time is planned ahead, of one that runs")
        # Whoever waits may be let in as soon as it is known who ends.
        if self._queues.waiting:
            return None
        row_of = {sequence: idx for idx, sequence in enumerate(running.sequences)}
        draft = Draft(self._policy.budget)
        for sequence in self._queues.running:
            source = row_of.get(sequence)
            if sequence.is_over or (source is not None and self._num_left(sequence) <= 1):
                continue
            if len(draft.rows) == self._policy.max_running:
                break
            # Penalties look at all tokens so far, the one that is being sampled included.
            is_bound = sequence.sampling.needs_history or sequence.awaits_grammar
            if is_bound or not sequence.is_decoding:
                return None
            num_tokens = len(sequence.tokens) + (source is not None)
            if num_tokens > len(sequence.block_table) * self._pool.block_size:
                assert sequence.table is not None
                if not self._pool.grow(sequence.table, num_tokens):
                    return None  # somebody has to give way: not before it is known who ends
            if source is None:
                draft.add_next(sequence)
            else:
                draft.add_after(sequence, source)
        if not draft.rows:
            return None
        self._next = draft.finished()
        for sequence in self._next.sequences:
            sequence.steps_in_flight += 1
        self._queues.stalled = [seq for seq in self._queues.stalled if not seq.steps_in_flight]
        self._queues.update_claim()
        return self._next

    def withdraw(self) -> None:
        """Take back what ``plan_next`` planned: it has not run, and will not."""
        if self._next is None:
            raise LocalProtocolError("no step is planned ahead")
        plan, self._next = self._next, None
        for sequence in plan.sequences:
            sequence.steps_in_flight -= 1
            if sequence.is_aborted and not sequence.steps_in_flight:
                self._queues.retire(sequence)

    def _num_left(self, sequence: Sequence) -> int:
        """Return how many tokens its answer may still get."""
        num_most = self._policy.max_model_len - sequence.num_tokens
        return min(sequence.num_remaining_tokens, num_most)

    def _plan_decodes(self, draft: Draft) -> None:
        """Give every decoding sequence its next token, oldest first, taking room from the newest if
        need be."""
        block_size = self._pool.block_size
        # A copy: making room takes others out of the list.
        for sequence in self._queues.running[: self._policy.max_running]:
            is_running = sequence.state is SequenceState.RUNNING and not sequence.awaits_grammar
            if not is_running or sequence in self._queues.computing:
                continue
            if len(sequence.tokens) <= len(sequence.block_table) * block_size:
                draft.add_next(sequence)  # nearly always: its last block has room yet
            elif self._pool.num_blocks_for(sequence.num_tokens) > self._pool.num_blocks:
                self._fail_for_room(sequence, draft)
            elif self._make_room(sequence, draft):
                draft.add_next(sequence)
            else:
                self._queues.stalled.append(sequence)

    def _make_room(self, sequence: Sequence, draft: Draft) -> bool:
        assert sequence.table is not None
        while not self._pool.grow(sequence.table, sequence.num_tokens):
            victim = next(
                (other for other in reversed(self._queues.running) if not other.is_prefill_only),
                sequence,
            )
            if victim is sequence:
                # Nobody is newer: wait. Older ones may still take its room, so it blocks nobody.
                return False
            if self._pool.num_blocks_for(victim.num_tokens) > self._pool.num_blocks:
                self._fail_for_room(victim, draft)  # put back, it would block the queue
            else:
                self._preempt(victim, draft)
        return True

    def _preempt(self, victim: Sequence, draft: Draft) -> None:
        assert victim.table is not None
        self._pool.release(victim.table)
        victim.table = None
        self._num_preemptions += 1
        self._num_recomputed_tokens += victim.num_computed_tokens
        victim.num_preemptions += 1
        victim.num_computed_tokens = 0
        victim.prompt_logprobs.clear()
        draft.preempted.append(victim)
        self._queues.put_back(victim)

    def _fail_for_room(self, sequence: Sequence, draft: Draft) -> None:
        error = NoBlocks(
            f"the answer outgrew this worker's {self._pool.num_blocks} KV blocks",
            code="answer_larger_than_pool",
        )
        draft.failed.append(Failure(sequence, error))
        self._queues.leave_running(sequence)
        self._queues.finish(sequence)

    def _plan_admissions(self, draft: Draft) -> None:
        """Let waiting sequences in, oldest first, none overtaking, each with all its blocks or
        none; those whose prefix or grammar is on its way are passed over."""
        while len(self._queues.running) < self._policy.max_running:
            sequence = next((it for it in self._queues.waiting if not it.is_awaiting), None)
            # What it will find in the cache, and so where it begins, shows only when it is let in.
            if sequence is None or draft.room(0) <= 0 or not self._may_run(sequence):
                return
            if not self._admit(sequence):
                return
            self._queues.let_in(sequence)
            draft.admitted.append(sequence)
            self._add_chunk(sequence, draft)

    def _add_chunk(self, sequence: Sequence, draft: Draft) -> None:
        room = draft.room(sequence.num_computed_tokens)
        if room > 0:
            draft.add(sequence, sequence.num_computed_tokens + room)

    def _may_run(self, sequence: Sequence) -> bool:
        """Whether it has not been preempted too often, or is the oldest, whom nobody preempts."""
        if sequence.is_prefill_only or sequence.num_preemptions < self._policy.max_preemptions:
            return True
        return not self._queues.running or self._queues.running[0].arrival > sequence.arrival

    def _admit(self, sequence: Sequence) -> bool:
        pool, tokens = self._pool, sequence.tokens
        most = sequence.most_cached_tokens
        # Prompts whose KV goes elsewhere have room promised there in the order in which they came.
        # Who passes one leaves it room here: else each of the two could hold what the other needs.
        passed = takewhile(lambda it: it is not sequence, self._queues.waiting)
        keep_free = sum(pool.num_blocks_for(it.num_tokens) for it in passed if it.is_prefill_only)
        table = pool.acquire(
            sequence.chain, tokens, len(tokens), max_hit_tokens=most, keep_free=keep_free
        )
        if table is None:
            return False
        sequence.table = table
        sequence.num_computed_tokens = table.num_hit_tokens
        # What a recompute finds again was its own: no client was saved anything.
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = table.num_hit_tokens
        return True

    # --- committing ----------------------------------------------------------------------------

    def commit(self, plan: StepPlan, results: list[RowResult]) -> StepOutcome:
        """Take a step's results in row order: extend the sequences, publish their blocks, end those
        that are done. What was planned ahead runs from now on."""
        if plan is not self._plan or len(results) != len(plan.rows):
            raise LocalProtocolError("commit wants the plan that runs and one result a row")
        self._plan, self._next = self._next, None
        self._num_steps += 1
        tokens: list[NewToken] = []
        failed: list[Failure] = []
        block_size = self._pool.block_size
        for sequence, row, result in zip(plan.sequences, plan.rows, results, strict=True):
            table, stop = sequence.table, row.stop
            assert table is not None
            sequence.steps_in_flight -= 1
            sequence.num_computed_tokens = stop
            # Of one that was aborted, a row planned ahead goes one beyond the tokens it has.
            if (table.num_published + 1) * block_size <= stop <= len(sequence.tokens):
                self._pool.publish(table, sequence.chain, sequence.tokens, stop)
            if sequence.is_over:
                if not sequence.steps_in_flight:
                    self._queues.retire(sequence)
                continue
            if result.failure:
                failed.append(Failure.of_grammar(sequence, result.failure))
                self.abort(sequence)
                continue
            if row.prompt_logprobs is not None:
                collect_prompt_logprobs(sequence, row, result)
            if row.sample is not None:
                tokens.append(self._append(sequence, row.sample.index, result))
        self._queues.computing = [seq for seq in self._queues.computing if not seq.is_decoding]
        self._queues.update_claim()
        return StepOutcome(tokens=tuple(tokens), failed=tuple(failed))

    def _append(self, sequence: Sequence, index: int, result: RowResult) -> NewToken:
        sequence.tokens.append(result.token_id)
        sequence.finish_reason = finish_reason_of(
            result.token_id,
            index,
            sequence.num_tokens,
            sequence.sampling,
            eos_token_ids=self._policy.eos_token_ids,
            max_model_len=self._policy.max_model_len,
        )
        is_done = sequence.is_prefill_only or sequence.finish_reason is not FinishReason.NONE
        # A row planned ahead still writes into its blocks: then the commit of that step retires it.
        if is_done and not sequence.steps_in_flight:
            self._queues.retire(sequence)
        prompt_logprobs = tuple(sequence.prompt_logprobs)
        sequence.prompt_logprobs.clear()
        return NewToken(
            sequence,
            result.token_id,
            index,
            sequence.finish_reason,
            result.logprobs,
            prompt_logprobs,
        )

    def runway(self) -> int:
        """Return how many steps of one token for each running sequence are sure to come next; the
        last may end answers, by their length. 0 if a token may end one, or if somebody may be let
        in or lack a block."""
        most = self._policy.max_running
        num_running = len(self._queues.running)
        lets_in = self._queues.waiting and num_running < most
        if self._plan is not None or self._queues.computing or lets_in or num_running > most:
            return 0
        return self._num_equal_steps(self._queues.running)

    def _num_equal_steps(self, running: list[Sequence]) -> int:
        limit, has_end_tokens = self._policy.max_model_len, bool(self._policy.eos_token_ids)
        return num_equal_steps(running, self._pool, limit, has_end_tokens=has_end_tokens)

    def begin_step(self, num_rows: int) -> None:
        """Give the oldest running sequences the blocks that ``plan`` would give them for the next
        step: it runs already, and ``advance`` will tell what came of it."""
        size = self._pool.block_size
        for sequence in self._queues.running[:num_rows]:
            table = sequence.table
            assert table is not None
            if len(sequence.tokens) > len(table.blocks) * size:
                self._pool.grow(table, len(sequence.tokens))

    def advance(self, answers: list[list[int]]) -> list[Sequence]:
        """Do what ``plan`` and ``commit`` would do in as many steps as each list has tokens; return
        whose answers that ended.

        answers: of each running sequence, in order of arrival, its next tokens; who came while the
        last of these steps ran has none. Raises LocalProtocolError: not as many for each, or more
        than ``runway``.
        """
        rows = self._queues.running[: len(answers)]
        num_steps = len(answers[0]) if len(rows) == len(answers) > 0 else 0
        most = 0 if self._plan is not None else self._num_equal_steps(rows)
        if not 0 < num_steps <= most or {*map(len, answers)} != {num_steps}:
            raise LocalProtocolError("advance wants one list a running sequence, within the runway")
        take_steps(rows, answers, self._pool)
        self._num_steps += num_steps
        self._queues.stalled = []
        ended: list[Sequence] = []
        if num_steps == most:
            ended = [seq for seq in rows if self._num_left(seq) <= 0]
            for sequence in ended:
                sequence.finish_reason = FinishReason.LENGTH
                self._queues.retire(sequence)
        self._queues.update_claim()
        return ended

    # --- looking at it -------------------------------------------------------------------------

    def statistics(self) -> SchedulerStatistics:
        """Return all gauges and counters at once."""
        prompts = (*self._queues.computing, *self._queues.waiting)
        return SchedulerStatistics(
            num_waiting=len(self._queues.waiting),
            num_running=len(self._queues.running),
            num_held=len(self._queues.held),
            num_stalled=len(self._queues.stalled),
            pending_tokens=sum(seq.num_uncomputed_tokens for seq in prompts),
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
        )

    @property
    def running(self) -> list[Sequence]:
        """Who computes, in order of arrival; not to be changed."""
        return self._queues.running

    @property
    def has_prompts(self) -> bool:
        """Whether anybody's prompt, or what is recomputed, is not computed yet."""
        return bool(self._queues.computing or self._queues.waiting)

    @property
    def unfinished(self) -> list[Sequence]:
        """Who computes, then who waits for it."""
        return [*self._queues.running, *self._queues.waiting]

    def tables(self) -> list[BlockTable]:
        """Every block table that a sequence holds, for ``BlockPool.check_integrity``."""
        return self._queues.tables()

    def check_integrity(self) -> None:
        """See ``Queues.check_integrity``."""
        self._queues.check_integrity()
