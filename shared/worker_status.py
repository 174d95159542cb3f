"""A worker's report on itself, as it tells it and as gateways keep it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.home import Role
from shared.ids import NO_ORDER, Incarnation, StreamId
from shared.predict.step_time import NO_FIT, StepFit

REPORT_S = 0.5
"""Between two reports while there is news; and the most that news may wait."""

GATHER_S = 0.05
MOST_REPORTS = 1000
"""A second, to one gateway. A worker with work has news all the time: 64 of them that reported each
50 ms cost a gateway more than their requests."""


def gather_s(num_workers: int) -> float:
    """Return how long each of so many workers gathers news of its load before it tells them: in
    steps of two, so that it seldom changes."""
    seconds = GATHER_S
    while seconds < REPORT_S and num_workers > MOST_REPORTS * seconds:
        seconds = min(REPORT_S, 2 * seconds)
    return seconds


@dataclass(slots=True, kw_only=True)  # one a report: frozen costs four times as much to make
class WorkerStatus:
    """What a worker is busy with at one instant; tokens and blocks are counts.

    pending_tokens: prompt tokens queued or running. reserved_blocks: held by leases and sequences.
    step_s: moving mean of the step time. paired: workers that its canary reached, itself if it is
    colocated; speeds: bytes a second to them, as measured. num_prompts, num_answers: what it holds
    of either kind. home: the role that it has been given, None = the one that it joined with;
    home_order: by which order, 0 = none. queue_s: predicted seconds until all its prompts are
    computed. step_tokens: most tokens of a step, 0 = unknown; batch_tokens: up to so many, prompts
    share one, likewise; max_running: most sequences of a step, likewise. prompt_steps,
    answer_steps: how long its steps take with prompts, and without. egress_bytes: KV that is
    announced to others and not acknowledged. first_gateway: the lowest of the gateways that it has
    joined, num_gateways: how many, 0 = it does not say. num_taken: prompts that it was sent, by all
    of them. dram_token_s, ssd_token_s: seconds that a token's KV takes from there back into the
    pool, 0 = unknown. seen: the last order of the gateway it is told to that it counts, 0 = none.
    """

    pending_tokens: int = 0
    num_waiting: int = 0
    num_running: int = 0
    free_blocks: int = 0
    reserved_blocks: int = 0
    quarantined_blocks: int = 0
    step_s: float = 0.0
    is_draining: bool = False
    paired: frozenset[Incarnation] = frozenset()
    num_prompts: int = 0
    num_answers: int = 0
    home: Role | None = None
    home_epoch: int = 0
    home_order: int = 0
    queue_s: float = 0.0
    step_tokens: int = 0
    batch_tokens: int = 0
    max_running: int = 0
    prompt_steps: StepFit = NO_FIT
    answer_steps: StepFit = NO_FIT
    speeds: Mapping[Incarnation, float] = field(default_factory=dict[Incarnation, float])
    egress_bytes: int = 0
    first_gateway: int = 0
    num_gateways: int = 0
    num_taken: int = 0
    dram_token_s: float = 0.0
    ssd_token_s: float = 0.0
    seen: StreamId = NO_ORDER

    def prompt_s(self, num_tokens: int, num_cached: int) -> float:
        """Predict how long a prompt takes alone; its last token is computed, cached or not."""
        start = min(num_cached, num_tokens - 1)
        return self.prompt_steps.prompt_seconds(start, num_tokens, self.step_tokens)
