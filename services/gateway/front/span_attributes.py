"""What a call's span says of it, in OpenTelemetry's words where it has some (semantic conventions
for generative AI, HTTP and RPC). Counts, settings and ids; never a client's text.
"""

from __future__ import annotations

from services.gateway.front.answers import Answers
from shared.telemetry.tracing import Value

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/pdmesh.v1.Inference/Generate": "text_completion",
}


def route_attributes(route: str, status: int) -> dict[str, Value]:
    """Return what a span says of its protocol. status: of HTTP, 0 = none was sent."""
    service, _, method = route[1:].partition("/")
    if service.startswith("pdmesh."):
        return {"rpc.system": "grpc", "rpc.service": service, "rpc.method": method}
    attributes: dict[str, Value] = {"http.request.method": "POST", "http.route": route}
    if status:
        attributes["http.response.status_code"] = status
    return attributes


def answer_attributes(
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
            choice.finish_reason.name.lower() for choice in choices if choice.is_done
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
