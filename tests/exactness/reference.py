"""What transformers answers, and how close an answer through the mesh comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from shared.request import FinishReason
from tests.support.checkpoints import load_reference
from tests.support.grpc_client import Answer

NUM_NEW = 20
"""Tokens of every answer: more than a reservation holds room for, so that blocks can run out."""

NUM_TOP = 4
"""Alternatives asked for with every token."""

LOGPROB_TOLERANCE = 1e-4

TIE = 1e-5
"""Where the two best logprobs of the reference are closer than this, float32 does not say which is
the better one, and either will do."""


class Expected(NamedTuple):
    """Greedy tokens, and log-softmax of the logits at each: ``[NUM_NEW, vocab]``."""

    token_ids: list[int]
    logprobs: torch.Tensor


class Reference:
    """``transformers`` generate on one folder: each prompt alone, each computed once."""

    def __init__(self, folder: Path) -> None:
        self._model = load_reference(folder)
        self._model.generation_config = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=NUM_NEW,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        self._known: dict[tuple[int, ...], Expected] = {}

    def answer(self, prompt: Sequence[int]) -> Expected:
        """Return the greedy answer."""
        key = tuple(prompt)
        if key not in self._known:
            ids = torch.tensor([list(prompt)])
            with torch.inference_mode():
                out = self._model.generate(ids, attention_mask=torch.ones_like(ids))
            logits = torch.cat(out.logits).float()
            tokens = out.sequences[0, len(prompt) :].tolist()
            self._known[key] = Expected(tokens, logits.log_softmax(-1))
        return self._known[key]

    def prompt_logprobs(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return log-softmax of the logits at every prompt position, ``[len(prompt), vocab]``."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(prompt)])).logits[0]
        return logits.float().log_softmax(-1)


@dataclass
class Tally:
    """How a set of answers compares with the reference.

    num_ties: answers that left the reference's path where its two best tokens tie.
    worst: largest difference of a logprob.
    """

    num_answers: int = 0
    num_ties: int = 0
    worst: float = 0.0

    def take(self, answer: Answer, want: Expected, prompt: Sequence[int]) -> None:
        """Compare one answer; a wrong token that is no tie, or a logprob too far off, fails."""
        self.num_answers += 1
        about = f"prompt of {len(prompt)} tokens"
        assert len(answer.token_ids) == len(answer.logprobs) == NUM_NEW, about
        assert answer.finish == FinishReason.LENGTH, about
        assert answer.usage.prompt_tokens == len(prompt), about
        assert answer.usage.completion_tokens == NUM_NEW, about
        for index, (token_id, entry) in enumerate(
            zip(answer.token_ids, answer.logprobs, strict=True)
        ):
            row = want.logprobs[index]
            if token_id != want.token_ids[index]:
                short = (row.max() - row[token_id]).item()
                assert short < TIE, f"{about}: token {index} falls short by {short}"
                self.num_ties += 1
                return
            self.compare_entry(token_id, entry.logprob, entry.top, row, f"{about}, token {index}")

    def compare_entry(
        self,
        token_id: int,
        logprob: float,
        top: Sequence[tuple[int, float]],
        row: torch.Tensor,
        about: str,
    ) -> None:
        """Compare one token's logprob and its best alternatives, in their order."""
        assert len(top) == NUM_TOP, about
        differences = [logprob - row[token_id].item()]
        # Both what they say of the tokens they name, and that no better ones were left out.
        differences += [value - row[other].item() for other, value in top]
        best = row.topk(NUM_TOP).values.tolist()
        differences += [value - due for (_, value), due in zip(top, best, strict=True)]
        assert len({other for other, _ in top}) == NUM_TOP, about
        worst = max(map(abs, differences))
        assert worst <= LOGPROB_TOLERANCE, f"{about}: a logprob is off by {worst}"
        self.worst = max(self.worst, worst)

    def assert_ties_are_rare(self) -> None:
        """At most one answer in a hundred, or one at all, may rest on a tie."""
        assert self.num_ties <= max(1, self.num_answers // 100)
