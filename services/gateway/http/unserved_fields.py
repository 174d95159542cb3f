"""Fields of OpenAI, vLLM and SGLang that would change an answer, and that are not served: each is
refused by name, unless it asks for nothing.

The page ``docs/request-fields.md`` has them all, with those that are served and those that have no
effect; a test sends every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import msgspec

from services.gateway import limits
from services.gateway.front.field_rules import rule
from shared.errors import InvalidRequest

Body = TypeVar("Body", bound=msgspec.Struct)


class Unserved(NamedTuple):
    """why: what the client reads. harmless: values, beside null, that ask for nothing."""

    why: str
    harmless: tuple[Any, ...] = (False,)


_NO_CODE = Unserved("no code of a client runs here")
_NO_SUCH_PART = Unserved("the answer has no such part")
_NO_PLACE = Unserved("a request does not say where it runs")
_NO_THINKING = "thinking is not told from the rest of an answer"

UNSERVED: dict[str, Unserved] = {
    "functions": Unserved("use tools", (False, [])),
    "function_call": Unserved("use tool_choice", ("none", "auto")),
    "web_search_options": Unserved("there is no search"),
    "audio": Unserved("only text is supported"),
    "modalities": Unserved("only text is supported", (["text"],)),
    "verbosity": Unserved("ask for it in the messages", ("medium",)),
    "task": Unserved("ask for it in the messages"),
    "reasoning": Unserved("use reasoning_effort or chat_template_kwargs"),
    "thinking_token_budget": Unserved(_NO_THINKING, (-1,)),
    "include_reasoning": Unserved(_NO_THINKING, (True,)),
    **dict.fromkeys(
        ("logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs"), _NO_CODE
    ),
    "lora_path": Unserved("adapters are not supported", (False, "")),
    "use_beam_search": Unserved("beam search is not supported"),
    "watermarking": Unserved("watermarks are not supported"),
    "repetition_detection": Unserved("use repetition_penalty or stop"),
    "stop_regex": Unserved("use stop", (False, [])),
    "no_stop_trim": Unserved("use include_stop_str_in_output"),
    "spaces_between_special_tokens": Unserved("the tokenizer decides", (True,)),
    "prompt_embeds": Unserved("send text or token ids"),
    "input_ids": Unserved("send token ids as the prompt of /v1/completions"),
    "prompt_logprobs": Unserved("use echo with logprobs in /v1/completions"),
    "logprob_token_ids": Unserved("use logprobs"),
    **dict.fromkeys(
        (
            *("return_tokens_as_token_ids", "return_token_ids", "return_prompt_token_ids"),
            *("return_prompt_text", "return_meta_info", "return_cached_tokens_details"),
            *("return_hidden_states", "return_routed_experts", "return_token_strs"),
        ),
        _NO_SUCH_PART,
    ),
    **dict.fromkeys(
        (
            *("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port"),
            *("bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
        ),
        _NO_PLACE,
    ),
    "session_params": Unserved("send the whole prompt each time"),
    "extra_key": Unserved("use cache_salt"),
}
"""By name. Beside them ``best_of``, ``suffix`` and chat's ``echo``, which depend on more than a
value."""


def with_unserved(name: str, table: Mapping[str, Unserved], base: type[Body]) -> type[Body]:
    """Return a body that has these fields, too, so that what a client sent is seen."""
    fields = [
        (field, Annotated[Any, rule(f"Not served: {why}.", enum=[None, *harmless])], None)
        for field, (why, harmless) in table.items()
    ]
    made = msgspec.defstruct(name, fields, bases=(base,), kw_only=True, module=__name__)
    return cast("type[Body]", made)


UnservedFields = with_unserved("UnservedFields", UNSERVED, msgspec.Struct)


_VALUES = attrgetter(*UNSERVED)
_ALL_NULL = (None,) * len(UNSERVED)


def refuse_unserved(body: msgspec.Struct) -> None:
    """Raise InvalidRequest for the first field that asks for something we cannot do."""
    if _VALUES(body) != _ALL_NULL:  # of nearly all bodies, and at once
        refuse_those_of(UNSERVED, body)


def refuse_those_of(table: Mapping[str, Unserved], body: msgspec.Struct) -> None:
    """Likewise, of another table."""
    for name, (why, harmless) in table.items():
        if asks_for_something(getattr(body, name), harmless):
            raise unsupported(name, why)


def asks_for_something(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether a field's value is neither null nor one of those that ask for nothing."""
    return value is not None and not any(
        type(value) is type(one) and value == one for one in harmless
    )


def unsupported(param: str, why: str) -> InvalidRequest:
    """The error for a field that is known and not served."""
    return limits.refusal(param, why, code="unsupported")
