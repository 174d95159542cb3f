"""The bodies that OpenAI-style clients send, parsed, described and turned into forms.

Unknown keys are ignored. Keys that we know and that would change the answer, but cannot serve
(``unserved_fields.py``), are refused by name: a client must never believe that it got what it did
not get. Field names are those of the OpenAI API and, for what that lacks, of vLLM. The ranges are
those of ``limits.py``, which checks them; that the types here name them too is for ``openapi.py``.
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec

from services.gateway import limits
from services.gateway.front import field_rules as fields
from services.gateway.front.frontdoor import Form
from services.gateway.front.tool_fields import (
    MessageCall,
    ToolChoice,
    Tools,
    for_template,
    message_for_template,
)
from services.gateway.http.structured_fields import STRUCTURED, StructuredFields, structure_of
from services.gateway.http.unserved_fields import (
    UNSERVED,
    asks_for_something,
    refuse_unserved,
    unsupported,
)
from services.gateway.limits import SamplingForm
from services.gateway.text.chat_template import Rendering
from shared.tenants import Asked


class StreamOptions(msgspec.Struct):
    """``continuous_usage_stats``: vLLM's; usage in every chunk. ``include_receipt``: ours."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_receipt: bool | None = None


class _RenderedBody(StructuredFields, kw_only=True):
    """How messages become a prompt; bodies have one line of ancestors."""

    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool | None, fields.rule(fields.CONTINUED)] = None
    chat_template: fields.Template | None = None
    chat_template_kwargs: fields.Arguments | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | float | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None

    @property
    def rendering(self) -> Rendering:
        """The same, for the front door. Documents and effort are variables of the template; an
        effort also says whether to think at all, as in vLLM."""
        arguments: dict[str, Any] = {}
        if self.documents is not None:
            arguments["documents"] = self.documents
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
            arguments["enable_thinking"] = self.reasoning_effort != "none"
        return Rendering(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message is True,
            chat_template=self.chat_template,
            arguments=arguments | (self.chat_template_kwargs or {}),
            add_special_tokens=self.add_special_tokens is True,
            tools=for_template(self.tools) if self.tools and self.tool_choice != "none" else None,
        )


OF_MESSAGES = tuple(
    name
    for name in _RenderedBody.__struct_fields__
    if name not in (*UNSERVED, *STRUCTURED, "add_special_tokens")
)
"""Fields that say nothing of a prompt that is no messages."""

_OF_MESSAGES = attrgetter(*OF_MESSAGES)


class SamplingBody(_RenderedBody, kw_only=True):
    """What chat and completions have in common."""

    model: fields.ModelName | None = None
    max_tokens: fields.MaxTokens | None = None
    min_tokens: fields.MinTokens | None = None
    n: fields.NumChoices | None = None
    temperature: Annotated[float, fields.bounds("temperature", "0 = greedy.")] | None = None
    top_p: fields.TopP | None = None
    top_k: Annotated[int, fields.bounds("top_k", "0 or -1 = off.")] | None = None
    min_p: Annotated[float, fields.bounds("min_p")] | None = None
    presence_penalty: Annotated[float, fields.bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, fields.bounds("frequency_penalty")] | None = None
    repetition_penalty: Annotated[float, fields.bounds("repetition_penalty")] | None = None
    logit_bias: fields.LogitBias | None = None
    seed: fields.Seed | None = None
    stop: fields.OneStop | fields.StopTexts | None = None
    stop_token_ids: fields.StopIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include_receipt: bool | None = None
    cache_salt: fields.Salt | None = None
    allowed_token_ids: fields.PromptIds | None = None
    bad_words: fields.BadWords | None = None
    truncate_prompt_tokens: fields.NumKept | None = None
    truncation_side: fields.Side | None = None
    best_of: Annotated[fields.NumChoices, fields.rule("Equals n.")] | None = None
    priority: Annotated[int, fields.bounds("priority", fields.PRIORITY)] | None = None
    ttft_ms: Annotated[float, fields.limit("ttft_ms", fields.TTFT)] | None = None
    tpot_ms: Annotated[float, fields.limit("tpot_ms", fields.TPOT)] | None = None

    @property
    def wants_receipt(self) -> bool:
        options = self.stream_options
        return bool(self.include_receipt or (options is not None and options.include_receipt))

    def _form(self, sampling: SamplingForm, *, continues_text: bool, **own: Any) -> Form:
        """Return the form of a body. own: of its kind. Raises InvalidRequest."""
        return Form(
            sampling=sampling,
            num_choices=_one(self.n),
            cache_salt=limits.checked_salt(self.cache_salt),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            continues_text=continues_text,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            structure=structure_of(self),
            asked=Asked("", self.priority, self.ttft_ms, self.tpot_ms),
            **own,
        )


class ContentPart(msgspec.Struct):
    """One part of a message's content; only text is served."""

    type: Annotated[str, fields.rule(const="text")]
    text: Annotated[str | None, fields.rule(type="string")] = None


EMPTY: tuple[Any, ...] = ("", [])
"""Values of these that ask for nothing."""

_Unserved = Annotated[Any, fields.rule("Not served.", enum=[None, *EMPTY])]


Parts = Annotated[list[ContentPart], fields.rule(maxItems=limits.MAX_PARTS)]


class Message(msgspec.Struct):
    """One chat message. tool_calls: of an answer; tool_call_id: which of them a tool's message is
    the result of. reasoning: vLLM's name of reasoning_content, the thinking of an answer."""

    role: fields.Role
    content: str | Parts | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: _Unserved = None
    tools: _Unserved = None
    audio: _Unserved = None


Messages = Annotated[list[Message], fields.rule(minItems=1, maxItems=limits.MAX_MESSAGES)]

UNSERVED_OF_A_MESSAGE = ("function_call", "tools", "audio")


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: fields.MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: fields.TopLogprobs | None = None
    echo: Annotated[bool, fields.rule("Not served.", const=False)] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None

    def form(self) -> Form:
        """Return what to generate. Raises InvalidRequest: an unsupported or malformed field."""
        _refuse_unsupported(self)
        if self.echo:
            raise unsupported("echo", "use continue_final_message, or /v1/completions")
        if self.top_logprobs and not self.logprobs:
            raise limits.refusal("top_logprobs", "needs logprobs to be true")
        if self.top_logprobs is not None:
            limits.checked_int(
                self.top_logprobs, *limits.INTEGERS["top_logprobs"], param="top_logprobs"
            )
        newer = self.max_completion_tokens
        return self._form(
            _sampling(
                self,
                max_tokens=self.max_tokens if newer is None else newer,
                max_tokens_param="max_tokens" if newer is None else "max_completion_tokens",
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            ),
            continues_text=self.continue_final_message is True,
            prompt_param="messages",
        )


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions."""

    prompt: fields.PromptText | fields.PromptList
    max_tokens: fields.MaxMoreTokens | None = None
    echo: bool | None = None
    logprobs: Annotated[int, fields.bounds("logprobs")] | None = None
    suffix: Annotated[str, fields.rule(maxLength=0)] | None = None

    def form(self) -> Form:
        """Return what to generate. Raises InvalidRequest: an unsupported or malformed field."""
        _refuse_unsupported(self)
        for name, value in zip(OF_MESSAGES, _OF_MESSAGES(self), strict=True):
            if value is not None:
                raise unsupported(name, "only messages are rendered: use /v1/chat/completions")
        if self.suffix:
            raise unsupported("suffix", "text after the answer is not supported")
        echo = bool(self.echo)
        return self._form(
            _sampling(
                self,
                max_tokens=self.max_tokens,
                logprobs=self.logprobs,
                prompt_logprobs=self.logprobs if echo else None,
            ),
            continues_text=True,
            default_max_tokens=16,
            is_echo_only=echo and self.max_tokens == 0,
        )

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts of the four customary forms: text, texts, ids, lists of ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        # Before the count: so many are one prompt's ids, and no prompts.
        if prompt and isinstance(prompt[0], int):
            ids = [item for item in prompt if isinstance(item, int)]
            if len(ids) == len(prompt):
                return [ids]
        limits.checked_count(
            len(prompt), limits.MAX_PROMPTS, param="prompt", what="prompts", least=1
        )
        texts: list[str | list[int]] = [item for item in prompt if isinstance(item, str)]
        lists: list[str | list[int]] = [item for item in prompt if isinstance(item, list)]
        if len(prompt) not in (len(texts), len(lists)):
            raise limits.refusal(
                "prompt",
                "must be a string, a list of strings, a list of token ids or a list of those",
            )
        return texts or lists


class TokenizeBody(_RenderedBody, kw_only=True):
    """POST /tokenize: a prompt or messages (vLLM's endpoint)."""

    model: fields.ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None


class RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /cluster/workers/{worker}/role."""

    role: Literal["prompt", "token"]


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: fields.ModelName | None = None
    tokens: list[fields.TokenId]


def messages_for_template(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them. Raises InvalidRequest: not text, too many, or
    a tool's result that nobody asked for."""
    limits.checked_count(
        len(messages), limits.MAX_MESSAGES, param="messages", what="messages", least=1
    )
    called: set[str] = set()
    return [
        _message(message, f"messages[{index}]", called) for index, message in enumerate(messages)
    ]


def _message(message: Message, param: str, called: set[str]) -> dict[str, Any]:
    """called: ids of the calls so far."""
    for name in UNSERVED_OF_A_MESSAGE:
        if asks_for_something(getattr(message, name), EMPTY):
            raise unsupported(f"{param}.{name}", "only text is supported")
    return message_for_template(
        param,
        called,
        role=message.role,
        content=_content(message, param),
        name=message.name,
        thought=message.reasoning_content or message.reasoning,
        calls=message.tool_calls,
        call_id=message.tool_call_id,
    )


def _content(message: Message, param: str) -> str:
    content = message.content
    if isinstance(content, list):
        limits.checked_count(len(content), limits.MAX_PARTS, param=f"{param}.content", what="parts")
        texts: list[str] = []
        for index, part in enumerate(content):
            if part.type != "text" or part.text is None:
                kind = part.type if re.fullmatch("[a-z_]{1,32}", part.type) else "such"
                raise unsupported(
                    f"{param}.content[{index}]",
                    f"{kind} parts are not supported, only parts of type text with a text",
                )
            texts.append(part.text)
        content = "\n".join(texts)
    return content or ""


def _sampling(
    body: SamplingBody,
    *,
    max_tokens: int | None,
    max_tokens_param: str = "max_tokens",
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingForm:
    stop = body.stop
    return SamplingForm(
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_logit_bias(body.logit_bias),
        seed=body.seed,
        stop=((stop,) if stop else ()) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        allowed_token_ids=body.allowed_token_ids,
        bad_words=tuple(body.bad_words or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(bias: dict[str, float] | None) -> list[tuple[int, float]]:
    if not bias:
        return []
    limits.checked_count(len(bias), limits.MAX_LOGIT_BIAS, param="logit_bias")
    if not all(re.fullmatch(limits.BIAS_KEY_PATTERN, key) for key in bias):
        raise limits.refusal("logit_bias", "keys must be token ids, in decimal")
    return [(int(key), value) for key, value in bias.items()]


def _one(n: int | None) -> int:
    return 1 if n is None else n


def _refuse_unsupported(body: SamplingBody) -> None:
    refuse_unserved(body)
    if body.best_of is not None and body.best_of != _one(body.n):
        raise unsupported("best_of", "use n")
