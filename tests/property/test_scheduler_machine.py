"""The scheduler with the exact fake engine in the loop: whatever happens, answers are the
reference's.

Sequences of all three kinds come and go, blocks are scarce, foreign reservations come between, and
anything may happen between plan and commit, also while the step after is planned already. The
engine runs only at commit, so a block freed or shared too early is overwritten by then and the
answer changes.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.engine.fake import FakeEngine, FakeModel
from shared.errors import NoBlocks, NoCapacity
from shared.kv.pool import BlockTable
from shared.request import FinishReason
from shared.schedule.plan import NewToken, StepPlan
from shared.schedule.sequence import Sequence, SequenceState
from shared.step import RowResult
from tests.support.cores import Worker, a_sequence, answer_of
from tests.support.fake_reference import fake_answer, fake_prompt_logprobs

MODEL = FakeModel(
    vocab_size=50, max_model_len=64, eos_every=25, num_layers=2, num_kv_heads=1, head_dim=8
)
LAYERS = MODEL.num_layers

# Prompts are beginnings of three texts, two of which begin alike: prefixes are shared all the time.
TEXTS = (tuple(range(1, 21)), (*range(1, 8), *range(30, 43)), tuple(range(20, 40)))
PROMPTS = st.builds(lambda text, stop: text[:stop], st.sampled_from(TEXTS), st.integers(1, 20))
ANSWERS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 16),
        "temperature": st.sampled_from([0.0, 0.7]),
        "seed": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, releases and reservations, between steps and during them."""

    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []
        self.failed: list[Sequence] = []
        self.got: dict[int, list[NewToken]] = {}
        self.first_index: dict[int, int] = {}
        self.expected: dict[int, tuple[list[int], FinishReason]] = {}
        self.leases: list[BlockTable] = []
        self.plan: StepPlan | None = None
        self.next: StepPlan | None = None
        self.last: list[RowResult] = []

    @initialize(
        num_blocks=st.integers(3, 14),
        max_running=st.integers(1, 6),
        budget=st.integers(1, 24),
        max_preemptions=st.integers(0, 2),
    )
    def start(self, num_blocks: int, max_running: int, budget: int, max_preemptions: int) -> None:
        """Any limits."""
        self.max_running, self.budget = max_running, budget
        self.max_preemptions = max_preemptions
        self.worker = Worker(
            num_blocks=num_blocks,
            block_size=3,
            model=MODEL,
            max_running=max_running,
            token_budget=budget,
            max_preemptions=max_preemptions,
        )

    def remember(self, sequence: Sequence, first_index: int) -> None:
        """Expect tokens of this sequence from that index on."""
        self.sequences.append(sequence)
        self.got[id(sequence)] = []
        self.first_index[id(sequence)] = first_index
        prompt = sequence.item.token_ids[: sequence.num_prompt_tokens]
        self.expected[id(sequence)] = fake_answer(prompt, sequence.sampling, model=MODEL)

    # --- coming ------------------------------------------------------------------------------

    @rule(prompt=PROMPTS, answer=ANSWERS, is_prefill=st.booleans())
    def add(self, prompt: tuple[int, ...], answer: dict[str, Any], is_prefill: bool) -> None:
        """A prompt, to be decoded here or elsewhere."""
        sequence = a_sequence(prompt, **answer)
        scheduler = self.worker.scheduler
        try:
            (scheduler.add_prefill if is_prefill else scheduler.add)(sequence)
        except NoCapacity:
            assert len(prompt) + 1 > self.worker.pool.num_blocks * 3
            return
        self.remember(sequence, 0)

    @rule(prompt=PROMPTS, answer=ANSWERS, num_answered=st.integers(1, 4))
    def add_retry(self, prompt: tuple[int, ...], answer: dict[str, Any], num_answered: int) -> None:
        """A later attempt brings the tokens that the client has already."""
        params = a_sequence(prompt, **answer).sampling
        expected, reason = fake_answer(prompt, params, model=MODEL)
        num_answered = min(num_answered, len(expected) - (reason is not FinishReason.NONE))
        sequence = a_sequence(prompt, answered=tuple(expected[:num_answered]), **answer)
        try:
            self.worker.scheduler.add(sequence)
        except NoCapacity:
            return
        self.remember(sequence, num_answered)

    @rule(prompt=PROMPTS, answer=ANSWERS)
    def add_ready(self, prompt: tuple[int, ...], answer: dict[str, Any]) -> None:
        """KV from elsewhere, in freshly reserved blocks; the cached prefix is not sent."""
        sequence, pool = a_sequence(prompt, **answer), self.worker.pool
        expected, _ = fake_answer(prompt, sequence.sampling, model=MODEL)
        if len(expected) < 2:
            return
        chain = pool.new_chain()
        table = pool.acquire(
            chain,
            prompt,
            len(prompt),
            max_hit_tokens=len(prompt),
            keep_free=pool.keep_free_for_newcomers,
        )
        if table is None:
            return
        donor = FakeEngine(model=MODEL, num_blocks=10, block_size=2)
        donor_worker = Worker(num_blocks=10, block_size=2, model=MODEL)
        donor_worker.engine = donor
        copy = a_sequence(prompt)
        donor_worker.scheduler.add_prefill(copy)
        donor_worker.step()
        start, stop = table.num_hit_tokens, len(prompt)
        frame = donor.new_buffer((stop - start) * MODEL.layout.token_bytes)
        donor.gather(copy.block_table, start, stop, 0, LAYERS, frame)
        self.worker.engine.scatter(table.blocks, start, stop, 0, LAYERS, frame)
        sequence.tokens.append(expected[0])
        sequence.table, sequence.chain, sequence.num_computed_tokens = table, chain, stop
        self.worker.scheduler.add_ready(sequence)
        self.remember(sequence, 1)

    @rule(num_tokens=st.integers(1, 12))
    def reserve(self, num_tokens: int) -> None:
        """Somebody else takes blocks and writes what he likes there."""
        pool, tokens = self.worker.pool, [9] * num_tokens
        table = pool.acquire(
            pool.new_chain(b"foreign"),
            tokens,
            num_tokens,
            max_hit_tokens=0,
            keep_free=pool.keep_free_for_newcomers,
        )
        if table is not None:
            self.leases.append(table)
            stop = len(table.blocks) * 3
            noise = bytes([0xAA]) * (stop * MODEL.layout.token_bytes)
            self.worker.engine.scatter(table.blocks, 0, stop, 0, LAYERS, noise)

    # --- going -------------------------------------------------------------------------------

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def unreserve(self, data: st.DataObject) -> None:
        """A reservation ends."""
        table = data.draw(st.sampled_from(self.leases))
        self.leases.remove(table)
        self.worker.pool.release(table)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Anybody may be aborted at any time."""
        self.worker.scheduler.abort(data.draw(st.sampled_from(self.sequences)))

    @precondition(lambda self: any(seq.is_prefill_only for seq in self.sequences))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A push is settled, or was given up."""
        prefills = [seq for seq in self.sequences if seq.is_prefill_only]
        self.worker.scheduler.release(data.draw(st.sampled_from(prefills)))

    # --- stepping ----------------------------------------------------------------------------

    @precondition(lambda self: self.plan is None)
    @rule()
    def begin(self) -> None:
        """Plan a step."""
        plan = self.worker.scheduler.plan()
        for failure in plan.failed:
            assert isinstance(failure.error, NoBlocks)
            assert failure.sequence.num_tokens > self.worker.pool.num_blocks * 3
            self.failed.append(failure.sequence)
        assert len(plan.rows) <= self.max_running
        assert plan.num_prefill_tokens <= max(1, self.budget - plan.num_decode_rows)
        self.plan = None if plan.is_empty else plan

    @precondition(lambda self: self.plan is not None and self.next is None)
    @rule()
    def look_ahead(self) -> None:
        """Plan the step after the running one."""
        self.next = self.worker.scheduler.plan_next()
        if self.next is not None:
            assert len(self.next.rows) <= self.max_running
            assert self.next.num_prefill_tokens == 0

    @precondition(lambda self: self.next is not None)
    @rule()
    def withdraw(self) -> None:
        """Take it back."""
        self.worker.scheduler.withdraw()
        self.next = None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def end(self) -> None:
        """Run and commit it; what was planned ahead follows it."""
        assert self.plan is not None
        plan, self.plan, self.next = self.plan, self.next, None
        for token_ids, source in plan.to_come:
            token_ids[0] = self.last[source].token_id
        for row, sequence in zip(plan.rows, plan.sequences, strict=True):
            assert row.start == sequence.num_computed_tokens  # not moved while the step ran
            if not sequence.is_aborted:  # else its last token was given to nobody
                assert row.token_ids == sequence.tokens[row.start : row.stop]
        self.last = self.worker.engine.step(plan.rows)
        outcome = self.worker.scheduler.commit(plan, self.last)
        for token in outcome.tokens:
            assert not token.sequence.is_aborted
            self.got[id(token.sequence)].append(token)

    @rule(num_steps=st.integers(1, 8), looks_ahead=st.booleans())
    def steps(self, num_steps: int, looks_ahead: bool) -> None:
        """Several steps in peace."""
        for _ in range(num_steps):
            if self.plan is None:
                self.begin()
            if self.plan is not None:
                if looks_ahead and self.next is None:
                    self.look_ahead()
                self.end()

    # --- what must hold ----------------------------------------------------------------------

    @invariant()
    def counts_hold(self) -> None:
        """Every block is somebody's or nobody's, and exactly once."""
        if not hasattr(self, "worker"):
            return
        self.worker.scheduler.check_integrity()
        self.worker.pool.check_integrity([*self.worker.scheduler.tables(), *self.leases])

    @invariant()
    def preemptions_are_bounded(self) -> None:
        """Nobody gives way more often than allowed; a ready one runs at once and may always
        once."""
        for sequence in self.sequences:
            most = 0 if sequence.is_prefill_only else max(1, self.max_preemptions)
            assert sequence.num_preemptions <= most

    @invariant()
    def answers_are_exact(self) -> None:
        """Each token once, in order, and the reference's."""
        for sequence in self.sequences:
            expected, reason = self.expected[id(sequence)]
            tokens, first = self.got[id(sequence)], self.first_index[id(sequence)]
            assert [token.index for token in tokens] == list(range(first, first + len(tokens)))
            assert answer_of(sequence) == expected[: len(answer_of(sequence))]
            assert [token.token_id for token in tokens] == answer_of(sequence)[first:]
            if tokens and len(answer_of(sequence)) == len(expected):
                assert tokens[-1].finish_reason is reason
            if tokens and first == 0 and sequence.sampling.prompt_logprobs is not None:
                prompt = sequence.item.token_ids[: sequence.num_prompt_tokens]
                wanted = fake_prompt_logprobs(prompt, 1, model=MODEL)
                assert list(tokens[0].prompt_logprobs[1:]) == wanted

    def teardown(self) -> None:
        """Left alone, everybody finishes and nothing leaks."""
        if not hasattr(self, "worker"):
            return
        for table in self.leases:
            self.worker.pool.release(table)
        self.leases = []
        while self.plan is not None:
            self.end()
        for _ in range(3000):
            num_failed = len(self.failed)
            self.begin()
            held = [seq for seq in self.sequences if seq.state is SequenceState.HELD]
            for sequence in held:
                self.worker.scheduler.release(sequence)
            if self.plan is None:
                if not held and len(self.failed) == num_failed:
                    break  # nothing moves any more
                continue
            self.look_ahead()
            self.end()
            if self.plan is not None:
                self.end()
        self.counts_hold()
        self.answers_are_exact()
        assert not self.worker.scheduler.unfinished
        assert self.worker.pool.num_held == 0
        for sequence in self.sequences:
            is_cut = sequence.is_aborted or sequence in self.failed or sequence.is_released
            if not (is_cut or sequence.is_prefill_only):
                assert sequence.finish_reason is not FinishReason.NONE
                assert sequence.state is SequenceState.FINISHED


TestSchedulerMachine = SchedulerMachine.TestCase
