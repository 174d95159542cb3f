"""From a body to its answer, for every route that makes text: what is asked of the mesh, and the
answer whole or as a stream, written by a format of the route's own.

The routes differ in the bodies they take and the formats they write. All else is here, once:
refusals before any work, deadlines, a client that does not read, errors in the midst of a stream.
"""

from __future__ import annotations

import time
from asyncio import to_thread
from collections.abc import Sequence
from functools import partial

from services.gateway.front.answers import (
    MAX_LOGPROBS_ON_LOOP,
    Answers,
    Choice,
    TextDelta,
    TokenCounts,
    open_answers,
)
from services.gateway.front.calls import Call, typed
from services.gateway.front.chats import AskedChat, AskedTools, asked_chat
from services.gateway.front.frontdoor import FrontDoor, asked_by
from services.gateway.http.connection import HttpRequest
from services.gateway.http.item_answers import ItemFormat
from services.gateway.http.messages import Response, json_response
from services.gateway.http.openai_answers import AnswerFormat, AnswerHead
from services.gateway.http.openai_forms import ChatBody, SamplingBody, messages_for_template
from services.gateway.http.sse import EventStream
from services.gateway.mesh import ServedModel
from shared.log import is_debugging
from shared.telemetry.moments import Moment, note

Format = AnswerFormat | ItemFormat
"""Writes one request's answers, whole or as events."""


def head_of_answer(call: Call, model: ServedModel, prefix: str) -> AnswerHead:
    return AnswerHead(id=prefix + call.request_id, model=model.name, created=int(time.time()))


async def asked_of(
    front: FrontDoor, request: HttpRequest, call: Call, body: ChatBody, *, is_counted: bool = False
) -> AskedChat:
    """Return the answers that a chat asks for. is_counted: see ``asked_chat``.

    Raises MeshError: the first thing that is wrong."""
    form = body.form()
    call.caller.asked = asked_by(request.headers)
    return await asked_chat(
        front,
        call.caller,
        form,
        AskedTools(body.tools, body.tool_choice, body.parallel_tool_calls),
        model_name=body.model,
        messages=lambda: messages_for_template(body.messages),
        rendering=body.rendering,
        tells_thinking=body.separate_reasoning is not False,
        is_counted=is_counted,
    )


async def answered(
    front: FrontDoor,
    request: HttpRequest,
    call: Call,
    body: SamplingBody,
    choices: Sequence[Choice],
    answer_format: Format,
) -> Response | None:
    """Make the answers and return them, or stream them and return None."""
    if body.stream:
        await _stream(front, request, call, body, choices, answer_format)
        return None
    deltas: list[TextDelta] = []
    async with open_answers(front.mesh, choices) as answers:
        call.answers = answers
        answers.hold()
        while arrived := await answers.next():
            deltas += arrived
            call.note()
    receipts = answers.receipts() if body.wants_receipt else ()
    write = partial(answer_format.body, deltas, answers.usage, receipts)
    is_small = _num_logprobs(choices) <= MAX_LOGPROBS_ON_LOOP
    return json_response(write() if is_small else await to_thread(write))


def _num_logprobs(choices: Sequence[Choice]) -> int:
    """How many there are in answers that are over."""
    sampling = choices[0].request.sampling
    num = 0
    if (top := sampling.logprobs) is not None:
        num += (1 + top) * sum(choice.num_tokens for choice in choices)
    if (top := sampling.prompt_logprobs) is not None:
        num += (1 + top) * sum(len(choice.request.token_ids) for choice in choices)
    return num


async def _stream(
    front: FrontDoor,
    request: HttpRequest,
    call: Call,
    body: SamplingBody,
    choices: Sequence[Choice],
    answer_format: Format,
) -> None:
    events = EventStream(request, call.headers, stall_s=front.stall_s)
    try:
        async with open_answers(front.mesh, choices) as answers:
            call.answers = answers
            chunks = _Chunks(events, answer_format, call, answers)
            answers.write_to(chunks)
            while deltas := await answers.next():
                call.note()
                # While a prompt's are written nothing else is: the stream has not begun, or its
                # answers are several, and no sink.
                told = (entry for delta in deltas for entry in delta.prompt_logprobs or ())
                is_small = sum(1 + len(entry.top) for entry in told) <= MAX_LOGPROBS_ON_LOOP
                written = map(chunks.of, deltas)
                events_now = b"".join(written) if is_small else await to_thread(b"".join, written)
                if events_now:
                    await events.write(events_now)
        receipts = answers.receipts() if body.wants_receipt else ()
        await events.end(answer_format.closing(answers.usage, receipts))
    except ConnectionError:
        raise
    except Exception as failure:
        # Before the first byte the guard answers with a status; after it the stream says it.
        if not events.has_begun:
            raise
        await events.end(answer_format.failed(typed(failure, call, is_cut=events.is_cut)))


class _Chunks:
    """Deltas that become events, and leave at once where there is room (the ``DeltaSink`` of a
    stream)."""

    def __init__(
        self, events: EventStream, answer_format: Format, call: Call, answers: Answers
    ) -> None:
        self.has_room = events.has_room
        self._write = events.write_nowait
        self._chunks = answer_format.chunks
        self._request_id = call.caller.request_id
        self._counts: TokenCounts | None = None
        if answer_format.continuous_usage:
            self._counts = TokenCounts(answers.usage.prompt_tokens, 0, 0)
        self._choices = answers.choices
        firsts = {choice.prompt_idx: choice.index for choice in reversed(answers.choices)}
        self._firsts = set(firsts.values())  # of their prompts; those that have not begun

    def of(self, delta: TextDelta) -> bytes:
        """Return the events of a delta, about to be written."""
        if self._counts is not None:
            self._counts = self._counted(self._counts, delta)
        chunks = self._chunks(delta, self._counts)
        if chunks and is_debugging():
            note(Moment.WRITTEN, self._request_id, num_bytes=len(chunks))
        return chunks

    def write(self, delta: TextDelta) -> None:
        if chunks := self.of(delta):
            self._write(chunks)

    def _counted(self, before: TokenCounts, delta: TextDelta) -> TokenCounts:
        """Return the counts with this delta's: to sum over hundreds of answers at each is dear."""
        cached_tokens = before.cached_tokens
        generation = self._choices[delta.choice].generation
        if delta.choice in self._firsts and generation is not None:
            self._firsts.remove(delta.choice)
            cached_tokens += generation.cached_tokens
        completion_tokens = before.completion_tokens + len(delta.tokens)
        return TokenCounts(before.prompt_tokens, completion_tokens, cached_tokens)
