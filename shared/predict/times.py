"""Models of how long a step takes, behind one interface: for who plans without a machine at hand.

A step is told by four numbers, so that models of different origin can be put in each other's place:
prompt tokens computed, positions that these attend to (``attended``), sequences that decode, and
tokens of context that those read, the new one included. Times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from shared.predict.fit_steps import FittedPhase


class TimeModel(Protocol):
    """One time model."""

    @property
    def source(self) -> str:
        """Where its numbers come from, in a phrase."""
        ...

    def step_s(self, num_prompt: int, num_attended: int, num_rows: int, num_context: int) -> float:
        """Return the seconds of a step with at least one token."""
        ...

    def warnings(self) -> list[str]:
        """Return what a reader must know of the answers given so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineTimes:
    """A share for the step, for each prompt token, for each decode row, and for each token of
    context that decode rows read."""

    base_s: float
    prompt_token_s: float
    decode_row_s: float
    context_token_s: float
    source: str = "four numbers given"

    def step_s(self, num_prompt: int, num_attended: int, num_rows: int, num_context: int) -> float:
        """See TimeModel."""
        return (
            self.base_s
            + num_prompt * self.prompt_token_s
            + num_rows * self.decode_row_s
            + num_context * self.context_token_s
        )

    def warnings(self) -> list[str]:
        """See TimeModel."""
        return []


OPT_13B_A100 = AffineTimes(
    base_s=0.0199,
    prompt_token_s=102e-6,
    decode_row_s=38.5e-6,
    context_token_s=0.627e-6,
    source="DistServe's fit of OPT-13B on one A100-80GB, prompts without their quadratic part",
)
"""Below 95 sequences; from their published profile."""


@dataclass(frozen=True, slots=True)
class ScaledTimes:
    """Another model's times, by a factor: what if it is wrong by so much?"""

    times: TimeModel
    factor: float

    @property
    def source(self) -> str:
        """See TimeModel."""
        return f"{self.times.source}, times {self.factor:g}"

    def step_s(self, num_prompt: int, num_attended: int, num_rows: int, num_context: int) -> float:
        """See TimeModel."""
        return self.factor * self.times.step_s(num_prompt, num_attended, num_rows, num_context)

    def warnings(self) -> list[str]:
        """See TimeModel."""
        return self.times.warnings()


@dataclass(slots=True)
class FittedTimes:
    """Two measured lines: steps with prompts in them, and steps without. Remembers how far beyond
    what was measured it was asked."""

    prompts: FittedPhase
    answers: FittedPhase
    source: str = "a profile"
    _farthest: dict[str, float] = field(default_factory=dict[str, float], init=False)

    def step_s(self, num_prompt: int, num_attended: int, num_rows: int, num_context: int) -> float:
        """See TimeModel."""
        phase, name = (self.prompts, "prompts") if num_prompt else (self.answers, "answers")
        tokens, attended = num_prompt + num_rows, num_attended + num_context
        if tokens > phase.most_tokens or attended > phase.most_attended:
            beyond = max(tokens / phase.most_tokens, attended / phase.most_attended)
            self._farthest[name] = max(beyond, self._farthest.get(name, 0.0))
        return phase.seconds(tokens, attended)

    def warnings(self) -> list[str]:
        """See TimeModel."""
        return [
            f"steps with {name} went {beyond:.1f} times beyond what was profiled: their times are "
            "extrapolated"
            for name, beyond in sorted(self._farthest.items())
        ]
