"""What /v1/responses says, as structs; the rest of what the HTTP door sends is in ``bodies.py``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.front.answers import TokenCounts
from services.gateway.http.bodies import Receipt
from services.gateway.http.item_answers import NamedEvent

Status = Literal["completed", "incomplete", "failed", "in_progress"]


class OutputText(msgspec.Struct, kw_only=True):
    """Text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(msgspec.Struct, kw_only=True):
    """Text of thinking."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(msgspec.Struct, kw_only=True):
    """What the model said."""

    id: str
    type: Literal["message"] = "message"
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(msgspec.Struct, kw_only=True):
    """A call of a tool that the model asks for. arguments: a JSON object as text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputReasoning(msgspec.Struct, kw_only=True):
    """What the model thought. summary: none is made."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]


OutputItem = OutputMessage | OutputCall | OutputReasoning
_ITEM = msgspec.Meta(extra_json_schema={"type": "object", "required": ["id", "type", "status"]})


class InputDetails(msgspec.Struct):
    """cached_tokens: those whose KV was not computed again."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """reasoning_tokens: of the thinking, with its last mark."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Tokens of the input and of the answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int

    @classmethod
    def of(cls, counts: TokenCounts, num_thought_tokens: int) -> ResponseUsage:
        """Return the counts as this protocol tells them."""
        return cls(
            counts.prompt_tokens,
            InputDetails(counts.cached_tokens),
            counts.completion_tokens,
            OutputDetails(num_thought_tokens),
            counts.prompt_tokens + counts.completion_tokens,
        )


class Incomplete(msgspec.Struct):
    """Why an answer ends in its midst."""

    reason: Literal["max_output_tokens"]


class ResponseFault(msgspec.Struct):
    """What broke an answer that had begun."""

    code: str
    message: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response. store: whether it is kept here, for previous_response_id."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: ResponseFault | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, Any]
    model: str
    output: list[Annotated[Any, _ITEM]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    receipt: Receipt | UnsetType = UNSET


class DeletedResponse(msgspec.Struct):
    """A response that is forgotten now."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# --- events ---------------------------------------------------------------------------------------


class ResponseEvent(NamedEvent, kw_only=True):
    """One event of a stream; the kinds have more fields, as OpenAI's have them."""

    sequence_number: int


class WholeEvent(ResponseEvent, kw_only=True):
    """response.created, in_progress, completed, incomplete, failed."""

    response: ResponseBody


class ItemEvent(ResponseEvent, kw_only=True):
    """response.output_item.added and done."""

    output_index: int
    item: OutputItem


class PartEvent(ResponseEvent, kw_only=True):
    """response.content_part.added and done."""

    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class TextEvent(ResponseEvent, kw_only=True):
    """response.output_text and reasoning_text, delta and done."""

    item_id: str
    output_index: int
    content_index: int = 0
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class ArgumentsEvent(ResponseEvent, kw_only=True):
    """response.function_call_arguments.delta and done."""

    item_id: str
    output_index: int
    delta: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
