"""What a setting may be: bounds of numbers, and words; beside the fields of ``config.py``."""

from __future__ import annotations

import math
import os
import re
import stat
from functools import cache
from typing import Any, Literal, NamedTuple, get_type_hints

from shared.address import is_host
from shared.object_reference import is_reference

RoutingPolicyName = Literal[
    "conductor", "local", "least_loaded", "round_robin", "random", "splitwise", "p2c", "hash"
]
"""What ``--policy`` takes; the policies are the gateway's (``core/routing/routing.py``)."""

OverloadName = Literal["off", "stage", "early", "predicted"]
"""What ``--overload`` takes (``core/admission/overload.py``)."""

PlannerName = Literal["off", "advise", "act"]
"""What ``--planner`` takes (``core/scaling/autoscaler.py``)."""

ToolFamily = Literal[
    "hermes",
    "llama3",
    "mistral",
    "pythonic",
    "qwen3_coder",
    "glm45",
    "seed_oss",
    "minimax_m2",
    "deepseek_v3",
    "harmony",
]
"""What ``--tool-parser`` takes; the parsers are the gateway's (``text/calls``)."""

ThoughtName = Literal["think", "mistral", "seed_oss", "harmony"]
"""What ``--reasoning-parser`` takes."""

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s*]+")
"""What ``--cors-origins`` takes; apps that are made of a browser have schemes of their own."""

MOST_PLANNED = 1024
"""Most workers that are planned."""


class Between(NamedTuple):
    """What a number may be, both ends included."""

    low: float
    high: float = math.inf

    def why_wrong(self, value: Any) -> str:
        """Return the rule if a value breaks it, else ''."""
        text = f"{self.low}..{self.high}" if self.high < math.inf else f"at least {self.low}"
        return "" if self.low <= value <= self.high else f"must be {text}"


class AboveZero(NamedTuple):
    """What a number may be, 0 excluded."""

    high: float

    def why_wrong(self, value: Any) -> str:
        return "" if 0 < value <= self.high else f"must be above 0 and at most {self.high}"


class OneOf:
    """What a word may be. own: what else, in words: an object of a package outside this one."""

    def __init__(self, *words: str, own: str = "") -> None:
        self.words = words
        self.own = own

    def why_wrong(self, value: Any) -> str:
        if value in self.words or (self.own and is_reference(value)):
            return ""
        *most, last = (*self.words, self.own) if self.own else self.words
        return f"must be {', '.join(most)} or {last}"


class Host:
    """What a name of this machine may be; an empty one would be all of its addresses."""

    def why_wrong(self, value: Any) -> str:
        return "" if is_host(value) else "must be an IP address or a host name"


class Reread:
    """What a file may be that is read more than once: by a command first, or when it changes."""

    def why_wrong(self, value: Any) -> str:
        try:
            is_pipe = value is not None and stat.S_ISFIFO(os.stat(value).st_mode)
        except (OSError, ValueError):  # who reads it says why
            return ""
        rule = "must be a file: a pipe is empty when it is read again"
        return rule if is_pipe else ""


@cache
def rules_of(kind: type) -> dict[str, Between | AboveZero | OneOf | Host | Reread]:
    """Return what the fields of a record may be."""
    hints = get_type_hints(kind, include_extras=True)
    said = {name: getattr(hints[name], "__metadata__", ()) for name in hints}
    kinds = (Between, AboveZero, OneOf, Host, Reread)
    return {name: one for name, all_ in said.items() for one in all_ if isinstance(one, kinds)}
