"""``GET /openapi.json``: the HTTP API as it really is.

Made from what the gateway itself works with: the route table, the structs of the bodies, the limits
and the table of errors; for each route one line here says what it takes and gives. What JSON Schema
cannot say (a prompt and its answer must fit the context together) is in the descriptions. Knows no
HTTP; ``http.py`` serves the result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway import limits
from services.gateway.http import openapi_shapes as shapes
from services.gateway.http.openai_forms import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from services.gateway.http.openapi_rules import Schema, apply_rules, field_rules
from services.gateway.http.server import Policy, Route
from services.gateway.mesh import ServedModel
from shared.rpc.status import STATUS_TABLE

OPENAPI_VERSION = "3.2.0"
"""The first version that can describe a stream of events."""

PARTS_OF_THE_PAGE = "/page/"

_REFERENCE = "#/components/schemas/{name}"


class Operation(NamedTuple):
    """What a route takes and gives.

    answer: a struct for JSON, else a media type. event: of a stream, if the body may ask for one.
    needs_model: no answer without a served model. refusal: what a 503 says, if not an error.
    """

    summary: str
    answer: type[msgspec.Struct] | str
    body: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    needs_model: bool = False
    refusal: type[msgspec.Struct] | None = None


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a chat, whole or as a stream of events.",
        shapes.ChatCompletion,
        body=ChatBody,
        event=shapes.ChatCompletionChunk,
        needs_model=True,
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue one or several prompts, whole or as a stream of events.",
        shapes.Completion,
        body=CompletionBody,
        event=shapes.CompletionChunk,
        needs_model=True,
    ),
    ("GET", "/v1/models"): Operation("List the served model.", shapes.ModelList),
    ("GET", "/v1/models/{name:.+}"): Operation(
        "Tell of one model.", shapes.ModelCard, needs_model=True
    ),
    ("POST", "/tokenize"): Operation(
        "Turn a prompt, or messages by the chat template, into token ids.",
        shapes.Tokens,
        body=TokenizeBody,
        needs_model=True,
    ),
    ("POST", "/detokenize"): Operation(
        "Turn token ids into text.", shapes.Text, body=DetokenizeBody, needs_model=True
    ),
    ("GET", "/health"): Operation("Say that the process lives.", shapes.Health),
    ("GET", "/ready"): Operation(
        "Say whether a request would be served now.",
        shapes.Readiness,
        refusal=shapes.Readiness,
    ),
    ("GET", "/version"): Operation("Tell the gateway's version.", shapes.Version),
    ("GET", "/metrics"): Operation("Numbers for Prometheus.", "text/plain"),
    ("GET", "/cluster"): Operation(
        "Tell of workers, load and the last minute's traffic.", shapes.Cluster
    ),
    ("GET", "/openapi.json"): Operation("This document.", "application/json"),
    ("GET", "/"): Operation("A page to chat and to watch the mesh.", "text/html"),
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
        for struct in (operation.body, operation.answer, operation.event):
            if isinstance(struct, type):
                structs[struct.__name__] = struct
    structs[shapes.ErrorBody.__name__] = shapes.ErrorBody
    _, components = msgspec.json.schema_components(list(structs.values()), ref_template=_REFERENCE)
    rules_of = field_rules(model, max_choices=max_choices, takes_templates=takes_templates)
    for name, rules in rules_of.items():
        apply_rules(components.get(name, {}), rules)
    paths: dict[str, dict[str, Any]] = {}
    statuses: set[int] = set()
    for route, operation in operations:
        statuses |= _error_statuses(route, operation)
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
            "responses": {str(status): _error_response(status) for status in sorted(statuses)},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


_ABOUT = (
    "OpenAI's chat and completions, vLLM's tokenizer endpoints, and what operators ask. "
    "Unknown fields are ignored; fields that are known and cannot be served are refused by name. "
    f"A body has at most {limits.MAX_BODY_BYTES} bytes, is nested at most "
    f"{limits.MAX_JSON_DEPTH} levels deep, and is sent without compression. "
    "Every GET is also answered as HEAD."
)

_PARAMETERS: dict[str, Schema] = {
    "timeout": {
        "name": "X-Request-Timeout",
        "in": "header",
        "description": "Seconds after which the client is no longer interested (504 then).",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": limits.MAX_TIMEOUT_S},
    },
    "label": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "The client's own id of its request, for logs; comes back as "
        f"x-request-label. Ignored unless it matches {limits.LABEL_PATTERN}.",
        "schema": {"type": "string"},
    },
}

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


def _operation(route: Route, operation: Operation, model: ServedModel | None) -> Schema:
    made: Schema = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"[a-z0-9]+", route.path)]),
        "summary": operation.summary,
        "responses": _responses(route, operation),
    }
    if route.policy is Policy.ANYBODY:
        made["security"] = []
    if "{name" in route.path:
        named: Schema = {"name": "name", "in": "path", "required": True}
        named["schema"] = {"type": "string", "minLength": 1}
        if model is not None:
            named["example"] = model.name
        made["parameters"] = [named]
    if operation.body is not None:
        made["parameters"] = [{"$ref": f"#/components/parameters/{name}"} for name in _PARAMETERS]
        made["requestBody"] = {"required": True, "content": _json(operation.body)}
    return made


def _responses(route: Route, operation: Operation) -> Schema:
    if isinstance(operation.answer, str):
        content: Schema = {operation.answer: {}}
    else:
        content = _json(operation.answer)
    if operation.event is not None:
        content["text/event-stream"] = {"itemSchema": _event(operation.event)}
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
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return responses


def _error_statuses(route: Route, operation: Operation) -> set[int]:
    statuses = {400, 500}
    if route.policy is not Policy.ANYBODY:
        statuses.add(401)
    if route.policy is Policy.METERED:
        statuses.add(429)
    if operation.body is not None:
        statuses |= {413, 504}
    if operation.needs_model:
        statuses |= {404, 503}
    return statuses


def _error_response(status: int) -> Schema:
    own = {401: ("www-authenticate",), 429: ("retry-after",), 503: ("retry-after",)}.get(status, ())
    return {
        "description": ", ".join(name for name, row in STATUS_TABLE.items() if row.http == status),
        "headers": _headers(*own),
        "content": _json(shapes.ErrorBody),
    }


def _headers(*own: str) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *own)}


def _json(struct: type[msgspec.Struct]) -> Schema:
    return {"application/json": {"schema": _reference(struct)}}


def _reference(struct: type[msgspec.Struct]) -> Schema:
    return {"$ref": _REFERENCE.format(name=struct.__name__)}


def _event(struct: type[msgspec.Struct]) -> Schema:
    chunk = {"oneOf": [_reference(struct), _reference(shapes.ErrorBody)]}
    data: Schema = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": chunk,
    }
    return {
        "type": "object",
        "description": "The last event is [DONE]; a stream without it was cut off.",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }
