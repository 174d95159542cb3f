"""Who runs next in a MuxServe unit: adaptive batch scheduling (ICML'24, algorithm 3).

Models take turns. A prefill that waits goes before any decode; if it cannot have its resources,
decodes wait until it can. KV blocks are split into quotas, which move from models that do not use
theirs to those that are full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# As in their code: tokens of a sequence where nobody knows better; the use of its quota from which
# on a model receives, and up to which others give what they do not use; in mean quotas, the least
# demand of a receiver, and what it gets in a period.
AVERAGE_TOKENS: Final = 416
FULL: Final = 0.9
SPARE: Final = 0.95
BACKLOG: Final = 1.1
STEP: Final = 0.1


@dataclass(frozen=True, slots=True)
class QuotaShare:
    """What of a model decides its share of blocks."""

    rate: float
    num_heads: int
    num_layers: int

    @property
    def weight(self) -> float:
        """Blocks are of one head, so that models of any shape share a pool."""
        return self.rate * self.num_heads * self.num_layers


def initial_quota(
    shares: Mapping[str, QuotaShare], num_blocks: int, block_tokens: int
) -> dict[str, int]:
    """Return how many sequences each model may run.

    num_blocks: of one head and block_tokens tokens, in the whole unit.
    """
    total = sum(share.weight for share in shares.values())
    one = AVERAGE_TOKENS // block_tokens
    return {
        name: int(num_blocks * share.weight / total) // (share.num_heads * share.num_layers) // one
        for name, share in shares.items()
    }


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """Of one model: mean running batch of late, and sequences that run or wait now."""

    mean_running: float
    num_running: int
    num_waiting: int


def adapted_quota(quota: Mapping[str, int], use: Mapping[str, QuotaUse]) -> dict[str, int]:
    """Return quotas after one period; their sum stays.

    Models that use 90 % receive, the fullest first, if they have a backlog; the others give what
    they have beyond 95 % of their use, in proportion.
    """
    average = max(1, round(sum(quota.values()) / len(quota)))
    used = {name: use[name].mean_running / max(1, num) for name, num in quota.items()}
    spare = {
        name: int((SPARE - used[name]) * num) for name, num in quota.items() if used[name] < FULL
    }
    found = dict(quota)
    receivers = sorted((n for n in quota if used[n] >= FULL), key=lambda n: -used[n])
    for name in receivers:
        demand = use[name].num_running + use[name].num_waiting
        if demand < BACKLOG * average:
            continue
        wanted = min(max(1, int(STEP * average)), demand - quota[name])
        left = sum(spare.values())
        take = min(max(0, wanted), left)
        for donor in sorted(spare, key=lambda n: -spare[n]):
            # Rounded up, so that all is given; who comes last gives what is still lacking.
            part = min(spare[donor], -(-take * spare[donor] // left) if left else 0)
            part = min(part, take - (found[name] - quota[name]))
            spare[donor] -= part
            found[donor] -= part
            found[name] += part
    return found


class Adbs:
    """Whose turn it is."""

    def __init__(self, models: Sequence[str]) -> None:
        self._models = list(models)
        self._next_prefill = self._next_decode = 0
        self.is_prefill_waiting = False

    def next_prefill(
        self, has_prompt: Callable[[str], bool], has_resources: Callable[[str], bool]
    ) -> str | None:
        """Return whose prefill starts, if none runs; None: none waits, or it must wait."""
        turn = self._turn(self._next_prefill, has_prompt)
        self.is_prefill_waiting = turn is not None
        if turn is None or not has_resources(self._models[turn]):
            return None
        self.is_prefill_waiting = False
        self._next_prefill = turn + 1
        return self._models[turn]

    def next_decode(
        self, has_work: Callable[[str], bool], has_resources: Callable[[str], bool]
    ) -> str | None:
        """Return whose decode batch starts; None: a prefill waits for resources, or nobody can."""
        if self.is_prefill_waiting:
            return None
        turn = self._turn(self._next_decode, has_work)
        if turn is None or not has_resources(self._models[turn]):
            return None
        self._next_decode = turn + 1
        return self._models[turn]

    def _turn(self, first: int, is_ready: Callable[[str], bool]) -> int | None:
        num = len(self._models)
        turns = ((first + offset) % num for offset in range(num))
        return next((turn for turn in turns if is_ready(self._models[turn])), None)
