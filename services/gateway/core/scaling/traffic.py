"""What is asked of the mesh: how often, how long the prompts compute, how long the answers are, and
which share of them kept the limits. The autoscaler goes by it.

Counted by one gateway for all: what others sent is seen from the workers, which tell how many
orders they took from anybody. Pure: ``now`` is an argument, in seconds of a clock that never goes
back; memory is bounded, whatever comes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from shared.ids import Incarnation
from shared.predict.quantiles import RunningQuantiles
from shared.predict.step_time import StepFit

SECONDS = 60
"""How far back requests are counted."""

RECENT_SECONDS = 30
"""The newest part, in which a jump of the load shows first."""

PROMPTS = 256
"""Prompts of which the computing times are known apart."""

_NEW_SHARE = 0.01
"""Of the newest answer in a mean."""

_LEAST = 8
"""Fewer answers tell of no length."""


class Traffic(NamedTuple):
    """What is asked, of all gateways together.

    arrivals_s, recent_s: requests a second, over ``SECONDS`` and over ``RECENT_SECONDS``.
    prompts_s: computing times of prompts, alone on an idle worker, ascending; each stands for the
    same share of them. prompt_s, prompt_square_s: mean of those times, and of their squares.
    prompt_tokens, output_tokens: means.
    """

    arrivals_s: float
    recent_s: float
    prompts_s: tuple[float, ...]
    prompt_s: float
    prompt_square_s: float
    prompt_tokens: float
    output_tokens: float


class Attainment(NamedTuple):
    """Of the answers that ended in the last ``SECONDS``, how many could keep their limits, and how
    many kept each. num_refused: requests that were told at once that they would not."""

    num_judged: int = 0
    num_ttft_kept: int = 0
    num_tpot_kept: int = 0
    num_kept: int = 0
    num_refused: int = 0

    @property
    def share(self) -> float | None:
        """What kept both limits, of all that came; None = nothing came."""
        total = self.num_judged + self.num_refused
        return self.num_kept / total if total else None


class _Mean:
    """Of all at first, later the newer ones count more."""

    def __init__(self) -> None:
        self.num = 0
        self.value = 0.0

    def add(self, value: float) -> None:
        self.num += 1
        self.value += (value - self.value) * max(1.0 / self.num, _NEW_SHARE)


class TrafficMeter:
    """One gateway's. ttft_s, tpot_s: the limits that answers are judged by."""

    def __init__(self, ttft_s: float, tpot_s: float, started_at: float) -> None:
        self._ttft_s, self._tpot_s = ttft_s, tpot_s
        self._started_at = started_at
        # By the number of a second: requests that were asked and sent, and what Attainment has.
        self._seconds: deque[tuple[int, Counter[str]]] = deque()
        self._prompts = RunningQuantiles(PROMPTS)
        self._prompt_s, self._prompt_square_s = _Mean(), _Mean()
        self._prompt_tokens, self._output_tokens = _Mean(), _Mean()
        self._taken: deque[tuple[float, Mapping[Incarnation, int]]] = deque()

    # --- events ---------------------------------------------------------------------------------

    def asked(self, now: float) -> None:
        """A request came."""
        self._second(now)["num_asked"] += 1

    def sent(self, now: float) -> None:
        """An attempt of one went to the workers."""
        self._second(now)["num_sent"] += 1

    def ended(
        self,
        now: float,
        *,
        is_whole: bool,
        has_left: bool,
        num_attempts: int,
        steps: StepFit | None,
        step_tokens: int,
        num_prompt: int,
        num_cached: int,
        num_output: int,
        ttft_s: float | None,
        tpot_s: float,
    ) -> None:
        """A request ended. Who left early says nothing; who was never sent to workers was refused.
        steps, step_tokens: of who computed its prompt, None = that is not known.

        What counts of the prompt is what it computes on an idle worker, without what was cached;
        who could not keep its limit even there is judged by nobody.
        """
        if not is_whole and not has_left and not num_attempts:
            self._second(now)["num_refused"] += 1
        if not is_whole or ttft_s is None or steps is None or not steps.is_known:
            return
        # The last token is computed even if its KV is cached: token 1 comes out of it.
        start = min(num_cached, num_prompt - 1)
        prompt_s = steps.prompt_seconds(start, num_prompt, step_tokens)
        self._prompts.add(prompt_s)
        self._prompt_s.add(prompt_s)
        self._prompt_square_s.add(prompt_s * prompt_s)
        self._prompt_tokens.add(num_prompt)
        self._output_tokens.add(num_output)
        if prompt_s > self._ttft_s:
            return
        has_ttft, has_tpot = ttft_s <= self._ttft_s, tpot_s <= self._tpot_s
        self._second(now).update(
            num_judged=1,
            num_ttft_kept=has_ttft,
            num_tpot_kept=has_tpot,
            num_kept=has_ttft and has_tpot,
        )

    def taken(self, now: float, orders: Mapping[Incarnation, int]) -> None:
        """So many prompts has each worker taken from all gateways since it began."""
        self._taken.append((now, dict(orders)))
        # The oldest stays until the next is old enough: the two ends are ``SECONDS`` apart or more.
        while len(self._taken) > 1 and self._taken[1][0] <= now - SECONDS:
            self._taken.popleft()

    # --- questions ------------------------------------------------------------------------------

    def traffic(self, now: float) -> Traffic | None:
        """Return what is asked; None while nobody knows: ``RECENT_SECONDS`` from the start, until
        some answers have ended, and while all requests go to other gateways."""
        if now - self._started_at < RECENT_SECONDS:
            return None
        covered_s = min(SECONDS, now - self._started_at)
        num_asked = self._count("num_asked", now, SECONDS)
        factor = self._others_factor(now)
        if factor is None or (num_asked and self._output_tokens.num < _LEAST):
            return None
        num = max(1, min(20, len(self._prompts)))
        return Traffic(
            factor * num_asked / covered_s,
            factor * self._count("num_asked", now, RECENT_SECONDS) / RECENT_SECONDS,
            tuple(self._prompts.quantile((idx + 0.5) / num) for idx in range(num)),
            self._prompt_s.value,
            self._prompt_square_s.value,
            self._prompt_tokens.value,
            self._output_tokens.value,
        )

    def attainment(self, now: float) -> Attainment:
        """Return how the last answers fared."""
        return Attainment(*(self._count(name, now, SECONDS) for name in Attainment._fields))

    def _others_factor(self, now: float) -> float | None:
        """Return how many requests come to all gateways for each that comes here; None = all come
        to others."""
        if len(self._taken) < 2:
            return 1.0
        (since, before), (_, after) = self._taken[0], self._taken[-1]
        taken = sum(
            max(0, num - before[worker]) for worker, num in after.items() if worker in before
        )
        # What was sent, not what was asked: workers count each attempt, too.
        own = self._count("num_sent", now, max(1, round(now - since)))
        if not own:
            return None if taken else 1.0
        return max(1.0, taken / own)

    def _count(self, name: str, now: float, seconds: int) -> int:
        since = int(now) - seconds
        return sum(counts[name] for number, counts in self._seconds if number > since)

    def _second(self, now: float) -> Counter[str]:
        number = int(now)
        if not self._seconds or self._seconds[-1][0] != number:
            self._seconds.append((number, Counter()))
            # What was sent is held against ``taken``, whose two ends may be farther apart.
            first_look = int(self._taken[0][0]) if self._taken else number
            oldest = min(number - SECONDS, first_look)
            while self._seconds[0][0] < oldest:
                self._seconds.popleft()
        return self._seconds[-1][1]
