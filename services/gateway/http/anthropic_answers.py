"""Answers of Anthropic's /v1/messages: whole, and as its sequence of events; and its errors.

Format: https://docs.anthropic.com/en/api/messages, .../messages-streaming and .../errors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.front.answers import TokenCounts
from services.gateway.http.bodies import ErrorDetail, Receipt
from services.gateway.http.item_answers import Event, Item, ItemFormat, encode
from shared.errors import MeshError, TooLarge
from shared.request import FinishReason
from shared.rpc.status import openai_error_body

_TYPES = {"server_error": "api_error"}
"""Types of errors that have another name here than with OpenAI."""


class AnthropicFault(ErrorDetail):
    """What is wrong. details: by which Anthropic's client knows to do without."""

    details: dict[str, Any] | UnsetType = UNSET


class AnthropicError(msgspec.Struct, kw_only=True):
    """The shape of this route's errors; in a stream that has begun, its last event."""

    type: str = "error"
    error: AnthropicFault

    @classmethod
    def of(cls, error: MeshError) -> AnthropicError:
        fault = msgspec.convert(openai_error_body(error)["error"], AnthropicFault)
        named = "request_too_large" if isinstance(error, TooLarge) else fault.type
        fault.type = _TYPES.get(named, named)
        if error.param == "thread":
            fault.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return cls(error=fault)


class TextBlock(msgspec.Struct, kw_only=True, tag="text"):
    """What the model said. No citations, not even null, which Vercel's client refuses."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag="thinking"):
    """What it thought. signature: none is made, and none is asked for."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag="tool_use"):
    """A call of a tool that it asks for."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock
StopName = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class ThinkingTokens(msgspec.Struct):
    """thinking_tokens: of the thinking, with its last mark."""

    thinking_tokens: int


class AnthropicUsage(msgspec.Struct):
    """input_tokens: of the prompt, without those whose KV was not computed again."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, counts: TokenCounts, num_thought_tokens: int) -> AnthropicUsage:
        """Return the counts as this protocol tells them."""
        return cls(
            counts.prompt_tokens - counts.cached_tokens,
            counts.cached_tokens,
            counts.completion_tokens,
            ThinkingTokens(num_thought_tokens),
        )


class MessageBody(msgspec.Struct, kw_only=True):
    """A whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopName | None = None
    stop_sequence: str | None = None
    usage: AnthropicUsage
    receipt: Receipt | UnsetType = UNSET


class InputTokens(msgspec.Struct):
    """What /v1/messages/count_tokens tells."""

    input_tokens: int


_DELTAS = {
    "text": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesFormat(ItemFormat):
    """See the module."""

    continuous_usage = True  # the first event tells of the prompt

    def opening(self, usage: TokenCounts | None) -> Iterator[Event]:
        assert usage is not None
        yield {"type": "message_start", "message": self._message([], usage)}

    def began(self, item: Item) -> Iterator[Event]:
        block = _block(item, {})
        yield {"type": "content_block_start", "index": item.index, "content_block": block}

    def grew(self, item: Item, text: str) -> Event:
        kind, name = _DELTAS[item.kind]
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": item.index, "delta": delta}

    def ended(self, item: Item, *, is_cut: bool) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": item.index}

    def ending(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> Iterator[Event]:
        counts = AnthropicUsage.of(usage, self._teller.num_thought)
        reason, sequence = self._end()
        end = {"stop_reason": reason, "stop_sequence": sequence}
        receipt = {"receipt": receipts[0]} if receipts else {}
        yield {"type": "message_delta", "delta": end, "usage": counts, **receipt}
        yield {"type": "message_stop"}

    def breaking(self, error: MeshError) -> Event:
        return {"type": "error", "error": AnthropicError.of(error).error}

    def whole(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> bytes:
        called = [(item, _arguments_of(item)) for item in self.items]
        blocks = [_block(item, given) for item, given in called if given is not None]
        message = self._message(blocks, usage)
        message.stop_reason, message.stop_sequence = self._end()
        if receipts:
            message.receipt = receipts[0]
        return encode(message)

    def _message(self, blocks: list[AnswerBlock], usage: TokenCounts) -> MessageBody:
        counts = AnthropicUsage.of(usage, self._teller.num_thought)
        return MessageBody(id=self._head.id, model=self._head.model, content=blocks, usage=counts)

    def _end(self) -> tuple[StopName, str | None]:
        """Why the answer ends, and the stop string that did it."""
        if self.finish_reason is FinishReason.LENGTH:
            return "max_tokens", None
        # Who is told of calls looks for one to run.
        calls = (item for item in self.items if item.kind == "call")
        if not self._teller.is_within_call and any(_arguments_of(it) is not None for it in calls):
            return "tool_use", None
        if isinstance(self.stop_reason, str):
            return "stop_sequence", self.stop_reason
        return "end_turn", None


def _block(item: Item, called: dict[str, Any]) -> AnswerBlock:
    match item.kind:
        case "text":
            return TextBlock(text=item.text)
        case "thought":
            return ThinkingBlock(thinking=item.text)
        case "call":
            return ToolUseBlock(id=item.id, name=item.name, input=called)


def _arguments_of(item: Item) -> dict[str, Any] | None:
    """Return the arguments of a call, {} of what is none; None = cut off in their midst, or
    no object: no client shall run such a call, and no template can show it."""
    if item.kind != "call":
        return {}
    try:
        return msgspec.json.decode(item.text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
