"""Answers of /v1/responses: whole, and as OpenAI's sequence of events.

Format: https://platform.openai.com/docs/api-reference/responses and .../responses-streaming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.front.answers import TokenCounts
from services.gateway.front.chats import Teller
from services.gateway.http.bodies import CompletionTokensDetails, Receipt
from services.gateway.http.item_answers import Event, Item, ItemFormat, NamedEvent, encode
from services.gateway.http.openai_answers import AnswerHead
from services.gateway.http.responses_forms import ResponsesBody, sealed, spaced
from services.gateway.text.text_model import TextModel
from shared.errors import MeshError
from shared.request import FinishReason, SamplingParams
from shared.rpc.status import openai_error_body

Status = Literal["completed", "incomplete", "failed", "in_progress"]


_ITEM = msgspec.Meta(extra_json_schema={"type": "object", "required": ["id", "type", "status"]})


class InputDetails(msgspec.Struct):
    """cached_tokens: those whose KV was not computed again."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of the input and of the answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, counts: TokenCounts, num_thought_tokens: int) -> ResponseUsage:
        """Return the counts as this protocol tells them."""
        return cls(
            counts.prompt_tokens,
            InputDetails(counts.cached_tokens),
            counts.completion_tokens,
            CompletionTokensDetails(num_thought_tokens),
            counts.prompt_tokens + counts.completion_tokens,
        )


class Incomplete(msgspec.Struct):
    """Why an answer ends in its midst."""

    reason: Literal["max_output_tokens"]


class ResponseFault(msgspec.Struct):
    """What broke an answer that had begun."""

    code: str
    message: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """A response. None is kept, so none goes on from another."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status
    background: Literal[False] = False
    error: ResponseFault | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, Any]
    model: str
    output: list[Annotated[Any, _ITEM]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    receipt: Receipt | UnsetType = UNSET


class InputCount(msgspec.Struct, kw_only=True):
    """What /v1/responses/input_tokens tells."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


# --- events ---------------------------------------------------------------------------------------


class ResponseEvent(NamedEvent, kw_only=True):
    """One event of a stream; the kinds have more fields, as OpenAI's have them."""

    sequence_number: int


_KINDS = {
    "text": ("msg", "message"),
    "call": ("fc", "function_call"),
    "thought": ("rs", "reasoning"),
}
"""Of each kind of items: how an id begins, and its name here."""


class ResponsesFormat(ItemFormat):
    """See the module. response: as it is before its answer. seals: thinking comes sealed, too."""

    def __init__(
        self,
        head: AnswerHead,
        text: TextModel,
        new_teller: Callable[[], Teller] | None,
        *,
        response: ResponseBody,
        seals: bool,
    ) -> None:
        super().__init__(head, text, new_teller)
        self._seals = seals
        self._response = response
        self._spaced = {
            spaced(space.name or "", one.name or ""): {"name": one.name, "namespace": space.name}
            for space in response.tools
            for one in space.tools or ()
        }
        self._output: list[Event] = []
        self._num_events = 0

    # --- streams --------------------------------------------------------------------------------

    def opening(self, usage: TokenCounts | None) -> Iterator[Event]:
        for name in ("created", "in_progress"):
            yield self._whole_event(name)

    def began(self, item: Item) -> Iterator[Event]:
        shown = self._shown(item, "in_progress", "")
        self._output.append(shown)
        if item.kind != "call":
            shown["content"] = []
        yield self._item_event("added", item, shown)
        if item.kind != "call":
            yield self._part_event("added", item, "")

    def grew(self, item: Item, text: str) -> Event:
        if item.kind == "call":
            return self._of(item, "function_call_arguments.delta", delta=text)
        return self._text_event("delta", item, delta=text)

    def ended(self, item: Item, *, is_cut: bool) -> Iterator[Event]:
        text = item.text
        if item.kind == "call":
            name = self._named(item)["name"]
            yield self._of(item, "function_call_arguments.done", name=name, arguments=text)
        else:
            yield self._text_event("done", item, text=text)
            yield self._part_event("done", item, text)
        shown = self._shown(item, "incomplete" if is_cut else "completed", text)
        self._output[item.index] = shown
        yield self._item_event("done", item, shown)

    def ending(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> Iterator[Event]:
        self._finish(usage, receipts)
        yield self._whole_event(self._response.status)

    def breaking(self, error: MeshError) -> Event:
        told = openai_error_body(error)["error"]
        self._response.status = "failed"
        self._response.error = ResponseFault(told["code"], told["message"])
        if self._output:  # the last item is on its way
            cut = self.items[-1]
            self._output[-1] = self._shown(cut, "incomplete", cut.text)
        self._response.output = self._output
        return self._whole_event("failed")

    # --- whole bodies ---------------------------------------------------------------------------

    def whole(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> bytes:
        self._finish(usage, receipts)
        return encode(self._response)

    def _finish(self, usage: TokenCounts, receipts: Sequence[dict[str, Any]]) -> None:
        response = self._response
        is_cut = self.finish_reason is FinishReason.LENGTH
        response.status = "incomplete" if is_cut else "completed"
        if is_cut:
            response.incomplete_details = Incomplete("max_output_tokens")
        response.output = self._output
        response.usage = ResponseUsage.of(usage, self._teller.num_thought)
        if receipts:
            response.receipt = receipts[0]

    # --- parts ----------------------------------------------------------------------------------

    def _id(self, item: Item) -> str:
        answer = self._head.id.rpartition("_")[2]
        return f"{_KINDS[item.kind][0]}_{answer}{item.index:02x}"

    def _shown(self, item: Item, status: Status, text: str) -> Event:
        shown: Event = {"id": self._id(item), "type": _KINDS[item.kind][1], "status": status}
        match item.kind:
            case "text":
                return shown | {"role": "assistant", "content": [_part(item, text)]}
            case "thought":  # summary: none is made
                seal = {"encrypted_content": sealed(text)} if self._seals and text else {}
                return shown | {"summary": [], "content": [_part(item, text)], **seal}
            case "call":
                return shown | {"call_id": item.id, **self._named(item), "arguments": text}

    def _named(self, call: Item) -> Event:
        return self._spaced.get(call.name, {"name": call.name})

    def _next(self, kind: str, /, **said: Any) -> Event:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **said}

    def _of(self, item: Item, kind: str, /, **said: Any) -> Event:
        return self._next(kind, item_id=self._id(item), output_index=item.index, **said)

    def _whole_event(self, name: str) -> Event:
        return self._next(name, response=self._response)

    def _item_event(self, name: str, item: Item, shown: Event) -> Event:
        return self._next(f"output_item.{name}", output_index=item.index, item=shown)

    def _part_event(self, name: str, item: Item, text: str) -> Event:
        return self._of(item, f"content_part.{name}", content_index=0, part=_part(item, text))

    def _text_event(self, name: str, item: Item, **said: Any) -> Event:
        if item.kind == "thought":
            return self._of(item, f"reasoning_text.{name}", content_index=0, **said)
        return self._of(item, f"output_text.{name}", content_index=0, **said, logprobs=[])


def _part(item: Item, text: str) -> Event:
    if item.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_before(
    head: AnswerHead, body: ResponsesBody, sampling: SamplingParams
) -> ResponseBody:
    """Return the response to a body before there is an answer. sampling: as workers get it."""
    text = None if body.text is None else body.text.format
    effort = body.reasoning.effort if body.reasoning is not None else body.reasoning_effort
    return ResponseBody(
        id=head.id,
        created_at=head.created,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=head.model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": effort, "summary": None},
        temperature=sampling.temperature,
        text={"format": {"type": "text"} if text is None else text},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=sampling.top_p,
    )
