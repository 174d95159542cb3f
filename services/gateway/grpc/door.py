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

from services.gateway import limits
from services.gateway.front.answers import MAX_LOGPROBS_ON_LOOP, TextDelta, open_answers
from services.gateway.front.auth import ROLES
from services.gateway.front.calls import Call, RecordedCall, typed
from services.gateway.front.chats import AskedChat, AskedTools, Teller, asked_chat, new_call_id
from services.gateway.front.frontdoor import Caller, FrontDoor, Prompt
from services.gateway.grpc.forms import (
    PLACES,
    choice_of,
    column_of,
    form_of,
    messages_of,
    rendering_of,
    require_of_messages,
    tools_of,
)
from services.gateway.limits import SamplingForm
from shared import wire
from shared.errors import DeadlinePassed, InvalidRequest, MeshError
from shared.messages.columns import pack_f32, pack_u32
from shared.request import TokenLogprobs
from shared.rpc.methods import CHANGE_ROLE, GENERATE, LIST_MODELS, TOKENIZE
from shared.rpc.service import FIRST_MESSAGE_S, ServerStream, Servicer, bind, bind_unary
from shared.rpc.status import MAX_TRAILER_BYTES, RECEIPT_TRAILER
from shared.telemetry.moments import Moment, note

GenerateStream = ServerStream[wire.GenerateRequest, wire.GenerateResponse]


class Inference:
    """The servicer's handlers; ``servicer()`` is what ``Network.serve`` takes."""

    def __init__(self, front: FrontDoor) -> None:
        self._front = front

    def servicer(self) -> Servicer:
        return Servicer(
            bind(GENERATE, self.generate),
            bind_unary(TOKENIZE, self.tokenize),
            bind_unary(LIST_MODELS, self.list_models),
            bind_unary(CHANGE_ROLE, self.change_role),
        )

    async def generate(self, stream: GenerateStream) -> None:
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
            model = await self._front.model(request.model, call.caller)
            text = request.text
            if bool(text) == bool(request.messages):
                raise InvalidRequest("give either text or messages", param="text")
            special = request.add_special_tokens
            if request.messages:
                with PLACES.told():
                    tools = tools_of(request.tools)
                    rendering = rendering_of(request.rendering, tools, add_special=special)
                    messages = messages_of(request.messages)
                prompt = await self._front.chat_prompt(messages, rendering, call.caller)
                ids: Sequence[int] = prompt.token_ids
            else:
                require_of_messages(request, "rendering", "tools")
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
        with RecordedCall(self._front, path, stream.metadata, span_name=span_name) as call:
            try:
                yield call
            except MeshError as failure:
                raise typed(failure, call) from None
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
            # Over HTTP a wrong one is passed over (``label_or_none``): no proxy sets this one.
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
        asked = await self._asked(request, call.caller)
        form, choices = asked.form, asked.choices
        teller = None if asked.new_teller is None else asked.new_teller()
        async with open_answers(self._front.mesh, choices) as answers:
            call.answers = answers
            while deltas := await answers.next():
                call.note()
                for delta in deltas:
                    response = _response(delta, form.sampling)
                    if delta.finish_reason:
                        response.usage = wire.Usage(**answers.usage._asdict())
                    if teller is not None:
                        _tell_apart(teller, response, delta, call.caller.request_id.hex())
                    if (of_prompt := delta.prompt_logprobs) is not None:
                        tops = map(_top, of_prompt, choices[0].request.token_ids)
                        num = len(of_prompt) * (2 + (form.sampling.prompt_logprobs or 0))
                        is_small = num <= MAX_LOGPROBS_ON_LOOP
                        response.prompt_logprobs = (
                            list(tops) if is_small else await asyncio.to_thread(list, tops)
                        )
                    await self._send(stream, response)
                    note(Moment.WRITTEN, call.caller.request_id)
        receipt = json.dumps(answers.receipts()[0])
        if len(receipt) <= MAX_TRAILER_BYTES:
            stream.set_trailer(RECEIPT_TRAILER, receipt)

    async def _asked(self, request: wire.GenerateRequest, caller: Caller) -> AskedChat:
        """Return the answer to make. Raises MeshError: the first thing that is wrong."""
        front = self._front
        given = [name for name in ("text", "token_ids", "messages") if getattr(request, name)]
        if len(given) != 1:
            raise InvalidRequest("give exactly one of text, token_ids, messages", param="text")
        form = form_of(request, given[0])
        if given[0] == "messages":
            with PLACES.told():
                tools = tools_of(request.tools)
                shown = () if request.tool_choice == "none" else tools
                return await asked_chat(
                    front,
                    caller,
                    form,
                    AskedTools(tools, choice_of(request.tool_choice), request.parallel_tool_calls),
                    model_name=request.model,
                    messages=lambda: messages_of(request.messages),
                    rendering=rendering_of(request.rendering, shown),
                    tells_thinking=request.separate_reasoning is not False,
                )
        require_of_messages(
            request,
            *("rendering", "tools", "tool_choice", "parallel_tool_calls", "separate_reasoning"),
        )
        model = await front.model(request.model, caller)
        ids: Sequence[int]
        if given[0] == "token_ids":
            ids = column_of(request.token_ids, "token_ids")
        else:
            ids = await front.text.encode(request.text, add_special_tokens=True)
        await front.structured(form)
        choices = front.choices(caller, model, [Prompt(token_ids=tuple(ids))], form)
        return AskedChat(model, form, choices, None)

    async def _send(self, stream: GenerateStream, response: wire.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._front.stall_s):
                await stream.send(response)
        except TimeoutError:
            raise DeadlinePassed(
                f"the client read nothing for {self._front.stall_s:g} s", code="client_too_slow"
            ) from None


def _tell_apart(
    teller: Teller, response: wire.GenerateResponse, delta: TextDelta, answer_id: str
) -> None:
    """Replace the text of a delta by what it says."""
    said = teller.take(delta)
    response.reasoning = "".join(one.text for one in said if one.is_thought)
    response.text = "".join(one.text for one in said if one.call < 0 and not one.is_thought)
    response.tool_calls = [
        wire.ToolCallPart(
            index=one.call,
            id=new_call_id(answer_id, 0, one.call) if one.name else "",
            name=one.name,
            arguments=one.text,
        )
        for one in said
        if one.call >= 0
    ]
    if response.usage is not None:
        response.usage.reasoning_tokens = teller.num_thought
    if teller.runs_calls(delta.finish_reason):
        response.finish_reason = wire.FinishReason.TOOL_CALLS


def _response(delta: TextDelta, sampling: SamplingForm) -> wire.GenerateResponse:
    logprobs = delta.logprobs
    return wire.GenerateResponse(
        text=delta.text,
        token_ids=pack_u32(delta.token_ids),
        first_index=delta.tokens[0].index if delta.tokens else 0,
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
