"""Routing: choose the pair (prefill, decode) for a request in one decision.

A colocated worker is a pair with itself and competes as any other pair does.

A policy is a pure function of the workers' views, the request's size and one random number; its
answer is a record that can be logged and replayed. JSQ as in Splitwise (arXiv 2311.18677, section
4.1: pending tokens for prompts) with the decode side by reserved memory, as in its public
simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.gateway.core.peer_table import Worker
from shared.ids import Incarnation

Pair = tuple[Worker, Worker]

MAX_REMEMBERED = 4096
"""Workers whose last choice is remembered; more than can be here at once."""

MAX_LOGGED = 8
"""Candidates in a logged decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a policy may know of a request. avoid: workers that failed an earlier attempt."""

    num_tokens: int
    max_new_tokens: int
    avoid: frozenset[Incarnation] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One pair and its scores; lower is better."""

    prefill: Incarnation
    decode: Incarnation
    prefill_score: float
    decode_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteDecision:
    """Which pair, and why: the whole table of candidates that the policy saw."""

    policy: str
    prefill: Incarnation
    decode: Incarnation
    candidates: tuple[Candidate, ...]

    @property
    def is_colocated(self) -> bool:
        """Whether one worker does it all."""
        return self.prefill == self.decode

    def as_dict(self) -> dict[str, Any]:
        """Return the record as it is logged: of many candidates the best few, and how many there
        were. Incarnations in hexadecimal."""
        best = sorted(self.candidates, key=lambda c: (c.prefill_score, c.decode_score))
        return {
            "policy": self.policy,
            "prefill": f"{self.prefill:016x}",
            "decode": f"{self.decode:016x}",
            "num_candidates": len(self.candidates),
            "candidates": [
                {
                    "prefill": f"{c.prefill:016x}",
                    "decode": f"{c.decode:016x}",
                    "prefill_score": c.prefill_score,
                    "decode_score": round(c.decode_score, 4),
                }
                for c in best[:MAX_LOGGED]
            ],
        }


class RoutingPolicy(Protocol):
    """Chooses among pairs that can all take the request; never called with an empty list."""

    name: str

    def choose(self, request: RouteRequest, pairs: Sequence[Pair], random: float) -> Pair:
        """Return one of ``pairs``. random: uniform in [0, 1), drawn by the shell for this
        decision."""
        ...

    def score(self, pair: Pair) -> tuple[float, float]:
        """Return the numbers that this policy compares, for the record."""
        ...


class RoundRobin:
    """Each role in turn, each with its own counter, so that 2 x 2 workers see all four pairs."""

    name = "round_robin"

    def __init__(self) -> None:
        self._num_decisions = 0

    def choose(self, request: RouteRequest, pairs: Sequence[Pair], random: float) -> Pair:
        """Return the next pair."""
        turn = self._num_decisions
        self._num_decisions += 1
        prefills = _distinct(prefill for prefill, _ in pairs)
        prefill = prefills[turn % len(prefills)]
        decodes = [decode for p, decode in pairs if p is prefill]
        return prefill, decodes[(turn // len(prefills)) % len(decodes)]

    def score(self, pair: Pair) -> tuple[float, float]:
        """Round robin compares nothing."""
        return 0.0, 0.0


class Random:
    """Any pair with equal probability."""

    name = "random"

    def choose(self, request: RouteRequest, pairs: Sequence[Pair], random: float) -> Pair:
        """Return a random pair."""
        return pairs[min(int(random * len(pairs)), len(pairs) - 1)]

    def score(self, pair: Pair) -> tuple[float, float]:
        """A random choice compares nothing."""
        return 0.0, 0.0


class LeastLoaded:
    """Join the shortest queue: pending tokens for prefill, share of reserved blocks for decode.

    Ties go to the one chosen longest ago, so that idle workers share the work.
    """

    name = "least_loaded"

    def __init__(self) -> None:
        self._num_decisions = 0
        self._last_chosen: dict[Incarnation, int] = {}

    def choose(self, request: RouteRequest, pairs: Sequence[Pair], random: float) -> Pair:
        """Return the pair with the shortest prefill queue, then the emptiest decode worker."""
        self._num_decisions += 1

        def key(pair: Pair) -> tuple[float, float, int, int]:
            prefill, decode = pair
            prefill_score, decode_score = self.score(pair)
            return (
                prefill_score,
                decode_score,
                self._last_chosen.get(prefill.incarnation, 0),
                self._last_chosen.get(decode.incarnation, 0),
            )

        chosen = min(pairs, key=key)
        for worker in chosen:
            self._last_chosen.pop(worker.incarnation, None)
            self._last_chosen[worker.incarnation] = self._num_decisions
        if len(self._last_chosen) > MAX_REMEMBERED:  # the one chosen longest ago has left
            del self._last_chosen[next(iter(self._last_chosen))]
        return chosen

    def score(self, pair: Pair) -> tuple[float, float]:
        """Return (pending tokens, share of blocks reserved)."""
        prefill, decode = pair
        return float(prefill.pending_tokens), decode.reserved_blocks / max(1, decode.num_blocks)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
}
"""Name on the command line -> policy."""


def route(
    policy: RoutingPolicy, request: RouteRequest, pairs: Sequence[Pair], random: float
) -> RouteDecision | None:
    """Choose a pair, or return None if none can take the request now.

    Pairs whose decode worker is too small for the prompt are left out; workers to avoid are used
    only if nothing else is left.
    """
    fitting = [
        (prefill, decode)
        for prefill, decode in pairs
        if decode.blocks_for(request.num_tokens + 1) <= decode.num_blocks
        and prefill.blocks_for(request.num_tokens) <= prefill.num_blocks
    ]
    usable = _avoiding(fitting, request.avoid)
    if not usable:
        return None
    table = tuple(
        Candidate(
            prefill=prefill.incarnation,
            decode=decode.incarnation,
            prefill_score=scores[0],
            decode_score=scores[1],
        )
        for prefill, decode in usable
        for scores in (policy.score((prefill, decode)),)
    )
    prefill, decode = policy.choose(request, usable, random)
    return RouteDecision(
        policy=policy.name,
        prefill=prefill.incarnation,
        decode=decode.incarnation,
        candidates=table,
    )


def _avoiding(pairs: Sequence[Pair], avoid: Collection[Incarnation]) -> list[Pair]:
    """Drop the pairs with most avoided workers while something is left."""
    if not pairs:
        return []
    num_avoided = [sum(worker.incarnation in avoid for worker in pair) for pair in pairs]
    fewest = min(num_avoided)
    return [pair for pair, count in zip(pairs, num_avoided, strict=True) if count == fewest]


def _distinct(workers: Iterable[Worker]) -> list[Worker]:
    return list({worker.incarnation: worker for worker in workers}.values())
