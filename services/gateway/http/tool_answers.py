"""Answers with calls of tools or with thinking told apart, in the shapes of OpenAI's chat.

A ``ChatFormat`` whose text goes through a parser of its own an answer; answers without tools and
thinking never come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET

from services.gateway.front.answers import Choice, TextDelta, TokenCounts
from services.gateway.front.chats import Teller, new_call_id
from services.gateway.http import bodies
from services.gateway.http.openai_answers import FINISH_NAMES, AnswerHead, ChatFormat
from services.gateway.http.openai_forms import StreamOptions
from services.gateway.text.calls.parser import Said
from services.gateway.text.text_model import TextModel


class ToolChatFormat(ChatFormat):
    """See the module."""

    def __init__(
        self,
        head: AnswerHead,
        text: TextModel,
        choices: Sequence[Choice],
        options: StreamOptions | None,
        *,
        new_teller: Callable[[], Teller],
    ) -> None:
        super().__init__(head, text, choices, options)
        self._tellers = [new_teller() for _ in choices]

    def chunks(self, delta: TextDelta, usage: TokenCounts | None) -> bytes:
        choice = delta.choice
        deltas = [self._delta(choice, one) for one in self._tellers[choice].take(delta)]
        counts = None if usage is None else self._usage(usage)
        events = b""
        if choice not in self._begun:
            self._begun.add(choice)
            events = self._event(self._first(delta), counts)
        logprobs = None
        if self._has_logprobs and delta.tokens:
            logprobs = self._logprobs(delta)
            # Also of tokens that show nothing yet; once, for they are of the whole delta.
            deltas = deltas or [bodies.DeltaBody()]
        for new in deltas:
            events += self._event(bodies.ChatChunkChoice(choice, new, logprobs, None), counts)
            logprobs = None
        if delta.finish_reason:
            name = self._finish_name(delta)
            end = bodies.ChatChunkChoice(choice, bodies.DeltaBody(), None, name, delta.stop_reason)
            events += self._event(end, counts)
        return events

    def _usage(self, counts: TokenCounts) -> bodies.UsageBody:
        tellers = self._tellers
        num = sum(teller.num_thought for teller in tellers) if tellers[0].thinks else None
        return bodies.UsageBody.of(counts, num)

    def _delta(self, choice: int, said: Said) -> bodies.DeltaBody:
        if said.is_thought:
            return bodies.DeltaBody(reasoning_content=said.text)
        if said.call < 0:
            return bodies.DeltaBody(content=said.text)
        function = bodies.CallPart(said.name or UNSET, said.text)
        if not said.name:
            return bodies.DeltaBody(tool_calls=[bodies.CallDelta(said.call, function)])
        call_id = new_call_id(self._head.id, choice, said.call)
        call = bodies.CallDelta(said.call, function, call_id, "function")
        return bodies.DeltaBody(tool_calls=[call])

    def _finish_name(self, last: TextDelta) -> bodies.FinishName:
        reason = last.finish_reason
        return (
            "tool_calls" if self._tellers[last.choice].runs_calls(reason) else FINISH_NAMES[reason]
        )

    # --- whole bodies ---------------------------------------------------------------------------

    def _whole_choice(self, answer: TextDelta) -> Any:
        index = answer.choice
        said = self._tellers[index].take(answer)
        thought = "".join(one.text for one in said if one.is_thought)
        text = "".join(one.text for one in said if one.call < 0 and not one.is_thought)
        calls: list[bodies.CallBody] = []
        for one in said:
            if one.name:
                function = bodies.WholeCall(one.name, "")
                call_id = new_call_id(self._head.id, index, one.call)
                calls.append(bodies.CallBody(call_id, "function", function))
            if one.call >= 0:
                calls[one.call].function.arguments += one.text
        message = bodies.AnswerMessage(
            role="assistant",
            content=text if text.strip() or not calls else None,
            refusal=None,
            tool_calls=calls or UNSET,
            reasoning_content=thought or UNSET,
        )
        logprobs = self._logprobs(answer) if self._has_logprobs else None
        return bodies.ChatChoice(
            index, message, logprobs, self._finish_name(answer), answer.stop_reason
        )
