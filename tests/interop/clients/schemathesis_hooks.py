"""Makes data that is right by the document right by the rules, too, that JSON Schema cannot say.

Runs inside schemathesis. Each line of ``_mended`` is a rule that the document tells in words; wrong
data is sent as it was made. Answers are kept short, because a real model computes them.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis import Case, HookContext

MOST_TOKENS = 4
MOST_MESSAGES = 8
GRAMMARS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "guided_whitespace_pattern", "json_schema", "regex", "ebnf"),
    *("structural_tag", "tools", "tool_choice", "text"),
)
"""Fields that hold a text in a language of its own, which the document cannot describe; tools have
names that differ, and a choice needs them."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Mend what is meant to be right."""
    body = case.body
    # Messages must say how long an answer may be: what is wrong without it stays wrong.
    is_free = not case.path.startswith("/v1/messages")
    if isinstance(body, dict) and is_free and all(body.get(name) is None for name in LIMITS):
        body["max_output_tokens" if case.path == "/v1/responses" else "max_tokens"] = MOST_TOKENS
    if case.headers and _is_positive(case.headers.get("X-Request-Timeout")):
        case.headers["X-Request-Timeout"] = "60"  # a microsecond is a right value, and times out
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if isinstance(body, dict):
        case.body = _mended(_whole(body))
        if not is_free:
            case.body |= {"system": None, "thinking": None, "output_config": None}
            for message in case.body["messages"]:
                message["content"] = "a"  # blocks are of roles


def _is_positive(header: object) -> bool:
    try:
        return 0 < float(str(header)) <= 86_400
    except ValueError:
        return False


def _mended(body: dict[str, Any]) -> dict[str, Any]:
    for name in LIMITS:
        if body.get(name) is not None:
            body[name] = min(max(body[name], 1), MOST_TOKENS)
    if body.get("min_tokens") is not None:
        body["min_tokens"] = min(body["min_tokens"], 1)  # at most max_tokens
    for name in GRAMMARS:
        body.pop(name, None)
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1
    if body.get("logit_bias") is not None:
        body["logit_bias"] = {"3": 1.5, "4": -1.5}  # keys are of the vocabulary
    if isinstance(body.get("input"), list):
        body["input"] = [{"role": "user", "content": "a"} for _ in body["input"][:MOST_MESSAGES]]
    if isinstance(body.get("messages"), list):
        body["messages"] = [
            {**message, "role": "user", "tool_calls": None, "tool_call_id": None}
            for message in body["messages"][:MOST_MESSAGES]
        ]  # the template decides about roles; together they fit the context
        for message in body["messages"]:
            if isinstance(message.get("content"), list):
                message["content"] = message["content"][:MOST_MESSAGES]
    return body


def _whole(value: Any) -> Any:
    """JSON Schema takes 1.0 for an integer, the gateway does not."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in value.items()}
    return value
