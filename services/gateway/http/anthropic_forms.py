"""The body of Anthropic's /v1/messages, and the chat that it becomes.

What a chat takes beside its messages is taken here, too, under the same names; what has another
name or shape in this protocol stands below.
Format: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec

from services.gateway import limits
from services.gateway.front import field_rules as fields
from services.gateway.front.places import Places
from services.gateway.front.tool_fields import (
    MAX_TOOLS,
    CalledFunction,
    FunctionBody,
    MessageCall,
    NamedFunction,
    NamedTool,
    ToolBody,
    ToolName,
)
from services.gateway.http.chat_pieces import ChatPieces
from services.gateway.http.openai_forms import ChatBody, ContentPart, Message, SamplingBody
from services.gateway.http.structured_fields import JsonSchema, NamedSchema, ResponseFormat
from services.gateway.http.unserved_fields import (
    Unserved,
    refuse_those_of,
    unsupported,
    with_unserved,
)

_KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}
"""What Claude Code sends with each request that may think."""

_BILLING = "x-anthropic-billing-header:"
"""Begins a block of Claude Code's that is for Anthropic's servers, not for the model, and another
one in each request: no request would have its beginning in a cache."""

MESSAGES_UNSERVED: dict[str, Unserved] = {
    "max_completion_tokens": Unserved("use max_tokens"),
    **dict.fromkeys(("n", "best_of"), Unserved("there is one answer", (1,))),
    "stop": Unserved("use stop_sequences", ("", [])),
    "response_format": Unserved("use output_config.format"),
    "output_format": Unserved("use output_config.format"),
    "reasoning_effort": Unserved("use output_config.effort"),
    "parallel_tool_calls": Unserved("use tool_choice.disable_parallel_tool_use", (True,)),
    "logprobs": Unserved("use /v1/chat/completions", (False,)),
    "top_logprobs": Unserved("use logprobs of /v1/chat/completions", (0,)),
    "container": Unserved("no code of a client runs here"),
    "mcp_servers": Unserved("tools are called by the client", ([],)),
    "context_management": Unserved(
        "send what the model shall read", ({}, {"edits": []}, {"edits": [_KEEP_ALL]})
    ),
    "diagnostics": Unserved("usage tells how much of a prompt was cached", ({},)),
    "inference_geo": Unserved("a request does not say where it runs"),
    "thread": Unserved("no conversation is kept here: send all messages"),
    "speed": Unserved("use priority", ("standard",)),
}
"""Beside those of a chat."""

_ROLES = ("user", "assistant", "system")
_BLOCKS = ["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
_THINKING = {"enabled": True, "adaptive": True, "disabled": False}


class Block(msgspec.Struct):
    """One block of a message's content: text, thinking of an answer (redacted: nothing of it can
    be read), a call that it made (tool_use), or what came of one (tool_result)."""

    type: Annotated[str, fields.rule(enum=_BLOCKS)]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None


Blocks = Annotated[list[Block], fields.rule(minItems=1, maxItems=limits.MAX_PARTS)]
SystemBlocks = Annotated[list[Block], fields.rule(maxItems=limits.MAX_PARTS)]


class AnthropicMessage(msgspec.Struct):
    """One message. The answer continues the last one if that is an answer's text."""

    role: Annotated[str, fields.rule(enum=list(_ROLES))]
    content: str | Blocks


class AnthropicTool(msgspec.Struct):
    """One tool; the client runs all there are."""

    name: ToolName
    type: Annotated[str | None, fields.rule(enum=["custom", None])] = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicChoice(msgspec.Struct):
    """Which tools are called. name: of type tool."""

    type: Annotated[str, fields.rule(enum=["auto", "any", "tool", "none"])]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether to think first, where the template can say so. budget_tokens: only of max_tokens."""

    type: Annotated[str, fields.rule(enum=list(_THINKING))]
    budget_tokens: int | None = None
    display: Annotated[str | None, fields.rule(enum=["summarized", None])] = None


class OutputFormat(msgspec.Struct, rename={"schema_": "schema"}):
    """What the text shall match."""

    type: Annotated[str, fields.rule(const="json_schema")]
    schema_: JsonSchema | None = None


class OutputConfig(msgspec.Struct):
    """effort: a variable of the template."""

    effort: str | None = None
    format: OutputFormat | None = None


_AnthropicFields = with_unserved("_AnthropicFields", MESSAGES_UNSERVED, SamplingBody)

AnthropicTools = Annotated[list[AnthropicTool], fields.rule("Names differ.", maxItems=MAX_TOOLS)]


class CountTokensBody(_AnthropicFields, kw_only=True):
    """POST /v1/messages/count_tokens: a body of /v1/messages, of which no answer is made."""

    messages: Annotated[
        list[AnthropicMessage], fields.rule(minItems=1, maxItems=limits.MAX_MESSAGES)
    ]
    system: str | SystemBlocks | None = None
    stop_sequences: fields.StopTexts | None = None
    tools: AnthropicTools | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    tool_choice: AnthropicChoice | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    separate_reasoning: bool | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: fields.MaxTokens  # pyright: ignore[reportIncompatibleVariableOverride, reportGeneralTypeIssues]


_OF_CHATS = tuple(
    name
    for name in SamplingBody.__struct_fields__
    if name
    not in (
        *MESSAGES_UNSERVED,
        *("tools", "tool_choice", "chat_template_kwargs", "continue_final_message"),
    )
)


def chat_of_messages(body: CountTokensBody) -> tuple[ChatBody, Places]:
    """Return the chat of a body, and where its fields stood.

    Raises InvalidRequest: a field that is not served, or a block that says nothing we know.
    """
    refuse_those_of(MESSAGES_UNSERVED, body)
    limits.checked_count(
        len(body.messages), limits.MAX_MESSAGES, param="messages", what="messages", least=1
    )
    places = Places(
        {
            "stop": "stop_sequences",
            "response_format": "output_config.format",
            "response_format.json_schema": "output_config.format",
            "tool_choice.function": "tool_choice",
        }
    )
    for index in range(len(body.tools or ())):
        places.put(f"tools[{index}].function", f"tools[{index}]")
        places.put(f"tools[{index}].function.parameters", f"tools[{index}].input_schema")
    lead: list[Message] = []
    if system := _system(body.system or ""):
        lead.append(Message("system", system))
        places.put("messages[0].content", "system")
    pieces = ChatPieces(places, num_before=len(lead), call_id="tool_use_id")
    for index, message in enumerate(body.messages):
        for piece, place in _pieces(message, f"messages[{index}]"):
            pieces.add(piece, place)
    last = pieces.messages[-1] if pieces.messages else Message("user")
    is_begun = last.role == "assistant" and bool(last.content) and not last.tool_calls
    continues = body.continue_final_message
    if continues is None and is_begun and not body.add_generation_prompt:
        continues = True
    choice, output = body.tool_choice, body.output_config
    chat = ChatBody(
        **{name: getattr(body, name) for name in _OF_CHATS},
        messages=[*lead, *pieces.messages],
        stop=body.stop_sequences,
        continue_final_message=continues,
        tools=None if body.tools is None else _tools(body.tools),
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
        response_format=None if output is None else _format(output.format),
        reasoning_effort=None if output is None else output.effort,
        chat_template_kwargs=_template_arguments(body),
        separate_reasoning=body.separate_reasoning,
    )
    return chat, places


def _template_arguments(body: CountTokensBody) -> dict[str, Any] | None:
    thinking = body.thinking
    if thinking is None:
        return body.chat_template_kwargs
    if (asked := _THINKING.get(thinking.type)) is None:
        raise unsupported("thinking.type", f"must be one of {', '.join(_THINKING)}")
    if thinking.display not in (None, "summarized"):
        raise unsupported("thinking.display", "the answer has the thinking itself, or none")
    return {"enable_thinking": asked} | (body.chat_template_kwargs or {})


def _choice(choice: AnthropicChoice) -> str | NamedTool:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            return NamedTool(NamedFunction(choice.name or ""))
        case _:
            raise unsupported("tool_choice.type", "must be auto, any, tool or none")


def _tools(tools: Sequence[AnthropicTool]) -> list[ToolBody]:
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise unsupported(
                f"tools[{index}].type", "must be custom: no tool of ours runs here, only yours"
            )
    return [
        ToolBody(FunctionBody(tool.name, tool.description, tool.input_schema, tool.strict))
        for tool in tools
    ]


def _format(asked: OutputFormat | None) -> ResponseFormat | None:
    if asked is None:
        return None
    if asked.type != "json_schema":
        raise unsupported("output_config.format.type", "must be json_schema")
    return ResponseFormat("json_schema", NamedSchema(None, asked.schema_))


# --- messages -------------------------------------------------------------------------------------


def _pieces(message: AnthropicMessage, place: str) -> Iterator[tuple[Message, str]]:
    """The messages of a chat that a message becomes, with their places."""
    role, content = message.role, message.content
    if role not in _ROLES:
        raise unsupported(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
    if isinstance(content, str):
        yield Message(role, content), place
        return
    limits.checked_count(
        len(content), limits.MAX_PARTS, param=f"{place}.content", what="blocks", least=1
    )
    for is_text, blocks in groupby(enumerate(content), lambda one: one[1].type == "text"):
        if is_text:
            texts = [_text(block, f"{place}.content[{index}]") for index, block in blocks]
            yield Message(role, texts), place
            continue
        for index, block in blocks:
            where = f"{place}.content[{index}]"
            yield _block(block, role, where), where


def _block(block: Block, role: str, place: str) -> Message:
    """What a block says that is not text."""
    match block.type, role:
        case (("thinking" | "redacted_thinking"), "assistant"):
            return Message(role, reasoning_content=block.thinking)
        case "tool_use", "assistant":
            for name in ("id", "name"):
                if not getattr(block, name):
                    raise limits.refusal(f"{place}.{name}", "is required")
            arguments = msgspec.json.encode(block.input or {}).decode()
            function = CalledFunction(block.name or "", arguments)
            return Message(role, tool_calls=[MessageCall(block.id or "", function)])
        case "tool_result", "user":
            content = _texts(block.content or "", f"{place}.content")
            return Message("tool", content, tool_call_id=block.tool_use_id)
        case (("thinking" | "redacted_thinking" | "tool_use"), _):
            raise limits.refusal(f"{place}.type", "belongs to the role assistant")
        case "tool_result", _:
            raise limits.refusal(f"{place}.type", "belongs to the role user")
        case _:
            raise unsupported(
                f"{place}.type", "must be text, thinking, tool_use or tool_result: only text"
            )


def _system(content: str | list[Block]) -> str | list[ContentPart]:
    texts = _texts(content, "system")
    if isinstance(texts, str):
        return texts
    return [part for part in texts if not (part.text or "").startswith(_BILLING)]


def _texts(content: str | list[Block], place: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    return [_text(block, f"{place}[{index}]") for index, block in enumerate(content)]


def _text(block: Block, place: str) -> ContentPart:
    if block.type != "text" or block.text is None:
        raise unsupported(place, "is not served: only blocks of type text with a text")
    return ContentPart("text", block.text)
