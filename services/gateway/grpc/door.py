"""The gRPC door: ``pdmesh.v1.Inference``, for clients in any language.

The same admission, limits and answers as over HTTP. A call ends with one finish reason and the
receipt in the trailer ``pdmesh-receipt``, or with a status and the typed error in the trailer
``pdmesh-error``. Cancelling the call cancels everywhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from services.gateway import limits
from services.gateway.front.answers import (
    MAX_LOGPROBS_ON_LOOP,
    TextDelta,
    TokenCounts,
    open_answers,
)
from services.gateway.front.auth import ROLES
from services.gateway.front.calls import Call, recorded
from services.gateway.front.frontdoor import Form, FrontDoor, Prompt, Rendering
from services.gateway.limits import SamplingForm
from services.gateway.text.grammars import Structure, one_wish, parsed_json
from shared import wire
from shared.errors import DeadlinePassed, InvalidRequest, MeshError, RemoteProtocolError
from shared.messages.columns import pack_f32, pack_u32, unpack_u32
from shared.request import TokenLogprobs
from shared.rpc.methods import CHANGE_ROLE, GENERATE, LIST_MODELS, TOKENIZE
from shared.rpc.service import FIRST_MESSAGE_S, ServerStream, Servicer, bind, bind_unary
from shared.rpc.status import MAX_TRAILER_BYTES, RECEIPT_TRAILER
from shared.telemetry.moments import Moment, note

_NO_PARAMS = wire.GenerateParams()

GenerateStream = ServerStream[wire.GenerateRequest, wire.GenerateResponse]


class Inference:
    """The servicer's handlers; ``servicer()`` is what ``Network.serve`` takes."""

    def __init__(self, front: FrontDoor) -> None:
        self._front = front

    def servicer(self) -> Servicer:
        """Return the service."""
        return Servicer(
            bind(GENERATE, self.generate),
            bind_unary(TOKENIZE, self.tokenize),
            bind_unary(LIST_MODELS, self.list_models),
            bind_unary(CHANGE_ROLE, self.change_role),
        )

    async def generate(self, stream: GenerateStream) -> None:
        """Stream one answer."""
        with self._recorded(stream, GENERATE.path) as call:
            await self._generate(stream, call)

    async def tokenize(
        self,
        request: wire.TokenizeRequest,
        stream: ServerStream[wire.TokenizeRequest, wire.TokenizeResponse],
    ) -> wire.TokenizeResponse:
        """Ids of a text or of rendered messages."""
        with self._recorded(stream, TOKENIZE.path) as call:
            self._admit(stream, call)
            model = self._front.model(request.model)
            text = request.text
            if bool(text) == bool(request.messages):
                raise InvalidRequest("give either text or messages", param="text")
            special = request.add_special_tokens
            if request.messages:
                rendering = _rendering(request.rendering, add_special=special)
                prompt = await self._front.chat_prompt(_messages(request.messages), rendering)
                ids: Sequence[int] = prompt.token_ids
            else:
                _require_none(request.rendering)
                ids = await self._front.text.encode(text, add_special_tokens=special)
            return wire.TokenizeResponse(token_ids=pack_u32(ids), max_model_len=model.max_model_len)

    async def list_models(
        self,
        request: wire.ListModelsRequest,
        stream: ServerStream[wire.ListModelsRequest, wire.ListModelsResponse],
    ) -> wire.ListModelsResponse:
        """The model served, if a worker has brought one."""
        with self._recorded(stream, LIST_MODELS.path, is_traced=False) as call:
            self._admit(stream, call, is_metered=False)
            model = self._front.mesh.model
            if model is None:
                return wire.ListModelsResponse()
            info = wire.ModelInfo(
                name=model.name, vocab_size=model.vocab_size, max_model_len=model.max_model_len
            )
            return wire.ListModelsResponse(models=[info])

    async def change_role(
        self,
        request: wire.ChangeRoleRequest,
        stream: ServerStream[wire.ChangeRoleRequest, wire.ChangeRoleResponse],
    ) -> wire.ChangeRoleResponse:
        """Change what a worker is when nothing is asked of it."""
        with self._recorded(stream, CHANGE_ROLE.path, is_traced=False) as call:
            self._admit(stream, call, is_metered=False, right=ROLES)
            worker = await self._front.mesh.change_role(request.worker, request.role)
            return wire.ChangeRoleResponse(
                worker=worker["incarnation"], home=worker["home"], pool=worker["pool"]
            )

    # --- what they share ------------------------------------------------------------------------

    @contextmanager
    def _recorded(
        self, stream: ServerStream[Any, Any], path: str, *, is_traced: bool = True
    ) -> Generator[Call]:
        """Open a call and note how it ended; ``shared/rpc`` turns the error into a status."""
        span_name = path[1:] if is_traced else ""
        with recorded(self._front, path, stream.metadata, span_name=span_name) as call:
            try:
                yield call
            except MeshError as error:
                call.outcome = error.type
                raise
            except asyncio.CancelledError:
                deadline_at = call.caller.deadline_at
                if deadline_at is not None and asyncio.get_running_loop().time() >= deadline_at:
                    call.outcome = DeadlinePassed.type  # ``shared/rpc`` watches it, and says so
                raise
            except Exception:
                call.outcome = "internal"
                raise
            call.outcome = "ok"

    def _admit(
        self,
        stream: ServerStream[Any, Any],
        call: Call,
        *,
        label: str = "",
        is_metered: bool = True,
        right: str = "",
    ) -> None:
        call.caller = self._front.authenticate(
            call.caller,
            authorization=stream.metadata.get("authorization"),
            is_metered=is_metered,
            right=right,
        )
        deadline_at = stream.deadline_at
        caller = call.caller
        call.caller = replace(
            caller,
            label=limits.checked_label(label, param="request_label"),
            deadline_at=caller.deadline_at if deadline_at is None else deadline_at,
        )
        for name, value in call.headers.items():
            stream.set_trailer(name, value)

    # --- Generate -------------------------------------------------------------------------------

    async def _generate(self, stream: GenerateStream, call: Call) -> None:
        request = await stream.receive(within_s=FIRST_MESSAGE_S)
        if request is None:
            raise InvalidRequest("the call has no request message")
        self._admit(stream, call, label=request.request_label)
        note(Moment.PARSED, call.caller.request_id)
        model = self._front.model(request.model)
        prompt, param = await self._prompt(request)
        params = request.params or _NO_PARAMS
        rendering = request.rendering
        form = Form(
            sampling=_sampling(params),
            prompt_param=param,
            continues_text=param != "messages"
            or (rendering is not None and rendering.continue_final_message),
            truncate_prompt_tokens=params.truncate_prompt_tokens,
            truncation_side=params.truncation_side or None,
            structure=_structure(params),
            priority=request.priority,
            ttft_ms=request.ttft_ms,
            tpot_ms=request.tpot_ms,
        )
        await self._front.structured(form)
        choices = self._front.choices(call.caller, model, [prompt], form)
        async with open_answers(self._front.mesh, choices) as answers:
            call.answers = answers
            while deltas := await answers.next():
                call.note()
                for delta in deltas:
                    response = _response(delta, form.sampling)
                    if delta.finish_reason:
                        response.usage = _usage(answers.usage)
                    if (of_prompt := delta.prompt_logprobs) is not None:
                        tops = map(_top, of_prompt, choices[0].request.token_ids)
                        num = len(of_prompt) * (2 + (params.prompt_logprobs or 0))
                        is_small = num <= MAX_LOGPROBS_ON_LOOP
                        response.prompt_logprobs = (
                            list(tops) if is_small else await asyncio.to_thread(list, tops)
                        )
                    await self._send(stream, response)
                    note(Moment.WRITTEN, call.caller.request_id)
        receipt = json.dumps(answers.receipts()[0])
        if len(receipt) <= MAX_TRAILER_BYTES:
            stream.set_trailer(RECEIPT_TRAILER, receipt)

    async def _prompt(self, request: wire.GenerateRequest) -> tuple[Prompt, str]:
        """Return the prompt and the name of the field that it came from."""
        given = [name for name in ("text", "token_ids", "messages") if getattr(request, name)]
        if len(given) != 1:
            raise InvalidRequest("give exactly one of text, token_ids, messages", param="text")
        if given[0] != "messages":
            _require_none(request.rendering)
        match given[0]:
            case "token_ids":
                ids: Sequence[int] = _column(request.token_ids, "token_ids")
            case "messages":
                rendering = _rendering(request.rendering)
                prompt = await self._front.chat_prompt(_messages(request.messages), rendering)
                return prompt, "messages"
            case _:
                ids = await self._front.text.encode(request.text, add_special_tokens=True)
        return Prompt(token_ids=tuple(ids)), given[0]

    async def _send(self, stream: GenerateStream, response: wire.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._front.stall_s):
                await stream.send(response)
        except TimeoutError:
            raise DeadlinePassed(
                f"the client read nothing for {self._front.stall_s:g} s", code="client_too_slow"
            ) from None


def _messages(messages: Sequence[wire.ChatMessage]) -> list[dict[str, str]]:
    limits.checked_count(
        len(messages), limits.MAX_MESSAGES, param="messages", what="messages", least=1
    )
    return [
        {
            "role": limits.checked_role(message.role, param=f"messages[{index}].role"),
            "content": message.content,
        }
        for index, message in enumerate(messages)
    ]


def _require_none(rendering: wire.Rendering | None) -> None:
    if rendering not in (None, wire.Rendering()):
        raise limits.refusal("rendering", "only messages are rendered", code="unsupported")


def _rendering(given: wire.Rendering | None, *, add_special: bool = False) -> Rendering:
    if given is None:
        return Rendering(add_special_tokens=add_special)
    return Rendering(
        add_generation_prompt=given.add_generation_prompt,
        continue_final_message=given.continue_final_message,
        chat_template=given.chat_template or None,
        arguments=_arguments(given.chat_template_kwargs),
        add_special_tokens=add_special,
    )


def _arguments(text: str) -> dict[str, Any]:
    try:
        # Not Python's reader: that takes NaN, and half characters, which no prompt can hold.
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise limits.refusal("chat_template_kwargs", "must be a JSON object") from None


def _sampling(params: wire.GenerateParams) -> SamplingForm:
    return SamplingForm(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=list(params.logit_bias.items()),
        seed=params.seed,
        stop=params.stop,
        stop_token_ids=_column(params.stop_token_ids, "stop_token_ids"),
        ignore_eos=bool(params.ignore_eos),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        allowed_token_ids=_column(params.allowed_token_ids, "allowed_token_ids") or None,
        bad_words=params.bad_words,
    )


def _structure(params: wire.GenerateParams) -> Structure | None:
    wishes: list[Structure] = []
    if params.json_schema:
        schema = parsed_json(params.json_schema, "json_schema")
        wishes.append(Structure(kind="json_schema", value=schema, param="json_schema"))
    if params.regex:
        wishes.append(Structure(kind="regex", value=params.regex, param="regex"))
    if params.grammar:
        wishes.append(Structure(kind="grammar", value=params.grammar, param="grammar"))
    if params.choice:
        wishes.append(Structure(kind="choice", value=params.choice, param="choice"))
    return one_wish(wishes)


def _column(data: bytes, param: str) -> Sequence[int]:
    try:
        return unpack_u32(data, name=param)
    except RemoteProtocolError as error:
        raise InvalidRequest(error.message, param=param) from None


def _usage(usage: TokenCounts) -> wire.Usage:
    return wire.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _response(delta: TextDelta, sampling: SamplingForm) -> wire.GenerateResponse:
    logprobs = delta.logprobs
    return wire.GenerateResponse(
        text=delta.text,
        token_ids=pack_u32(delta.token_ids),
        first_index=delta.tokens[0].position if delta.tokens else 0,
        logprobs=pack_f32(entry.logprob for entry in logprobs),
        top_logprobs=[_top(entry) for entry in logprobs] if sampling.logprobs else [],
        finish_reason=wire.FinishReason(int(delta.finish_reason)),
        stop_reason="" if delta.stop_reason is None else str(delta.stop_reason),
    )


def _top(entry: TokenLogprobs, token_id: int | None = None) -> wire.TopLogprobs:
    """token_id: the token itself, which then comes first."""
    own = () if token_id is None else ((token_id, entry.logprob),)
    rows = (*own, *entry.top)
    return wire.TopLogprobs(
        token_ids=pack_u32(row[0] for row in rows), logprobs=pack_f32(row[1] for row in rows)
    )
