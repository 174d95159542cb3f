"""``GET /openapi.json``: the HTTP API as it really is.

Made from what the gateway itself works with: the route table, the structs that bodies are parsed
into (``openai_forms.py``) and encoded from (``bodies.py``), and the table of errors; for each route
one line here says what it takes and gives. What JSON Schema cannot say (a prompt and its answer
must fit the context together) is in the descriptions. Knows no HTTP; ``door.py`` serves the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from services.gateway import limits
from services.gateway.http import anthropic_answers, bodies, responses_bodies
from services.gateway.http.anthropic_forms import CountTokensBody, MessagesBody
from services.gateway.http.cluster_bodies import Cluster, ClusterWorker, Explanation, RecentRequests
from services.gateway.http.field_rules import Known
from services.gateway.http.item_answers import NamedEvent
from services.gateway.http.openai_forms import (
    OF_MESSAGES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    RoleBody,
    TokenizeBody,
)
from services.gateway.http.responses_forms import ResponsesBody
from services.gateway.http.server import Policy, Route
from services.gateway.mesh import ServedModel
from shared.rpc.status import STATUS_TABLE
from shared.tenants import MAX_LIMIT_MS, MAX_PRIORITY

OPENAPI_VERSION = "3.2.0"
"""The first version that can describe a stream of events."""

PARTS_OF_THE_PAGE = "/page/"

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"


class ApiOperation(NamedTuple):
    """What a route takes and gives.

    answer: a struct for JSON, else a media type. event: of a stream, if the body may ask for one.
    ends_with_done: whether such a stream's last event is [DONE].
    needs_workers: no answer without the model or the worker that it names. refusal: what a 503
    says, if not an error. error: the shape of its errors.
    """

    summary: str
    answer: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    ends_with_done: bool = True
    needs_workers: bool = False
    refusal: type[msgspec.Struct] | None = None
    error: type[msgspec.Struct] = bodies.ErrorBody


OPERATIONS: dict[tuple[str, str], ApiOperation] = {
    ("POST", "/v1/chat/completions"): ApiOperation(
        "Answer a chat, whole or as a stream of events.",
        bodies.ChatCompletion,
        body=ChatBody,
        event=bodies.ChatCompletionChunk,
        needs_workers=True,
    ),
    ("POST", "/v1/completions"): ApiOperation(
        "Continue one or several prompts, whole or as a stream of events.",
        bodies.Completion,
        body=CompletionBody,
        event=bodies.CompletionChunk,
        needs_workers=True,
    ),
    ("POST", "/v1/responses"): ApiOperation(
        "Answer a chat as OpenAI's newer API does, whole or as a stream of events.",
        responses_bodies.ResponseBody,
        body=ResponsesBody,
        event=responses_bodies.ResponseEvent,
        ends_with_done=False,
        needs_workers=True,
    ),
    ("GET", "/v1/responses/{response_id}"): ApiOperation(
        "Tell a response that is kept.", responses_bodies.ResponseBody
    ),
    ("DELETE", "/v1/responses/{response_id}"): ApiOperation(
        "Forget a response.", responses_bodies.DeletedResponse
    ),
    ("POST", "/v1/messages"): ApiOperation(
        "Answer a chat as Anthropic's API does, whole or as a stream of events.",
        anthropic_answers.MessageBody,
        body=MessagesBody,
        event=NamedEvent,
        ends_with_done=False,
        needs_workers=True,
        error=anthropic_answers.AnthropicError,
    ),
    ("POST", "/v1/messages/count_tokens"): ApiOperation(
        "Count the tokens of a body of /v1/messages.",
        anthropic_answers.InputTokens,
        body=CountTokensBody,
        needs_workers=True,
        error=anthropic_answers.AnthropicError,
    ),
    ("GET", "/v1/models"): ApiOperation("List the served model.", bodies.ModelList),
    ("GET", "/v1/models/{name:.+}"): ApiOperation(
        "Tell of one model.", bodies.ModelCard, needs_workers=True
    ),
    ("POST", "/tokenize"): ApiOperation(
        "Turn a prompt, or messages by the chat template, into token ids.",
        bodies.Tokens,
        body=TokenizeBody,
        needs_workers=True,
    ),
    ("POST", "/detokenize"): ApiOperation(
        "Turn token ids into text.", bodies.Text, body=DetokenizeBody, needs_workers=True
    ),
    ("GET", "/health"): ApiOperation("Say that the process lives.", bodies.Health),
    ("GET", "/ready"): ApiOperation(
        "Say whether a request would be served now.",
        bodies.Readiness,
        refusal=bodies.Readiness,
    ),
    ("GET", "/version"): ApiOperation("Tell the gateway's version.", bodies.Version),
    ("GET", "/metrics"): ApiOperation("Numbers for Prometheus.", "text/plain"),
    ("GET", "/cluster"): ApiOperation(
        "Tell of workers, load and the last minute's traffic.", Cluster
    ),
    ("GET", "/cluster/requests"): ApiOperation(
        "Tell the last requests as receipts, and the workers that they met.", RecentRequests
    ),
    ("GET", "/cluster/requests/{request_id}"): ApiOperation(
        "Tell why one of the last requests went where it went.", Explanation
    ),
    ("POST", "/cluster/workers/{worker}/role"): ApiOperation(
        "Change what a worker is when nothing is asked of it; what it has in hand goes on.",
        ClusterWorker,
        body=RoleBody,
        needs_workers=True,
    ),
    ("GET", "/openapi.json"): ApiOperation("This document.", "application/json"),
    ("GET", "/"): ApiOperation("A page to chat and to watch the mesh.", "text/html"),
}
"""Every route of the table has one, but for the parts of the page; a test says so."""


def openapi_document(
    routes: Sequence[Route],
    *,
    version: str,
    model: ServedModel | None,
    needs_key: bool,
    max_choices: int,
    takes_templates: bool,
) -> dict[str, Any]:
    """Return the document of these routes, JSON-ready.

    model: its name, context and vocabulary become bounds of the fields that depend on them.
    The page's scripts and pictures are no API and are left out.
    Raises KeyError: a route without an operation.
    """
    operations = [
        (route, OPERATIONS[route.method, route.path])
        for route in routes
        if not route.path.startswith(PARTS_OF_THE_PAGE)
    ]
    structs: dict[str, type[msgspec.Struct]] = {}
    for _, operation in operations:
        for struct in (operation.body, operation.answer, operation.event, operation.error):
            if isinstance(struct, type):
                structs[struct.__name__] = struct
    _, components = msgspec.json.schema_components(list(structs.values()), ref_template=_REFERENCE)
    known: Schema = {
        Known.MODELS: None if model is None else [model.name, ""],
        Known.LAST_ID: None if model is None else model.vocab_size - 1,
        Known.MOST_TOKENS: None if model is None else model.max_model_len - 1,
        Known.MAX_CHOICES: max_choices,
        Known.NO_TEMPLATES: None if takes_templates else {},
    }
    components = {name: _filled(part, known) for name, part in components.items()}
    absent: Schema = {"type": "null", "description": "Not served."}
    components["CompletionBody"]["properties"] |= dict.fromkeys(OF_MESSAGES, absent)
    components["ContentPart"]["required"] = ["type", "text"]  # of other parts it need not be there
    components["TokenizeBody"]["oneOf"] = [
        _one_of("prompt", "messages"),
        _one_of("messages", "prompt"),
    ]
    paths: dict[str, dict[str, Any]] = {}
    errors: dict[str, Schema] = {}
    for route, operation in operations:
        for status in sorted(_error_statuses(route, operation)):
            errors[_error_name(status, operation)] = _error_response(status, operation)
        path = route.path.replace(":.+}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, operation, model)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {
            "title": "pdmesh gateway",
            "version": version,
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"key": []}] if needs_key else [{}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "parameters": _PARAMETERS,
            "headers": _HEADERS,
            "responses": errors,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _filled(schema: Any, known: Mapping[str, Any]) -> Any:
    """Put in what a running gateway knows; rules of which it knows nothing go, and so do branches
    that nothing fits."""
    if isinstance(schema, list):
        branches = [_filled(item, known) for item in cast("list[Any]", schema)]
        return [branch for branch in branches if branch != {"not": {}}]
    if not isinstance(schema, dict):
        return schema
    filled: Schema = {}
    for name, rule in cast("Schema", schema).items():
        value = known[rule] if isinstance(rule, str) and rule in known else _filled(rule, known)
        if not (value is None and isinstance(rule, str)):
            filled[name] = value
    return {"not": {}} if filled.get("not") == {} else filled


def _one_of(given: str, other: str) -> Schema:
    return {
        "required": [given],
        "properties": {given: {"not": {"type": "null"}}, other: {"type": "null"}},
    }


_ABOUT = (
    "OpenAI's and Anthropic's chats, OpenAI's completions, vLLM's tokenizer endpoints, and what "
    "operators ask. "
    "Unknown fields are ignored; fields that are known and cannot be served are refused by name. "
    f"A body has at most {limits.MAX_BODY_BYTES} bytes, is nested at most "
    f"{limits.MAX_JSON_DEPTH} levels deep, and may be compressed by gzip or deflate. "
    "Every GET is also answered as HEAD."
)

_IN_PATH: dict[str, Schema] = {
    "request_id": {
        "type": "string",
        "pattern": "^([a-z]+[-_])?[0-9a-f]{32}$",
        "description": "The id of an answer, or what its header x-request-id said.",
    },
    "name": {"type": "string", "minLength": 1},
    "response_id": {"type": "string", "minLength": 1},
    "worker": {
        "type": "string",
        "minLength": 1,
        "description": "A worker's incarnation, as /cluster tells it.",
    },
}

_PARAMETERS: dict[str, Schema] = {
    "timeout": {
        "name": "X-Request-Timeout",
        "in": "header",
        "description": "Seconds after which the client is no longer interested (504 then).",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": limits.MAX_TIMEOUT_S},
    },
    "priority": {
        "name": "X-Priority",
        "in": "header",
        "description": "As the body's priority, for who cannot change that.",
        "schema": {"type": "integer", "minimum": 0, "maximum": MAX_PRIORITY},
    },
    "ttft": {
        "name": "X-TTFT-Ms",
        "in": "header",
        "description": "As the body's ttft_ms.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_LIMIT_MS},
    },
    "tpot": {
        "name": "X-TPOT-Ms",
        "in": "header",
        "description": "As the body's tpot_ms.",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_LIMIT_MS},
    },
    "label": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "The client's own id of its request, for logs; comes back as "
        f"x-request-label. Ignored unless it matches {limits.LABEL_PATTERN}.",
        "schema": {"type": "string"},
    },
}

_OF_ANSWERS = ("priority", "ttft", "tpot")

_HEADERS: dict[str, Schema] = {
    "x-request-id": {
        "description": "The gateway's id of the request: the one in its logs.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[0-9a-f]{32}$"},
    },
    "retry-after": {
        "description": "Seconds after which to try again, where a retry may help.",
        "schema": {"type": "integer", "minimum": 1},
    },
    "www-authenticate": {"schema": {"const": "Bearer"}},
}


def _operation(route: Route, operation: ApiOperation, model: ServedModel | None) -> Schema:
    made: Schema = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"[a-z0-9]+", route.path)]),
        "summary": operation.summary,
        "responses": _responses(route, operation),
    }
    if route.policy is Policy.ANYBODY:
        made["security"] = []
    parameters: list[Schema] = []
    for name in re.findall(r"{(\w+)", route.path):
        parameters.append({"name": name, "in": "path", "required": True, "schema": _IN_PATH[name]})
        if name == "name" and model is not None:
            parameters[-1]["example"] = model.name
    if operation.body is not None:
        parameters += [
            {"$ref": f"#/components/parameters/{name}"}
            for name in _PARAMETERS
            if name not in _OF_ANSWERS or operation.event is not None
        ]
        made["requestBody"] = {"required": True, "content": _json(operation.body)}
    if parameters:
        made["parameters"] = parameters
    return made


def _responses(route: Route, operation: ApiOperation) -> Schema:
    if isinstance(operation.answer, str):
        content: Schema = {operation.answer: {}}
    else:
        content = _json(operation.answer)
    if operation.event is not None:
        content["text/event-stream"] = {"itemSchema": _event(operation)}
    responses: Schema = {
        "200": {"description": "As asked.", "headers": _headers(), "content": content}
    }
    if operation.refusal is not None:
        responses["503"] = {
            "description": "Not now.",
            "headers": _headers(),
            "content": _json(operation.refusal),
        }
    for status in sorted(_error_statuses(route, operation)):
        name = _error_name(status, operation)
        responses[str(status)] = {"$ref": f"#/components/responses/{name}"}
    return responses


def _error_statuses(route: Route, operation: ApiOperation) -> set[int]:
    statuses = {400, 500}
    if route.policy is not Policy.ANYBODY:
        statuses.add(401)
    if route.policy is Policy.METERED:
        statuses.add(429)
    if route.policy is Policy.ROLES:
        statuses.add(403)
    if operation.body is not None:
        statuses |= {413, 504}
    if operation.needs_workers:
        statuses |= {404, 503}
    if "{" in route.path:
        statuses.add(404)
    return statuses


def _error_name(status: int, operation: ApiOperation) -> str:
    return f"{operation.error.__name__}{status}"


def _error_response(status: int, operation: ApiOperation) -> Schema:
    own = {401: ("www-authenticate",), 429: ("retry-after",), 503: ("retry-after",)}.get(status, ())
    return {
        "description": ", ".join(name for name, row in STATUS_TABLE.items() if row.http == status),
        "headers": _headers(*own),
        "content": _json(operation.error),
    }


def _headers(*own: str) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *own)}


def _json(struct: type[msgspec.Struct]) -> Schema:
    return {"application/json": {"schema": _reference(struct)}}


def _reference(struct: type[msgspec.Struct]) -> Schema:
    return {"$ref": _REFERENCE.format(name=struct.__name__)}


def _event(operation: ApiOperation) -> Schema:
    assert operation.event is not None
    kinds = [_reference(operation.event)]
    if operation.ends_with_done:
        kinds.append(_reference(bodies.ErrorBody))
    data: Schema = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"oneOf": kinds},
    }
    if not operation.ends_with_done:
        return {
            "type": "object",
            "description": "Named as its data says; the last one ends the answer, or tells what "
            "broke it.",
            "required": ["event", "data"],
            "properties": {"event": {"type": "string"}, "data": data},
        }
    return {
        "type": "object",
        "description": "The last event is [DONE]; a stream without it was cut off.",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }
