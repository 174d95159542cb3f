"""The HTTP door: endpoints of OpenAI, Anthropic and vLLM (its tokenizer), and what operators ask.

Each handler reads its body, makes a form of it, and answers whole or as a stream. Routes exist only
through ``HttpDoor.routes``, the one table, where each states who may call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway import limits
from services.gateway.front.answers import Choice
from services.gateway.front.calls import Call
from services.gateway.front.chats import AskedChat
from services.gateway.front.frontdoor import FrontDoor, Prompt, asked_by, in_time
from services.gateway.http import bodies
from services.gateway.http.answering import answered, asked_of, head_of_answer
from services.gateway.http.anthropic_answers import (
    AnthropicError,
    InputTokens,
    MessageBody,
    MessagesFormat,
)
from services.gateway.http.anthropic_forms import CountTokensBody, MessagesBody, chat_of_messages
from services.gateway.http.cluster_bodies import Cluster, ClusterWorker, Explanation, RecentRequests
from services.gateway.http.connection import HttpRequest, listen
from services.gateway.http.item_answers import NamedEvent
from services.gateway.http.messages import Response, json_response
from services.gateway.http.openai_answers import ChatFormat, CompletionFormat
from services.gateway.http.openai_forms import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RoleBody,
    TokenizeBody,
    messages_for_template,
)
from services.gateway.http.openapi import openapi_document
from services.gateway.http.page_files import page_routes
from services.gateway.http.responses_answers import (
    InputCount,
    ResponseBody,
    ResponseEvent,
    ResponsesFormat,
    response_before,
)
from services.gateway.http.responses_forms import ResponsesBody, chat_of_input
from services.gateway.http.server import AllowedOrigins, Policy, Route, Routes, read_body
from services.gateway.http.tool_answers import ToolChatFormat
from services.gateway.http.unserved_fields import refuse_unserved
from services.gateway.mesh import ServedModel
from shared.address import Address, is_loopback
from shared.errors import InvalidRequest
from shared.rpc.tls import ServerTls
from shared.version import VERSION

_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)
_RESPONSES = msgspec.json.Decoder(ResponsesBody)
_MESSAGES = msgspec.json.Decoder(MessagesBody)
_COUNT_TOKENS = msgspec.json.Decoder(CountTokensBody)
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_ROLE = msgspec.json.Decoder(RoleBody)


def serve_http(
    front: FrontDoor,
    address: Address,
    *,
    own_port: int = 0,
    drain_s: float = 30.0,
    reuse_port: bool = False,
    tls: ServerTls | None = None,
    origins: frozenset[str] = frozenset(),
) -> AbstractAsyncContextManager[Address]:
    """Serve HTTP until the block ends; see ``connection.listen``.

    origins: whose pages may ask, too.
    """
    only_here = front.keys.is_open and is_loopback(address.host)
    pages = AllowedOrigins(origins, only_here=only_here)
    return listen(
        Routes(front, HttpDoor(front).routes(), pages).handle,
        address,
        headers_for=pages.headers_for if origins else None,
        is_draining=lambda: front.mesh.is_draining,
        own_port=own_port,
        drain_s=drain_s,
        reuse_port=reuse_port,
        tls=tls,
    )


def serve_metrics(front: FrontDoor, address: Address) -> AbstractAsyncContextManager[Address]:
    """Serve what watches a gateway until the block ends: /metrics, /health and /ready, without key
    and TLS."""
    routes = Routes(front, HttpDoor(front).watched_routes(), AllowedOrigins())
    return listen(routes.handle, address, drain_s=0.0)


class HttpDoor:
    def __init__(self, front: FrontDoor) -> None:
        self._front = front
        self._document: tuple[ServedModel | None, bytes] | None = None

    def routes(self) -> tuple[Route, ...]:
        return (
            *self._probes(),
            Route("GET", "/version", Policy.KEY, self.version, bodies.Version),
            Route("GET", "/metrics", Policy.KEY, self.metrics, "text/plain", is_polled=True),
            Route("GET", "/cluster", Policy.KEY, self.cluster, Cluster, is_polled=True),
            Route(
                *("GET", "/cluster/requests", Policy.KEY, self.recent, RecentRequests),
                is_polled=True,
            ),
            Route(
                *("GET", "/cluster/requests/{request_id}", Policy.KEY, self.explain, Explanation)
            ),
            Route(
                *("POST", "/cluster/workers/{worker}/role", Policy.ROLES, self.change_role),
                *(ClusterWorker, _ROLE),
            ),
            Route("GET", "/openapi.json", Policy.KEY, self.openapi, "application/json"),
            Route("GET", "/v1/models", Policy.KEY, self.models, bodies.ModelList),
            Route(
                *("GET", "/v1/models/{name:.+}", Policy.KEY, self.one_model, bodies.ModelCard),
                needs_workers=True,
            ),
            Route(
                *("POST", "/v1/chat/completions", Policy.METERED, self.chat),
                *(bodies.ChatCompletion, _CHAT, bodies.ChatCompletionChunk),
            ),
            Route(
                *("POST", "/v1/completions", Policy.METERED, self.completion),
                *(bodies.Completion, _COMPLETION, bodies.CompletionChunk),
            ),
            Route(
                *("POST", "/v1/responses", Policy.METERED, self.respond),
                *(ResponseBody, _RESPONSES, ResponseEvent),
            ),
            Route(
                *("POST", "/v1/responses/input_tokens", Policy.METERED, self.count_input),
                *(InputCount, _RESPONSES),
            ),
            Route(
                *("POST", "/v1/messages", Policy.METERED, self.message),
                *(MessageBody, _MESSAGES, NamedEvent),
                error=AnthropicError,
            ),
            Route(
                *("POST", "/v1/messages/count_tokens", Policy.METERED, self.count_tokens),
                *(InputTokens, _COUNT_TOKENS),
                error=AnthropicError,
            ),
            Route(
                *("POST", "/tokenize", Policy.METERED, self.tokenize, bodies.Tokens, _TOKENIZE),
            ),
            Route(
                *("POST", "/detokenize", Policy.METERED, self.detokenize, bodies.Text, _DETOKENIZE),
            ),
            *page_routes(),
        )

    def watched_routes(self) -> tuple[Route, ...]:
        """Return the routes of the listener for scrapes, where nobody has a key."""
        return (
            *self._probes(),
            Route("GET", "/metrics", Policy.ANYBODY, self.metrics, "text/plain", is_polled=True),
        )

    def _probes(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/health", Policy.ANYBODY, self.health, bodies.Health),
            Route(
                *("GET", "/ready", Policy.ANYBODY, self.ready, bodies.Readiness),
                refusal=bodies.Readiness,
            ),
        )

    # --- operators ------------------------------------------------------------------------------

    async def health(self, *_: object) -> Response:
        """Say that the process lives."""
        return json_response(bodies.Health("ok"))

    async def ready(self, *_: object) -> Response:
        """Say whether a request would be served now."""
        mesh = self._front.mesh
        if mesh.is_ready:
            return json_response(bodies.Readiness("ready"))
        answer = bodies.Readiness("not ready", mesh.not_ready_reason)
        return json_response(answer, status=503)

    async def version(self, *_: object) -> Response:
        """Tell the gateway's version."""
        return json_response(bodies.Version(VERSION))

    async def metrics(self, *_: object) -> Response:
        """Numbers for Prometheus."""
        body = generate_latest(self._front.metrics.registry)
        return Response(200, body, {"Content-Type": CONTENT_TYPE_LATEST})

    async def cluster(self, *_: object) -> Response:
        """Tell of workers, load and the last minute's traffic."""
        return _told({"version": VERSION, **self._front.mesh.cluster()}, Cluster)

    async def recent(self, *_: object) -> Response:
        """Tell the last requests as receipts, and the workers that they met."""
        return _told({"version": VERSION, **self._front.mesh.recent()}, RecentRequests)

    async def explain(self, request: HttpRequest, _: Call) -> Response:
        """Tell why one of the last requests went where it went."""
        return _told(self._front.mesh.explain(request.parameters["request_id"]), Explanation)

    async def change_role(self, request: HttpRequest, call: Call) -> Response:
        """Change what a worker is when nothing is asked of it; what it has in hand goes on."""
        body = await read_body(request, call, _ROLE)
        worker = await self._front.mesh.change_role(request.parameters["worker"], body.role)
        return json_response(msgspec.convert(worker, ClusterWorker))

    async def openapi(self, *_: object) -> Response:
        """This document."""
        # Behind the key: it tells version and model.
        model = self._front.mesh.model
        if self._document is None or self._document[0] != model:
            document = openapi_document(
                self.routes(),
                version=VERSION,
                model=model,
                needs_key=not self._front.keys.is_open,
                max_choices=self._front.config.max_choices,
                takes_templates=self._front.config.trust_templates,
            )
            self._document = model, msgspec.json.encode(document)
        return json_response(self._document[1])

    async def models(self, *_: object) -> Response:
        """List the served model."""
        model = self._front.mesh.model
        data = [] if model is None else [_model_card(model)]
        return json_response(bodies.ModelList("list", data))

    async def one_model(self, request: HttpRequest, call: Call) -> Response:
        """Tell of one model."""
        model = await self._front.model(request.parameters["name"], call.caller)
        return json_response(_model_card(model))

    # --- text -----------------------------------------------------------------------------------

    async def tokenize(self, request: HttpRequest, call: Call) -> Response:
        """Turn a prompt, or messages by the chat template, into token ids."""
        body = await read_body(request, call, _TOKENIZE)
        refuse_unserved(body)
        model = await self._front.model(body.model, call.caller)
        text = self._front.text
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.messages is not None:
            messages = messages_for_template(body.messages)
            prompt = await self._front.chat_prompt(messages, body.rendering, call.caller)
            ids = prompt.token_ids
        else:
            ids = await text.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        answer = bodies.Tokens(len(ids), model.max_model_len, list(ids))
        return json_response(answer)

    async def detokenize(self, request: HttpRequest, call: Call) -> Response:
        """Turn token ids into text."""
        body = await read_body(request, call, _DETOKENIZE)
        model = await self._front.model(body.model, call.caller)
        ids = limits.checked_token_ids(body.tokens, model.vocab_size, param="tokens")
        (text,) = await self._front.text.decode_all([ids], skip_special=False)
        return json_response(bodies.Text(text))

    # --- generation -----------------------------------------------------------------------------

    async def chat(self, request: HttpRequest, call: Call) -> Response | None:
        """Answer a chat, whole or as a stream of events."""
        body = await read_body(request, call, _CHAT)
        asked = await asked_of(self._front, request, call, body)
        head = head_of_answer(call, asked.model, "chatcmpl-")
        about = head, self._front.text, asked.choices, body.stream_options
        if asked.new_teller is None:
            answer_format = ChatFormat(*about)
        else:
            answer_format = ToolChatFormat(*about, new_teller=asked.new_teller)
        return await answered(self._front, request, call, body, asked.choices, answer_format)

    async def completion(self, request: HttpRequest, call: Call) -> Response | None:
        """Continue one or several prompts, whole or as a stream of events."""
        body = await read_body(request, call, _COMPLETION)
        form = body.form()
        await in_time(call.caller, self._front.structured(form))
        call.caller.asked = asked_by(request.headers)
        model = await self._front.model(body.model, call.caller)
        prompts = await in_time(call.caller, self._prompts(body))
        choices = self._front.choices(call.caller, model, prompts, form)
        echo = await self._echo(choices, prompts) if body.echo else None
        head = head_of_answer(call, model, "cmpl-")
        about = head, self._front.text, choices, body.stream_options
        answer_format = CompletionFormat(
            *about, echo=echo, shows_special=not form.skip_special_tokens
        )
        return await answered(self._front, request, call, body, choices, answer_format)

    async def respond(self, request: HttpRequest, call: Call) -> Response | None:
        """Answer a chat as OpenAI's newer API does, whole or as a stream of events."""
        body = await read_body(request, call, _RESPONSES)
        asked = await self._asked(request, call, body)
        head = head_of_answer(call, asked.model, "resp_")
        answer_format = ResponsesFormat(
            head,
            self._front.text,
            asked.new_teller,
            response=response_before(head, body, asked.choices[0].request.sampling),
            seals=bool(getattr(body, "include", None)),
        )
        return await answered(self._front, request, call, body, asked.choices, answer_format)

    async def message(self, request: HttpRequest, call: Call) -> Response | None:
        """Answer a chat as Anthropic's API does, whole or as a stream of events."""
        body = await read_body(request, call, _MESSAGES)
        asked = await self._asked(request, call, body)
        head = head_of_answer(call, asked.model, "msg_")
        answer_format = MessagesFormat(head, self._front.text, asked.new_teller)
        return await answered(self._front, request, call, body, asked.choices, answer_format)

    async def count_tokens(self, request: HttpRequest, call: Call) -> Response:
        """Count the tokens of a body of /v1/messages."""
        body = await read_body(request, call, _COUNT_TOKENS)
        asked = await self._asked(request, call, body, is_counted=True)
        return json_response(InputTokens(len(asked.choices[0].request.token_ids)))

    async def count_input(self, request: HttpRequest, call: Call) -> Response:
        """Count the tokens of the input of a body of /v1/responses."""
        body = await read_body(request, call, _RESPONSES)
        asked = await self._asked(request, call, body, is_counted=True)
        return json_response(InputCount(input_tokens=len(asked.choices[0].request.token_ids)))

    async def _asked(
        self,
        request: HttpRequest,
        call: Call,
        body: ResponsesBody | CountTokensBody,
        *,
        is_counted: bool = False,
    ) -> AskedChat:
        if isinstance(body, ResponsesBody):
            given, chat_of = body.input, partial(chat_of_input, body)
        else:
            given, chat_of = body.messages, partial(chat_of_messages, body)
        # A conversation of thousands would hold the loop.
        size = 0 if isinstance(given, str) else 4 * len(given)
        chat, places = await self._front.text.offload(chat_of, size)
        with places.told():
            asked = await asked_of(self._front, request, call, chat, is_counted=is_counted)
        for choice in asked.choices:  # a worker's word for it comes later
            choice.structure_param = places.own(choice.structure_param)
        return asked

    async def _echo(
        self, choices: Sequence[Choice], prompts: Sequence[Prompt]
    ) -> list[tuple[Sequence[int], str]]:
        """Return the prompt of each answer, as ids that may have been cut, and its text."""
        shown = {choice.prompt_idx: choice.request.token_ids for choice in choices}
        texts = {
            idx: prompt.text
            for idx, prompt in enumerate(prompts)
            if prompt.text is not None and len(prompt.token_ids) == len(shown[idx])
        }
        others = [idx for idx in shown if idx not in texts]
        decoded = await self._front.text.decode_all(
            [shown[idx] for idx in others], skip_special=True
        )
        texts.update(zip(others, decoded, strict=True))
        return [(choice.request.token_ids, texts[choice.prompt_idx]) for choice in choices]

    async def _prompts(self, body: CompletionBody) -> list[Prompt]:
        given = body.prompts()
        texts = [item for item in given if isinstance(item, str)]
        if not texts:
            return [Prompt(token_ids=tuple(ids)) for ids in given if isinstance(ids, list)]
        encoded = await self._front.text.encode_all(
            texts, add_special_tokens=body.add_special_tokens is not False
        )
        return [
            Prompt(token_ids=tuple(ids), text=text)
            for ids, text in zip(encoded, texts, strict=True)
        ]


def _told(view: dict[str, Any], shape: type[msgspec.Struct]) -> Response:
    """What the mesh says of itself now; ``shape`` is what ``/openapi.json`` says of it."""
    return json_response(msgspec.convert(view, shape), headers={"Cache-Control": "no-store"})


def _model_card(model: ServedModel) -> bodies.ModelCard:
    return bodies.ModelCard(model.name, "model", model.created, "pdmesh", model.max_model_len)
