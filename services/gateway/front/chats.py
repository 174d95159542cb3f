"""A chat, from its form to the answers to make, and what tells its answers' text, thinking and
calls apart: the same for every door."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from services.gateway import limits
from services.gateway.front.answers import Choice
from services.gateway.front.frontdoor import Caller, Form, FrontDoor, Prompt
from services.gateway.front.tool_fields import NamedTool, ToolBody, ToolUse, size_of, tool_use
from services.gateway.mesh import ServedModel
from services.gateway.text.chat_template import Rendering
from services.gateway.text.text_model import TextModel
from services.gateway.text.tool_calls import ListParser, NamedParser, ThoughtParser, ToolParser
from services.gateway.text.tool_families import PARSERS, SHOWS_SPECIAL_TOKENS
from shared.request import FinishReason

AnswerParser = ToolParser | ThoughtParser

_FORMATS = ("response_format", "json_schema")
"""Fields that ask for JSON: as with OpenAI, of answers that call nothing."""


class AskedTools(NamedTuple):
    """Tools, as a client offers them."""

    tools: list[ToolBody] | None
    choice: str | NamedTool | None
    is_parallel: bool | None


class AskedChat(NamedTuple):
    """A chat, checked, rendered and tokenized. new_parser: None = an answer is nothing but text."""

    model: ServedModel
    form: Form
    use: ToolUse | None
    choices: list[Choice]
    new_parser: Callable[[], AnswerParser] | None


async def asked_chat(
    front: FrontDoor,
    caller: Caller,
    form: Form,
    asked: AskedTools,
    *,
    model_name: str | None,
    messages: Callable[[], Sequence[Mapping[str, Any]]],
    rendering: Rendering,
    tells_thinking: bool,
    is_counted: bool = False,
) -> AskedChat:
    """Return the answers that a chat asks for.

    messages: for the template. tells_thinking: apart from the text, if the model thinks.
    is_counted: no answer is made, and the prompt may be longer than the context.
    Raises MeshError: the first thing that is wrong.
    """
    use = await _used(asked, form, front)
    model = front.model(model_name)
    if is_counted:
        model = replace(model, max_model_len=limits.INTEGERS["max_tokens"][1])
    prompt = await front.chat_prompt(messages(), rendering, caller, form.cache_salt)
    thinks = front.thinks and tells_thinking
    if thinks and form.structure is not None:
        form.structure = replace(form.structure, thought=prompt.thought)
    await front.structured(form)
    choices = front.choices(caller, model, [prompt], form)
    return AskedChat(model, form, use, choices, _parser_maker(use, prompt, front, thinks=thinks))


def runs_calls(use: ToolUse | None, reason: FinishReason, parser: AnswerParser) -> bool:
    """Whether an answer ends for its calls to be run; OpenAI's word is ``stop`` where the one
    function to call was named."""
    is_named = use is not None and use.choice == "named"
    has_calls = parser.num_calls and not parser.is_within_call
    return bool(has_calls and reason is FinishReason.STOP and not is_named)


def new_call_id(answer_id: str, choice: int, call: int) -> str:
    """Nine letters and digits, for Mistral's templates take no other id."""
    seed = f"{answer_id}/{choice}/{call}".encode()
    return hashlib.blake2b(seed, digest_size=5).hexdigest()[:9]


class ThoughtTokens:
    """How many of an answer's tokens are of its thinking, with the last mark, if it thinks."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._said = ""
        self.num = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Take the answer's next tokens."""
        end = ThoughtParser.END
        for token_id in token_ids:
            if end in self._said:
                return
            self.num += 1
            self._said = self._said[-len(end) :] + self._text.piece(token_id).text


async def _used(asked: AskedTools, form: Form, front: FrontDoor) -> ToolUse | None:
    """Return how a chat may call, None = not at all, and have its answers make the calls that must
    be made.

    Raises InvalidRequest: wrong tools; the answer must match something else, too; or the model
    knows no tools.
    """

    def used() -> ToolUse | None:
        use = tool_use(*asked)
        if use is not None:
            _hold_to(use, form, front)
        return use

    # A hundred lines of references can keep a loop for half a second.
    return await front.text.offload(used, size_of(asked.tools)) if asked.tools else used()


def _hold_to(use: ToolUse, form: Form, front: FrontDoor) -> None:
    family = front.tool_family
    if use.choice == "auto" and family is None:
        raise limits.refusal(
            "tools",
            "how this model writes calls is not known: use tool_choice required or a function, or "
            "start the gateway with --tool-parser",
            code="unsupported",
        )
    wanted, alone = form.structure, None
    if wanted and wanted.kind == "json_schema" and wanted.param.startswith(_FORMATS):
        alone = wanted
    structure = use.structure(family, alone)
    if structure and wanted and not alone:
        raise limits.refusal(wanted.param, "does not go with calls that must match a schema")
    if structure is not None:
        form.structure = structure
    if use.choice == "auto" and family in SHOWS_SPECIAL_TOKENS:
        form.skip_special_tokens = False


def _parser_maker(
    use: ToolUse | None, prompt: Prompt, front: FrontDoor, *, thinks: bool
) -> Callable[[], AnswerParser] | None:
    """Return what makes the parser of each of a chat's answers; None = they are text alone."""
    if use is None and not thinks:
        return None
    is_open = prompt.thought == "open"

    def parser() -> AnswerParser:
        after = None if use is None else _tool_parser(use, front)
        if thinks:
            return ThoughtParser(after, is_open=is_open)
        assert after is not None
        return after

    return parser


def _tool_parser(use: ToolUse, front: FrontDoor) -> ToolParser:
    match use.choice:
        case "named":
            return NamedParser(use.schemas)
        case "required":
            return ListParser(use.schemas)
        case "auto":
            assert front.tool_family is not None
            parser = PARSERS[front.tool_family](use.schemas)
            parser.max_calls = None if use.is_parallel else 1
            return parser
