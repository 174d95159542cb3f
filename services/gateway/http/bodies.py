"""The bodies that the HTTP door sends, as structs: answers are encoded from them, and
``openapi.py`` describes them. A field without a default is always there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.front.answers import TokenCounts
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
        return msgspec.convert(openai_error_body(error), cls)


class PromptTokensDetails(msgspec.Struct):
    """cached_tokens: of the prompt, those whose KV was not computed again."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """reasoning_tokens: of the thinking, with its last mark."""

    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """A prompt counts once, however many answers it gets. completion_tokens_details: where thinking
    is told apart."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, counts: TokenCounts, num_thought_tokens: int | None = None) -> UsageBody:
        """Return the counts as OpenAI's clients read them."""
        total = counts.prompt_tokens + counts.completion_tokens
        cached = PromptTokensDetails(counts.cached_tokens)
        usage = cls(counts.prompt_tokens, counts.completion_tokens, total, cached)
        if num_thought_tokens is not None:
            usage.completion_tokens_details = CompletionTokensDetails(num_thought_tokens)
        return usage


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


class WholeCall(msgspec.Struct):
    """What to call, with a JSON object as text."""

    name: str
    arguments: str


class CallBody(msgspec.Struct):
    """A call of a tool that the answer asks for."""

    id: str
    type: Literal["function"]
    function: WholeCall


class AnswerMessage(msgspec.Struct):
    """What the model said. content: null if there are calls and nothing else."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CallBody] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishName
    stop_reason: StopReason


class ChatCompletion(_Answer, kw_only=True):
    """A whole answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody


class CallPart(msgspec.Struct):
    """What is new of a call; its name comes first."""

    name: str | UnsetType
    arguments: str


class CallDelta(msgspec.Struct):
    """What is new of one of an answer's calls; id and type come first."""

    index: int
    function: CallPart
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class DeltaBody(msgspec.Struct):
    """What is new; role comes first."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """What is new of one answer."""

    index: int
    delta: DeltaBody
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

    def followed_by(self, more: CompletionLogprobs) -> CompletionLogprobs:
        """Return the columns of these tokens and of those that come next."""
        return CompletionLogprobs(
            self.tokens + more.tokens,
            self.token_logprobs + more.token_logprobs,
            self.top_logprobs + more.top_logprobs,
            self.text_offset + more.text_offset,
        )


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
