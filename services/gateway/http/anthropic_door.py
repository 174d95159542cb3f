"""Anthropic's /v1/messages: a chat in another dress."""

from __future__ import annotations

import msgspec

from services.gateway.front.calls import Call
from services.gateway.front.frontdoor import FrontDoor
from services.gateway.http.answering import Wants, answered, asked_chat, head_of_answer
from services.gateway.http.anthropic_answers import (
    AnthropicError,
    InputTokens,
    MessageBody,
    MessagesFormat,
)
from services.gateway.http.anthropic_forms import CountTokensBody, MessagesBody, chat_of
from services.gateway.http.connection import HttpRequest
from services.gateway.http.item_answers import NamedEvent
from services.gateway.http.messages import Response, json_response
from services.gateway.http.server import Policy, Route, read_body

MESSAGES = msgspec.json.Decoder(MessagesBody)
COUNT_TOKENS = msgspec.json.Decoder(CountTokensBody)


class AnthropicDoor:
    """The handlers."""

    def __init__(self, front: FrontDoor) -> None:
        self._front = front

    def routes(self) -> tuple[Route, ...]:
        """Return the routes."""
        path = "/v1/messages"
        return (
            Route(
                *("POST", path, Policy.METERED, self.answer),
                *(MessageBody, MESSAGES, NamedEvent),
                ends_with_done=False,
                needs_workers=True,
                error=AnthropicError,
            ),
            Route(
                *("POST", f"{path}/count_tokens", Policy.METERED, self.count),
                *(InputTokens, COUNT_TOKENS),
                needs_workers=True,
                error=AnthropicError,
            ),
        )

    async def answer(self, request: HttpRequest, call: Call) -> Response | None:
        """Answer a chat as Anthropic's API does, whole or as a stream of events."""
        body = await read_body(request, call, MESSAGES)
        chat, places = chat_of(body)
        with places.told():
            asked = await asked_chat(self._front, request, call, chat)
        head = head_of_answer(call, asked.model, "msg_")
        answer_format = MessagesFormat(head, self._front.text, asked.new_parser)
        wants = Wants(stream=bool(body.stream), usage=True, receipt=chat.wants_receipt)
        return await answered(self._front, request, call, asked.choices, answer_format, wants)

    async def count(self, request: HttpRequest, call: Call) -> Response:
        """Count the tokens of a body of /v1/messages."""
        body = await read_body(request, call, COUNT_TOKENS)
        chat, places = chat_of(body)
        with places.told():
            asked = await asked_chat(self._front, request, call, chat)
        num_tokens = len(asked.choices[0].request.token_ids)
        return json_response(InputTokens(num_tokens), headers=call.headers)
