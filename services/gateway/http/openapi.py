"""``GET /openapi.json``: the HTTP API as it really is.

Made from what the gateway itself works with: the route table, the structs that bodies are parsed
into (``openai_forms.py``) and encoded from (``bodies.py``), and the table of errors. What JSON
Schema cannot say (a prompt and its answer must fit the context together) is in the descriptions.
Knows no HTTP; ``door.py`` serves the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from services.gateway import limits
from services.gateway.front.field_rules import Known
from services.gateway.http import bodies
from services.gateway.http.item_answers import NamedEvent
from services.gateway.http.openai_forms import OF_MESSAGES
from services.gateway.http.server import Policy, Route
from services.gateway.mesh import ServedModel
from shared.rpc.status import STATUS_TABLE
from shared.tenants import MAX_LIMIT_MS, MAX_PRIORITY

OPENAPI_VERSION = "3.2.0"
"""The first version that can describe a stream of events."""

PARTS_OF_THE_PAGE = "/page/"

Schema = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"


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
    """
    routes = [route for route in routes if not route.path.startswith(PARTS_OF_THE_PAGE)]
    structs: dict[str, type[msgspec.Struct]] = {}
    for route in routes:
        body = None if route.body is None else route.body.type
        for struct in (body, route.answer, route.event, route.error):
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
    # Those of other types need not have all of it, and are refused by their type.
    components["ContentPart"]["required"] = ["type", "text"]
    components["FlatTool"]["required"] = ["type", "name"]
    components["FlatChoice"]["required"] = ["name"]
    for name in ("ToolBody", "NamedTool"):
        components[name]["required"] = ["function"]
    components["TokenizeBody"]["oneOf"] = [
        _one_of("prompt", "messages"),
        _one_of("messages", "prompt"),
    ]
    paths: dict[str, dict[str, Any]] = {}
    errors: dict[str, Schema] = {}
    for route in routes:
        for status in sorted(_error_statuses(route)):
            errors[_error_name(status, route)] = _error_response(status, route)
        path = route.path.replace(":.+}", "}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, model)
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


def _operation(route: Route, model: ServedModel | None) -> Schema:
    made: Schema = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"[a-z0-9]+", route.path)]),
        "summary": " ".join((route.handler.__doc__ or "").split()),
        "responses": _responses(route),
    }
    if route.policy is Policy.ANYBODY:
        made["security"] = []
    parameters: list[Schema] = []
    for name in re.findall(r"{(\w+)", route.path):
        parameters.append({"name": name, "in": "path", "required": True, "schema": _IN_PATH[name]})
        if name == "name" and model is not None:
            parameters[-1]["example"] = model.name
    if route.body is not None:
        parameters += [
            {"$ref": f"#/components/parameters/{name}"}
            for name in _PARAMETERS
            if name not in _OF_ANSWERS or route.event is not None
        ]
        # A decoder may read what is no class, so msgspec types this more widely; ours read structs.
        body = cast("type[msgspec.Struct]", route.body.type)
        made["requestBody"] = {"required": True, "content": _json(body)}
    if parameters:
        made["parameters"] = parameters
    return made


def _responses(route: Route) -> Schema:
    if isinstance(route.answer, str):
        content: Schema = {route.answer: {}}
    else:
        content = _json(route.answer)
    if route.event is not None:
        content["text/event-stream"] = {"itemSchema": _event(route)}
    responses: Schema = {
        "200": {"description": "As asked.", "headers": _headers(), "content": content}
    }
    if route.refusal is not None:
        responses["503"] = {
            "description": "Not now.",
            "headers": _headers(),
            "content": _json(route.refusal),
        }
    for status in sorted(_error_statuses(route)):
        name = _error_name(status, route)
        responses[str(status)] = {"$ref": f"#/components/responses/{name}"}
    return responses


def _error_statuses(route: Route) -> set[int]:
    statuses = {400, 500}
    if route.policy is not Policy.ANYBODY:
        statuses.add(401)
    if route.policy is Policy.METERED:
        statuses.add(429)
    if route.body is not None:
        statuses |= {403, 413, 504}
    if route.needs_workers or route.body is not None:
        statuses |= {404, 503}
    if "{" in route.path:
        statuses.add(404)
    return statuses


def _error_name(status: int, route: Route) -> str:
    return f"{route.error.__name__}{status}"


def _error_response(status: int, route: Route) -> Schema:
    own = {401: ("www-authenticate",), 429: ("retry-after",), 503: ("retry-after",)}.get(status, ())
    return {
        "description": ", ".join(name for name, row in STATUS_TABLE.items() if row.http == status),
        "headers": _headers(*own),
        "content": _json(route.error),
    }


def _headers(*own: str) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *own)}


def _json(struct: type[msgspec.Struct]) -> Schema:
    return {"application/json": {"schema": _reference(struct)}}


def _reference(struct: type[msgspec.Struct]) -> Schema:
    return {"$ref": _REFERENCE.format(name=struct.__name__)}


def _event(route: Route) -> Schema:
    assert route.event is not None
    is_named = issubclass(route.event, NamedEvent)
    kinds = [_reference(route.event)]
    if not is_named:
        kinds.append(_reference(bodies.ErrorBody))
    data: Schema = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"oneOf": kinds},
    }
    if is_named:
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
