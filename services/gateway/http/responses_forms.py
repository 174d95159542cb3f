"""The body of OpenAI's /v1/responses, and the chat that it becomes.

What a chat takes beside its messages is taken here, too, under the same names; what has another
name or shape in this protocol stands below.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway import limits
from services.gateway.front import field_rules as fields
from services.gateway.front.places import Places
from services.gateway.front.tool_fields import (
    MAX_TOOLS,
    AllowedTools,
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

_USE_OURS = Unserved("use max_output_tokens")

RESPONSES_UNSERVED: dict[str, Unserved] = {
    "max_tokens": _USE_OURS,
    "max_completion_tokens": _USE_OURS,
    "messages": Unserved("use input"),
    **dict.fromkeys(("n", "best_of"), Unserved("a response is one answer", (1,))),
    "response_format": Unserved("use text.format"),
    "background": Unserved("an answer is made while its client waits"),
    **dict.fromkeys(
        ("previous_response_id", "conversation"),
        Unserved("no conversation is kept here: send all of it as input"),
    ),
    "prompt": Unserved("no prompts are kept here: send input and instructions"),
    "include": Unserved("the answer has no such part", ([], ["reasoning.encrypted_content"])),
    "max_tool_calls": Unserved("tools are called by the client, which can count"),
    "truncation": Unserved("use truncate_prompt_tokens", ("disabled",)),
    "logprobs": Unserved("use /v1/chat/completions", (False,)),
    "top_logprobs": Unserved("use logprobs of /v1/chat/completions", (0,)),
    "moderation": Unserved("nothing is moderated here"),
    "context_management": Unserved("send what the model shall read", ([],)),
}
"""Beside those of a chat."""

_PARTS = ("input_text", "output_text", "text")
_AS_TEXT = "only parts of type input_text and output_text with a text"


_SEAL = "pdmesh1."


def sealed(thought: str) -> str:
    """Return thinking for clients that send nothing back but what they cannot read."""
    return _SEAL + b64encode(thought.encode()).decode()


def opened(content: str) -> str:
    """Return what ``sealed`` was given; of another's, ''."""
    try:
        return b64decode(content[len(_SEAL) :]).decode() if content.startswith(_SEAL) else ""
    except ValueError:
        return ""


class ItemPart(msgspec.Struct):
    """One part of an item's content; only text is served."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct):
    """One item of the input: a message, a call that an earlier answer made, what came of it, or the
    thinking of an answer."""

    type: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None


class FlatTool(msgspec.Struct):
    """One tool: a function, or a namespace that has some. strict: not by itself, as OpenAI's are.
    tools: of a namespace."""

    type: Annotated[str, fields.rule(enum=["function", "namespace"])]
    name: Annotated[str | None, fields.rule(type="string")] = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[FlatTool] | UnsetType | None = UNSET


class FlatAllowed(msgspec.Struct):
    """A tool that may be called."""

    name: ToolName
    type: Annotated[str, fields.rule(const="function")] = "function"


class FlatChoice(msgspec.Struct):
    """The one tool to call, or those that may be; other choices are refused by their type."""

    name: ToolName | UnsetType = UNSET
    type: Annotated[str, fields.rule(enum=["function", "allowed_tools"])] = "function"
    mode: Annotated[str, fields.rule(enum=["auto", "required"])] | UnsetType = UNSET
    tools: Annotated[list[FlatAllowed], fields.rule(maxItems=MAX_TOOLS)] | UnsetType = UNSET


class TextFormat(msgspec.Struct, rename={"schema_": "schema"}):
    """What the text shall match."""

    type: Annotated[str, fields.rule(enum=["text", "json_object", "json_schema"])] = "text"
    name: str | None = None
    schema_: JsonSchema | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct):
    """verbosity: not served."""

    format: TextFormat | None = None
    verbosity: Annotated[str, fields.rule("Not served.", const="medium")] | None = None


class Reasoning(msgspec.Struct):
    """effort: a variable of the template; none: do not think. Of summaries nothing is read: the
    thinking itself is in the answer."""

    effort: str | None = None


_ResponsesFields = with_unserved("_ResponsesFields", RESPONSES_UNSERVED, SamplingBody)

Input = Annotated[list[InputItem], fields.rule(minItems=1, maxItems=limits.MAX_MESSAGES)]
FlatTools = Annotated[list[FlatTool], fields.rule("Names differ.", maxItems=MAX_TOOLS)]
FlatToolChoice = Annotated[str, fields.rule(enum=["none", "auto", "required"])] | FlatChoice


class ResponsesBody(_ResponsesFields, kw_only=True):
    """POST /v1/responses."""

    input: str | Input
    instructions: str | None = None
    max_output_tokens: fields.MaxTokens | None = None
    tools: FlatTools | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    tool_choice: FlatToolChoice | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    separate_reasoning: bool | None = None


_OF_CHATS = tuple(
    name
    for name in SamplingBody.__struct_fields__
    if name not in (*RESPONSES_UNSERVED, "tools", "tool_choice", "reasoning", "reasoning_effort")
)


def chat_of_input(body: ResponsesBody) -> tuple[ChatBody, Places]:
    """Return the chat of a body, and where its fields stood.

    Raises InvalidRequest: a field that is not served, or an item that says nothing we know.
    """
    refuse_those_of(RESPONSES_UNSERVED, body)
    asked: Reasoning | None = body.reasoning
    effort = body.reasoning_effort if asked is None or asked.effort is None else asked.effort
    lead = [Message("system", body.instructions)] if body.instructions else []
    places = Places(
        {
            "messages": "input",
            "max_completion_tokens": "max_output_tokens",
            "response_format": "text.format",
            "response_format.json_schema": "text.format",
            "tool_choice.function": "tool_choice",
            "tool_choice.allowed_tools": "tool_choice",
        }
    )
    choice = body.tool_choice
    chat = ChatBody(
        **{name: getattr(body, name) for name in _OF_CHATS},
        reasoning_effort=effort,
        messages=[*lead, *_messages(body.input, places, len(lead))],
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else _tools(body.tools, places),
        tool_choice=_choice(choice, places) if isinstance(choice, FlatChoice) else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
        separate_reasoning=body.separate_reasoning,
    )
    return chat, places


def _choice(choice: FlatChoice, places: Places) -> NamedTool:
    if choice.type == "allowed_tools":
        if choice.mode is UNSET or choice.tools is UNSET:
            raise limits.refusal("tool_choice", "of allowed tools needs mode and tools")
        for idx in range(len(choice.tools)):
            own = f"tool_choice.tools[{idx}]"
            places.put(f"tool_choice.allowed_tools.tools[{idx}].function", own)
        tools = [ToolBody(FunctionBody(one.name), one.type) for one in choice.tools]
        return NamedTool(type=choice.type, allowed_tools=AllowedTools(choice.mode, tools))
    if choice.type != "function":
        raise unsupported("tool_choice.type", "must be function")
    if choice.name is UNSET:
        raise limits.refusal("tool_choice.name", "is required")
    return NamedTool(NamedFunction(choice.name))


def spaced(namespace: str, name: str) -> str:
    """Return what the model calls a function of a namespace, as agents name those of MCP."""
    return f"{namespace}__{name}"


def _tools(tools: list[FlatTool], places: Places) -> list[ToolBody]:
    """places: learns where each stood."""
    made: list[ToolBody] = []

    def add(tool: FlatTool, place: str, namespace: str = "") -> None:
        has_own = tool.type == "namespace" and not namespace
        if tool.type != "function" and not has_own:
            raise unsupported(
                f"{place}.type", "must be function: no tool of ours runs here, only yours"
            )
        if tool.name is None:
            raise limits.refusal(f"{place}.name", "is required")
        if has_own:
            for index, one in enumerate(tool.tools or ()):
                add(one, f"{place}.tools[{index}]", tool.name)
            return
        places.put(f"tools[{len(made)}].function", place)
        name = spaced(namespace, tool.name) if namespace else tool.name
        made.append(ToolBody(FunctionBody(name, tool.description, tool.parameters, tool.strict)))

    for index, tool in enumerate(tools):
        add(tool, f"tools[{index}]")
    return made


def _format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None:
        return None
    if text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "ask for it in the input")
    asked = text.format
    if asked is None:
        return None
    if asked.type not in ("text", "json_object", "json_schema"):
        raise unsupported("text.format.type", "must be text, json_object or json_schema")
    named = NamedSchema(asked.name, asked.schema_, asked.strict, asked.description)
    return ResponseFormat(asked.type, named if asked.type == "json_schema" else None)


# --- items ----------------------------------------------------------------------------------------


def _messages(given: str | list[InputItem], places: Places, num_before: int) -> list[Message]:
    """Return the messages of an input. num_before: those that come before these, for the places of
    errors."""
    if isinstance(given, str):
        return [Message("user", given)]
    limits.checked_count(len(given), limits.MAX_MESSAGES, param="input", what="items", least=1)
    pieces = ChatPieces(places, num_before=num_before, call_id="call_id")
    for index, item in enumerate(given):
        place = f"input[{index}]"
        kind = item.type or ("message" if item.role is not None else "")
        pieces.add(_READERS.get(kind, _unknown)(item, place), place)
    return pieces.messages


def _message(item: InputItem, place: str) -> Message:
    limits.checked_role(item.role or "", param=f"{place}.role")
    content = item.content
    parts = content if isinstance(content, str) or content is None else _parts(content, place)
    return Message(item.role or "", parts)


def _call(item: InputItem, place: str) -> Message:
    for name in ("call_id", "name"):
        if not getattr(item, name):
            raise limits.refusal(f"{place}.{name}", "is required")
    name = spaced(item.namespace, item.name or "") if item.namespace else item.name or ""
    function = CalledFunction(name, item.arguments or "{}")
    return Message("assistant", tool_calls=[MessageCall(item.call_id or "", function)])


def _result(item: InputItem, place: str) -> Message:
    if item.output is None:
        raise limits.refusal(f"{place}.output", "is required")
    output = item.output
    parts = output if isinstance(output, str) else _parts(output, place, "output")
    return Message("tool", parts, tool_call_id=item.call_id)


def _thought(item: InputItem, place: str) -> Message:
    parts = item.content if isinstance(item.content, list) else ()
    text = "".join(part.text or "" for part in parts)
    return Message("assistant", reasoning_content=text or opened(item.encrypted_content or ""))


def _unknown(item: InputItem, place: str) -> Message:
    if item.type == "item_reference":
        raise unsupported(
            f"{place}.type", "no items are kept here: send them as they came, as with store: false"
        )
    raise unsupported(
        f"{place}.type", "must be message, function_call, function_call_output or reasoning"
    )


_READERS = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _result,
    "reasoning": _thought,
}


def _parts(parts: list[ItemPart], place: str, name: str = "content") -> list[ContentPart]:
    made: list[ContentPart] = []
    for index, part in enumerate(parts):
        if part.type not in _PARTS or part.text is None:
            raise unsupported(f"{place}.{name}[{index}]", f"is not served: {_AS_TEXT}")
        made.append(ContentPart("text", part.text))
    return made
