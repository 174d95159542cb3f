"""Answers with calls of tools or with thinking told apart, in the shapes of OpenAI's chat.

A ``ChatFormat`` whose text goes through a parser of its own an answer; answers without tools and
thinking never come here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET

from services.gateway.front.answers import TextDelta, TokenCounts
from services.gateway.front.frontdoor import Form, FrontDoor, Prompt
from services.gateway.http import bodies
from services.gateway.http.openai_answers import FINISH_NAMES, AnswerHead, ChatFormat, Collected
from services.gateway.http.openai_forms import ChatBody
from services.gateway.http.tool_fields import ToolUse, size_of
from services.gateway.limits import refusal
from services.gateway.text.text_model import TextModel
from services.gateway.text.tool_calls import (
    ListParser,
    NamedParser,
    Said,
    ThoughtParser,
    ToolParser,
)
from services.gateway.text.tool_families import PARSERS, SHOWS_SPECIAL_TOKENS
from shared.request import FinishReason

AnswerParser = ToolParser | ThoughtParser


async def use_tools(body: ChatBody, form: Form, front: FrontDoor) -> ToolUse | None:
    """Return how a chat may call, None = not at all, and have its answers make the calls that must
    be made.

    Raises InvalidRequest: wrong tools; the answer must match something else, too; or the model
    knows no tools.
    """

    def used() -> ToolUse | None:
        use = body.tool_use()
        if use is not None:
            _hold_to(use, form, front)
        return use

    # A hundred lines of references can keep a loop for half a second.
    return await front.text.offload(used, size_of(body.tools)) if body.tools else used()


def _hold_to(use: ToolUse, form: Form, front: FrontDoor) -> None:
    family = front.tool_family
    if use.choice == "auto" and family is None:
        raise refusal(
            "tools",
            "how this model writes calls is not known: use tool_choice required or a function, or "
            "start the gateway with --tool-parser",
            code="unsupported",
        )
    wanted, alone = form.structure, None
    if wanted and wanted.kind == "json_schema" and wanted.param.startswith("response_format"):
        alone = wanted  # as with OpenAI, it is of answers that call nothing
    structure = use.structure(family, alone)
    if structure and wanted and not alone:
        raise refusal(wanted.param, "does not go with calls that must match a schema")
    if structure is not None:
        form.structure = structure
    if use.choice == "auto" and family in SHOWS_SPECIAL_TOKENS:
        form.skip_special_tokens = False


def parser_maker(
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


def chat_format(
    head: AnswerHead,
    new_parser: Callable[[], AnswerParser] | None,
    use: ToolUse | None,
    front: FrontDoor,
    **options: Any,
) -> ChatFormat:
    """Return what writes a chat's answers."""
    if new_parser is None:
        return ChatFormat(head, front.text, **options)
    return ToolChatFormat(head, front.text, new_parser, use, **options)


def new_call_id(answer_id: str, choice: int, call: int) -> str:
    """Nine letters and digits, for Mistral's templates take no other id."""
    seed = f"{answer_id}/{choice}/{call}".encode()
    return hashlib.blake2b(seed, digest_size=5).hexdigest()[:9]


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


class ToolChatFormat(ChatFormat):
    """See the module. use: None = only thinking is told apart."""

    def __init__(
        self,
        head: AnswerHead,
        text: TextModel,
        new_parser: Callable[[], AnswerParser],
        use: ToolUse | None,
        **options: Any,
    ) -> None:
        super().__init__(head, text, **options)
        self._use = use
        self._parsers = [new_parser() for _ in range(options["num_choices"])]
        self._thinks = isinstance(self._parsers[0], ThoughtParser)
        self._thoughts: dict[int, ThoughtTokens] = {}
        self._have_thought: set[int] = set()

    def chunks(self, delta: TextDelta, usage: TokenCounts | None) -> bytes:
        choice, parser = delta.choice, self._parsers[delta.choice]
        said = parser.feed(delta.text)
        if delta.finish_reason:
            said += parser.finish()
        self._note(choice, said, delta.token_ids)
        counts = None if usage is None else self._usage(usage)
        deltas = [self._delta(choice, one) for one in said]
        events = b""
        if choice not in self._begun:
            self._begun.add(choice)
            events = self._event(self._first(delta), counts)
        logprobs = None
        if self._has_logprobs and delta.tokens:
            logprobs = self._logprobs(delta)
            deltas = deltas or [bodies.DeltaBody()]
        for new in deltas:
            events += self._event(bodies.ChatChunkChoice(choice, new, logprobs, None), counts)
            logprobs = None
        if delta.finish_reason:
            name = self._finish_name(delta.finish_reason, parser)
            end = bodies.ChatChunkChoice(choice, bodies.DeltaBody(), None, name, delta.stop_reason)
            events += self._event(end, counts)
        return events

    def _note(self, choice: int, said: Sequence[Said], token_ids: Sequence[int]) -> None:
        """Note what an answer thought; token_ids: those that are new."""
        if self._thinks:
            self._thoughts.setdefault(choice, ThoughtTokens(self._text)).take(token_ids)
            if any(one.is_thought for one in said):
                self._have_thought.add(choice)

    def _usage(self, counts: TokenCounts) -> bodies.UsageBody:
        num = sum(self._thoughts[choice].num for choice in self._have_thought)
        return bodies.UsageBody.of(counts, num if self._thinks else None)

    def _delta(self, choice: int, said: Said) -> bodies.DeltaBody:
        if said.is_thought:
            return bodies.DeltaBody(reasoning_content=said.text)
        if said.call < 0:
            return bodies.DeltaBody(content=said.text)
        function = bodies.CallPart(said.name or UNSET, said.text)
        if not said.name:
            return bodies.DeltaBody(tool_calls=[bodies.CallDelta(said.call, function)])
        call = bodies.CallDelta(said.call, function, self._new_id(choice, said.call), "function")
        return bodies.DeltaBody(tool_calls=[call])

    def _new_id(self, choice: int, call: int) -> str:
        return new_call_id(self._head.id, choice, call)

    def _finish_name(self, reason: FinishReason, parser: AnswerParser) -> bodies.FinishName:
        is_named = self._use is not None and self._use.choice == "named"
        has_calls = parser.num_calls and not parser.is_within_call
        if has_calls and reason is FinishReason.STOP and not is_named:
            return "tool_calls"
        return FINISH_NAMES[reason]

    # --- whole bodies ---------------------------------------------------------------------------

    def _whole_choice(self, index: int, answer: Collected) -> Any:
        parser = self._parsers[index]
        said = [*parser.feed("".join(answer.texts)), *parser.finish()]
        self._note(index, said, answer.token_ids)
        thought = "".join(one.text for one in said if one.is_thought)
        text = "".join(one.text for one in said if one.call < 0 and not one.is_thought)
        calls = _whole_calls(said, lambda call: self._new_id(index, call))
        message = bodies.AnswerMessage(
            role="assistant",
            content=text if text.strip() or not calls else None,
            refusal=None,
            tool_calls=calls or UNSET,
            reasoning_content=thought or UNSET,
        )
        logprobs = self._entries(answer.token_ids, answer.logprobs) if self._has_logprobs else None
        name = self._finish_name(answer.finish_reason, parser)
        return bodies.ChatChoice(index, message, logprobs, name, answer.stop_reason)


def _whole_calls(said: Sequence[Said], new_id: Callable[[int], str]) -> list[bodies.CallBody]:
    calls: list[bodies.CallBody] = []
    for one in said:
        if one.name:
            function = bodies.WholeCall(one.name, "")
            calls.append(bodies.CallBody(new_id(one.call), "function", function))
        if one.call >= 0:
            calls[one.call].function.arguments += one.text
    return calls
