"""The bodies that the HTTP door sends, as structs: answers are encoded from them, and
``openapi.py`` describes them. A field without a default is always there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.front.answers import TokenCounts
from services.gateway.http.planner_bodies import ClusterPlanner
from services.gateway.http.tool_bodies import SAID, SAID_IN_PART
from shared.errors import MeshError
from shared.rpc.status import openai_error_body

Receipt = Annotated[
    dict[str, Any],
    msgspec.Meta(description="Where the answer's time went, phase by phase: see docs/protocol.md."),
]
FinishName = Literal["stop", "length", "tool_calls"]
FinishReason = Annotated[
    FinishName | None, msgspec.Meta(description="null while the answer goes on.")
]
StopReason = Annotated[
    str | int | None,
    msgspec.Meta(description="The stop string or token id that ended it; null if none did."),
]


class ErrorDetail(msgspec.Struct):
    """What is wrong. code: machine-readable, finer than type. param: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str
    retry_after_s: float | UnsetType = UNSET


class ErrorBody(msgspec.Struct):
    """The one shape of all errors; in a stream that has begun, an event of its own."""

    error: ErrorDetail

    @classmethod
    def of(cls, error: MeshError) -> ErrorBody:
        """Return the body of an error."""
        return msgspec.convert(openai_error_body(error), cls)


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: of the prompt, those whose KV was not computed again."""

    cached_tokens: int


class UsageBody(msgspec.Struct):
    """A prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, counts: TokenCounts) -> UsageBody:
        """Return the counts as OpenAI's clients read them."""
        total = counts.prompt_tokens + counts.completion_tokens
        cached = PromptTokensDetails(counts.cached_tokens)
        return cls(counts.prompt_tokens, counts.completion_tokens, total, cached)


class _Answer(msgspec.Struct, kw_only=True):
    id: str
    object: Any
    created: int
    model: str
    choices: list[Any]
    usage: Any
    receipt: Receipt | UnsetType = UNSET
    receipts: list[Receipt] | UnsetType = UNSET


# --- chat -----------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    """A token that might have come. bytes: of its UTF-8, which may be part of a character."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(msgspec.Struct):
    """What the model said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: Annotated[Any, SAID]
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
    stop_reason: StopReason


class ChatCompletion(_Answer, kw_only=True):
    """A whole answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody


class DeltaBody(msgspec.Struct):
    """What is new; role comes first."""

    content: str
    role: Literal["assistant"] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """What is new of one answer."""

    index: int
    delta: Annotated[Any, SAID_IN_PART]
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason | UnsetType = UNSET


class ChatCompletionChunk(_Answer, kw_only=True):
    """The data of one event of a streamed chat. The last one has no choices, if usage or a receipt
    was asked for."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


# --- completions ----------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    """Columns, one entry a token. token_logprobs: null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishName
    stop_reason: StopReason


class Completion(_Answer, kw_only=True):
    """A whole continuation of one or several prompts."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageBody


class CompletionChunkChoice(msgspec.Struct):
    """What is new of one answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason | UnsetType = UNSET


class CompletionChunk(_Answer, kw_only=True):
    """The data of one event of a streamed completion. The last one has no choices, if usage or a
    receipt was asked for."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


# --- models and tokens ----------------------------------------------------------------------------


class ModelCard(msgspec.Struct):
    """A served model. max_model_len: prompt and answer together, in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct):
    """What is served: nothing until the first worker has joined."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(msgspec.Struct):
    """Ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class Text(msgspec.Struct):
    """Text of ids."""

    prompt: str


# --- operators ------------------------------------------------------------------------------------


class Health(msgspec.Struct):
    """The process lives."""

    status: Literal["ok"]


class Readiness(msgspec.Struct):
    """Whether a request would be served now, and if not, why."""

    status: Literal["ready", "not ready"]
    reason: str | UnsetType = UNSET


class Version(msgspec.Struct):
    """The gateway's version."""

    version: str


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
    wrong for a minute, and it is routed by load alone. queue_s: until a prompt that comes now would
    begin. Errors are medians of |predicted - real| / real: of its steps with prompts, of those
    without, and of the time to the first token of answers whose prompts it computed (null if too
    few ended in the last minute)."""

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

    state: Literal["silent", "learning", "known", "left out"]
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


class ExplainedSteps(msgspec.Struct, forbid_unknown_fields=True):
    """How long a worker's steps with prompts take: seconds for a step, for each of its tokens, and
    for each position that these attend to. num_steps: learned from; 0 = not known."""

    constant_s: float
    token_s: float
    attended_s: float
    num_steps: int
    error_p50: float
    error_p90: float


class ExplainedTerms(msgspec.Struct, forbid_unknown_fields=True):
    """What a score is made of, in seconds or, if is_s is false, in tokens: the wait, and what is
    to compute; cached_tokens need not be. Of these source, another worker, sends fetched_tokens
    within fetch, beside the wait; null = it computes what it has not."""

    wait: float
    compute: float
    cached_tokens: int
    is_s: bool
    fetch: float
    source: str | None
    fetched_tokens: int


class ExplainedWorker(msgspec.Struct, forbid_unknown_fields=True):
    """A worker as a decision saw it. score: what the policy compared, lower is better. unseen: what
    this gateway had ordered that the report, report_age_s old, did not count; it is part of
    pending_tokens and reserved_blocks. queue_s: as the worker predicted it. step_tokens: of its
    largest step. cached_tokens: of the prompt, in its prefix cache as far as the gateway knows.
    terms: of the scores of policies conductor and local."""

    worker: str
    address: str
    score: float
    pending_tokens: int
    unseen_tokens: int
    reserved_blocks: int
    unseen_blocks: int
    queued: int
    prompts: int
    answers: int
    queue_s: float
    prompt_steps: ExplainedSteps
    answer_steps: ExplainedSteps
    step_tokens: int
    cached_tokens: int
    terms: ExplainedTerms | None
    report_age_s: float
    role: str
    serves: list[str]
    home: str | None
    colocated: bool
    blocks: int
    block_size: int


class ExplainedDecision(msgspec.Struct, forbid_unknown_fields=True):
    """Why one attempt of a request went to its pair: everything that the policy looked at, so that
    `pdmesh explain --replay` can decide again. partners: of each prefill worker the decode workers
    that it reaches, by their places. prediction: seconds until token 1 and what they consist of;
    null if the prefill worker knew no step times. fetchable_tokens: what one worker has of the
    prompt at most. hand_over_speeds: bytes a second to each decode worker from the prefill worker
    that is ready soonest. num_output_tokens: how long such answers are, 0 = not known."""

    attempt: int
    policy: str
    random: float
    memory: dict[str, int] | int | None
    num_tokens: int
    max_new_tokens: int
    num_output_tokens: int
    avoid: list[str]
    affinity: str
    fetchable_tokens: int
    layout: dict[str, str | int] | None
    hand_over_speeds: list[float]
    prefill: str
    decode: str
    prefills: list[ExplainedWorker]
    decodes: list[ExplainedWorker]
    partners: list[list[int]]
    prediction: dict[str, float | None] | None


class Explanation(msgspec.Struct, forbid_unknown_fields=True):
    """Why a request went where it went. receipt: as of now."""

    request_id: str
    ended: bool
    decisions: list[ExplainedDecision]
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
