"""A live mesh's requests, replayed: what they were, and what the simulator said of them beside what
was seen.

Receipts tell how much of a prompt was cached, not whose it was: it is taken to be the beginning of
the latest earlier prompt on that worker that is long enough, or of a prompt before all of them.
Each term of TTFT and of TPOT is a mean over the requests, and terms add up to the mean. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from shared.predict.fit_steps import FittedPhase
from shared.predict.step_time import StepFit
from shared.predict.times import FittedTimes
from shared.telemetry.definitions import Slo, percentile

MOST_POINTS: Final = 0.02
MOST_P50: Final = 0.1
MOST_P99: Final = 0.2
"""How far attainment, medians and 99th percentiles may be off: points, and shares of what was
seen."""

FAR: Final = 1 << 60
"""Of coefficients that were kept without how far they hold."""

UNEQUAL: Final = 0.2
"""Share by which steps of workers of a kind may differ until it is said that they do."""


class TimeTerms(NamedTuple):
    """Where one request's time went, in seconds. gateway, prefill_queue, prefill and hand_over add
    up to TTFT; first_gap (token 1 to token 2, which hides the rest of a transfer) and later_gaps,
    each as a share of TPOT, to that."""

    gateway: float
    prefill_queue: float
    prefill: float
    hand_over: float
    first_gap: float
    later_gaps: float


TTFT_TERMS: Final = ("gateway", "prefill_queue", "prefill", "hand_over")
TPOT_TERMS: Final = ("first_gap", "later_gaps")

MEANING: Final = {
    "gateway": "waiting for a place and for a pair: what the gateway admits, or work that came "
    "from elsewhere",
    "prefill_queue": "waiting on the prefill worker: it follows from how long prompts compute and "
    "how they share steps (--batch-tokens), or other gateways sent some, too",
    "prefill": "the time model of prompts: measure it (pdmesh profile -o, then --profile), or "
    "workers compute beside others",
    "hand_over": "messages, loops and processes that wait for a core (--wire), or blocks that "
    "decode lacks: a first token waits for room",
    "first_gap": "what of a transfer no compute hides: the link (--link), messages (--wire), or "
    "blocks that decode lacks",
    "later_gaps": "the time model of answers: measure it (pdmesh profile -o, then --profile), or "
    "workers compute beside others",
}
"""Of a term that is off: what it is, and what to look at."""


class SeenRequest(NamedTuple):
    """One request of a live mesh, or what became of it in the simulator. at_s: its arrival. worker:
    who computed its prompt, '' = not known. ttft_s: None = no token came. is_whole: False = it
    failed or its client left. is_over: False = it goes on. terms: None = nobody tells them."""

    at_s: float
    num_prompt: int
    num_output: int
    ttft_s: float | None
    tpot_s: float
    is_whole: bool = True
    is_over: bool = True
    num_cached: int = 0
    worker: str = ""
    terms: TimeTerms | None = None

    @property
    def e2e_s(self) -> float:
        """Arrival to last token."""
        return (self.ttft_s or 0.0) + self.tpot_s * max(0, self.num_output - 1)

    def meets(self, slo: Slo) -> bool:
        """Whether it kept both limits."""
        is_kept = self.ttft_s is not None and self.ttft_s <= slo.ttft_s
        return self.is_whole and is_kept and self.tpot_s <= slo.tpot_s


def terms_of(
    ttft_s: float,
    tpot_s: float,
    num_output: int,
    *,
    gateway: float,
    prefill_queue: float,
    prefill: float,
    first_gap_s: float,
) -> TimeTerms:
    """Return the terms; what is not named of TTFT is hand-over."""
    hand_over = ttft_s - gateway - prefill_queue - prefill
    first_gap = first_gap_s / (num_output - 1) if num_output > 1 else 0.0
    return TimeTerms(gateway, prefill_queue, prefill, hand_over, first_gap, tpot_s - first_gap)


Prompts = list[tuple[int, ...]]


def replay_of(seen: Sequence[SeenRequest]) -> tuple[Prompts, Prompts]:
    """Return prompts before all others, from which some had a beginning, and prompts of the lengths
    seen, with as much in common as was cached; both as tokens."""
    seeds: Prompts = []
    prompts: Prompts = []
    before: dict[str, Prompts] = {}
    for number, it in enumerate(seen, 1):
        num_cached = min(it.num_cached, it.num_prompt - 1)
        # One token for each request: nobody finds more of it in a cache than was found.
        own = (number,) * (it.num_prompt - num_cached)
        known = before.setdefault(it.worker, [])
        prompt = own
        if num_cached:
            donor = next((one for one in reversed(known) if len(one) >= num_cached), None)
            if donor is None:
                donor = (len(seen) + number,) * (num_cached + 1)
                seeds.append(donor)
            prompt = donor[:num_cached] + own
        known.append(prompt)
        prompts.append(prompt)
    return seeds, prompts


def fitted_times(prompts: Sequence[StepFit], answers: Sequence[StepFit]) -> FittedTimes | None:
    """Return the time model of what workers report of their steps in the mean, and of those that
    know the mean; None: nobody does. prompts: of those who compute prompts; answers: likewise.

    Who has run few steps knows those before it joined, which others that started then may have
    slowed: it counts from half as many steps on as who has run most.
    """
    lines = [_mean(_well_known(fits)) for fits in (prompts, answers)]
    prompt, answer = lines
    if prompt is None or answer is None:
        return None
    errors = f"their own errors {prompt.error:.1%} with prompts, {answer.error:.1%} without"
    return FittedTimes(prompt, answer, f"what workers report of their steps; {errors}")


def are_unequal(fits: Sequence[StepFit], num_tokens: int, num_attended: int) -> bool:
    """Whether workers' steps of that size differ by more than a few per cent."""
    seconds = [fit.seconds(num_tokens, num_attended) for fit in fits if fit.is_known]
    return bool(seconds) and max(seconds) > (1 + UNEQUAL) * min(seconds)


def _well_known(fits: Sequence[StepFit]) -> list[StepFit]:
    most = max((fit.num_steps for fit in fits), default=0)
    return [fit for fit in fits if fit.is_known and 2 * fit.num_steps >= most]


def _mean(fits: Sequence[StepFit]) -> FittedPhase | None:
    if not fits:
        return None
    num = len(fits)
    return FittedPhase(
        constant_s=sum(fit.mean_ratio * fit.constant_s for fit in fits) / num,
        token_s=sum(fit.mean_ratio * fit.token_s for fit in fits) / num,
        attended_s=sum(fit.mean_ratio * fit.attended_s for fit in fits) / num,
        error=max(fit.error_p50 for fit in fits),
        # A gateway's JSON has floats for them.
        num_steps=int(sum(fit.num_steps for fit in fits)),
        most_tokens=int(max(fit.most_tokens for fit in fits)) or FAR,
        most_attended=int(max(fit.most_attended for fit in fits)) or FAR,
    )


class Figure(NamedTuple):
    """One figure, seen and predicted: a share, or seconds. error: points of a share, else a share
    of what was seen. bar: how far it may be off."""

    name: str
    seen: float
    predicted: float
    error: float
    bar: float

    @property
    def is_kept(self) -> bool:
        """Whether it is within its bar."""
        return abs(self.error) <= self.bar


class TermOff(NamedTuple):
    """A term of TTFT or of TPOT (of): means of seconds."""

    of: str
    name: str
    seen: float
    predicted: float


class Comparison(NamedTuple):
    """A replay beside what was seen."""

    figures: list[Figure]
    terms: list[TermOff]

    @property
    def is_kept(self) -> bool:
        """Whether all figures are within their bars."""
        return all(figure.is_kept for figure in self.figures)

    def worst(self, of: str) -> TermOff | None:
        """Return the term of TTFT or TPOT that is off most, if one of its figures is."""
        if all(it.is_kept for it in self.figures if it.name.startswith(of)):
            return None
        own = [term for term in self.terms if term.of == of]
        return max(own, key=lambda it: abs(it.predicted - it.seen), default=None)


def compare(seen: Sequence[SeenRequest], predicted: Sequence[SeenRequest], slo: Slo) -> Comparison:
    """Hold a replay against what was seen, request by request in the same order; those that go on
    are left out on both sides."""
    pairs = [(was, said) for was, said in zip(seen, predicted, strict=True) if was.is_over]
    shares = [sum(it.meets(slo) for it in side) / len(pairs) for side in zip(*pairs, strict=True)]
    error = shares[1] - shares[0]
    figures = [Figure("attainment", shares[0], shares[1], error, MOST_POINTS)]
    has_both = [(a, b) for a, b in pairs if a.is_whole and b.is_whole]
    ttft = [[it.ttft_s or 0.0 for it in pair] for pair in has_both]
    tpot = [[it.tpot_s for it in pair] for pair in has_both if pair[0].num_output > 1]
    for name, values in (("TTFT", ttft), ("TPOT", tpot)):
        for q, bar in ((50, MOST_P50), (99, MOST_P99)):
            if values:
                was, said = (percentile([it[side] for it in values], q) for side in (0, 1))
                error = (said - was) / was if was else 0.0
                figures.append(Figure(f"{name} p{q}", was, said, error, bar))
    return Comparison(figures, _terms(has_both))


Pairs = Sequence[tuple[SeenRequest, SeenRequest]]


def _terms(pairs: Pairs) -> list[TermOff]:
    found: list[TermOff] = []
    told = [(a, b, a.terms, b.terms) for a, b in pairs]
    for of, names in (("TTFT", TTFT_TERMS), ("TPOT", TPOT_TERMS)):
        own = [
            (was, said)
            for a, _, was, said in told
            if was is not None and said is not None and (of == "TTFT" or a.num_output > 1)
        ]
        for name in names if own else ():
            sums = [sum(getattr(it[side], name) for it in own) for side in (0, 1)]
            found.append(TermOff(of, name, sums[0] / len(own), sums[1] / len(own)))
    return found
