"""What the gateway tells operators and those who plan, as structs: the mesh at this moment, its
last requests and their workers, by which `pdmesh plan verify` and `pdmesh plan watch` go, and why
a request went where it went. ``bodies.py`` has the rest.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ClusterModel(msgspec.Struct, forbid_unknown_fields=True):
    """The served model."""

    id: str
    max_model_len: int


class ClusterGateway(msgspec.Struct, forbid_unknown_fields=True):
    """Requests that run, wait for admission, and were refused since the start, also by code."""

    incarnation: str
    running: int
    queued: int
    refused: int
    refusals: dict[str, int]


class ClusterBlocks(msgspec.Struct, forbid_unknown_fields=True):
    """KV blocks by state."""

    total: int
    free: int
    reserved: int
    quarantined: int


class ClusterPrediction(msgspec.Struct, forbid_unknown_fields=True):
    """How long a worker's steps take is known, and how well. believed: false = its predictions were
    wrong for a minute. Unless known and believed it is routed by load alone. queue_s: until a
    prompt that comes now would begin. Errors are medians of |predicted - real| / real: of its steps
    with prompts, of those without, and of the time to the first token of answers whose prompts it
    computed (null if too few ended in the last minute)."""

    known: bool
    believed: bool
    queue_s: float
    prompt_step_error: float
    answer_step_error: float
    ttft_error: float | None


class ClusterPrompts(msgspec.Struct, forbid_unknown_fields=True):
    """Prompts that this worker read for answers that ended in the last minute. cached_tokens: of
    their tokens so many were in its prefix cache; fetched_tokens: of these, another worker had sent
    them for that prompt; dram_tokens, ssd_tokens: of these, they came from memory and from files
    below its pool."""

    tokens: int
    cached_tokens: int
    fetched_tokens: int
    dram_tokens: int
    ssd_tokens: int


class ClusterPrefixes(msgspec.Struct, forbid_unknown_fields=True):
    """What the gateway knows of a worker's prefix cache. state: known = proved equal at its last
    report. count: prefixes of 128 or more tokens that it has."""

    state: Literal["silent", "learning", "known", "left out", "unproved"]
    count: int


class ClusterWorker(msgspec.Struct, forbid_unknown_fields=True):
    """One worker, as it reported itself last. home: what it is when nothing is asked of it; pool:
    what it is now; moves: whether it does the work of both roles. prefixes: null = the policy does
    not go by them. paired: the workers it exchanges KV with; a colocated worker names itself."""

    incarnation: str
    role: Literal["prefill", "decode"]
    home: Literal["prompt", "token"]
    pool: Literal["prompt", "token", "mixed"]
    moves: bool
    address: str
    state: str
    running: int
    waiting: int
    pending_tokens: int
    blocks: ClusterBlocks
    step_s: float
    prediction: ClusterPrediction
    prompts: ClusterPrompts
    prefixes: ClusterPrefixes | None
    paired: list[str]


class Explanation(msgspec.Struct, forbid_unknown_fields=True):
    """Why a request went where it went. decisions: of each attempt the record of all that its
    policy looked at, by which `pdmesh explain --replay` decides again. error: what its client was
    told, '' if the answer is whole, or not yet. receipt: as of now."""

    request_id: str
    ended: bool
    error: str
    decisions: list[dict[str, Any]]
    receipt: dict[str, Any]


class ClusterWindow(msgspec.Struct, forbid_unknown_fields=True):
    """This gateway's traffic of the last seconds. Percentiles (p50, p90, p99) are null if nothing
    came. unlisted_transfers: of pairs beyond those that are listed."""

    seconds: float
    requests: int
    failed: int
    output_tokens: int
    prompt_tokens: int
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    output_tokens_each_s: list[int]
    ttft_s: dict[str, float] | None
    itl_s: dict[str, float] | None
    unlisted_transfers: int


class ClusterTransfers(msgspec.Struct, forbid_unknown_fields=True):
    """KV that went from one worker to another in the window."""

    prefill: str
    decode: str
    lane: str
    count: int
    bytes: int
    gb_per_s: dict[str, float] | None
    exposed_s: dict[str, float] | None


class ClusterPrefix(msgspec.Struct, forbid_unknown_fields=True):
    """A beginning that many prompts have in common. hash: where it ends, 16 digits. share: of the
    last minutes' prompts that begin so. workers: how many have its KV."""

    hash: str
    tokens: int
    share: float
    workers: int


class ClusterPlanner(msgspec.Struct, forbid_unknown_fields=True):
    """What the planner wants, by role (colocated workers are one of their own). decides: false =
    another gateway decides how many workers there are. num_looks: so often it has looked. busy:
    share of their time that those here would compute. attained: of the last minute's requests,
    those that kept its limits (null if nothing came). startup_s: of a worker, as measured last, 0 =
    never. orders: what it does, or would do; they stay until they are done. hold: why it changes
    nothing. limit: what keeps it from its limits."""

    mode: Literal["advise", "act"]
    decides: bool
    num_looks: int
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


class Cluster(msgspec.Struct, forbid_unknown_fields=True):
    """The mesh at this moment. hot_prefixes: those by which most tokens come again, where the
    policy goes by prefixes. planner: null = --planner off."""

    version: str
    ready: bool
    not_ready_reason: str
    uptime_s: float
    model: ClusterModel | None
    gateway: ClusterGateway
    workers: list[ClusterWorker]
    window: ClusterWindow
    transfers: list[ClusterTransfers]
    hot_prefixes: list[ClusterPrefix]
    planner: ClusterPlanner | None


class RecentWorker(msgspec.Struct, forbid_unknown_fields=True):
    """One worker, as it reported itself ``age_s`` ago. kind: colocated ones are one of their own.
    moves: whether its home may change. held: prompts and answers. queue_s: predicted seconds of
    prompts that wait there. prompt_steps, answer_steps: how long its steps take with prompts and
    without, in seconds for a step (constant_s), each of its tokens (token_s) and each position that
    these attend to (attended_s), which is the ordinary step of the last few; in the mean they take
    mean_ratio as long, and the largest learned had most_tokens and most_attended (0 = not known);
    num_steps 0 = not known. step_tokens: of its largest step; batch_tokens: up
    to so many, prompts share one; max_running: most sequences of one, 0 = not known. token_bytes:
    KV of one token in all layers. taken: prompts that it was sent since it began, by every
    gateway."""

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
    batch_tokens: int = 0
    max_running: int = 0


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
    and on one (colocated), 0 = there was none. link_bytes_s: as workers measured it, 0 = not.
    max_running, max_waiting, max_wait_s, max_pending_tokens, overload: whom it lets in; max_running
    0 = it does not say. waiting: requests that wait to be let in."""

    version: str
    now_s: float
    model: str
    policy: str
    decides: bool
    handover_s: dict[str, float]
    link_bytes_s: float
    workers: list[RecentWorker]
    requests: list[RecentRequest]
    max_running: int = 0
    max_waiting: int = 0
    max_wait_s: float = 0.0
    max_pending_tokens: int = 0
    overload: str = ""
    waiting: int = 0
