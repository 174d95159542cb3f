"""OpenAI's /v1/responses: a chat in another dress, whose answer is kept for a while if the client
does not say otherwise."""

from __future__ import annotations

import msgspec

from services.gateway.front.calls import Call
from services.gateway.front.frontdoor import FrontDoor
from services.gateway.http.answering import Wants, answered, asked_chat, head_of_answer
from services.gateway.http.connection import HttpRequest
from services.gateway.http.kept_responses import KeptResponses
from services.gateway.http.messages import Response, json_response
from services.gateway.http.openai_forms import Message
from services.gateway.http.responses_answers import ResponsesFormat, response_before
from services.gateway.http.responses_bodies import (
    DeletedResponse,
    ResponseBody,
    ResponseEvent,
)
from services.gateway.http.responses_forms import ResponsesBody, turn_of
from services.gateway.http.server import Policy, Route, read_body

RESPONSES = msgspec.json.Decoder(ResponsesBody)


class ResponsesDoor:
    """The handlers."""

    def __init__(self, front: FrontDoor) -> None:
        self._front = front
        self._kept = KeptResponses(front.config.response_memory_mib << 20)

    def routes(self) -> tuple[Route, ...]:
        """Return the routes."""
        path = "/v1/responses/{response_id}"
        return (
            Route(
                *("POST", "/v1/responses", Policy.METERED, self.respond),
                *(ResponseBody, RESPONSES, ResponseEvent),
                ends_with_done=False,
                needs_workers=True,
            ),
            Route("GET", path, Policy.KEY, self.tell, ResponseBody),
            Route("DELETE", path, Policy.KEY, self.forget, DeletedResponse),
        )

    async def respond(self, request: HttpRequest, call: Call) -> Response | None:
        """Answer a chat as OpenAI's newer API does, whole or as a stream of events."""
        body = await read_body(request, call, RESPONSES)
        tenant = call.caller.key.cache_salt
        earlier: list[Message] = []
        if (previous := body.previous_response_id) is not None:
            earlier = self._kept.find(tenant, previous, param="previous_response_id").messages
        chat, places, conversation = turn_of(body, earlier)
        with places.told():
            asked = await asked_chat(self._front, request, call, chat)
        head = head_of_answer(call, asked.model, "resp_")

        def keep(answer: bytes, message: Message) -> bool:
            return self._kept.keep(tenant, head.id, answer, [*conversation, message])

        answer_format = ResponsesFormat(
            head,
            self._front.text,
            asked.new_parser,
            response=response_before(head, body, asked.choices[0].request.sampling),
            keep=None if body.store is False else keep,
        )
        wants = Wants(stream=bool(body.stream), usage=True, receipt=chat.wants_receipt)
        return await answered(self._front, request, call, asked.choices, answer_format, wants)

    async def tell(self, request: HttpRequest, call: Call) -> Response:
        """Tell a response that is kept."""
        name, tenant = request.parameters["response_id"], call.caller.key.cache_salt
        kept = self._kept.find(tenant, name, param="response_id")
        return json_response(kept.body, headers=call.headers)

    async def forget(self, request: HttpRequest, call: Call) -> Response:
        """Forget a response."""
        name, tenant = request.parameters["response_id"], call.caller.key.cache_salt
        self._kept.delete(tenant, name, param="response_id")
        return json_response(DeletedResponse(name), headers=call.headers)
