"""Policies that send a prompt where it is computed soonest: by the queue alone, with what that
worker has of it in its cache, or with what any worker has (Mooncake, FAST'25, section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from services.gateway.core.index.fetches import NOTHING, Fetches
from services.gateway.core.routing.sides import (
    AllTerms,
    AnswerTerms,
    Places,
    PromptTerms,
    RouteRequest,
    Scores,
    Sides,
)
from services.gateway.core.routing.turns import InTurn, least
from services.gateway.core.worker import Worker

MOST_SINKS = 4
"""Workers for which a fetch is looked at: those where it would serve soonest if it took no time."""

SAME = 0.1
"""No prediction is better than some per cent: what differs by less is decided by whose turn it is.
Gateways that decide at once then choose apart (bench/conductor: a lower mean TTFT than with 0.05 or
none)."""

FEW = 8
"""So many workers are looked at one by one, which is quicker than by columns."""

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
        if sides.is_whole:
            prefill = scores.source
            if prefill is None:
                prefill = self._next_source(prefills, scores.prefills)
            emptiest = least(scores.decodes, range(len(decodes)), self.equal)
        else:
            shortest = least(scores.prefills, range(len(prefills)), self.equal)
            reached = 0
            for place in shortest:
                reached |= partners[place]
            emptiest = least(scores.decodes, sides.places_of(reached), self.equal)
            if len(shortest) > 1:
                best = sum(decodes[place].bit for place in emptiest)
                shortest = [place for place in shortest if partners[place] & best]
            prefill = self.longest_ago(prefills, shortest)
            mask = partners[prefill]
            emptiest = [place for place in emptiest if decodes[place].bit & mask]
        decode = self.longest_ago(decodes, emptiest)
        self.chosen(prefills[prefill].incarnation, decodes[decode].incarnation)
        return prefill, decode

    def _next_source(self, prefills: Sequence[Worker], scores: Sequence[float]) -> int:
        return self.longest_ago(prefills, least(scores, range(len(prefills)), self.equal))


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
        """Return seconds; tokens, if no worker's speed is known and believed."""
        scores, terms = _prompt_scores(request, sides)
        return Scores(scores, _taken_shares(sides), terms)


class Conductor(Local):
    """Mooncake's conductor (FAST'25, section 5, Algorithm 1): as ``Local``, and whoever lacks the
    prompt's beginning may have it sent by who has it, if that is sooner than computing it.

        time to token 1 = max(queue, load, fetch) + what is left to compute

    A fetch runs beside the queue, as does what a worker loads from the tiers below its pool. The
    decode worker is the one with the shortest predicted time between tokens, the hand-over of KV
    that it lacks shared among the answer's tokens; one without room for the prompt comes last.
    """

    name = "conductor"
    fetches = True

    def scores(self, request: RouteRequest, sides: Sides) -> Scores:
        """Return seconds; tokens and shares, where no worker's speed is known and believed."""
        scores, terms = _prompt_scores(request, sides)
        if len(sides.decodes) > 1:
            # A hand-over's speed is of one prefill worker. Where not all are paired, another one
            # that counts as equal may be chosen after this.
            source = self._next_source(sides.prefills, scores)
            answers = _answer_scores(request, sides, sides.prefills[source])
            return Scores(scores, answers[0], terms, answers[1], source)
        return Scores(scores, _taken_shares(sides), terms)


def _prompt_scores(
    request: RouteRequest, sides: Sides
) -> tuple[Sequence[float], Sequence[PromptTerms]]:
    """Return the workers' scores, and what each is made of."""
    workers = sides.prefills
    # Fetches are weighed in columns only, and so is who is not predicted beside those who are.
    if len(workers) > FEW or request.fetches is not None:
        return _scores_in_columns(request, sides)
    known = {worker.is_predictable for worker in workers}
    if len(known) > 1:
        return _scores_in_columns(request, sides)
    terms = [_terms_of(worker, request, is_s=True in known) for worker in workers]
    return [it.score for it in terms], terms


def _scores_in_columns(
    request: RouteRequest, sides: Sides
) -> tuple[Sequence[float], Sequence[PromptTerms]]:
    """Return the same of all workers at once."""
    workers, num_tokens, fetches = sides.prefills, request.num_tokens, request.fetches
    side, _ = sides.in_columns()
    columns, cached = side.prompts(), side.cached(request.cached, num_tokens - 1)
    waits, by_load, is_s = columns.waits_s(request.now), None, True
    if not side.are_known(columns.token_s):
        by_load = columns.guess(waits, num_tokens)
        is_s = by_load is not None
    if is_s:
        computes = columns.compute_s(cached, num_tokens)
    else:
        waits, computes = columns.pending_tokens, num_tokens - cached
    scores = waits + computes
    terms = AllTerms(
        len(workers),
        lambda place: PromptTerms(
            waits.item(place),
            computes.item(place),
            int(cached.item(place)),
            is_s,
            by_load=by_load is not None and bool(by_load[place]),
        ),
    )
    if not is_s:
        return side.numbers(scores), terms
    for place in side.loading(request.cached):
        if workers[place].is_predictable:
            it = terms[place] = _terms_of(workers[place], request, is_s=True)
            scores[place] = it.score
    if fetches is not None:
        most = min(fetches.most_tokens, num_tokens - 1)
        bounds = waits + columns.compute_s(most, num_tokens)
        if by_load is not None:
            bounds[by_load] = math.inf
        for place in side.lowest(bounds, scores, MOST_SINKS):
            fetched = _with_fetch(terms[place], workers[place], request, fetches)
            if fetched is not None:
                terms[place], scores[place] = fetched, fetched.score
    return side.numbers(scores), terms


def _taken_shares(sides: Sides) -> Sequence[float]:
    """Return the decode workers' shares of blocks that are taken."""
    if len(sides.decodes) > FEW:
        return sides.in_columns()[1].shares()
    return [worker.reserved_share for worker in sides.decodes]


def _terms_of(worker: Worker, request: RouteRequest, *, is_s: bool) -> PromptTerms:
    """Return what a worker's score is made of that fetches nothing. It loads what lies below its
    pool, unless computing that is predicted to be quicker (``LowerTiers``)."""
    num_tokens, hit = request.num_tokens, request.cached.get(worker.place, NOTHING)
    # The prompt's last token is computed even if its KV is cached: token 1 comes out of it.
    cached, in_pool = min(hit.tokens, num_tokens - 1), min(hit.in_pool, num_tokens - 1)
    if not is_s:
        return PromptTerms(worker.pending_tokens, num_tokens - cached, cached, is_s=False)
    wait, compute = max(0.0, worker.free_at - request.now), _compute_s(worker, cached, num_tokens)
    if not (num_below := hit.in_dram + hit.on_ssd):
        return PromptTerms(wait, compute, cached, is_s=True)
    load = hit.in_dram * worker.status.dram_token_s + hit.on_ssd * worker.status.ssd_token_s
    without = _compute_s(worker, in_pool, num_tokens)
    if load >= without - compute:
        return PromptTerms(wait, without, in_pool, is_s=True)
    return PromptTerms(wait, compute, cached, True, load=load, loaded_tokens=num_below)


def _with_fetch(
    it: PromptTerms, worker: Worker, request: RouteRequest, fetches: Fetches
) -> PromptTerms | None:
    """Return the terms of a worker if it is ready sooner with a fetch; one that loads from below
    its pool does not fetch."""
    fetch = None if it.loaded_tokens else fetches.to(worker)
    if fetch is None:
        return None
    cached = min(fetch.num_tokens, request.num_tokens - 1)
    fetched = PromptTerms(
        it.wait,
        _compute_s(worker, cached, request.num_tokens),
        cached,
        True,
        fetch.seconds,
        fetch.source,
        cached - it.cached_tokens,
    )
    return fetched if fetched.score < it.score else None


def _compute_s(worker: Worker, cached: int, num_tokens: int) -> float:
    status = worker.status
    return status.prompt_steps.prompt_seconds(cached, num_tokens, status.step_tokens)


def _answer_scores(
    request: RouteRequest, sides: Sides, prefill: Worker
) -> tuple[Sequence[float], Sequence[AnswerTerms]]:
    """Return the seconds a token that an answer would take on each decode worker, and what each is
    made of; where they are known of none, the shares of blocks that are taken."""
    num_tokens, num_output, workers = request.num_tokens, _num_output(request), sides.decodes
    if len(workers) <= FEW and all(it.is_step_predictable for it in workers):
        few = [_answer_terms(worker, request, prefill) for worker in workers]
        return [it.score for it in few], few
    _, side = sides.in_columns()
    columns, by_load = side.answers(), None
    if not side.are_known(columns.token_s):
        by_load = columns.guess(num_tokens)
        if by_load is None:
            return _taken_shares(sides), ()
    missing = num_tokens - side.cached(request.cached, num_tokens)
    steps, are_full = columns.step_s(num_tokens)
    no_room = are_full * NO_ROOM_S
    hand_overs = missing * (workers[0].layout.token_bytes / num_output) * side.byte_s(prefill)
    terms = AllTerms(
        len(workers),
        lambda place: AnswerTerms(
            steps.item(place),
            no_room.item(place),
            hand_overs.item(place),
            by_load is not None and bool(by_load[place]),
        ),
    )
    return side.numbers(steps + no_room + hand_overs), terms


def _answer_terms(worker: Worker, request: RouteRequest, prefill: Worker) -> AnswerTerms:
    """Return the terms of one."""
    num_tokens = request.num_tokens
    context = worker.reserved_tokens + num_tokens
    step = worker.status.answer_steps.seconds(worker.num_answers + 1, context)
    hand_over = 0.0
    if (speed := prefill.status.speeds.get(worker.incarnation, 0.0)) > 0.0:
        hit = request.cached.get(worker.place, NOTHING)
        num_bytes = (num_tokens - min(hit.tokens, num_tokens)) * worker.layout.token_bytes
        hand_over = num_bytes / speed / _num_output(request)
    return AnswerTerms(step, NO_ROOM_S * (context >= worker.capacity_tokens), hand_over)


def _num_output(request: RouteRequest) -> int:
    return max(1, request.num_output_tokens or request.max_new_tokens)
