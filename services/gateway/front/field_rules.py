"""What is said of the fields of a body beyond their types, for ``openapi.py``: ranges, counts,
patterns, a sentence.

All numbers are those of ``limits.py``, which checks them: msgspec does not, so that gRPC and HTTP
refuse in the same words. What only a running gateway knows stands here as a word of ``Known``. A
test tries each bound on the gateway itself.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from services.gateway import limits


class Known:
    """Words in the rules that ``openapi.py`` replaces, or drops while there is no answer."""

    MODELS = "<names of the model>"
    LAST_ID = "<last token id>"
    MOST_TOKENS = "<context less one token>"
    MAX_CHOICES = "<max_choices>"
    NO_TEMPLATES = "<nothing fits, unless clients' templates are trusted>"


def rule(description: str = "", **schema: Any) -> msgspec.Meta:
    """What JSON Schema says of a field beyond its type; nothing that msgspec would check."""
    return msgspec.Meta(
        description=description or None,
        extra_json_schema={name.rstrip("_"): rule for name, rule in schema.items()},
    )


def bounds(field: str, description: str = "") -> msgspec.Meta:
    low, high = limits.INTEGERS.get(field) or limits.NUMBERS[field]
    return rule(description, minimum=low, maximum=high)


def limit(field: str, description: str = "") -> msgspec.Meta:
    return rule(description, exclusiveMinimum=0, maximum=limits.ABOVE_ZERO[field])


PRIORITY = "7 = before all others; at most what the API key's tenant may ask for."
TTFT = "Milliseconds until the first token, at most; default: the tenant's, or none."
TPOT = "Milliseconds between tokens, at most; default: the tenant's, or none."

ModelName = Annotated[str, rule("Empty or null = the one that is served.", enum=Known.MODELS)]
TokenId = Annotated[int, rule(minimum=0, maximum=Known.LAST_ID)]
PromptText = Annotated[str, rule(minLength=1)]
PromptIds = Annotated[list[TokenId], rule(minItems=1)]
PromptList = Annotated[
    list[PromptText | TokenId | PromptIds],
    rule(
        "Texts, token ids, or lists of token ids.",
        minItems=1,
        oneOf=[
            {"items": {"type": "string"}, "maxItems": limits.MAX_PROMPTS},
            {"items": {"type": "integer"}},
            {"items": {"type": "array"}, "maxItems": limits.MAX_PROMPTS},
        ],
    ),
]
FITTING = "With the prompt at most the model's context."
MaxTokens = Annotated[int, rule(FITTING, minimum=1, maximum=Known.MOST_TOKENS)]
ECHO_ONLY = "Default 16. 0 only with echo: tells of the prompt alone."
MaxMoreTokens = Annotated[int, rule(ECHO_ONLY, minimum=0, maximum=Known.MOST_TOKENS)]
MinTokens = Annotated[int, rule("At most max_tokens.", minimum=0, maximum=Known.MOST_TOKENS)]
NumChoices = Annotated[int, rule(minimum=1, maximum=Known.MAX_CHOICES)]
TopP = Annotated[float, rule(exclusiveMinimum=0, maximum=limits.ABOVE_ZERO["top_p"])]
Seed = Annotated[int, bounds("seed", "With the same seed, the same answer.")]
TopLogprobs = Annotated[int, bounds("top_logprobs", "Needs logprobs to be true.")]
LogitBias = Annotated[
    dict[str, Annotated[float, bounds("logit_bias")]],
    rule(
        "By token id of the vocabulary.",
        maxProperties=limits.MAX_LOGIT_BIAS,
        propertyNames={"pattern": f"^({limits.BIAS_KEY_PATTERN})$"},
    ),
]
StopText = Annotated[str, rule(minLength=1, maxLength=limits.MAX_STOP_CHARS)]
StopTexts = Annotated[list[StopText], rule(maxItems=limits.MAX_STOP_STRINGS)]
OneStop = Annotated[str, rule(maxLength=limits.MAX_STOP_CHARS)]
StopIds = Annotated[list[TokenId], rule(maxItems=limits.MAX_STOP_TOKEN_IDS)]
BadWords = Annotated[
    list[Annotated[StopText, rule(pattern=r"\S")]],
    rule("Not in the answer, as tokens.", maxItems=limits.MAX_BAD_WORDS),
]
SALT = "Only requests with the same salt share a prefix cache."
Salt = Annotated[str, rule(SALT, pattern=f"^({limits.LABEL_PATTERN})?$")]
KEPT = "Keep so many of the prompt's tokens; -1 = what leaves room."
NumKept = Annotated[
    int, rule(KEPT, minimum=-1, maximum=limits.INTEGERS["max_tokens"][1], not_={"const": 0})
]
Template = Annotated[str, rule(maxLength=limits.MAX_TEMPLATE_CHARS, not_=Known.NO_TEMPLATES)]
Arguments = Annotated[dict[str, Any], rule(maxProperties=limits.MAX_TEMPLATE_ARGUMENTS)]
CONTINUED = "The answer continues the last message; not with add_generation_prompt: true."
Side = Annotated[str, rule(enum=list(limits.SIDES))]
Role = Annotated[str, rule(enum=[*limits.ROLES, "tool"])]
