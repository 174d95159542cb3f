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


@schemathesis.hook
def before_call(context: HookContext, case: Case, kwargs: dict[str, Any]) -> None:
    """Mend what is meant to be right."""
    body = case.body
    if isinstance(body, dict) and not {"max_tokens", "max_completion_tokens"} & {
        name for name, value in body.items() if value is not None
    }:
        body["max_tokens"] = MOST_TOKENS
    if case.headers and _is_positive(case.headers.get("X-Request-Timeout")):
        case.headers["X-Request-Timeout"] = "60"  # a microsecond is a right value, and times out
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if isinstance(body, dict):
        case.body = _mended(_whole(body))


def _is_positive(header: object) -> bool:
    try:
        return 0 < float(str(header)) <= 86_400
    except ValueError:
        return False


def _mended(body: dict[str, Any]) -> dict[str, Any]:
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            body[name] = min(max(body[name], 1), MOST_TOKENS)
    if body.get("min_tokens") is not None:
        body["min_tokens"] = min(body["min_tokens"], 1)  # at most max_tokens
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1
    if body.get("logit_bias") is not None:
        body["logit_bias"] = {"3": 1.5, "4": -1.5}  # keys are of the vocabulary
    if isinstance(body.get("messages"), list):
        body["messages"] = [
            {**message, "role": "user"} for message in body["messages"][:MOST_MESSAGES]
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
