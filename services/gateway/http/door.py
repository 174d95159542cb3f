"""The HTTP door: OpenAI's endpoints, vLLM's tokenizer endpoints, and what operators ask.

Each handler reads its body, makes a form of it, and answers whole or as a stream. Routes exist only
through ``HttpDoor.routes``, the one table, where each states who may call it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.gateway import limits
from services.gateway.front.answers import Answers, Choice, TextDelta, open_answers
from services.gateway.front.calls import Call, typed
from services.gateway.front.frontdoor import Caller, FrontDoor, Prompt
from services.gateway.http import bodies
from services.gateway.http.cors import allow_origins
from services.gateway.http.openai_answers import (
    AnswerFormat,
    AnswerHead,
    ChatFormat,
    CompletionFormat,
)
from services.gateway.http.openai_forms import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RoleBody,
    StreamOptions,
    TokenizeBody,
    messages_for_template,
)
from services.gateway.http.openapi import openapi_document
from services.gateway.http.page_files import page_routes
from services.gateway.http.server import (
    Policy,
    Route,
    build_app,
    json_response,
    listen,
    read_body,
)
from services.gateway.http.sse import EventStream
from services.gateway.http.unserved_fields import refuse_unserved
from services.gateway.limits import STALL_S
from services.gateway.mesh import ServedModel
from shared.errors import InvalidRequest
from shared.log import is_debugging
from shared.rpc.network import Address
from shared.rpc.tls import ServerTls
from shared.telemetry.moments import Moment, note

_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)
_ROLE = msgspec.json.Decoder(RoleBody)

_NO_OPTIONS = StreamOptions()


def serve_http(
    front: FrontDoor,
    address: Address,
    *,
    own_port: int = 0,
    drain_s: float = 30.0,
    stall_s: float = STALL_S,
    reuse_port: bool = False,
    tls: ServerTls | None = None,
    origins: frozenset[str] = frozenset(),
) -> AbstractAsyncContextManager[Address]:
    """Serve HTTP until the block ends; see ``server.listen``.

    stall_s: how long a client may leave a full stream unread before it is cut off. origins: whose
    pages may ask, too (``cors.py``).
    """
    app = build_app(front, HttpDoor(front, stall_s=stall_s).routes())
    allow_origins(app, origins)
    return listen(app, address, own_port=own_port, drain_s=drain_s, reuse_port=reuse_port, tls=tls)


def serve_metrics(front: FrontDoor, address: Address) -> AbstractAsyncContextManager[Address]:
    """Serve what watches a gateway until the block ends: /metrics, /health and /ready, without key
    and TLS."""
    return listen(build_app(front, HttpDoor(front).watched_routes()), address, drain_s=0.0)


class HttpDoor:
    """The handlers."""

    def __init__(self, front: FrontDoor, *, stall_s: float = STALL_S) -> None:
        self._front = front
        self._stall_s = stall_s
        self._document: tuple[ServedModel | None, bytes] | None = None

    def routes(self) -> tuple[Route, ...]:
        """Return every route there is."""
        return (
            *self._probes(),
            Route("GET", "/version", Policy.KEY, self.version),
            Route("GET", "/metrics", Policy.KEY, self.metrics, is_polled=True),
            Route("GET", "/cluster", Policy.KEY, self.cluster, is_polled=True),
            Route("POST", "/cluster/workers/{worker}/role", Policy.KEY, self.change_role),
            Route("GET", "/openapi.json", Policy.KEY, self.openapi),
            Route("GET", "/v1/models", Policy.KEY, self.models),
            Route("GET", "/v1/models/{name:.+}", Policy.KEY, self.one_model),
            Route("POST", "/v1/chat/completions", Policy.METERED, self.chat),
            Route("POST", "/v1/completions", Policy.METERED, self.completion),
            Route("POST", "/tokenize", Policy.METERED, self.tokenize),
            Route("POST", "/detokenize", Policy.METERED, self.detokenize),
            *page_routes(),
        )

    def watched_routes(self) -> tuple[Route, ...]:
        """Return the routes of the listener for scrapes, where nobody has a key."""
        metrics = Route("GET", "/metrics", Policy.ANYBODY, self.metrics, is_polled=True)
        return (*self._probes(), metrics)

    def _probes(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/health", Policy.ANYBODY, self.health),
            Route("GET", "/ready", Policy.ANYBODY, self.ready),
        )

    # --- operators ------------------------------------------------------------------------------

    async def health(self, _: web.Request, call: Call) -> web.Response:
        """Alive: the loop answers."""
        return json_response(bodies.Health("ok"), headers=call.headers)

    async def ready(self, _: web.Request, call: Call) -> web.Response:
        """Would serve a request now."""
        mesh = self._front.mesh
        if mesh.is_ready:
            return json_response(bodies.Readiness("ready"), headers=call.headers)
        answer = bodies.Readiness("not ready", mesh.not_ready_reason)
        return json_response(answer, headers=call.headers, status=503)

    async def version(self, _: web.Request, call: Call) -> web.Response:
        """Our version."""
        return json_response(bodies.Version(self._front.version), headers=call.headers)

    async def metrics(self, _: web.Request, call: Call) -> web.Response:
        """Numbers for Prometheus."""
        body = generate_latest(self._front.metrics.registry)
        return web.Response(
            body=body, headers={**call.headers, "Content-Type": CONTENT_TYPE_LATEST}
        )

    async def cluster(self, _: web.Request, call: Call) -> web.Response:
        """Workers, load and the last minute's traffic, for live views."""
        view = {"version": self._front.version, **self._front.mesh.cluster()}
        headers = {**call.headers, "Cache-Control": "no-store"}
        return json_response(msgspec.convert(view, bodies.Cluster), headers=headers)

    async def change_role(self, request: web.Request, call: Call) -> web.Response:
        """Change what a worker is when nothing is asked of it."""
        body = await read_body(request, _ROLE)
        worker = await self._front.mesh.change_role(request.match_info["worker"], body.role)
        return json_response(msgspec.convert(worker, bodies.ClusterWorker), headers=call.headers)

    async def openapi(self, _: web.Request, call: Call) -> web.Response:
        """The description of this API; behind the key, because it tells version and model."""
        model = self._front.mesh.model
        if self._document is None or self._document[0] != model:
            document = openapi_document(
                self.routes(),
                version=self._front.version,
                model=model,
                needs_key=not self._front.keys.is_open,
                max_choices=self._front.max_choices,
                takes_templates=self._front.trusts_templates,
            )
            self._document = model, msgspec.json.encode(document)
        return json_response(self._document[1], headers=call.headers)

    async def models(self, _: web.Request, call: Call) -> web.Response:
        """The model served, if a worker has brought one."""
        model = self._front.mesh.model
        data = [] if model is None else [_model_card(model)]
        return json_response(bodies.ModelList("list", data), headers=call.headers)

    async def one_model(self, request: web.Request, call: Call) -> web.Response:
        """The model of this name."""
        model = self._front.model(request.match_info["name"])
        return json_response(_model_card(model), headers=call.headers)

    # --- text -----------------------------------------------------------------------------------

    async def tokenize(self, request: web.Request, call: Call) -> web.Response:
        """Ids of a prompt or of rendered messages."""
        body = await read_body(request, _TOKENIZE)
        refuse_unserved(body)
        model = self._front.model(body.model)
        text = self._front.text
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.messages is not None:
            messages = messages_for_template(body.messages)
            ids = (await self._front.chat_prompt(messages, body.rendering)).token_ids
        else:
            ids = await text.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )
        answer = bodies.Tokens(len(ids), model.max_model_len, list(ids))
        return json_response(answer, headers=call.headers)

    async def detokenize(self, request: web.Request, call: Call) -> web.Response:
        """Text of ids."""
        body = await read_body(request, _DETOKENIZE)
        model = self._front.model(body.model)
        ids = limits.checked_token_ids(body.tokens, model.vocab_size, param="tokens")
        text = await self._front.text.decode(ids)
        return json_response(bodies.Text(text), headers=call.headers)

    # --- generation -----------------------------------------------------------------------------

    async def chat(self, request: web.Request, call: Call) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = await read_body(request, _CHAT)
        form = body.form()
        note(Moment.PARSED, call.caller.request_id, num_bytes=request.content_length)
        model = self._front.model(body.model)
        text = self._front.text
        messages = messages_for_template(body.messages)
        prompt = await self._front.chat_prompt(messages, body.rendering)
        choices = self._front.choices(call.caller, model, [prompt], form)
        options = body.stream_options or _NO_OPTIONS
        answer_format = ChatFormat(
            _head(call.caller, model, "chatcmpl"),
            text,
            num_choices=len(choices),
            has_logprobs=form.sampling.logprobs is not None,
            usage_field=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
        )
        return await self._answer(request, call, body, choices, answer_format)

    async def completion(self, request: web.Request, call: Call) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await read_body(request, _COMPLETION)
        form = body.form()
        note(Moment.PARSED, call.caller.request_id, num_bytes=request.content_length)
        model = self._front.model(body.model)
        text = self._front.text
        prompts = [await self._prompt(item, body) for item in body.prompts()]
        choices = self._front.choices(call.caller, model, prompts, form)
        echo: list[tuple[Sequence[int], str]] | None = None
        if body.echo:
            echo = [await self._echo(choice, prompts[choice.prompt_idx]) for choice in choices]
        options = body.stream_options or _NO_OPTIONS
        answer_format = CompletionFormat(
            _head(call.caller, model, "cmpl"),
            text,
            echo=echo,
            num_choices=len(choices),
            has_logprobs=form.sampling.logprobs is not None,
            usage_field=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
        )
        return await self._answer(request, call, body, choices, answer_format)

    async def _echo(self, choice: Choice, prompt: Prompt) -> tuple[Sequence[int], str]:
        ids = choice.request.token_ids
        if prompt.text is not None and len(ids) == len(prompt.token_ids):
            return ids, prompt.text
        return ids, await self._front.text.decode(ids, skip_special=True)

    async def _prompt(self, item: str | list[int], body: CompletionBody) -> Prompt:
        if isinstance(item, list):
            return Prompt(token_ids=tuple(item))
        ids = await self._front.text.encode(
            item, add_special_tokens=body.add_special_tokens is not False
        )
        return Prompt(token_ids=tuple(ids), text=item)

    async def _answer(
        self,
        request: web.Request,
        call: Call,
        body: ChatBody | CompletionBody,
        choices: list[Choice],
        answer_format: AnswerFormat,
    ) -> web.StreamResponse:
        if body.stream:
            options = body.stream_options or _NO_OPTIONS
            return await self._stream(
                request,
                call,
                choices,
                answer_format,
                has_usage=bool(options.include_usage),
                has_receipt=body.wants_receipt,
            )
        deltas: list[TextDelta] = []
        async with open_answers(self._front.mesh, choices) as answers:
            call.answers = answers
            answers.hold()
            while arrived := await answers.next():
                deltas += arrived
                call.note()
        receipts = answers.receipts() if body.wants_receipt else ()
        return json_response(
            answer_format.body(deltas, answers.usage, receipts), headers=call.headers
        )

    async def _stream(
        self,
        request: web.Request,
        call: Call,
        choices: list[Choice],
        answer_format: AnswerFormat,
        *,
        has_usage: bool,
        has_receipt: bool,
    ) -> web.StreamResponse:
        events = EventStream(request, call.headers, stall_s=self._stall_s)
        try:
            async with open_answers(self._front.mesh, choices) as answers:
                call.answers = answers
                chunks = _Chunks(events, answer_format, call, answers)
                answers.write_to(chunks)
                while deltas := await answers.next():
                    call.note()
                    if events_now := b"".join([chunks.of(delta) for delta in deltas]):
                        await events.write(events_now)
            usage = answers.usage if has_usage else None
            receipts = answers.receipts() if has_receipt else ()
            await events.end(answer_format.closing(usage, receipts))
        except ConnectionError:
            raise
        except Exception as failure:
            # Before the first byte the guard answers with a status; after it the stream says it.
            if not events.has_begun:
                raise
            error = typed(failure, call)
            call.outcome = error.code if events.is_cut else error.type
            await events.end(b"data: %s\n\n" % msgspec.json.encode(bodies.ErrorBody.of(error)))
        return events.response


class _Chunks:
    """Deltas that become events, and leave at once where there is room (the ``DeltaSink`` of a
    stream)."""

    def __init__(
        self, events: EventStream, answer_format: AnswerFormat, call: Call, answers: Answers
    ) -> None:
        self.has_room = events.has_room
        self._write = events.write_nowait
        self._chunks = answer_format.chunks
        self._has_counts = answer_format.continuous_usage
        self._request_id = call.caller.request_id
        self._answers = answers

    def of(self, delta: TextDelta) -> bytes:
        """Return the events of a delta, about to be written."""
        chunks = self._chunks(delta, self._answers.usage if self._has_counts else None)
        if chunks and is_debugging():
            note(Moment.WRITTEN, self._request_id, num_bytes=len(chunks))
        return chunks

    def write(self, delta: TextDelta) -> None:
        """See ``DeltaSink``."""
        if chunks := self.of(delta):
            self._write(chunks)


def _head(caller: Caller, model: ServedModel, prefix: str) -> AnswerHead:
    return AnswerHead(
        id=f"{prefix}-{caller.request_id.hex()}", model=model.name, created=int(time.time())
    )


def _model_card(model: ServedModel) -> bodies.ModelCard:
    return bodies.ModelCard(model.name, "model", model.created, "pdmesh", model.max_model_len)
