"""Builders for tests of the cores, and a shell that is as thin as one can be."""

from __future__ import annotations

from typing import Any

from shared.engine.fake import FakeEngine, FakeModel
from shared.kv.pool import BlockPool
from shared.request import SamplingParams, WorkItem
from shared.schedule.budget import TokenBudget
from shared.schedule.plan import NewToken
from shared.schedule.scheduler import SchedulePolicy, Scheduler
from shared.schedule.sequence import Sequence

MODEL = FakeModel(vocab_size=64, max_model_len=512, num_layers=2, num_kv_heads=1, head_dim=8)


def an_item(
    prompt: int | tuple[int, ...] = 8,
    *,
    answered: tuple[int, ...] = (),
    salt: bytes = b"",
    **sampling: Any,
) -> WorkItem:
    """A request for the given prompt, or for one of that many tokens."""
    tokens = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    return WorkItem(
        token_ids=tokens + answered,
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(**sampling),
        cache_salt=salt,
    )


def a_sequence(prompt: int | tuple[int, ...] = 8, **kwargs: Any) -> Sequence:
    """A new sequence for ``an_item`` of the same arguments."""
    return Sequence(an_item(prompt, **kwargs))


class Worker:
    """Pool, scheduler and fake engine of one worker, stepped by hand."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        cache_prefixes: bool = True,
        model: FakeModel = MODEL,
        token_budget: int = 2048,
        **policy: Any,
    ) -> None:
        self.engine = FakeEngine(model=model, num_blocks=num_blocks, block_size=block_size)
        self.pool = BlockPool(
            num_blocks,
            block_size,
            cache_prefixes=cache_prefixes,
        )
        self.scheduler = Scheduler(
            self.pool,
            SchedulePolicy(
                max_model_len=model.max_model_len,
                eos_token_ids=frozenset(model.eos_token_ids),
                **{"budget": TokenBudget(token_budget), **policy},
            ),
        )

    def step(self) -> tuple[NewToken, ...]:
        """Plan, run and commit one step; () if there is nothing to run."""
        plan = self.scheduler.plan()
        if plan.is_empty:
            return ()
        outcome = self.scheduler.commit(plan, self.engine.step(plan.rows))
        self.check()
        return outcome.tokens

    def run(self, most_steps: int = 1000) -> list[NewToken]:
        """Step until nothing waits or runs."""
        tokens: list[NewToken] = []
        for _ in range(most_steps):
            if not self.scheduler.unfinished:
                return tokens
            tokens += self.step()
        raise AssertionError(f"{self.scheduler!r} did not finish in {most_steps} steps")

    def check(self) -> None:
        """Check every invariant, as if nobody but the scheduler held blocks."""
        self.scheduler.check_integrity()
        self.pool.check_integrity(self.scheduler.tables())


def answer_of(sequence: Sequence) -> list[int]:
    """The answer so far."""
    return sequence.tokens[sequence.num_prompt_tokens :]
