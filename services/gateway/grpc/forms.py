"""What clients send over gRPC, as forms and templates want it. Fields have the names of the HTTP
bodies, and the ranges of ``limits.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway import limits
from services.gateway.front.frontdoor import Form
from services.gateway.front.places import Places
from services.gateway.front.tool_fields import (
    MAX_TOOLS,
    CalledFunction,
    FunctionBody,
    MessageCall,
    NamedFunction,
    NamedTool,
    ToolBody,
    for_template,
    message_for_template,
)
from services.gateway.limits import SamplingForm
from services.gateway.text.chat_template import Rendering
from services.gateway.text.grammars import Structure, one_wish, parsed_json
from shared import wire
from shared.errors import InvalidRequest, RemoteProtocolError
from shared.messages.columns import unpack_u32
from shared.tenants import Asked

PLACES = Places(
    {"tool_choice.function.name": "tool_choice"}
    | {f"tools[{index}].function": f"tools[{index}]" for index in range(MAX_TOOLS)}
)
"""Of a chat's fields, what they are called here."""


_NO_PARAMS = wire.GenerateParams()


def form_of(request: wire.GenerateRequest, prompt_param: str) -> Form:
    """Return what to generate. prompt_param: which field has the prompt. Raises InvalidRequest."""
    params, rendering = request.params or _NO_PARAMS, request.rendering
    return Form(
        sampling=_sampling(params),
        prompt_param=prompt_param,
        cache_salt=limits.checked_salt(request.cache_salt),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens is not False,
        continues_text=prompt_param != "messages"
        or (rendering is not None and rendering.continue_final_message),
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        truncation_side=params.truncation_side or None,
        structure=_structure(params),
        asked=Asked("", request.priority, request.ttft_ms, request.tpot_ms),
    )


def tools_of(tools: Sequence[wire.Tool]) -> list[ToolBody]:
    """Return tools as those of HTTP. Raises InvalidRequest: too many, or parameters that are no
    JSON object."""
    limits.checked_count(len(tools), MAX_TOOLS, param="tools", what="tools")
    return [
        ToolBody(
            FunctionBody(
                tool.name,
                tool.description or None,
                _json_object(tool.parameters, f"tools[{index}].parameters")
                if tool.parameters
                else None,
                tool.strict,
            )
        )
        for index, tool in enumerate(tools)
    ]


def choice_of(choice: str) -> str | NamedTool | None:
    """Return which tools may be called: a word, or the one of this name."""
    if choice in ("", "auto", "none", "required"):
        return choice or None
    return NamedTool(NamedFunction(choice))


def messages_of(messages: Sequence[wire.ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them. Raises InvalidRequest: too many, or one that
    does not belong where it is."""
    limits.checked_count(
        len(messages), limits.MAX_MESSAGES, param="messages", what="messages", least=1
    )
    called: set[str] = set()
    return [
        message_for_template(
            f"messages[{index}]",
            called,
            role=message.role,
            content=message.content,
            name=None,
            thought=message.reasoning,
            calls=[
                MessageCall(call.id, CalledFunction(call.name, call.arguments))
                for call in message.tool_calls
            ],
            call_id=message.tool_call_id,
        )
        for index, message in enumerate(messages)
    ]


def require_of_messages(request: wire.GenerateRequest | wire.TokenizeRequest, *names: str) -> None:
    """Raises InvalidRequest: one of these fields is given, though there are no messages."""
    for name in names:
        if getattr(request, name) not in (None, "", [], wire.Rendering()):
            raise limits.refusal(name, "only messages are rendered", code="unsupported")


def rendering_of(
    given: wire.Rendering | None, tools: Sequence[ToolBody], *, add_special: bool = False
) -> Rendering:
    """Return how messages become a prompt. tools: those that it shows."""
    shown = for_template(tools) if tools else None
    if given is None:
        return Rendering(add_special_tokens=add_special, tools=shown)
    return Rendering(
        add_generation_prompt=given.add_generation_prompt,
        continue_final_message=given.continue_final_message,
        chat_template=given.chat_template or None,
        arguments=_json_object(given.chat_template_kwargs or "{}", "chat_template_kwargs"),
        add_special_tokens=add_special,
        tools=shown,
    )


def _json_object(text: str, param: str) -> dict[str, Any]:
    try:
        # Not Python's reader: that takes NaN, and half characters, which no prompt can hold.
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise limits.refusal(param, "must be a JSON object") from None


def _sampling(params: wire.GenerateParams) -> SamplingForm:
    return SamplingForm(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=list(params.logit_bias.items()),
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=column_of(params.stop_token_ids, "stop_token_ids"),
        ignore_eos=bool(params.ignore_eos),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        allowed_token_ids=column_of(params.allowed_token_ids, "allowed_token_ids") or None,
        bad_words=params.bad_words,
    )


def _structure(params: wire.GenerateParams) -> Structure | None:
    wishes: list[Structure] = []
    if params.json_schema:
        schema = parsed_json(params.json_schema, "json_schema")
        wishes.append(Structure(kind="json_schema", value=schema, param="json_schema"))
    if params.regex:
        wishes.append(Structure(kind="regex", value=params.regex, param="regex"))
    if params.grammar:
        wishes.append(Structure(kind="grammar", value=params.grammar, param="grammar"))
    if params.choice:
        wishes.append(Structure(kind="choice", value=params.choice, param="choice"))
    return one_wish(wishes)


def column_of(data: bytes, param: str) -> Sequence[int]:
    """Return token ids. Raises InvalidRequest: no whole number of them."""
    try:
        return unpack_u32(data, name=param)
    except RemoteProtocolError as error:
        raise InvalidRequest(error.message, param=param) from None
