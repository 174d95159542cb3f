"""The HTTP door against a scripted mesh: routes, keys, answers whole and in the OpenAI shapes."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import processors

from services.gateway.front.answers import Answers, TokenCounts
from services.gateway.front.auth import KeyRing, hash_key
from services.gateway.http.door import HttpDoor
from services.gateway.http.openai_answers import AnswerFormat
from services.gateway.http.page_files import page_routes
from services.gateway.http.server import Policy
from services.gateway.text.grammars import Grammars
from services.gateway.text.text_model import TextModel
from shared.version import VERSION
from tests.support.http_client import HI, Client, gateway
from tests.support.scripted_mesh import (
    ScriptedMesh,
    front_door,
    http_gateway,
    saying,
)
from tests.support.tiny_tokenizer import SPECIAL, tiny_tokenizer

ROUTES = {
    ("GET", "/health"): Policy.ANYBODY,
    ("GET", "/ready"): Policy.ANYBODY,
    ("GET", "/version"): Policy.KEY,
    ("GET", "/metrics"): Policy.KEY,
    ("GET", "/cluster"): Policy.KEY,
    ("GET", "/cluster/requests"): Policy.KEY,
    ("GET", "/cluster/requests/{request_id}"): Policy.KEY,
    ("POST", "/cluster/workers/{worker}/role"): Policy.ROLES,
    ("GET", "/openapi.json"): Policy.KEY,
    ("GET", "/v1/models"): Policy.KEY,
    ("GET", "/v1/models/{name:.+}"): Policy.KEY,
    ("POST", "/v1/chat/completions"): Policy.METERED,
    ("POST", "/v1/completions"): Policy.METERED,
    ("POST", "/v1/responses"): Policy.METERED,
    ("POST", "/v1/responses/input_tokens"): Policy.METERED,
    ("POST", "/v1/messages"): Policy.METERED,
    ("POST", "/v1/messages/count_tokens"): Policy.METERED,
    ("POST", "/tokenize"): Policy.METERED,
    ("POST", "/detokenize"): Policy.METERED,
}


PAGE = {("GET", route.path): Policy.ANYBODY for route in page_routes()}
"""Files that hold no data; ``test_gateway_page.py`` says which."""


async def test_every_route_is_listed_here_with_its_policy() -> None:
    """A new route must be added to this list, so that somebody decides who may call it."""
    front = front_door(ScriptedMesh())
    routes = HttpDoor(front).routes()
    assert {(route.method, route.path): route.policy for route in routes} == ROUTES | PAGE
    front.text.close()


async def test_with_keys_every_route_but_the_probes_needs_one(tmp_path: Path) -> None:
    """Default deny: no route can be reached around the guard."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret"))
    async with gateway(ScriptedMesh(), KeyRing(path)) as client:
        for (method, route), policy in ROUTES.items():
            target = route.replace("{name:.+}", "tiny").replace("{worker}", "a")
            status, headers, body = await client.ask(method, target)
            if policy is Policy.ANYBODY:
                assert status == 200
                continue
            assert status == 401, target
            assert headers["WWW-Authenticate"] == "Bearer"
            assert body["error"]["code"] == "missing_api_key"
            wrong = {"Authorization": "Bearer wrong"}
            status, _, body = await client.ask(method, target, headers=wrong)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        right = {"Authorization": "Bearer secret"}
        status, _, _ = await client.ask("GET", "/v1/models", headers=right)
        assert status == 200


async def test_a_key_that_may_only_ask_changes_no_role(tmp_path: Path) -> None:
    """403 before the body is looked at; a key with the right is let through."""
    path = tmp_path / "keys"
    path.write_text(f"{hash_key('alice', 'k1')}\n{hash_key('ops', 'k2', may='roles')}")
    target = "/cluster/workers/00000000000000a1/role"
    async with gateway(ScriptedMesh(), KeyRing(path)) as client:
        for body in ({"role": "token"}, {}):
            status, _, said = await client.ask(
                "POST", target, json=body, headers={"Authorization": "Bearer k1"}
            )
            assert (status, said["error"]["type"]) == (403, "permission_error")
            assert said["error"]["code"] == "missing_right"
        status, _, _ = await client.ask(
            "POST", target, json={"role": "chef"}, headers={"Authorization": "Bearer k2"}
        )
        assert status == 400


async def test_a_key_decides_the_cache_salt(tmp_path: Path) -> None:
    """The prefix cache is keyed by the tenant, narrowed by the client's own salt."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret", "team"))
    mesh = ScriptedMesh()
    headers = {"Authorization": "Bearer secret"}
    async with gateway(mesh, KeyRing(path)) as client:
        for salt in (None, "mine"):
            body = {"prompt": "a", "cache_salt": salt}
            await client.post("/v1/completions", body, headers=headers)
    first, second = (request.cache_salt for request in mesh.requests)
    assert len(first) == len(second) == 32
    assert first != second


async def test_probes_and_models() -> None:
    """Health, readiness, version and the model list."""
    mesh = ScriptedMesh()
    async with gateway(mesh) as client:
        assert (await client.ask("GET", "/health"))[2] == {"status": "ok"}
        assert (await client.ask("HEAD", "/health"))[0] == 200
        assert (await client.ask("GET", "/ready"))[2] == {"status": "ready"}
        assert (await client.ask("GET", "/version"))[2] == {"version": VERSION}
        model = (await client.ask("GET", "/v1/models"))[2]["data"][0]
        assert (model["id"], model["max_model_len"]) == ("tiny", 512)
        assert (await client.ask("GET", "/v1/models/tiny"))[2] == model
        status, _, body = await client.ask("GET", "/v1/models/org/other")
        assert (status, body["error"]["code"]) == (404, "model_not_found")
        # The same words over gRPC: no route of HTTP in them.
        assert body["error"]["message"] == "no model of this name is served here: its name is tiny"
        mesh.model, mesh.not_ready_reason = None, "no worker has joined yet"
        status, _, body = await client.ask("GET", "/ready")
        assert (status, body["reason"]) == (503, "no worker has joined yet")
        assert (await client.ask("GET", "/v1/models"))[2]["data"] == []
        status, headers, body = await client.ask("POST", "/v1/completions", json={"prompt": "a"})
        assert (status, body["error"]["code"], headers["Retry-After"]) == (503, "not_ready", "1")


async def test_metrics_count_calls() -> None:
    """Calls by route and outcome; what becomes of answers is the mesh's to count."""
    async with gateway(ScriptedMesh()) as client:
        await client.post("/v1/completions", {"prompt": "a", "max_tokens": 5})
        await client.ask("POST", "/v1/completions", json={})
        async with client.session.get(client.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
    route = 'route="/v1/completions"'
    assert f'pdmesh_gateway_requests_total{{outcome="ok",{route}}} 1.0' in lines
    assert f'pdmesh_gateway_requests_total{{outcome="invalid_request",{route}}} 1.0' in lines
    assert "pdmesh_gateway_requests_running 1.0" in lines  # this very one


# --- shapes -------------------------------------------------------------------------------------


async def test_a_chat_answer() -> None:
    """The whole body of a chat completion."""
    mesh = ScriptedMesh(saying("hello"))
    async with gateway(mesh) as client:
        body = await client.post("/v1/chat/completions", {"messages": HI, "model": "tiny"})
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    (request,) = mesh.requests
    assert request.sampling.max_tokens == 512 - 5
    assert request.sampling.temperature == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop": [" the"]},
        {"stop": ["and"], "include_stop_str_in_output": True},
        {"max_tokens": 4},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 3, "seed": 1},
    ],
)
@pytest.mark.parametrize("per_batch", [1, 3, 100])
async def test_a_streamed_chat_is_the_whole_one(fields: dict[str, Any], per_batch: int) -> None:
    """Text, finish reasons, logprobs and usage of both ways are equal; each answer begins with its
    role."""
    mesh = ScriptedMesh(saying("hello and the 🦊 end", per_batch=per_batch))
    body = {"messages": HI, **fields}
    async with gateway(mesh) as client:
        whole = await client.post("/v1/chat/completions", body)
        options = {"stream_options": {"include_usage": True}}
        events = await client.events("/v1/chat/completions", {**body, **options})
    assert events.pop() == "[DONE]"
    usage = events.pop()
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    seen: dict[int, dict[str, Any]] = {}
    for event in events:
        assert event["usage"] is None
        (chunk,) = event["choices"]
        answer = seen.get(chunk["index"])
        if answer is None:
            assert chunk["delta"] == {"role": "assistant", "content": ""}
            seen[chunk["index"]] = {"text": "", "tokens": [], "finish": None}
            continue
        assert answer["finish"] is None
        answer["text"] += chunk["delta"]["content"]
        answer["tokens"] += (chunk["logprobs"] or {"content": []})["content"]
        answer["finish"] = chunk["finish_reason"]
    assert len(seen) == len(whole["choices"])
    for choice in whole["choices"]:
        answer = seen[choice["index"]]
        assert answer["text"] == choice["message"]["content"]
        assert answer["finish"] == choice["finish_reason"] is not None
        assert answer["tokens"] == (choice["logprobs"] or {"content": []})["content"]


async def test_chat_logprobs_have_tokens_bytes_and_alternatives() -> None:
    """The chat format of logprobs."""
    async with gateway(ScriptedMesh(saying("the 🦊"))) as client:
        fields = {"messages": HI, "logprobs": True, "top_logprobs": 1, "max_tokens": 3}
        body = await client.post("/v1/chat/completions", fields)
    entries = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["the", " ", "\ufffd"]
    assert entries[2]["bytes"] == [0xF0]
    assert entries[0]["top_logprobs"] == [
        {"token": "the", "logprob": -0.25, "bytes": [116, 104, 101]}
    ]


async def test_many_logprobs_are_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long answer would hold up all others."""
    write, is_beside = AnswerFormat.body, list[bool]()

    def noted(own: AnswerFormat, *answer: Any) -> bytes:
        is_beside.append(threading.current_thread() is not threading.main_thread())
        return write(own, *answer)

    monkeypatch.setattr(AnswerFormat, "body", noted)
    async with gateway(ScriptedMesh(saying("the " * 200))) as client:
        for top in (1, 20):
            fields = {"messages": HI, "logprobs": True, "top_logprobs": top}
            body = await client.post("/v1/chat/completions", fields)
            assert len(body["choices"][0]["logprobs"]["content"]) == 202
        await client.post("/v1/completions", {"prompt": "the " * 99, "echo": True, "logprobs": 20})
    assert is_beside == [False, True, True]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_is_what_lm_eval_asks_for(stream: bool) -> None:
    """Prompt and answer in one list of logprobs, the first null, one answer token."""
    fields = {
        "prompt": [[265, 264]],
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "temperature": 0,
    }
    async with gateway(ScriptedMesh(saying("and"))) as client:
        if stream:
            events = [
                event["choices"][0]
                for event in (await client.events("/v1/completions", fields))[:-1]
            ]
            text = "".join(event["text"] for event in events)
            columns = {
                name: [item for event in events for item in event["logprobs"][name]]
                for name in events[0]["logprobs"]
            }
        else:
            choice = (await client.post("/v1/completions", fields))["choices"][0]
            text, columns = choice["text"], choice["logprobs"]
    assert text == "theth" + "and"
    assert columns == {
        "tokens": ["the", "th", "and"],
        "token_logprobs": [None, -0.25, -0.25],
        "top_logprobs": [None, {"th": -0.25}, {"and": -0.25}],
        "text_offset": [0, 3, 5],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shows_special", [False, True])
async def test_offsets_are_places_in_the_text(stream: bool, shows_special: bool) -> None:
    """Of what the text does not show, and of characters that several tokens make, too."""
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", SPECIAL.index("<pad>"))]
    )
    fields = {"prompt": "é<user>the🎉", "echo": True, "logprobs": 0, "stream": stream}
    fields["skip_special_tokens"] = not shows_special
    mesh = ScriptedMesh(saying("🎉<a>and"))
    async with (
        http_gateway(mesh, text=TextModel(tokenizer, None)) as url,
        aiohttp.ClientSession() as session,
    ):
        client, path = Client(url, session), "/v1/completions"
        whole = [] if stream else [await client.post(path, fields)]
        events = whole or (await client.events(path, fields))[:-1]
    choices = [event["choices"][0] for event in events]
    shown = "<a>" if shows_special else ""
    assert "".join(choice["text"] for choice in choices) == f"é<user>the🎉🎉{shown}and"
    # <pad>, two bytes, <user>, the, four bytes; four bytes, <a>, and, <eos>
    due = [*(0, 0, 0, 1, 7, 10, 10, 10, 10), *(11, 11, 11, 11, 12)]
    due += [12 + len(shown), 15 + len(shown)]
    assert [at for choice in choices for at in choice["logprobs"]["text_offset"]] == due


async def test_max_tokens_zero_with_echo_tells_of_the_prompt_alone() -> None:
    """No token is shown or counted; without echo it is an error."""
    async with gateway(ScriptedMesh()) as client:
        fields = {"prompt": "the the", "max_tokens": 0, "echo": True, "logprobs": 0}
        body = await client.post("/v1/completions", fields)
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("the the", "length")
        assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
        assert body["usage"]["completion_tokens"] == 0
        status, _, body = await client.ask(
            "POST", "/v1/completions", json={**fields, "echo": False}
        )
        assert (status, body["error"]["param"]) == (400, "max_tokens")


async def test_several_prompts_and_choices_are_numbered_prompt_by_prompt() -> None:
    """n answers a prompt, each with its own seed and request id; prompts count once."""
    mesh = ScriptedMesh(saying("x"))
    async with gateway(mesh) as client:
        fields = {"prompt": ["a", "and"], "n": 2, "echo": True, "seed": 9}
        body = await client.post("/v1/completions", fields)
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    assert [choice["text"] for choice in choices] == ["ax", "ax", "andx", "andx"]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 8
    by_prompt = {request.token_ids: request.sampling.seed for request in mesh.requests}
    assert len(by_prompt) == 2
    assert {request.sampling.seed for request in mesh.requests if len(request.token_ids) == 1} >= {
        9
    }
    assert len({request.sampling.seed for request in mesh.requests}) == 2
    assert len({request.request_id for request in mesh.requests}) == 4


async def test_equal_prompts_without_a_seed_get_independent_ones() -> None:
    """A random seed is not shared by the prompts of one request."""
    mesh = ScriptedMesh(saying("x"))
    async with gateway(mesh) as client:
        await client.post("/v1/completions", {"prompt": ["a", "a"]})
    assert len({request.sampling.seed for request in mesh.requests}) == 2


async def test_usage_in_every_chunk() -> None:
    """continuous_usage_stats counts along."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with gateway(ScriptedMesh(saying("abc", per_batch=1))) as client:
        fields = {"prompt": "a", "stream_options": options}
        events = await client.events("/v1/completions", fields)
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [1, 2, 3, 4, 4]


async def test_usage_in_every_chunk_of_many_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk counts what has been said until then, and no chunk costs a sum over all answers:
    with 512 of them that took 73 us each."""
    sums: list[Answers] = []
    usage = Answers.usage.fget
    assert usage is not None

    def counted(answers: Answers) -> TokenCounts:
        sums.append(answers)
        return usage(answers)

    monkeypatch.setattr(Answers, "usage", property(counted))
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with gateway(ScriptedMesh(saying("abc", per_batch=1))) as client:
        fields = {"prompt": ["a a a a", "and and"], "n": 2, "stream_options": options}
        *events, last = (await client.events("/v1/completions", fields))[:-1]
    counts = [event["usage"] for event in events]
    assert [each["completion_tokens"] for each in counts] == [*range(1, 17)]
    assert counts[-1] == last["usage"]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert len(sums) < 5


@pytest.mark.parametrize("n", [1, 2])
async def test_receipts_on_request(n: int) -> None:
    """The receipt of a finished generation, in the body and in the last chunk."""
    async with gateway(ScriptedMesh(saying("abc"))) as client:
        fields = {"prompt": "a", "n": n, "include_receipt": True}
        body = await client.post("/v1/completions", fields)
        events = await client.events("/v1/completions", fields)
        plain = await client.post("/v1/completions", {"prompt": "a"})
    receipt = {"ttft_s": 0.5, "is_over": True}
    for answer in (body, events[-2]):
        assert answer["receipt"] == receipt
        assert answer.get("receipts") == ([receipt] * 2 if n == 2 else None)
    assert "receipt" not in plain


async def test_tokenize_and_detokenize() -> None:
    """Ids of a prompt and of messages, and back."""
    async with gateway(ScriptedMesh()) as client:
        body = await client.post("/tokenize", {"prompt": "the the"})
        assert body == {"count": 2, "max_model_len": 512, "tokens": body["tokens"]}
        assert await client.post("/detokenize", {"tokens": body["tokens"]}) == {"prompt": "the the"}
        body = await client.post("/tokenize", {"messages": HI})
        back = await client.post("/detokenize", {"tokens": body["tokens"]})
        assert back == {"prompt": "<user>hi<eos><assistant>"}
        for wrong in ({}, {"prompt": "a", "messages": HI}, {"prompt": "a", "model": "other"}):
            status, _, _ = await client.ask("POST", "/tokenize", json=wrong)
            assert status in (400, 404)


async def test_ids_and_labels_come_back_in_headers() -> None:
    """Our id is ours; the client's is a label, echoed and passed on for logs if it is fit for
    them."""
    mesh = ScriptedMesh()
    async with gateway(mesh) as client:
        options = {"json": {"prompt": "a"}, "headers": {"X-Request-Id": "my.label-1"}}
        _, headers, body = await client.ask("POST", "/v1/completions", **options)
        assert headers["X-Request-Id"] == mesh.requests[0].request_id.hex()
        assert headers["X-Request-Label"] == mesh.requests[0].label == "my.label-1"
        assert body["id"] == f"cmpl-{headers['X-Request-Id']}"
        options["headers"] = {"X-Request-Id": "a b"}
        status, headers, body = await client.ask("POST", "/v1/completions", **options)
        assert status == 200, "a header that some proxy set is no reason to refuse"
        assert "X-Request-Label" not in headers


async def test_a_timeout_header_becomes_the_deadline() -> None:
    """The deadline is made once, at arrival."""
    mesh = ScriptedMesh()
    async with gateway(mesh) as client:
        for value, status in (("2.5", 200), ("0", 400), ("nan", 400), ("soon", 400)):
            options = {"json": {"prompt": "a"}, "headers": {"X-Request-Timeout": value}}
            assert (await client.ask("POST", "/v1/completions", **options))[0] == status
    (request,) = mesh.requests
    assert request.deadline_at == pytest.approx(request.arrived_at + 2.5)


@pytest.mark.parametrize(
    ("slow", "path", "body"),
    [
        ("encode_all", "/v1/completions", {"prompt": "a"}),
        ("encode_chat", "/v1/chat/completions", {"messages": HI}),
        ("checked", "/v1/completions", {"prompt": [1], "structured_outputs": {"regex": "a"}}),
    ],
)
async def test_a_deadline_counts_before_the_mesh_is_asked(
    slow: str, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many long prompts, or slow grammars, stand before it."""

    async def for_ever(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    owner = Grammars if slow == "checked" else TextModel
    monkeypatch.setattr(owner, slow, for_ever)
    mesh = ScriptedMesh()
    async with gateway(mesh) as client:
        headers = {"X-Request-Timeout": "0.05"}
        status, _, told = await client.ask("POST", path, json=body, headers=headers)
    assert (status, told["error"]["code"]) == (504, "deadline")
    assert not mesh.requests
