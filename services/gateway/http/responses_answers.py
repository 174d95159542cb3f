"""Answers of /v1/responses: whole, and as OpenAI's sequence of events.

Format: https://platform.openai.com/docs/api-reference/responses and .../responses-streaming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.gateway.front.answers import TokenCounts
from services.gateway.http import responses_bodies as bodies
from services.gateway.http.item_answers import Item, ItemFormat, NamedEvent, arguments_of, encode
from services.gateway.http.openai_answers import AnswerHead
from services.gateway.http.openai_forms import Message
from services.gateway.http.responses_forms import ResponsesBody
from services.gateway.http.tool_answers import AnswerParser
from services.gateway.http.tool_fields import CalledFunction, MessageCall
from services.gateway.text.text_model import TextModel
from shared.errors import MeshError
from shared.request import FinishReason, SamplingParams
from shared.rpc.status import openai_error_body

Keep = Callable[[bytes, Message], bool]
"""Takes the response and its answer as a message; returns whether it is kept."""

_PREFIXES = {"text": "msg", "call": "fc", "thought": "rs"}


class ResponsesFormat(ItemFormat):
    """See the module. response: as it is before its answer. keep: None = it is not to be kept."""

    def __init__(
        self,
        head: AnswerHead,
        text: TextModel,
        new_parser: Callable[[], AnswerParser] | None,
        *,
        response: bodies.ResponseBody,
        keep: Keep | None,
    ) -> None:
        super().__init__(head, text, new_parser)
        self._response = response
        self._keep = keep
        self._output: list[bodies.OutputItem] = []
        self._num_events = 0

    # --- streams --------------------------------------------------------------------------------

    def opening(self, usage: TokenCounts | None) -> Iterator[NamedEvent]:
        for name in ("created", "in_progress"):
            yield self._whole_event(name)

    def began(self, item: Item) -> Iterator[NamedEvent]:
        shown = self._shown(item, "in_progress", "")
        self._output.append(shown)
        if not isinstance(shown, bodies.OutputCall):
            shown.content = []
        yield self._item_event("added", item, shown)
        if item.kind != "call":
            yield self._part_event("added", item, "")

    def grew(self, item: Item, text: str) -> NamedEvent:
        if item.kind == "call":
            return bodies.ArgumentsEvent(
                **self._place("response.function_call_arguments.delta", item), delta=text
            )
        return self._text_event("delta", item, delta=text)

    def ended(self, item: Item, *, is_cut: bool) -> Iterator[NamedEvent]:
        text = item.text
        if item.kind == "call":
            where = self._place("response.function_call_arguments.done", item)
            yield bodies.ArgumentsEvent(**where, name=item.name, arguments=text)
        else:
            yield self._text_event("done", item, text=text)
            yield self._part_event("done", item, text)
        shown = self._shown(item, "incomplete" if is_cut else "completed", text)
        self._output[item.index] = shown
        yield self._item_event("done", item, shown)

    def ending(
        self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]
    ) -> Iterator[NamedEvent]:
        self._finish(usage, receipts)
        yield self._whole_event(self._response.status)

    def breaking(self, error: MeshError) -> NamedEvent:
        told = openai_error_body(error)["error"]
        self._response.status = "failed"
        self._response.error = bodies.ResponseFault(told["code"], told["message"])
        if self._output:  # the last item is on its way
            cut = self.items[-1]
            self._output[-1] = self._shown(cut, "incomplete", cut.text)
        self._response.output = self._output
        self._response.store = False
        return self._whole_event("failed")

    # --- whole bodies ---------------------------------------------------------------------------

    def whole(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> bytes:
        self._finish(usage, receipts)
        return encode(self._response)

    def _finish(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> None:
        """Complete the response, and keep it if it is to be kept and may."""
        response = self._response
        is_cut = self.finish_reason is FinishReason.LENGTH
        response.status = "incomplete" if is_cut else "completed"
        if is_cut:
            response.incomplete_details = bodies.Incomplete("max_output_tokens")
        response.output = self._output
        response.usage = bodies.ResponseUsage.of(usage, self.num_thought_tokens)
        response.store = self._keep is not None
        if receipts:
            response.receipt = receipts[0]
        if self._keep is not None:
            response.store = self._keep(encode(response), self._message())

    def _message(self) -> Message:
        """The answer as the next turn's template sees it."""
        said = dict.fromkeys(_PREFIXES, "")
        calls: list[MessageCall] = []
        for item in self.items:
            if item.kind == "call":
                if arguments_of(item) is not None:
                    calls.append(MessageCall(item.id, CalledFunction(item.name, item.text)))
            else:
                said[item.kind] += item.text
        return Message(
            "assistant",
            said["text"] or None,
            tool_calls=calls or None,
            reasoning_content=said["thought"] or None,
        )

    # --- parts ----------------------------------------------------------------------------------

    def _id(self, item: Item) -> str:
        answer = self._head.id.rpartition("_")[2]
        return f"{_PREFIXES[item.kind]}_{answer}{item.index:02x}"

    def _shown(self, item: Item, status: bodies.Status, text: str) -> bodies.OutputItem:
        name = self._id(item)
        match item.kind:
            case "text":
                content = [bodies.OutputText(text=text)]
                return bodies.OutputMessage(id=name, status=status, content=content)
            case "thought":
                thought = [bodies.ReasoningText(text=text)]
                return bodies.OutputReasoning(id=name, status=status, content=thought)
            case "call":
                return bodies.OutputCall(
                    id=name, status=status, call_id=item.id, name=item.name, arguments=text
                )

    def _number(self) -> int:
        self._num_events += 1
        return self._num_events - 1

    def _place(self, kind: str, item: Item) -> dict[str, Any]:
        return {
            "type": kind,
            "sequence_number": self._number(),
            "item_id": self._id(item),
            "output_index": item.index,
        }

    def _whole_event(self, name: str) -> NamedEvent:
        return bodies.WholeEvent(
            type=f"response.{name}", sequence_number=self._number(), response=self._response
        )

    def _item_event(self, name: str, item: Item, shown: bodies.OutputItem) -> NamedEvent:
        return bodies.ItemEvent(
            type=f"response.output_item.{name}",
            sequence_number=self._number(),
            output_index=item.index,
            item=shown,
        )

    def _part_event(self, name: str, item: Item, text: str) -> NamedEvent:
        is_thought = item.kind == "thought"
        part = (bodies.ReasoningText if is_thought else bodies.OutputText)(text=text)
        return bodies.PartEvent(**self._place(f"response.content_part.{name}", item), part=part)

    def _text_event(self, name: str, item: Item, **said: Any) -> NamedEvent:
        if item.kind == "thought":
            return bodies.TextEvent(**self._place(f"response.reasoning_text.{name}", item), **said)
        where = self._place(f"response.output_text.{name}", item)
        return bodies.TextEvent(**where, **said, logprobs=[])


def response_before(
    head: AnswerHead, body: ResponsesBody, sampling: SamplingParams
) -> bodies.ResponseBody:
    """Return the response to a body before there is an answer. sampling: as workers get it."""
    text = None if body.text is None else body.text.format
    effort = body.reasoning.effort if body.reasoning is not None else body.reasoning_effort
    return bodies.ResponseBody(
        id=head.id,
        created_at=head.created,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=head.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": effort, "summary": None},
        store=body.store is not False,
        temperature=sampling.temperature,
        text={"format": {"type": "text"} if text is None else text},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=sampling.top_p,
    )
