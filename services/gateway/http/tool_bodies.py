"""What an answer's message says where there are tools, or where the model thinks first; the rest of
an answer is in ``bodies.py``.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

SAID = msgspec.Meta(
    extra_json_schema={
        "type": "object",
        "required": ["role", "content", "refusal"],
        "properties": {
            "role": {"const": "assistant"},
            "content": {"type": ["string", "null"]},
            "refusal": {"type": "null"},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
            "reasoning_content": {"type": "string"},
        },
    }
)
"""Two structs, of which JSON Schema could not say when which comes."""

SAID_IN_PART = msgspec.Meta(
    extra_json_schema={
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": {"type": "string"},
            "tool_calls": {"type": "array", "items": {"type": "object"}},
            "reasoning_content": {"type": "string"},
        },
    }
)


class WholeCall(msgspec.Struct):
    """What to call, with a JSON object as text."""

    name: str
    arguments: str


class CallBody(msgspec.Struct):
    """A call of a tool that the answer asks for."""

    id: str
    type: Literal["function"]
    function: WholeCall


class ToolMessage(msgspec.Struct, kw_only=True):
    """What the model said where there are tools, or where it thinks first. content: null if there
    are calls and nothing else."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[CallBody] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


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


class ToolDelta(msgspec.Struct, kw_only=True):
    """What is new where there are tools, or where the model thinks first."""

    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
