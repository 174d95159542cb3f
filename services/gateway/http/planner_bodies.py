"""What the gateway tells those who plan: of its own planner in ``/cluster``, and of its last
requests and their workers in ``/cluster/requests``, by which `pdmesh plan verify` and `pdmesh plan
watch` go."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ClusterPlanner(msgspec.Struct, forbid_unknown_fields=True):
    """What the planner wants, by role (colocated workers are one of their own). decides: false =
    another gateway decides how many workers there are. busy: share of their time that those here
    would compute. attained: of the last minute's requests, those that kept its limits (null if
    nothing came). startup_s: of a worker, as measured last, 0 = never. orders: what it does, or
    would do; they stay until they are done. hold: why it changes nothing. limit: what keeps it from
    its limits."""

    mode: Literal["advise", "act"]
    decides: bool
    wanted: dict[str, int]
    present: dict[str, int]
    busy: dict[str, float]
    attained: float | None
    refuses_early: bool
    borrows: bool
    startup_s: float
    orders: list[str]
    hold: str
    limit: str


class RecentWorker(msgspec.Struct, forbid_unknown_fields=True):
    """One worker, as it reported itself ``age_s`` ago. kind: colocated ones are one of their own.
    moves: whether its home may change. held: prompts and answers. queue_s: predicted seconds of
    prompts that wait there. prompt_steps, answer_steps: how long its steps take with prompts and
    without, in seconds for a step (constant_s), each of its tokens (token_s) and each position that
    these attend to (attended_s); num_steps 0 = not known. step_tokens: of its largest step.
    token_bytes: KV of one token in all layers. taken: prompts that it was sent since it began, by
    every gateway."""

    incarnation: str
    address: str
    kind: Literal["prefill", "decode", "colocated"]
    moves: bool
    draining: bool
    age_s: float
    held: int
    queue_s: float
    prompt_steps: dict[str, float]
    answer_steps: dict[str, float]
    blocks: int
    block_size: int
    step_tokens: int
    token_bytes: int
    taken: int


class RecentRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One request. arrived_s: on the clock of ``now_s``. error: type of what ended it, 'cancelled'
    if its client left, '' if its answer is whole or goes on."""

    request_id: str
    arrived_s: float
    ended: bool
    error: str
    receipt: dict[str, Any]


class RecentRequests(msgspec.Struct, forbid_unknown_fields=True):
    """The last requests of this gateway, the oldest first, and the mesh that they met. now_s: of
    the clock of this body, 0 = the gateway began. decides: whether it is this gateway that would
    change workers. handover_s: what half of the last hand-overs took, between two workers (pair)
    and on one (colocated), 0 = there was none. link_bytes_s: as workers measured it, 0 = not."""

    version: str
    now_s: float
    model: str
    policy: str
    decides: bool
    handover_s: dict[str, float]
    link_bytes_s: float
    workers: list[RecentWorker]
    requests: list[RecentRequest]
