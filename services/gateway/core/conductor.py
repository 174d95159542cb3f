"""Policies that send a prompt where it is computed soonest: by the queue alone, with what that
worker has of it in its cache, or with what any worker has (Mooncake, FAST'25, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from operator import attrgetter

from services.gateway.core.fetches import Fetches
from services.gateway.core.sides import InTurn, Places, PromptTerms, RouteRequest, Scores, Sides
from services.gateway.core.turns import least
from services.gateway.core.worker import Worker

MOST_SINKS = 4
"""Workers for which a fetch is looked at: those where it would serve soonest if it took no time."""

NO_ROOM_S = 1000.0
"""Added to the score of a decode worker that would have to make room first."""


class LeastLoaded(InTurn):
    """Join the shortest queue: pending tokens for prefill, share of reserved blocks for decode.

    Ties go to the one chosen longest ago, so that idle workers share the work.
    """

    name = "least_loaded"
    score_prefill = staticmethod(attrgetter("pending_tokens"))
    score_decode = staticmethod(attrgetter("reserved_share"))

    def choose(self, request: RouteRequest, sides: Sides, scores: Scores, random: float) -> Places:
        """Return the shortest prefill queue, then the emptiest decode worker that it reaches; of
        equal queues one that reaches the emptiest."""
        prefills, partners, decodes = sides.prefills, sides.partners, sides.decodes
        shortest = least(scores.prefills, range(len(prefills)))
        reached = 0
        for place in shortest:
            reached |= partners[place]
        emptiest = least(scores.decodes, sides.places_of(reached))
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

    def scores(self, request: RouteRequest, sides: Sides) -> Scores:
        """Return seconds; tokens, if not every worker's speed is known and believed."""
        is_s = all(worker.is_predictable for worker in sides.prefills)
        terms = [_prompt_terms(worker, request, is_s=is_s) for worker in sides.prefills]
        return Scores(
            [_in_two_digits(it.score) for it in terms],
            list(map(self.score_decode, sides.decodes)),
            terms,
        )


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
        is_s = all(worker.is_predictable for worker in sides.prefills)
        terms = [_prompt_terms(worker, request, is_s=is_s) for worker in sides.prefills]
        if is_s and request.fetches is not None:
            _consider_fetches(request, request.fetches, sides.prefills, terms)
        scores = [it.score for it in terms]
        soonest = sides.prefills[scores.index(min(scores))]
        return Scores(
            list(map(_in_two_digits, scores)), _answer_scores(request, sides, soonest), terms
        )


def _consider_fetches(
    request: RouteRequest,
    fetches: Fetches,
    workers: Sequence[Worker],
    terms: list[PromptTerms],
) -> None:
    """Replace the terms of workers that are sooner ready with a fetch."""
    best, most = min([it.score for it in terms]), min(fetches.most_tokens, request.num_tokens - 1)
    bounds: list[tuple[float, int]] = []
    for place, it in enumerate(terms):
        if it.wait < best and it.cached_tokens < most:
            bound = it.wait + _compute_s(workers[place], most, request.num_tokens)
            if bound < best:
                bounds.append((bound, place))
    for _, place in nsmallest(MOST_SINKS, bounds):
        it, worker = terms[place], workers[place]
        fetch = fetches.to(worker)
        if fetch is None:
            continue
        num_tokens = min(fetch.num_tokens, request.num_tokens - 1)
        compute_s = _compute_s(worker, num_tokens, request.num_tokens)
        fetched = PromptTerms(
            it.wait,
            compute_s,
            num_tokens,
            True,
            fetch.seconds,
            fetch.source,
            num_tokens - it.cached_tokens,
        )
        if fetched.score < it.score:
            terms[place] = fetched


def _compute_s(worker: Worker, cached: int, num_tokens: int) -> float:
    steps, step_tokens = worker.status.prompt_steps, worker.status.step_tokens
    return steps.prompt_seconds(cached, num_tokens, step_tokens)


def _answer_scores(request: RouteRequest, sides: Sides, prefill: Worker) -> list[float]:
    """Return the seconds a token that an answer would take on each decode worker."""
    decodes = sides.decodes
    if not all(worker.is_believed and worker.status.answer_steps.is_known for worker in decodes):
        return [worker.reserved_share for worker in decodes]
    num_output = request.num_output_tokens or request.max_new_tokens
    speeds = prefill.status.speeds
    scores: list[float] = []
    for worker in decodes:
        context = worker.reserved_tokens + request.num_tokens
        seconds = worker.status.answer_steps.seconds(worker.num_answers + 1, context)
        speed = speeds.get(worker.incarnation, 0.0)
        if speed > 0.0:
            lacking = request.num_tokens - request.cached.get(worker.incarnation, 0)
            seconds += lacking * worker.layout.token_bytes / speed / max(1, num_output)
        room = worker.num_blocks - worker.reserved_blocks
        if worker.blocks_for(request.num_tokens + 1) > room:
            seconds += NO_ROOM_S
        scores.append(_in_two_digits(seconds))
    return scores


def _in_two_digits(score: float) -> float:
    """No prediction is better than some per cent: among what is equal then, the turn decides."""
    return float(f"{score:.2g}")


def _prompt_terms(worker: Worker, request: RouteRequest, *, is_s: bool) -> PromptTerms:
    # The last token is computed in any case: the first one of the answer comes out of it.
    cached = min(request.cached.get(worker.incarnation, 0), request.num_tokens - 1)
    if not is_s:
        return PromptTerms(worker.pending_tokens, request.num_tokens - cached, cached, is_s)
    compute_s = _compute_s(worker, cached, request.num_tokens)
    return PromptTerms(sum(worker.wait_s(request.now)), compute_s, cached, is_s)
