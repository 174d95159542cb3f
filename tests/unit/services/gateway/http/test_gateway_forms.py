"""OpenAI-style bodies: every form that clients send, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.front.frontdoor import Form, Prompt
from services.gateway.front.places import Places
from services.gateway.front.tool_fields import CalledFunction, MessageCall
from services.gateway.http.chat_pieces import ChatPieces
from services.gateway.http.json_body import parse_body
from services.gateway.http.openai_forms import (
    ChatBody,
    CompletionBody,
    Message,
    messages_for_template,
)
from services.gateway.limits import MAX_JSON_DEPTH, SamplingForm
from shared.errors import InvalidRequest
from shared.messages.columns import pack_u32
from tests.support.scripted_mesh import MODEL, ScriptedMesh, front_door

"""No test depends on speed."""

CHAT = msgspec.json.Decoder(ChatBody)
COMPLETION = msgspec.json.Decoder(CompletionBody)
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatBody:
    """Parse a chat body."""
    return parse_body(json.dumps({"messages": HI, **fields}).encode(), CHAT)


def completion(**fields: Any) -> CompletionBody:
    """Parse a completion body."""
    return parse_body(json.dumps({"prompt": "p", **fields}).encode(), COMPLETION)


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[]], [[]]),
        ("", [""]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, parsed: list[Any]) -> None:
    """Text, texts, token ids, lists of token ids."""
    assert completion(prompt=prompt).prompts() == parsed


@pytest.mark.parametrize(
    "prompt", [[], ["a", 1], [1, [2]], ["a"] * 513, [[1]] * 513, [1, "a", [2]]]
)
def test_mixed_empty_and_long_prompt_lists_are_refused(prompt: Any) -> None:
    """No form is guessed."""
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt).prompts()
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [None, 1, {"a": 1}, [1.5], [True], [[["x"]]]])
def test_a_prompt_of_another_type_is_refused(prompt: Any) -> None:
    """The error's param is the path of the wrong value."""
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.param.startswith("prompt")


def test_contents_are_text_or_parts_of_text() -> None:
    """Parts are joined; the newer name of the system role is mapped; a missing content is empty."""
    body = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": part} for part in "ab"]},
            {"role": "assistant", "content": None, "name": "x", "refusal": None, "tool_calls": []},
        ]
    )
    assert messages_for_template(body.messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "name": "x"},
    ]


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "user", "content": [{"type": "audio"}]}, "messages[0].content[0]", "audio"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]", "text"),
        ({"role": "<script>", "content": ""}, "messages[0].role", "must be"),
        ({"role": "assistant", "audio": {"id": "1"}}, "messages[0].audio", "text"),
        ({"role": "function", "content": "a"}, "messages[0].role", "assistant, tool"),
    ],
)
def test_a_message_that_is_not_text_is_named(message: Any, param: str, words: str) -> None:
    """The error tells which message and which part."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        messages_for_template(chat(messages=[message]).messages)
    assert caught.value.param == param


def test_messages_are_bounded() -> None:
    """Neither none nor more than the limit."""
    for messages in ([], [Message(role="user", content="x")] * 8193):
        with pytest.raises(InvalidRequest, match="messages"):
            messages_for_template(messages)


def test_sampling_of_a_chat_body() -> None:
    """Fields arrive in the form, with the newer name of max_tokens first."""
    form = chat(
        max_tokens=5,
        max_completion_tokens=6,
        temperature=0,
        stop="x",
        seed=-1,
        n=2,
        logit_bias={"7": 1},
        logprobs=True,
        top_logprobs=3,
        user="u",
        metadata={"a": [1]},
    ).form()
    sampling = form.sampling
    assert (sampling.max_tokens, sampling.max_tokens_param) == (6, "max_completion_tokens")
    assert (sampling.temperature, sampling.stop, sampling.seed) == (0.0, ("x",), -1)
    assert (sampling.logit_bias, sampling.logprobs, form.num_choices) == ([(7, 1.0)], 3, 2)
    assert form.default_max_tokens is None


def test_sampling_of_a_completion_body() -> None:
    """Sixteen tokens by default; echo with logprobs asks for the prompt's too."""
    form = completion(echo=True, logprobs=1, stop=["a", "b"], stop_token_ids=[3]).form()
    assert form.default_max_tokens == 16
    assert (form.sampling.logprobs, form.sampling.prompt_logprobs) == (1, 1)
    assert (form.sampling.stop, form.sampling.stop_token_ids) == (("a", "b"), (3,))
    assert completion(logprobs=1).form().sampling.prompt_logprobs is None
    assert completion(echo=True, max_tokens=0).form().is_echo_only


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"guided_regex": 0}, "guided_regex"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
        ({"cache_salt": "a b"}, "cache_salt"),
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused(
    fields: dict[str, Any], param: str
) -> None:
    """A client never gets something else than it asked for without being told."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields).form()
    assert caught.value.param == param


@pytest.mark.parametrize("value", [{"type": "object"}, "a|b", ["a"], True, 0])
@pytest.mark.parametrize("field", ["prompt_embeds", "audio"])
def test_what_is_not_served_is_said_so_whatever_its_type(field: str, value: Any) -> None:
    """The client reads that we do not serve it, not that its type is wrong."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**{field: value}).form()
    assert (caught.value.param, caught.value.code) == (field, "unsupported")


def test_completions_refuse_text_after_the_answer() -> None:
    """Suffix is not served."""
    with pytest.raises(InvalidRequest, match="suffix"):
        completion(suffix="x").form()


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": None, "tool_choice": "none", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"best_of": 1},
        {"guided_json": None, "structured_outputs": None, "audio": False},
        {"reasoning_effort": "low", "service_tier": "auto", "prompt_cache_key": "k"},
    ],
)
def test_harmless_fields_are_ignored(fields: dict[str, Any]) -> None:
    """What changes nothing, or asks for nothing, is no error."""
    assert chat(**fields).form() == chat().form()


def test_nulls_are_absences() -> None:
    """Clients that send every field as null get the defaults."""
    names = set(ChatBody.__struct_fields__) - {"messages", "add_generation_prompt"}
    assert chat(**dict.fromkeys(names)).form() == chat().form()


# --- bytes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "byte 0"),
        (b'{"messages":', "byte 12"),
        (b'{"messages": [] x}', "byte 16"),
        (b'{"messages": []} {}', "byte 18"),
        (b'{"model": "\xff", "messages": []}', "not UTF-8 at byte 11"),
        (b'{"unknown": "\xed\xa0\x80", "messages": []}', "not UTF-8 at byte 13"),
        (b'{"messages": [], "temperature": NaN}', "byte 32"),
    ],
)
def test_what_is_not_json_is_refused_with_its_place(data: bytes, words: str) -> None:
    """The position is told, the content is not."""
    with pytest.raises(InvalidRequest, match=words) as caught:
        parse_body(data, CHAT)
    assert caught.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b"{}", "messages"),
        (b'{"messages": [{}]}', "messages[0].role"),
        (b'{"messages": [], "max_tokens": "canary"}', "max_tokens"),
        (b'{"messages": [{"role": 1}]}', "messages[0].role"),
        (b'{"messages": [], "stop": [1]}', "stop[0]"),
        (b'{"messages": [], "temperature": 1e999}', "temperature"),
        (b'{"messages": [], "n": 1.5}', "n"),
        (b'{"messages": [], "n": true}', "n"),
        (b"[]", ""),
    ],
)
def test_a_field_of_the_wrong_type_is_named_by_its_path(data: bytes, param: str) -> None:
    """The path leads to the value; the value itself is not repeated."""
    with pytest.raises(InvalidRequest) as caught:
        parse_body(data, CHAT)
    assert caught.value.param == param
    assert "canary" not in caught.value.message


@pytest.mark.parametrize("surrogate", [b"\\ud800", b"\\ud800\\u0041", b"\\udc00"])
def test_lone_surrogates_never_become_text(surrogate: bytes) -> None:
    """A JSON string that is no Unicode text is refused or mended, never passed on broken."""
    try:
        body = parse_body(b'{"messages": [{"role": "user", "content": "%s"}]}' % surrogate, CHAT)
    except InvalidRequest:
        return
    content = body.messages[0].content
    assert isinstance(content, str)
    content.encode()


def nested(depth: int) -> bytes:
    """A valid body whose unknown field is nested so that the whole has this depth."""
    return b'{"messages": [], "x": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def test_nesting_is_bounded_exactly() -> None:
    """The deepest allowed body passes; one level more, and very many more, do not."""
    parse_body(nested(MAX_JSON_DEPTH), CHAT)
    for depth in (MAX_JSON_DEPTH + 1, 500, 50_000):
        with pytest.raises(InvalidRequest, match="nested deeper"):
            parse_body(nested(depth), CHAT)


def test_brackets_in_strings_and_width_are_not_depth() -> None:
    """A flat body with many brackets is no deep one."""
    chat(x="[{" * 1000 + '\\"]' * 7, y=[[{}]] * 1000, z=["\\", "[" * 99, '\\\\"', "{" * 99])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(ChatBody.__struct_fields__), JSON))
def test_any_chat_body_is_a_form_or_an_invalid_request(fields: dict[str, Any]) -> None:
    """Known fields with arbitrary values never raise anything else."""
    try:
        body = parse_body(json.dumps(fields).encode(), CHAT)
        body.form()
        messages_for_template(body.messages)
    except InvalidRequest:
        pass


@given(st.dictionaries(st.sampled_from(CompletionBody.__struct_fields__), JSON))
def test_any_completion_body_is_a_form_or_an_invalid_request(fields: dict[str, Any]) -> None:
    """Known fields with arbitrary values never raise anything else."""
    try:
        body = parse_body(json.dumps(fields).encode(), COMPLETION)
        body.form()
        body.prompts()
    except InvalidRequest:
        pass


@given(st.binary(max_size=60))
def test_any_bytes_are_a_body_or_an_invalid_request(data: bytes) -> None:
    """Random bytes never raise anything else."""
    with pytest.raises(InvalidRequest):
        parse_body(data, CHAT)


class Ids(list[int]):
    """Counts how often it is read."""

    num_reads = 0

    def __iter__(self) -> Iterator[int]:
        self.num_reads += 1
        return super().__iter__()


async def test_allowed_tokens_are_checked_once_for_all_prompts() -> None:
    """A body has room for a million of them, and for hundreds of prompts."""
    front, reads = front_door(ScriptedMesh()), []
    for num_prompts in (1, 8):
        ids = Ids([9, 4])
        form = Form(sampling=SamplingForm(allowed_token_ids=ids))
        prompts = [Prompt(token_ids=(5,))] * num_prompts
        for choice in front.choices(front.new_caller("", {}), MODEL, prompts, form):
            assert choice.request.sampling.allowed_token_ids == pack_u32([4, 9])
        reads.append(ids.num_reads)
    front.text.close()
    assert reads[0] == reads[1] > 0


def test_calls_that_are_put_together_are_not_copied_each_time() -> None:
    """A body has room for ten thousands of them, one a message."""
    pieces = ChatPieces(Places({}), num_before=0, call_id="id")
    calls = [MessageCall(str(number), CalledFunction("f")) for number in range(3)]
    found: list[Any] = []
    for call in calls:
        pieces.add(Message("assistant", tool_calls=[call]), "messages[0]")
        found.append(pieces.messages[0].tool_calls)
    assert found[-1] == calls
    assert all(one is found[-1] for one in found)


def test_one_structure_by_two_names() -> None:
    """As clients of vLLM's older and newer releases send it; two that differ are refused."""
    structured = {"structured_outputs": {"grammar": 'start: "a"'}}
    wanted = chat(guided_grammar='start: "a"', **structured).form().structure
    assert wanted is not None
    assert (wanted.kind, wanted.value) == ("grammar", 'start: "a"')
    for other in ({"guided_grammar": 'start: "b"'}, {"guided_regex": 'start: "a"'}):
        with pytest.raises(InvalidRequest, match="give one of them"):
            chat(**other, **structured).form()
