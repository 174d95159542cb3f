"""Mooncake's scheduling of prefill (arXiv 2407.00079, algorithm 1) and of overload (section 7).

Prefill instances compute one prompt after the other and keep its blocks, the least recently used
going first. Four ways to choose one: by chance, by the shortest queue, by that and its own prefix,
by that and any instance's prefix, which is fetched over the network where that is quicker. Decode
is a number of places a node: its step grows with them, and an answer holds one until its last
token.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Literal

from services.sim.asks import BLOCK_TOKENS, Ask

Choice = Literal["random", "balance", "local", "global"]
Rejection = Literal["stages", "early", "predicted"]

CHOICES: Final[tuple[Choice, ...]] = ("random", "balance", "local", "global")
REJECTIONS: Final[tuple[Rejection, ...]] = ("stages", "early", "predicted")

NUM_DECODE: Final = 2
"""Nodes for answers of the cluster that is overloaded."""
TTFT_LIMIT_S, TBT_LIMIT_S, ANSWER_S = 30.0, 0.05, 12.0


@dataclass(frozen=True, slots=True)
class ClusterTimes:
    """prefill_s(tokens, of which cached); fetch_s_per_token: of KV between two instances;
    step_s(answers of a node): of one decode step."""

    prefill_s: Callable[[int, int], float]
    fetch_s_per_token: float
    step_s: Callable[[int], float]


@dataclass(slots=True)
class PrefillNode:
    """Busy until then, and the blocks that it keeps."""

    capacity: int
    free_at: float = 0.0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])

    def num_cached(self, blocks: Sequence[int]) -> int:
        """Leading blocks that are here."""
        for idx, block in enumerate(blocks):
            if block not in self.blocks:
                return idx
        return len(blocks)

    def keep(self, blocks: Iterable[int]) -> None:
        """Use blocks; the least recently used go."""
        for block in blocks:
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > self.capacity:
            self.blocks.popitem(last=False)


class PrefillPool:
    """Chooses where prompts are computed. Every request served makes a queue longer at once."""

    def __init__(
        self,
        num_nodes: int,
        capacity: int,
        times: ClusterTimes,
        choice: Choice,
        pick: Callable[[int], int],
        *,
        balancing_threshold: float = 1.0,
    ) -> None:
        """capacity: blocks of a node. pick: an index below its argument, by chance.
        balancing_threshold: a longer prefix elsewhere counts from this ratio on."""
        self.nodes = [PrefillNode(capacity) for _ in range(num_nodes)]
        self._times, self._choice, self._pick = times, choice, pick
        self._threshold = balancing_threshold

    def expect(self, request: Ask) -> tuple[float, int, int]:
        """Return TTFT, node and cached tokens of the best choice; nothing changes."""
        cached = [node.num_cached(request.block_ids) for node in self.nodes]
        longest = max(cached) if self._choice == "global" else 0
        options: Sequence[int] = range(len(self.nodes))
        if self._choice == "random":
            options = [self._pick(len(self.nodes))]
        found = [self._best_at(request, idx, cached[idx], longest) for idx in options]
        if self._choice == "balance":
            return min(found, key=lambda it: self.nodes[it[1]].free_at)
        return min(found, key=itemgetter(0))

    def _best_at(self, request: Ask, idx: int, used: int, longest: int) -> tuple[float, int, int]:
        """With what the node has, or with the longest prefix that there is, if that is quicker."""
        own = self._ttft(request, idx, used, 0.0)
        # At equality the paper's algorithm prices a transfer, but copies nothing: here neither.
        if not longest or longest <= self._threshold * used:
            return own
        fetch_s = (longest - used) * BLOCK_TOKENS * self._times.fetch_s_per_token
        return min(own, self._ttft(request, idx, longest, fetch_s), key=itemgetter(0))

    def _ttft(
        self, request: Ask, idx: int, num_blocks: int, fetch_s: float
    ) -> tuple[float, int, int]:
        # The last token is computed in any case: token 1 comes out of it.
        tokens = min(num_blocks * BLOCK_TOKENS, request.num_input - 1)
        wait_s = max(0.0, self.nodes[idx].free_at - request.due_s)
        return wait_s + fetch_s + self._times.prefill_s(request.num_input, tokens), idx, tokens

    def take(self, request: Ask, expected: tuple[float, int, int]) -> float:
        """Queue a request where it was expected; returns when its first token is there."""
        ttft_s, idx, _ = expected
        node = self.nodes[idx]
        node.free_at = request.due_s + ttft_s
        node.keep(request.block_ids)
        return node.free_at


def mean_ttft(requests: Sequence[Ask], pool: PrefillPool) -> float:
    """Return the mean time to first token of a trace."""
    total = 0.0
    for request in requests:
        total += pool.take(request, pool.expect(request)) - request.due_s
    return total / len(requests)


@dataclass(frozen=True, slots=True)
class OverloadOutcome:
    """What an overloaded cluster did. wasted_s: prefill of requests that decode then refused."""

    num_rejected: int
    wasted_s: float


def overload(
    requests: Sequence[Ask],
    pool: PrefillPool,
    times: ClusterTimes,
    rejection: Rejection,
) -> OverloadOutcome:
    """Replay a trace with more load than the cluster serves.

    stages: each side checks when its stage starts. early: both loads at arrival. predicted: the
    load of decode as it will be when prefill ends, if every answer takes ``ANSWER_S``.
    """
    ends: list[float] = []  # of answers under way
    prefilling: list[tuple[float, int, float, int]] = []  # end, order, prefill seconds, answer
    rejected = 0
    wasted_s = 0.0

    def load(num_answers: float) -> float:
        # Answers are spread evenly: of the node that has one more, if one has.
        return times.step_s(-int(-num_answers // NUM_DECODE)) / TBT_LIMIT_S

    def settle(now: float) -> None:
        nonlocal rejected, wasted_s
        while prefilling and prefilling[0][0] <= now:
            at, _, prefill_s, output_len = heapq.heappop(prefilling)
            while ends and ends[0] <= at:
                heapq.heappop(ends)
            if load(len(ends) + 1) > 1:  # decode looks again, whoever has let it in
                rejected += 1
                wasted_s += prefill_s
                continue
            each = -int(-(len(ends) + 1) // NUM_DECODE)
            heapq.heappush(ends, at + output_len * times.step_s(each))
        while ends and ends[0] <= now:
            heapq.heappop(ends)

    for order, request in enumerate(requests):
        settle(request.due_s)
        expected = pool.expect(request)
        is_late = expected[0] > TTFT_LIMIT_S
        if rejection == "early":
            is_late = is_late or load(len(ends) + 1) > 1
        elif rejection == "predicted":
            then = request.due_s + expected[0]
            # The paper takes an answer's usual time for these, too; here their ends are known.
            will_run = sum(end > then for end in ends)
            will_run += sum(then - ANSWER_S < at <= then for at, *_ in prefilling)
            is_late = is_late or load(will_run + 1) > 1
        if is_late:
            rejected += 1
            continue
        prefill_s = times.prefill_s(request.num_input, expected[2])
        ends_at = pool.take(request, expected)
        heapq.heappush(prefilling, (ends_at, order, prefill_s, request.num_output))
    settle(float("inf"))
    return OverloadOutcome(rejected, wasted_s)
