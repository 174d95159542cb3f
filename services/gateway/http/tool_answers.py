"""Answers with calls of tools or with thinking told apart, in the shapes of OpenAI's chat.

A ``ChatFormat`` whose text goes through a parser of its own an answer; answers without tools and
thinking never come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET

from services.gateway.front.answers import Choice, TextDelta, TokenCounts
from services.gateway.front.chats import AnswerParser, ThoughtTokens, new_call_id, runs_calls
from services.gateway.front.tool_fields import ToolUse
from services.gateway.http import bodies
from services.gateway.http.openai_answers import FINISH_NAMES, AnswerHead, ChatFormat
from services.gateway.http.openai_forms import StreamOptions
from services.gateway.text.text_model import TextModel
from services.gateway.text.tool_calls import Said, ThoughtParser
from shared.request import FinishReason


class ToolChatFormat(ChatFormat):
    """See the module. use: None = only thinking is told apart."""

    def __init__(
        self,
        head: AnswerHead,
        text: TextModel,
        choices: Sequence[Choice],
        options: StreamOptions | None,
        *,
        new_parser: Callable[[], AnswerParser],
        use: ToolUse | None,
    ) -> None:
        super().__init__(head, text, choices, options)
        self._use = use
        self._parsers = [new_parser() for _ in choices]
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
        return "tool_calls" if runs_calls(self._use, reason, parser) else FINISH_NAMES[reason]

    # --- whole bodies ---------------------------------------------------------------------------

    def _whole_choice(self, answer: TextDelta) -> Any:
        index, parser = answer.choice, self._parsers[answer.choice]
        said = [*parser.feed(answer.text), *parser.finish()]
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
        logprobs = self._logprobs(answer) if self._has_logprobs else None
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
