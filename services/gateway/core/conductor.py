"""Policies that send a prompt where it is computed soonest: by the queue alone, with what that
worker has of it in its cache, or with what any worker has (Mooncake, FAST'25, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from operator import add, attrgetter

from services.gateway.core.fetches import Fetches
from services.gateway.core.sides import (
    AllPromptTerms,
    InTurn,
    Places,
    PromptTerms,
    RouteRequest,
    Scores,
    Sides,
)
from services.gateway.core.turns import least
from services.gateway.core.worker import Worker

MOST_SINKS = 4
"""Workers for which a fetch is looked at: those where it would serve soonest if it took no time."""

SAME = 0.1
"""No prediction is better than some per cent: what differs by less is decided by whose turn it is.
Gateways that decide at once then choose apart (bench/conductor: a lower mean TTFT than with 0.05 or
none)."""

_IS_PREDICTABLE = attrgetter("is_predictable")
_IS_STEP_PREDICTABLE = attrgetter("is_step_predictable")

NO_ROOM_S = 1000.0
"""Added to the score of a decode worker that would have to make room first."""


class LeastLoaded(InTurn):
    """Join the shortest queue: pending tokens for prefill, share of reserved blocks for decode.

    Ties go to the one chosen longest ago, so that idle workers share the work.
    """

    name = "least_loaded"
    score_prefill = staticmethod(attrgetter("pending_tokens"))
    score_decode = staticmethod(attrgetter("reserved_share"))
    equal = 0.0
    """By what share scores may differ that count as the same."""

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return the shortest prefill queue, then the emptiest decode worker that it reaches; of
        equal queues one that reaches the emptiest."""
        prefills, partners, decodes = sides.prefills, sides.partners, sides.decodes
        shortest = least(scores.prefills, range(len(prefills)), self.equal)
        reached = 0
        for place in shortest:
            reached |= partners[place]
        emptiest = least(scores.decodes, sides.places_of(reached), self.equal)
        if len(shortest) > 1:
            best = sum(decodes[place].bit for place in emptiest)
            shortest = [place for place in shortest if partners[place] & best]
        prefill = self._turns.longest_ago(prefills, shortest)
        mask = partners[prefill]
        emptiest = [place for place in emptiest if decodes[place].bit & mask]
        decode = self._turns.longest_ago(decodes, emptiest)
        self._turns.chosen(prefills[prefill].incarnation, decodes[decode].incarnation)
        return prefill, decode


class Local(LeastLoaded):
    """The least predicted time until the prompt is computed: the queue, and what the worker does
    not have of the prompt, at the worker's own speed (Mooncake's cache-aware scheduling, FAST'25,
    section 5: Algorithm 1 without transfers between prefill workers).

    Only such a sum is safe. Who has the longest prefix gets everything where all prompts begin
    alike; the shortest queue alone computes everything everywhere.
    """

    name = "local"
    needs_prefixes = True

    equal = SAME

    def scores(self, request: RouteRequest, sides: Sides) -> Scores:
        """Return seconds; tokens, if not every worker's speed is known and believed."""
        terms, scores = _prompt_terms(request, sides.prefills)
        return Scores(scores, list(map(self.score_decode, sides.decodes)), terms)


class Conductor(Local):
    """Mooncake's conductor (FAST'25, section 5, Algorithm 1): as ``Local``, and whoever lacks the
    prompt's beginning may have it sent by who has it, if that is sooner than computing it.

        time to token 1 = max(queue, fetch) + what is left to compute

    A fetch runs beside the queue. The decode worker is the one with the shortest predicted time
    between tokens, the hand-over of KV that it lacks shared among the answer's tokens; one without
    room for the prompt comes last.
    """

    name = "conductor"
    fetches = True

    def scores(self, request: RouteRequest, sides: Sides) -> Scores:
        """Return seconds; tokens and shares, where not every worker's speed is known and
        believed."""
        terms, scores = _prompt_terms(request, sides.prefills)
        if request.fetches is not None and terms[0].is_s:
            _consider_fetches(request, request.fetches, sides.prefills, terms, scores)
        soonest = sides.prefills[scores.index(min(scores))]
        return Scores(scores, _answer_scores(request, sides, soonest), terms)


def _prompt_terms(
    request: RouteRequest, workers: Sequence[Worker]
) -> tuple[AllPromptTerms, list[float]]:
    """Return what each worker's score is made of, and the scores."""
    num_tokens, now, is_s = request.num_tokens, request.now, all(map(_IS_PREDICTABLE, workers))
    # The last token is computed in any case: the first one of the answer comes out of it.
    most, cached_of = num_tokens - 1, request.cached.get
    cached = [cached_of(worker.incarnation, 0) for worker in workers] if request.cached else []
    cached = [min(it, most) for it in cached] or [0] * len(workers)
    if is_s:
        waits = [max(0.0, worker.free_at - now) for worker in workers]
        computes = [
            _compute_s(worker, num, num_tokens) for worker, num in zip(workers, cached, strict=True)
        ]
    else:
        waits = [float(worker.pending_tokens) for worker in workers]
        computes = [float(num_tokens - num) for num in cached]
    return AllPromptTerms(waits, computes, cached, is_s=is_s), list(map(add, waits, computes))


def _consider_fetches(
    request: RouteRequest,
    fetches: Fetches,
    workers: Sequence[Worker],
    terms: AllPromptTerms,
    scores: list[float],
) -> None:
    """Replace terms and scores of workers that are sooner ready with a fetch."""
    best, most = min(scores), min(fetches.most_tokens, request.num_tokens - 1)
    bounds = [
        (wait + _compute_s(workers[place], most, request.num_tokens), place)
        for place, wait in enumerate(terms.waits)
        if wait < best
    ]
    for bound, place in nsmallest(MOST_SINKS, bounds):
        if bound >= best:
            break
        it, worker = terms[place], workers[place]
        fetch = fetches.to(worker)
        if fetch is None:
            continue
        num_tokens = min(fetch.num_tokens, request.num_tokens - 1)
        fetched = PromptTerms(
            it.wait,
            _compute_s(worker, num_tokens, request.num_tokens),
            num_tokens,
            True,
            fetch.seconds,
            fetch.source,
            num_tokens - it.cached_tokens,
        )
        if fetched.score < it.score:
            terms[place], scores[place] = fetched, fetched.score


def _compute_s(worker: Worker, cached: int, num_tokens: int) -> float:
    status = worker.status
    return status.prompt_steps.prompt_seconds(cached, num_tokens, status.step_tokens)


def _answer_scores(request: RouteRequest, sides: Sides, prefill: Worker) -> list[float]:
    """Return the seconds a token that an answer would take on each decode worker."""
    decodes, num_tokens = sides.decodes, request.num_tokens
    if not all(map(_IS_STEP_PREDICTABLE, decodes)):
        return [worker.reserved_share for worker in decodes]
    num_output = max(1, request.num_output_tokens or request.max_new_tokens)
    bytes_of = decodes[0].layout.token_bytes / num_output
    speed_of, cached_of = prefill.status.speeds.get, request.cached.get
    scores: list[float] = []
    for worker in decodes:
        context = worker.reserved_tokens + num_tokens
        seconds = worker.status.answer_steps.seconds(worker.num_answers + 1, context)
        speed = speed_of(worker.incarnation, 0.0)
        if speed > 0.0:
            seconds += (num_tokens - cached_of(worker.incarnation, 0)) * bytes_of / speed
        if worker.reserved_tokens + num_tokens >= worker.capacity_tokens:
            seconds += NO_ROOM_S
        scores.append(seconds)
    return scores
