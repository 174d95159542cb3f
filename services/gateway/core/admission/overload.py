"""Overload: refuse before work is wasted what would miss its own limits (Mooncake, arXiv
2407.00079, section 6).

The load of a stage is what it would take over what it may: time to the first token for prefill,
time between tokens for decode, each over the request's own limit. A request is refused where one
of them is above 1.

It is judged when it is about to be sent, by the pair that the routing policy has chosen: whatever a
policy compares, what is predicted and what happens mean the same workers. One that has to wait
first is judged as it arrives, too, by the pair that suits it best: if that is too late, all are.

| mode | before its prompt is computed | and afterwards |
|---|---|---|
| off | | |
| stage | prefill | decode: what is refused here was computed for nothing |
| early | prefill, and decode by what is claimed there | likewise |
| predicted | prefill, and decode by what will run when the prompt is computed | likewise |

*Claimed*: room on decode is reserved as the prompt is sent, so answers whose prompts are computed
still count at once; load by those that run alone, as in the paper, swings. *Will run*: of the
answers that run and of those whose prompts will be computed by then, the part that will not have
ended, exp(-time / mean). (The paper gives each answer the mean time; at long answers and long
queues that forgets all that outlast it.) Only a request with a limit can be refused, and none that
has a token. Pure: ``now`` is an argument, seconds come from ``ReportedSpeeds``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from services.gateway.core.admission.tenants import Terms
from services.gateway.core.index.fetches import NOTHING, Hit
from services.gateway.core.routing.sides import NO_HITS, Sides
from services.gateway.core.worker import Worker
from shared.errors import WouldBeLate
from shared.ids import Incarnation

Cached = Callable[[float], Mapping[int, Hit]]
"""What workers have of a prompt at a time, by their places; asked only where it counts."""

MOST_ANSWERS = 1 << 16
"""No batch is larger."""

_NEW_SHARE = 0.05
"""Of the newest answer in the mean of how long answers last."""

_LEAST_ANSWER_S = 1e-3
"""What an answer counts as at least: uvloop's clock stands still for a millisecond."""

_SIGMAS = 2.0
"""Above the mean: what is hardly ever exceeded. At the mean itself every second prompt at
the limit would be computed for nothing."""


class OverloadMode(StrEnum):
    """When a request that would be late is refused."""

    OFF = "off"
    STAGE = "stage"
    EARLY = "early"
    PREDICTED = "predicted"


class ReportedSpeeds:
    """How fast workers are, in seconds, by what they report of their own steps; 0 = nothing is
    known, or its predictions have not come true lately, so that nobody is refused."""

    def queue_s(self, worker: Worker, now: float) -> float:
        """Until a prompt that is sent there now begins."""
        return sum(worker.wait_s(now)) if worker.is_predictable else 0.0

    def prompt_s(self, worker: Worker, num_tokens: int, num_cached: int = 0) -> float:
        """From then until what its cache does not have is computed; its last token always is."""
        return worker.status.prompt_s(num_tokens, num_cached) if worker.is_predictable else 0.0

    def step_s(self, worker: Worker, num_others: int, num_tokens: int) -> float:
        """One step of an answer to a prompt of so many tokens, the time between its tokens, beside
        others with as much context as those that it holds have. Grows with both numbers."""
        if not worker.is_step_predictable:
            return 0.0
        context = worker.reserved_tokens / worker.num_answers if worker.num_answers else 0.0
        num_attended = round(num_others * context) + num_tokens
        return worker.status.answer_steps.seconds(num_others + 1, num_attended)


class Asking(NamedTuple):
    """A prompt that is to be computed in time. waited_s: what of its time is gone, and what it will
    wait before it is sent."""

    terms: Terms
    num_tokens: int
    waited_s: float


class ChosenPair(NamedTuple):
    """The workers that a prompt is to go to. decode: None = it gets one token only. num_cached: of
    the prompt need not be computed. prefix_s: what a prefix that is fetched or loaded takes longer
    than the queue."""

    prefill: Worker
    decode: Worker | None
    num_cached: int = 0
    prefix_s: float = 0.0


class Forecast(NamedTuple):
    """What a request would see, in seconds. alone: with its workers to itself. retry: when the
    limit between tokens could be kept, if ever."""

    ttft_s: float = 0.0
    tbt_s: float = 0.0
    ttft_alone_s: float = 0.0
    tbt_alone_s: float = 0.0
    tbt_retry_s: float = 0.0


@dataclass(slots=True)
class _AnswerInHand:
    """An answer of this gateway. first_token_at: expected, until it is there."""

    decode: Incarnation
    first_token_at: float
    has_begun: bool = False


class Overload:
    """The answers in hand, and what follows from them for the next one."""

    def __init__(self, mode: OverloadMode, speeds: ReportedSpeeds | None = None) -> None:
        self.mode = mode
        self._speeds = speeds or ReportedSpeeds()
        self._answers: dict[Hashable, _AnswerInHand] = {}
        self._on: dict[Incarnation, dict[Hashable, _AnswerInHand]] = {}
        # Infinite = no answer has ended yet: none of those that run is expected to end.
        self._mean_s = math.inf

    # --- events ---------------------------------------------------------------------------------

    def dispatched(self, key: Hashable, pair: ChosenPair, num_tokens: int, now: float) -> None:
        """An attempt goes to a pair; told before its order counts there."""
        if self.mode is OverloadMode.OFF or pair.decode is None:
            return  # answers on decode are counted: one without it takes no place there
        before = self._forget(key)
        first_token_at = now + sum(self._until_computed(pair, num_tokens, now))
        answer = _AnswerInHand(pair.decode.incarnation, first_token_at)
        if before is not None and before.has_begun:  # its worker was lost: it goes on
            answer.first_token_at, answer.has_begun = before.first_token_at, True
        self._answers[key] = answer
        self._on.setdefault(pair.decode.incarnation, {})[key] = answer

    def began(self, key: Hashable, now: float) -> None:
        """Its first token is out."""
        answer = self._answers.get(key)
        if answer is not None and not answer.has_begun:
            answer.first_token_at, answer.has_begun = now, True

    def ended(self, key: Hashable, now: float) -> None:
        """It is over, in whatever way."""
        answer = self._forget(key)
        if answer is not None and answer.has_begun:
            lasted_s = max(now - answer.first_token_at, _LEAST_ANSWER_S)
            if self._mean_s == math.inf:
                self._mean_s = lasted_s
            self._mean_s += _NEW_SHARE * (lasted_s - self._mean_s)

    def _forget(self, key: Hashable) -> _AnswerInHand | None:
        answer = self._answers.pop(key, None)
        if answer is not None:
            on = self._on[answer.decode]
            del on[key]
            if not on:
                del self._on[answer.decode]
        return answer

    # --- questions ------------------------------------------------------------------------------

    def late_anywhere(
        self, asking: Asking, sides: Sides, now: float, cached: Cached = lambda now: NO_HITS
    ) -> WouldBeLate | None:
        """Return why a prompt would be late even at the pair that suits it best, or None."""
        if self.mode is OverloadMode.OFF or not asking.terms.has_limit or not sides:
            return None
        return self.late_at(asking, self._best_pair(asking, sides, now, cached(now)), now)

    def late_at(self, asking: Asking, pair: ChosenPair, now: float) -> WouldBeLate | None:
        """Return why a prompt is not worth computing at this pair, or None."""
        if self.mode is OverloadMode.OFF:
            return None
        return late(asking.terms, self.forecast(asking, pair, now))

    def refusal_at_decode(
        self, terms: Terms, num_tokens: int, decode: Worker, now: float
    ) -> WouldBeLate | None:
        """Return why an answer whose prompt is computed is not worth beginning, or None."""
        if self.mode is OverloadMode.OFF or terms.tpot_s == math.inf:
            return None
        num_others = self._num_running(decode)
        return late(terms, self._between_tokens(terms, num_tokens, decode, num_others, now))

    def forecast(self, asking: Asking, pair: ChosenPair, now: float) -> Forecast:
        """Return what a prompt that is sent there now would see; zeros of who cannot be
        predicted."""
        queue_s, alone_s = self._until_computed(pair, asking.num_tokens, now)
        forecast, decode = Forecast(), pair.decode
        if decode is not None and self.mode is not OverloadMode.STAGE:
            num_others = self._num_then(decode, now, queue_s + alone_s)
            forecast = self._between_tokens(
                asking.terms, asking.num_tokens, decode, num_others, now
            )
        return forecast._replace(ttft_s=asking.waited_s + queue_s + alone_s, ttft_alone_s=alone_s)

    def _between_tokens(
        self, terms: Terms, num_tokens: int, decode: Worker, num_others: int, now: float
    ) -> Forecast:
        """Return the forecast of an answer beside so many others."""
        tbt_s = self._speeds.step_s(decode, num_others, num_tokens)
        retry_s = 0.0
        if tbt_s > terms.tpot_s:
            retry_s = self._retry_s(decode, num_others, num_tokens, terms.tpot_s, now)
        return Forecast(
            tbt_s=tbt_s,
            tbt_alone_s=self._speeds.step_s(decode, 0, num_tokens),
            tbt_retry_s=retry_s,
        )

    def _until_computed(self, pair: ChosenPair, num_tokens: int, now: float) -> tuple[float, float]:
        """Return how long a prompt waits there, and how long it takes then; zeros = not known."""
        alone_s = self._speeds.prompt_s(pair.prefill, num_tokens, pair.num_cached)
        if not alone_s:
            return 0.0, 0.0
        return self._speeds.queue_s(pair.prefill, now) + pair.prefix_s, alone_s

    def _best_pair(
        self, asking: Asking, sides: Sides, now: float, cached: Mapping[int, Hit]
    ) -> ChosenPair:
        """Return the soonest prefill worker of those that reach a decode worker which keeps the
        limit between tokens, if there are such, and its best partner. Who cannot be predicted is
        taken only where nobody can."""
        pairs = [
            ChosenPair(worker, None, cached.get(worker.place, NOTHING).tokens)
            for worker in sides.prefills
        ]
        ttfts_s = [sum(self._until_computed(it, asking.num_tokens, now)) for it in pairs]
        soonest_s = ttfts_s[_least_known(ttfts_s, range(len(pairs)))]
        tbts_s = [
            self._speeds.step_s(it, self._num_then(it, now, soonest_s), asking.num_tokens)
            for it in sides.decodes
        ]
        keeping = sum(
            worker.bit
            for worker, tbt_s in zip(sides.decodes, tbts_s, strict=True)
            if 0.0 < tbt_s <= asking.terms.tpot_s
        )
        reaching = [idx for idx, mask in enumerate(sides.partners) if mask & keeping]
        prefill = _least_known(ttfts_s, reaching or range(len(pairs)))
        decode = _least_known(tbts_s, sides.partners_of(prefill))
        return pairs[prefill]._replace(decode=sides.decodes[decode])

    def _num_then(self, decode: Worker, now: float, in_s: float) -> int:
        """Return how many answers count there for a prompt that is computed so much later."""
        if self.mode is OverloadMode.PREDICTED:
            return self._num_in(decode, now, in_s)
        return decode.num_answers

    def _num_running(self, decode: Worker) -> int:
        own = self._on.get(decode.incarnation, {}).values()
        # The report counts other gateways' answers, too, but is older than our own newest ones.
        return max(decode.status.num_running, sum(answer.has_begun for answer in own))

    def _num_in(self, decode: Worker, now: float, in_s: float) -> int:
        """Return how many answers will run there so much later, at most (``_SIGMAS``)."""
        own = self._on.get(decode.incarnation, {}).values()
        # Of other gateways' answers nothing is known but their number: they count as if none ended.
        at, num, variance = now + in_s, float(max(0, decode.num_answers - len(own))), 0.0
        for answer in own:
            begins_at = now if answer.has_begun else max(now, answer.first_token_at)
            if begins_at <= at:
                share = math.exp((begins_at - at) / self._mean_s)
                num += share
                variance += share * (1.0 - share)
        return min(decode.num_answers, math.ceil(num + _SIGMAS * math.sqrt(variance)))

    def _retry_s(
        self, decode: Worker, num_others: int, num_tokens: int, tpot_s: float, now: float
    ) -> float:
        """Return when one answer more could run there within this limit."""
        low, high = 0, MOST_ANSWERS
        while low < high:  # the most others beside which it keeps it
            middle = (low + high + 1) // 2
            if self._speeds.step_s(decode, middle, num_tokens) <= tpot_s:
                low = middle
            else:
                high = middle - 1
        own = self._on.get(decode.incarnation, {}).values()
        ends = sorted(answer.first_token_at + self._mean_s for answer in own)
        num_over = max(1, num_others - low)  # 0 if not even it alone would keep it
        if num_over > len(ends) or ends[num_over - 1] == math.inf:
            return 1.0  # nobody knows
        return max(0.0, ends[num_over - 1] - now)


def _least_known(seconds: Sequence[float], places: Iterable[int]) -> int:
    """Return that place of the least; 0 = not known, and taken only where nothing is."""
    return min(places, key=lambda it: seconds[it] or math.inf)


def late(terms: Terms, forecast: Forecast) -> WouldBeLate | None:
    """Return the error that says which limit would be missed, by how much, and when to come back;
    None if both would be kept."""
    missed: list[str] = []
    codes: list[str] = []
    retry_s = 0.0
    ttft_s, tbt_s, ttft_alone_s, tbt_alone_s, tbt_retry_s = forecast
    # A queue of so many seconds is gone after as many.
    of_ttft = (ttft_s, terms.ttft_s, ttft_s - terms.ttft_s, ttft_alone_s)
    of_tbt = (tbt_s, terms.tpot_s, tbt_retry_s, tbt_alone_s)
    for code, name, field, hint, (would_s, limit_s, after_s, alone_s) in (
        ("slo_ttft", "time to first token", "ttft_ms", ", or shorten the prompt", of_ttft),
        ("slo_tbt", "time between tokens", "tpot_ms", "", of_tbt),
    ):
        if would_s <= limit_s:
            continue
        codes.append(code)
        missed.append(
            f"its {name} would be {_text(would_s)}, {_text(would_s - limit_s)} over its limit"
        )
        if alone_s > limit_s:
            after_s, raised = math.inf, f"raise {field} to {math.ceil(alone_s * 1e3)}{hint}"
            missed.append(f"which even an idle worker cannot keep: {raised}")
        retry_s = max(retry_s, after_s)
    if not codes:
        return None
    if retry_s < math.inf:
        retry_s = max(0.1, retry_s)
        missed.append(f"come back in {_text(retry_s)}")
    return WouldBeLate(
        f"not computed: {', '.join(missed)}",
        param="tpot_ms" if codes == ["slo_tbt"] else "ttft_ms",
        code="slo_both" if len(codes) == 2 else "slo_tbt" if codes == ["slo_tbt"] else "slo_ttft",
        retry_after_s=0.0 if retry_s == math.inf else round(retry_s, 3),
    )


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 100.0 else f"{seconds:.0f} s"
