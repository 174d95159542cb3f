"""A chat, from its form to the answers to make, and what tells its answers' text, thinking and
calls apart: the same for every door."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from services.gateway import limits
from services.gateway.front.answers import Choice, TextDelta
from services.gateway.front.frontdoor import Caller, Form, FrontDoor, Prompt, in_time
from services.gateway.front.tool_fields import NamedTool, ToolBody, ToolUse, tool_use
from services.gateway.mesh import ServedModel
from services.gateway.text.calls.families import PARSERS, SHOWS_SPECIAL_TOKENS
from services.gateway.text.calls.harmony import HarmonyParser
from services.gateway.text.calls.parser import ListParser, NamedParser, Said, ToolParser
from services.gateway.text.calls.thoughts import ThoughtMarks, ThoughtParser
from services.gateway.text.chat_template import Rendering
from services.gateway.text.text_model import TextModel
from shared.request import FinishReason

_FORMATS = ("response_format", "json_schema")
"""Fields that ask for JSON: as with OpenAI, of answers that call nothing."""


class AskedTools(NamedTuple):
    """Tools, as a client offers them."""

    tools: list[ToolBody] | None
    choice: str | NamedTool | None
    is_parallel: bool | None


class AskedChat(NamedTuple):
    """A chat, checked, rendered and tokenized. new_teller: makes one for each answer, None = they
    are nothing but text."""

    model: ServedModel
    form: Form
    choices: list[Choice]
    new_teller: Callable[[], Teller] | None


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
    is_counted: no answer is made, and none need fit the context.
    Raises MeshError: the first thing that is wrong.
    """
    use = await _used(asked, form, front)
    model = await front.model(model_name, caller)
    reading = front.chat_prompt(messages(), rendering, caller, form.cache_salt)
    prompt = await in_time(caller, reading)
    if is_counted and form.truncate_prompt_tokens != -1:  # which cuts to what leaves room
        num_more = len(prompt.token_ids) - 1  # an answer's length keeps to its range
        model = replace(model, max_model_len=model.max_model_len + num_more)
    thinking = front.thinking if tells_thinking else None
    if thinking is not None and form.structure is not None:
        form.structure = replace(form.structure, thought=prompt.thought)
    if front.speaks_harmony or (thinking is not None and thinking.are_special):
        form.skip_special_tokens = False
    await in_time(caller, front.structured(form))
    choices = front.choices(caller, model, [prompt], form)
    return AskedChat(model, form, choices, _teller_maker(use, prompt, front, thinking))


def new_call_id(answer_id: str, choice: int, call: int) -> str:
    """Nine letters and digits, for Mistral's templates take no other id."""
    seed = f"{answer_id}/{choice}/{call}".encode()
    return hashlib.blake2b(seed, digest_size=5).hexdigest()[:9]


class Teller:
    """Tells one answer's thinking, text and calls apart. use: how it may call, None = not at all.

    thinking: what stands around it, None = it is none, or text. is_open: the prompt has begun it.
    thinks: whether it may. num_thought: tokens of its thinking so far, with the last mark.
    """

    def __init__(
        self,
        parser: ToolParser | ThoughtParser,
        text: TextModel,
        use: ToolUse | None = None,
        thinking: ThoughtMarks | None = None,
        *,
        is_open: bool = False,
    ) -> None:
        self._parser = parser
        self._text = text
        self._use = use
        self._thinking = thinking
        self.thinks = thinking is not None
        self._has_thought = False
        self._num_tokens = 0  # that are of the thinking, if there is any
        # Where it cannot come later, an answer's beginning is that of its thinking.
        self._is_thinking = is_open or not (thinking and thinking.again)
        self._tail = ""

    def take(self, delta: TextDelta) -> list[Said]:
        """Return what the answer's next part says."""
        said = self._parser.feed(delta.text)
        if delta.finish_reason:
            said += self._parser.finish()
        if self._thinking is not None:
            self._has_thought = self._has_thought or any(one.is_thought for one in said)
            self._count(delta.token_ids, self._thinking)
        return said

    @property
    def num_thought(self) -> int:
        return self._num_tokens if self._has_thought else 0

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def is_within_call(self) -> bool:
        return self._parser.is_within_call

    def runs_calls(self, reason: FinishReason) -> bool:
        """Whether the answer ends for its calls to be run; OpenAI's word is ``stop`` where the one
        function to call was named."""
        is_named = self._use is not None and self._use.choice == "named"
        has_calls = self.num_calls > 0 and not self.is_within_call
        return has_calls and reason is FinishReason.STOP and not is_named

    def _count(self, token_ids: Sequence[int], marks: ThoughtMarks) -> None:
        for token_id in token_ids:
            mark = marks.end if self._is_thinking else marks.again
            if not mark:
                return
            self._num_tokens += self._is_thinking
            # The mark may come in several tokens: what could be its beginning is kept.
            self._tail = self._tail[-len(mark) :] + self._text.piece(token_id).text
            if mark in self._tail:
                self._is_thinking, self._tail = not self._is_thinking, ""


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
    size = len(msgspec.json.encode(asked.tools)) if asked.tools else 0
    return await front.text.offload(used, size)


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


def _teller_maker(
    use: ToolUse | None, prompt: Prompt, front: FrontDoor, thinking: ThoughtMarks | None
) -> Callable[[], Teller] | None:
    if use is None and thinking is None and not front.speaks_harmony:
        return None
    is_open = prompt.thought == "open"

    def teller() -> Teller:
        if front.speaks_harmony:  # which tells thinking, too
            schemas = {} if use is None else use.schemas
            tells_thinking, is_text = thinking is not None, not prompt.thought
            tools = HarmonyParser(schemas, tells_thinking=tells_thinking, is_text=is_text)
        else:
            tools = None if use is None else _tool_parser(use, front)
        if tools is not None and use is not None and use.choice == "auto":
            tools.max_calls = None if use.is_parallel else 1
        parser = tools
        if thinking is not None and not front.speaks_harmony:
            parser = ThoughtParser(tools, is_open=is_open, marks=thinking)
        assert parser is not None
        return Teller(parser, front.text, use, thinking, is_open=is_open)

    return teller


def _tool_parser(use: ToolUse, front: FrontDoor) -> ToolParser:
    match use.choice:
        case "named":
            return NamedParser(use.schemas)
        case "required":
            return ListParser(use.schemas)
        case "auto":
            assert front.tool_family is not None
            return PARSERS[front.tool_family](use.schemas)
