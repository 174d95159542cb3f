"""What the types of the bodies do not say: ranges, counts, patterns, and which fields are not
served, as JSON Schema for ``openapi.py``.

Every number is from ``limits.py``; a test tries each bound on the gateway itself.
"""

from __future__ import annotations

from typing import Any

from services.gateway import limits
from services.gateway.http.openai_forms import EMPTY, OF_MESSAGES, UNSERVED_OF_A_MESSAGE
from services.gateway.http.unserved_fields import UNSERVED
from services.gateway.mesh import ServedModel

Schema = dict[str, Any]


def field_rules(
    model: ServedModel | None, *, max_choices: int, takes_templates: bool
) -> dict[str, dict[str, Schema]]:
    """Rules by struct and field. A rule with a type of its own replaces the field's schema, any
    other refines it and leaves null allowed; the rule of "" is about the struct."""
    token_id: Schema = {"type": "integer", "minimum": 0}
    room: Schema = {}
    name: Schema = {"description": "Empty or null = the one that is served."}
    if model is not None:
        token_id["maximum"] = model.vocab_size - 1
        room["maximum"] = model.max_model_len - 1
        name["enum"] = [model.name, ""]
    sampling = _sampling_rules(token_id, room, max_choices)
    rendering: dict[str, Schema] = {
        "chat_template": {"maxLength": limits.MAX_TEMPLATE_CHARS} if takes_templates else _ABSENT,
        "chat_template_kwargs": {"maxProperties": limits.MAX_TEMPLATE_ARGUMENTS},
        "continue_final_message": {
            "description": "The answer continues the last message; not with "
            "add_generation_prompt: true."
        },
    }
    return {
        "ChatBody": {
            **sampling,
            "model": name,
            "messages": _MESSAGES,
            "max_completion_tokens": sampling["max_tokens"],
            "top_logprobs": _bounds("top_logprobs", "Needs logprobs to be true."),
            **rendering,
            "echo": {"const": False, "description": "Not served."},
        },
        "CompletionBody": {
            **sampling,
            "model": name,
            "prompt": _prompt(token_id),
            "max_tokens": {
                **room,
                "minimum": 0,
                "description": "Default 16. 0 only with echo: tells of the prompt alone.",
            },
            "logprobs": _bounds("logprobs"),
            "suffix": {"maxLength": 0},
            **dict.fromkeys(OF_MESSAGES, _ABSENT),
        },
        "TokenizeBody": {
            "": {"oneOf": [_one_of("prompt", "messages"), _one_of("messages", "prompt")]},
            "model": name,
            "messages": _MESSAGES,
            **rendering,
            **_UNSERVED,
        },
        "DetokenizeBody": {"model": name, "tokens": {"items": token_id}},
        "Message": {
            **{key: {"enum": [None, *EMPTY]} for key in UNSERVED_OF_A_MESSAGE},
            "role": {"enum": list(limits.ROLES)},
            "content": {
                "type": ["string", "array", "null"],
                "items": {"$ref": "#/components/schemas/ContentPart"},
                "maxItems": limits.MAX_PARTS,
            },
        },
        "ContentPart": {
            "": {"required": ["type", "text"]},
            "type": {"const": "text"},
            "text": {"type": "string"},
        },
    }


_ABSENT: Schema = {"type": "null", "description": "Not served."}

_UNSERVED: dict[str, Schema] = {
    name: {"enum": [None, *harmless], "description": f"Not served: {why}."}
    for name, (why, harmless) in UNSERVED.items()
}

_MESSAGES: Schema = {"minItems": 1, "maxItems": limits.MAX_MESSAGES}


def _bounds(field: str, description: str = "") -> Schema:
    low, high = limits.INTEGERS.get(field) or limits.NUMBERS[field]
    rule: Schema = {"minimum": low, "maximum": high}
    return rule | {"description": description} if description else rule


def _above_zero(field: str) -> Schema:
    return {"exclusiveMinimum": 0, "maximum": limits.ABOVE_ZERO[field]}


def _sampling_rules(token_id: Schema, room: Schema, max_choices: int) -> dict[str, Schema]:
    label = f"^({limits.LABEL_PATTERN})?$"
    bias = {"type": "number", **_bounds("logit_bias")}
    text: Schema = {"type": "string", "maxLength": limits.MAX_STOP_CHARS}
    return {
        "max_tokens": {
            **_bounds("max_tokens"),
            **room,
            "description": "With the prompt at most the model's context.",
        },
        "min_tokens": {**room, "minimum": 0, "description": "At most max_tokens."},
        "n": {"minimum": 1, "maximum": max_choices},
        "temperature": _bounds("temperature", "0 = greedy."),
        "top_p": _above_zero("top_p"),
        "top_k": _bounds("top_k", "0 or -1 = off."),
        "min_p": _bounds("min_p"),
        "presence_penalty": _bounds("presence_penalty"),
        "frequency_penalty": _bounds("frequency_penalty"),
        "repetition_penalty": _bounds("repetition_penalty"),
        "logit_bias": {
            "description": "By token id of the vocabulary.",
            "maxProperties": limits.MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": f"^({limits.BIAS_KEY_PATTERN})$"},
            "additionalProperties": bias,
        },
        "seed": _bounds("seed", "With the same seed, the same answer."),
        "stop": {
            "type": ["string", "array", "null"],
            "maxLength": limits.MAX_STOP_CHARS,
            "items": {**text, "minLength": 1},
            "maxItems": limits.MAX_STOP_STRINGS,
        },
        "stop_token_ids": {"items": token_id, "maxItems": limits.MAX_STOP_TOKEN_IDS},
        "cache_salt": {
            "pattern": label,
            "description": "Only requests with the same salt share a prefix cache.",
        },
        "best_of": {"minimum": 1, "maximum": max_choices, "description": "Equals n."},
        "allowed_token_ids": {"items": token_id, "minItems": 1},
        "bad_words": {
            "items": {**text, "minLength": 1, "pattern": r"\S"},
            "maxItems": limits.MAX_BAD_WORDS,
            "description": "Not in the answer, as tokens.",
        },
        "truncate_prompt_tokens": {
            "minimum": -1,
            "maximum": limits.INTEGERS["max_tokens"][1],
            "not": {"const": 0},
            "description": "Keep so many of the prompt's tokens; -1 = what leaves room.",
        },
        "truncation_side": {"enum": [*limits.SIDES, None]},
        "response_format": {"properties": {"type": {"const": "text"}}},
        **_UNSERVED,
    }


def _prompt(token_id: Schema) -> Schema:
    ids: Schema = {"type": "array", "items": token_id, "minItems": 1}
    text: Schema = {"type": "string", "minLength": 1}
    several: Schema = {"type": "array", "minItems": 1, "maxItems": limits.MAX_PROMPTS}
    return {
        "description": "A text, texts, token ids, or lists of token ids.",
        "anyOf": [text, ids, {**several, "items": text}, {**several, "items": ids}],
    }


def _one_of(given: str, other: str) -> Schema:
    return {
        "required": [given],
        "properties": {given: {"not": {"type": "null"}}, other: {"type": "null"}},
    }


def apply_rules(component: Schema, rules: dict[str, Schema]) -> None:
    fields: dict[str, Schema] = component.get("properties", {})
    for name, rule in rules.items():
        if not name:
            component.update(rule)
        elif name in fields:
            fields[name] = _ruled(fields[name], rule)


def _ruled(field: Schema, rule: Schema) -> Schema:
    kept = {name: field[name] for name in ("default",) if name in field}
    rule = dict(rule)
    if "description" in rule:
        kept["description"] = rule.pop("description")
    if "type" in rule or "anyOf" in rule:
        return rule | kept
    if "anyOf" not in field:
        return field | rule | kept
    return {
        "anyOf": [
            branch if branch == {"type": "null"} else branch | rule for branch in field["anyOf"]
        ],
        **kept,
    }
