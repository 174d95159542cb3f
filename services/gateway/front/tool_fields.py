"""Tools that a client offers, and messages that tell of calls: fields, and what they ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway import limits
from services.gateway.front import field_rules as fields
from services.gateway.text.calls.harmony import HARMONY, call_header
from services.gateway.text.grammars import Structure
from services.gateway.text.schemas import moved, schema_fault
from shared.bounds import ToolFamily

MAX_TOOLS = 512
NAME_PATTERN = r"[A-Za-z0-9_.-]{1,128}"
"""Anthropic's limit; OpenAI's is 64, which names of MCP's tools exceed."""

_NAME = re.compile(NAME_PATTERN)
_OF_NO_PARAMETERS = {"type", "properties", "required", "title", "description", "$schema"}
"""Keywords of a function without parameters that say nothing else."""

Function = TypeVar("Function")

ToolName = Annotated[str, fields.rule(pattern=f"^{NAME_PATTERN}$")]


class FunctionBody(msgspec.Struct):
    """A function that the model may call. parameters: a JSON schema of an object."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """What arguments must match: an object, an empty one where no parameter is named."""
        parameters = self.parameters or {"properties": {}}
        schema = {**parameters, "type": "object"}
        if not parameters.get("properties", True) and schema.keys() <= _OF_NO_PARAMETERS:
            schema["additionalProperties"] = False
        return schema


class ToolBody(msgspec.Struct):
    """One tool; functions are all there are. Others have none, and are refused by their type."""

    function: FunctionBody | UnsetType = UNSET
    type: Annotated[str, fields.rule(const="function")] = "function"


class NamedFunction(msgspec.Struct):
    """A function by its name."""

    name: ToolName


Tools = Annotated[list[ToolBody], fields.rule("Names differ.", maxItems=MAX_TOOLS)]


class AllowedTools(msgspec.Struct):
    """The tools that may be called, by their names, of those that the model is shown."""

    mode: Annotated[str, fields.rule(enum=["auto", "required"])]
    tools: Tools


class NamedTool(msgspec.Struct):
    """The one tool to call, or those that may be; other choices are refused by their type."""

    function: NamedFunction | UnsetType = UNSET
    type: Annotated[str, fields.rule(enum=["function", "allowed_tools"])] = "function"
    allowed_tools: AllowedTools | UnsetType = UNSET


class CalledFunction(msgspec.Struct):
    """What was called, with a JSON object as text."""

    name: ToolName
    arguments: str = "{}"


class MessageCall(msgspec.Struct):
    """A call that an earlier answer made."""

    id: str
    function: CalledFunction
    type: Annotated[str, fields.rule(const="function")] = "function"


ToolChoice = Annotated[str, fields.rule(enum=["none", "auto", "required"])] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools, checked. functions: those that may be called, by the places of their fields."""

    functions: Mapping[str, FunctionBody]
    choice: Literal["auto", "required", "named"]
    is_parallel: bool = True

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Of the arguments of all that may be called, by name."""
        return {one.name: one.schema for one in self.functions.values()}

    @property
    def is_strict(self) -> bool:
        """Whether a function's arguments must match its schema, though none need be called."""
        return self.choice == "auto" and any(one.strict for one in self.functions.values())

    def structure(self, family: ToolFamily | None, alone: Structure | None) -> Structure | None:
        """Return what the answer must match for these calls to be made; None = nothing.

        alone: what an answer without calls must match. Raises InvalidRequest: strict tools, or
        these beside a schema, of a family whose calls no grammar can follow.
        """
        if family == "harmony":  # a call that must come has its form, too
            is_free = self.choice == "auto" and not self.is_strict and alone is None
            return None if is_free else _harmony(self, alone)
        match self.choice:
            case "named":
                ((place, function),) = self.functions.items()
                return _json(function.schema, {"": place})
            case "required":
                return _calls(self.functions, {} if self.is_parallel else {"maxItems": 1})
            case "auto":
                if not self.is_strict and alone is None:
                    return None
                if family == "llama3" and alone is not None:
                    return _calls(self.functions, None, alone)  # both begin with a brace
                return _tags(self.functions, family, alone)


def tool_use(
    tools: list[ToolBody] | None, choice: str | NamedTool | None, is_parallel: bool | None
) -> ToolUse | None:
    """Return what may be called, None = nothing. Raises InvalidRequest: a tool named twice, no
    function, or with a schema that is none; a choice of what is not there."""
    functions = {
        f"tools[{idx}].function.parameters": _checked(tool, f"tools[{idx}]")
        for idx, tool in enumerate(tools or ())
    }
    limits.checked_count(len(functions), MAX_TOOLS, param="tools", what="tools")
    names: set[str] = set()
    for idx, function in enumerate(functions.values()):
        if function.name in names:
            raise limits.refusal(f"tools[{idx}].function.name", "another tool has this name, too")
        names.add(function.name)
    if choice is None or choice == "auto":
        use = "auto"
    elif choice == "none":
        return None
    elif choice == "required":
        use = "required"
    elif isinstance(choice, NamedTool) and choice.type == "allowed_tools":
        use, wanted = _allowed(choice.allowed_tools, names)
        functions = {place: one for place, one in functions.items() if one.name in wanted}
    elif isinstance(choice, NamedTool):
        wanted = _of_type_function(choice, choice.function, "tool_choice").name
        if wanted not in names:
            raise limits.refusal("tool_choice.function.name", "is none of the tools")
        functions = {place: one for place, one in functions.items() if one.name == wanted}
        use = "named"
    else:
        rule = "must be none, auto, required, a function or allowed_tools"
        raise limits.refusal("tool_choice", rule)
    if not functions:
        if use != "auto":
            raise limits.refusal("tool_choice", "needs tools")
        return None
    return ToolUse(functions=functions, choice=use, is_parallel=is_parallel is not False)


def _allowed(
    allowed: AllowedTools | UnsetType, names: Container[str]
) -> tuple[Literal["auto", "required"], set[str]]:
    """Return whether one must be called, and which may be."""
    param = "tool_choice.allowed_tools"
    if allowed is UNSET:
        raise limits.refusal(param, "is required")
    wanted: set[str] = set()
    for idx, tool in enumerate(allowed.tools):
        name = _of_type_function(tool, tool.function, f"{param}.tools[{idx}]").name
        if name not in names:
            raise limits.refusal(f"{param}.tools[{idx}].function.name", "is none of the tools")
        wanted.add(name)
    if allowed.mode not in ("auto", "required"):
        raise limits.refusal(f"{param}.mode", "must be auto or required")
    return allowed.mode, wanted


def for_template(tools: Sequence[ToolBody]) -> list[dict[str, Any]]:
    """Return tools as chat templates expect them."""
    shown: list[dict[str, Any]] = []
    for index, tool in enumerate(tools):
        function = _of_type_function(tool, tool.function, f"tools[{index}]")
        parameters = function.parameters or {"type": "object", "properties": {}}
        about = {"name": function.name, "description": function.description or ""}
        shown.append({"type": "function", "function": about | {"parameters": parameters}})
    return shown


def message_for_template(
    param: str,
    called: set[str],
    *,
    role: str,
    content: str,
    name: str | None,
    thought: str | None,
    calls: Sequence[MessageCall] | None,
    call_id: str | None,
) -> dict[str, Any]:
    """Return a message as chat templates expect it.

    param: its place in the body. called: ids of the calls so far; its own are added. Raises
    InvalidRequest: no such role, or a call or a result that does not belong there.
    """
    role = limits.checked_role(role, param=f"{param}.role", roles=(*limits.ROLES, "tool"))
    shown: dict[str, Any] = {"role": role, "content": content}
    if name:
        shown["name"] = name
    if thought:
        shown["reasoning_content"] = thought
    if calls:
        if role != "assistant":
            raise limits.refusal(f"{param}.tool_calls", "belongs to the role assistant")
        called |= {call.id for call in calls}
        shown["tool_calls"] = _calls_for_template(calls)
    if role == "tool":
        if call_id not in called:
            raise limits.refusal(f"{param}.tool_call_id", "is no id of an earlier message's calls")
        shown["tool_call_id"] = call_id
    elif call_id:
        raise limits.refusal(f"{param}.tool_call_id", "belongs to the role tool")
    return shown


def _calls_for_template(calls: Sequence[MessageCall]) -> list[dict[str, Any]]:
    """Return a message's calls as chat templates expect them, arguments as values; what is no JSON
    object, which models write at times, as it was written."""
    shown: list[dict[str, Any]] = []
    for call in calls:
        text = call.function.arguments
        arguments: dict[str, Any] | str = text
        with suppress(msgspec.DecodeError, RecursionError):
            # Not Python's reader: that takes NaN, and half characters, which no prompt can hold.
            arguments = msgspec.json.decode(text or "{}", type=dict[str, Any])
        function = {"name": call.function.name, "arguments": arguments}
        shown.append({"id": call.id, "type": "function", "function": function})
    return shown


def _of_type_function(
    asked: ToolBody | NamedTool, function: Function | UnsetType, param: str
) -> Function:
    if asked.type != "function":
        raise limits.refusal(f"{param}.type", "must be function", code="unsupported")
    if function is UNSET:
        raise limits.refusal(f"{param}.function", "is required")
    return function


def _checked(tool: ToolBody, param: str) -> FunctionBody:
    function = _of_type_function(tool, tool.function, param)
    if _NAME.fullmatch(function.name) is None:
        raise limits.refusal(
            f"{param}.function.name", "must be 1 to 128 characters of A-Z a-z 0-9 . _ -"
        )
    fault = schema_fault(function.parameters) if function.parameters is not None else None
    if fault is not None:
        raise limits.refusal(f"{param}.function.parameters{fault.place}", fault.rule)
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise limits.refusal(f"{param}.function.parameters.type", "must be object")
    return function


def _json(schema: dict[str, Any], places: Mapping[str, str]) -> Structure:
    return Structure(kind="json_schema", value=schema, param="tools", places=places)


def _calls(
    functions: Mapping[str, FunctionBody],
    bounds: dict[str, int] | None,
    alone: Structure | None = None,
) -> Structure:
    """A list of calls; without bounds one call. alone: or this."""
    roots = {
        f"f{idx}": moved(one.schema, f"#/$defs/f{idx}")
        for idx, one in enumerate(functions.values())
    }
    places = {f".$defs.f{idx}": place for idx, place in enumerate(functions)}
    choices: list[Any] = [
        {
            "type": "object",
            "properties": {
                "name": {"const": one.name},
                "parameters": {"$ref": f"#/$defs/f{idx}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for idx, one in enumerate(functions.values())
    ]
    if alone is not None:
        roots["alone"] = moved(alone.value, "#/$defs/alone")
        places[".$defs.alone"] = alone.param
        choices.append({"$ref": "#/$defs/alone"})
    schema: dict[str, Any] = {"anyOf": choices}
    if bounds is not None:
        schema = {"type": "array", "minItems": 1, **bounds, "items": schema}
    return _json({**schema, "$defs": roots}, places)


def _harmony(use: ToolUse, alone: Structure | None) -> Structure:
    """A call, or what an answer may be without one."""
    is_free = use.choice == "auto"
    forms: list[dict[str, Any]] = [
        {
            "begin": call_header(one.name),
            "schema": {"type": "object"} if is_free and not one.strict else one.schema,
        }
        for one in use.functions.values()
    ]
    places = {f"[{idx}].schema": place for idx, place in enumerate(use.functions)}
    if alone is not None:
        places[f"[{len(forms)}].schema"] = alone.param
        forms.append({"begin": HARMONY.answer, "schema": alone.value})
    elif is_free:
        forms.append({"begin": HARMONY.answer})
    return Structure(kind="forms", value=forms, param="tools", places=places)


def _tags(
    functions: Mapping[str, FunctionBody], family: ToolFamily | None, alone: Structure | None
) -> Structure:
    if family == "hermes":
        begin, middle, end = '<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>"
        trigger = "<tool_call>"
    elif family == "llama3":
        begin, middle, end = '{"name": ', ', "parameters": ', "}"
        trigger = '{"name": '
    else:
        raise limits.refusal(
            "tools",
            f"{'strict' if alone is None else alone.param} is served with tool_choice auto where "
            "calls are JSON, as Hermes, Qwen2.5, Qwen3 and Llama 3 write them: use tool_choice "
            "required or none, or leave it out",
            code="unsupported",
        )
    tags: list[dict[str, Any]] = [
        {
            "trigger": trigger,
            "begin": f"{begin}{json.dumps(one.name)}{middle}",
            "schema": one.schema if one.strict else {"type": "object"},
            "end": end,
        }
        for one in functions.values()
    ]
    places = {f"[{idx}].schema": place for idx, place in enumerate(functions)}
    if alone is not None:
        places[f"[{len(tags)}].schema"] = alone.param
        tags.append({"schema": alone.value})
    return Structure(kind="tags", value=tags, param="tools", places=places)
