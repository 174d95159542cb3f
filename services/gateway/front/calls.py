"""One call in progress, over HTTP or gRPC: what its log line, its metrics and its span will say
when it is over.

Spans have OpenTelemetry's words where it has some (semantic conventions for generative AI, HTTP and
RPC): counts, settings and ids, never a client's text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from services.gateway import limits
from services.gateway.front.answers import Answers
from services.gateway.front.frontdoor import Caller, FrontDoor
from shared.errors import InvariantViolated, MeshError, without_frames
from shared.log import is_informing, log_often
from shared.telemetry.moments import Moment, note
from shared.telemetry.tracing import Value

log: Any = structlog.get_logger("gateway.calls")


@dataclass(slots=True)
class Call:
    """Filled in while the call runs. id_headers: those that tell its id. outcome: ok, cancelled (so
    until we know better) or an error's type."""

    caller: Caller
    id_headers: tuple[str, ...] = ("x-request-id",)
    outcome: str = "cancelled"
    status: int = 0
    answers: Answers | None = None
    first_token_s: float | None = None

    @property
    def request_id(self) -> str:
        return self.caller.request_id.hex()

    @property
    def headers(self) -> dict[str, str]:
        """What every response says of itself: our id, and the client's own label."""
        headers = dict.fromkeys(self.id_headers, self.request_id)
        if self.caller.label:
            headers["x-request-label"] = self.caller.label
        return headers

    def note(self) -> None:
        """Note that tokens arrived; the first time, TTFT."""
        if self.first_token_s is None:
            at = None if self.answers is None else self.answers.first_token_at
            if at is None:
                at = asyncio.get_running_loop().time()
            self.first_token_s = at - self.caller.arrived_at


class RecordedCall:
    """Opens a call; its end is counted, traced if its span has a name, and, unless it is a probe,
    logged. Never with a word of its text. A class: every request has one, and a generator costs
    several times as much."""

    __slots__ = ("_call", "_front", "_is_probe", "_route")

    def __init__(
        self,
        front: FrontDoor,
        route: str,
        headers: Mapping[str, str],
        *,
        span_name: str = "",
        is_probe: bool = False,
    ) -> None:
        self._front, self._route, self._is_probe = front, route, is_probe
        self._call = Call(front.new_caller(span_name, headers))

    def __enter__(self) -> Call:
        if not self._is_probe:
            note(Moment.ARRIVED, self._call.caller.request_id, route=self._route)
        self._front.metrics.num_running += 1
        return self._call

    def __exit__(self, *_: object) -> None:
        call, route, metrics = self._call, self._route, self._front.metrics
        caller = call.caller
        if caller.hold is not None:
            caller.hold.release()
        metrics.num_running -= 1
        seconds = asyncio.get_running_loop().time() - caller.arrived_at
        metrics.requests.add(1, route, call.outcome)
        if caller.span.is_recording:
            _end_span(self._front, route, call)
        if not self._is_probe and is_informing():
            _log(route, call, seconds)


def _log(route: str, call: Call, seconds: float) -> None:
    usage = None if call.answers is None else call.answers.usage
    log_often(
        "request",
        route=route,
        request_id=call.request_id,
        label=call.caller.label,
        key=call.caller.key.name,
        outcome=call.outcome,
        status=call.status,
        seconds=round(seconds, 6),
        ttft_s=None if call.first_token_s is None else round(call.first_token_s, 6),
        prompt_tokens=None if usage is None else usage.prompt_tokens,
        completion_tokens=None if usage is None else usage.completion_tokens,
        receipts=[] if call.answers is None else call.answers.receipts(),
        # Of a ``traceparent``: two digits of a version, a dash, then the id.
        trace_id=call.caller.span.context[3:35] or None,
    )


def _end_span(front: FrontDoor, route: str, call: Call) -> None:
    span, model = call.caller.span, front.mesh.model
    span.set({"pdmesh.request_id": call.request_id, **_route_attributes(route, call.status)})
    if call.answers is not None and model is not None:
        span.set(_answer_attributes(route, model.name, call.answers, call.first_token_s))
    span.end(error="" if call.outcome == "ok" else call.outcome)


def typed(failure: Exception, call: Call, *, is_cut: bool = False) -> MeshError:
    """Return the failure as the client may know it, our own bugs as an id of what is logged in
    full, and note that the call ended so. is_cut: by its code, for its client reads nothing.

    It has no frames any more: nobody looks at them, and they would keep the call.
    """
    if not isinstance(failure, MeshError):
        log.error("internal error", request_id=call.request_id, exc_info=failure)
        error = InvariantViolated(f"internal error; its log has request id {call.request_id}")
    elif failure.code == "grammar_failed" and call.answers is not None:
        # A worker knows the grammar, and not which field it came in.
        param = call.answers.choices[0].structure_param
        error = limits.refusal(param, failure.message, code=failure.code)
    else:
        error = failure
    call.outcome = error.code if is_cut else error.type
    without_frames(failure)
    return error


_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/pdmesh.v1.Inference/Generate": "text_completion",
}


def _route_attributes(route: str, status: int) -> dict[str, Value]:
    """Return what a span says of its protocol. status: of HTTP, 0 = none was sent."""
    service, _, method = route[1:].partition("/")
    if service.startswith("pdmesh."):
        return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
    attributes: dict[str, Value] = {"http.request.method": "POST", "http.route": route}
    if status:
        attributes["http.response.status_code"] = status
    return attributes


def _answer_attributes(
    route: str, model: str, answers: Answers, first_token_s: float | None
) -> dict[str, Value]:
    """Return what a span says of the answers that were asked for. model: ours, not the client's
    word for it."""
    choices, usage = answers.choices, answers.usage
    sampling = choices[0].request.sampling
    attributes: dict[str, Value] = {
        "gen_ai.provider.name": "pdmesh",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": tuple(
            choice.finish_reason.name.lower() for choice in choices if choice.finish_reason
        ),
    }
    if route in _OPERATIONS:
        attributes["gen_ai.operation.name"] = _OPERATIONS[route]
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if len(choices) > 1:
        attributes["gen_ai.request.choice.count"] = len(choices)
    if first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first_token_s
    return attributes
