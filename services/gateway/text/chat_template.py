"""Chat messages to one prompt text, with the template that came with the model.

The template runs in Jinja's immutable sandbox with the names that Hugging Face templates expect,
compiled once; a client's own, where the gateway lets it bring one, is compiled for its request.
What is different from transformers' own renderer: nothing that templates can see, but the output
has a cap.
Format: https://huggingface.co/docs/transformers/chat_templating_writing
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from services.gateway.limits import MAX_RENDERED_CHARS
from shared.errors import InvalidRequest, ModelError
from shared.model_folder import SpecialTokens

_OURS = ("messages", "tools", "add_generation_prompt")
_MARK = "\ue000continue\ue000 "
"""Ends the final message while it is rendered, to find that place again; from the private use area
of Unicode, and with a space that a template which trims messages takes away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How messages become a prompt, as a client wrote it. None = not given.

    add_generation_prompt: not given = unless the answer continues the final message.
    continue_final_message: the prompt ends where the last message's content ends, as in
    transformers. chat_template: instead of the model's own. arguments: further variables of the
    template (``enable_thinking``). add_special_tokens: to the ids of the prompt.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    add_special_tokens: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None


AS_USUAL = Rendering()


class _TemplateRefusal(jinja2.TemplateError):
    """``raise_exception`` was called by the template."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks assistant text for training masks; for serving its body is just
    text."""

    tags = {"generation"}  # noqa: RUF012  (the library's own declaration is this)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. of_client: a client brought it, so errors are about its field.

    Raises, from the constructor, ModelError or, of a client's, InvalidRequest: the source is no
    valid template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: SpecialTokens,
        *,
        of_client: bool = False,
        max_chars: int = MAX_RENDERED_CHARS,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        # The library declares both as plain dict.
        filters = cast("dict[str, Any]", environment.filters)  # pyright: ignore[reportUnknownMemberType]
        filters["tojson"] = _to_json
        functions = cast("dict[str, Any]", environment.globals)  # pyright: ignore[reportUnknownMemberType]
        functions["raise_exception"] = _refuse

        def strftime_now(form: str) -> str:
            return now().strftime(form)

        functions["strftime_now"] = strftime_now
        try:
            self._template = environment.from_string(source)
        # What Jinja overlooks Python finds, and raises what it will (SyntaxError, RecursionError).
        except Exception as error:
            why = f"is not valid: {error}"
            if of_client:
                raise InvalidRequest(f"chat_template: {why}", param="chat_template") from None
            raise ModelError(f"the model's chat template {why}") from error
        self.source = source
        # gpt-oss's name of it, beside which it takes no other text of a message that calls.
        self._says_thinking = "message.thinking" in source
        self._name = "the request's chat template" if of_client else "the model's chat template"
        self._param = "chat_template" if of_client else "messages"
        self._max_chars = max_chars
        self._names: dict[str, Any] = {
            "bos_token": special_tokens.bos,
            "eos_token": special_tokens.eos,
            "pad_token": special_tokens.pad,
            "unk_token": special_tokens.unk,
        }

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering = AS_USUAL) -> str:
        """Return the prompt.

        Raises InvalidRequest: an argument has a name of ours, the template refuses or cannot render
        these messages, or the text passes the cap.
        """
        continues, generation = rendering.continue_final_message, rendering.add_generation_prompt
        for name in rendering.arguments:
            if name in self._names or name in _OURS:
                raise InvalidRequest(
                    "chat_template_kwargs: messages, tools, add_generation_prompt and special "
                    "tokens are no variables of a client",
                    param="chat_template_kwargs",
                )
        if continues:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + _MARK}]
        names: dict[str, Any] = {
            "documents": None,
            **rendering.arguments,
            **self._names,
            "messages": messages,
            "tools": rendering.tools,
            "add_generation_prompt": not continues if generation is None else generation,
        }
        if self._says_thinking:
            names["messages"] = list(map(_with_thinking, messages))
        try:
            text = self._generated(names)
        except InvalidRequest as refused:
            # DeepSeek's templates put arguments of earlier calls together as texts.
            if not (isinstance(refused.__cause__, TypeError) and any(map(_calls_of, messages))):
                raise
            text = self._generated({**names, "messages": list(map(_with_texts, names["messages"]))})
        return self._open_ended(text) if continues else text

    def _open_ended(self, text: str) -> str:
        end = text.rfind(_MARK.rstrip())
        if end < 0:
            raise InvalidRequest(
                f"{self._name} does not show the last message as it is, so it cannot be continued",
                param="continue_final_message",
            )
        # A template that trims messages would have trimmed this one's end, too.
        return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()

    def _generated(self, names: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        room = self._max_chars
        try:
            for piece in self._template.generate(names):
                room -= len(piece)
                if room < 0:
                    raise InvalidRequest(
                        "prompt is too long: the rendered messages have more than "
                        f"{self._max_chars} characters",
                        param="messages",
                        code="context_length_exceeded",
                    )
                pieces.append(piece)
            text = "".join(pieces)
            text.encode()  # half a character, which no tokenizer takes, is found here
        except InvalidRequest:
            raise
        except _TemplateRefusal as refusal:
            raise InvalidRequest(
                f"{self._name} refuses these messages: {refusal.message}", param=self._param
            ) from None
        # A template is a program over the client's messages: whatever it trips over, they made it.
        except Exception as error:
            raise InvalidRequest(
                f"{self._name} cannot render these messages ({type(error).__name__})",
                param=self._param,
            ) from error
        return text


def _calls_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _with_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not (calls := _calls_of(message)):
        return message
    shown: list[dict[str, Any]] = []
    for call in calls:
        given = call["function"]["arguments"]
        text = given if isinstance(given, str) else _to_json(given)
        shown.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": shown}


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning as gpt-oss's template names it."""
    thought = message.get("reasoning_content")
    if not thought or "thinking" in message:
        return message
    return {**message, "thinking": thought} | ({"content": ""} if _calls_of(message) else {})


def _refuse(message: object) -> str:
    raise _TemplateRefusal(str(message)[:500])


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which models have never seen.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
