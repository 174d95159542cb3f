"""A model that thinks, behind real workers: thinking comes apart from answers and calls through
each door, whole and streamed, also before what must match a grammar, and cut in its midst."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.interop.conftest import pdmesh_up
from tests.support.grammars import needs_library
from tests.support.thinking_model import ANSWER, ARGUMENTS, THOUGHT, call_bias, thinking_model

pytestmark = [pytest.mark.process, pytest.mark.ucx, needs_library]

ASKED: list[Any] = [{"role": "user", "content": "What is it?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "parameters": SCHEMA}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}


@dataclass(frozen=True)
class Thinker:
    """thought: what it thinks, as its prompt leaves it. calls: has it call its tool."""

    url: str
    thought: str
    calls: dict[str, float]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def ask(self, **fields: Any) -> tuple[Any, str]:
        """Ask whole and streamed; the same must come. Returns message and finish reason."""
        asked: dict[str, Any] = {"model": "", "messages": ASKED, "temperature": 0, **fields}
        whole = self.client.chat.completions.create(**asked)
        chunks = list(self.client.chat.completions.create(**asked, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        one = whole.choices[0].message
        for said in ("content", "reasoning_content"):
            parts = [getattr(delta, said, None) or "" for delta in deltas]
            assert "".join(parts) == (getattr(one, said, None) or "")
        parts = [part for delta in deltas for part in delta.tool_calls or ()]
        arguments = "".join(part.function.arguments or "" for part in parts if part.function)
        assert arguments == "".join(call.function.arguments for call in one.tool_calls or ())
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        return one, whole.choices[0].finish_reason


@pytest.fixture(scope="module", params=["model begins", "prompt begins"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Thinker]:
    folder: Path = thinking_model(tmp_path_factory.mktemp("model") / "thinker", request.param)
    thought = THOUGHT if request.param == "model begins" else THOUGHT.removeprefix("Let me ")
    with pdmesh_up("--model", str(folder)) as (url, _):
        yield Thinker(f"{url}/v1", thought, call_bias(folder))


def test_an_answer_after_thinking(thinker: Thinker) -> None:
    """The template's switch ends the thinking, and what was thought goes into the next prompt."""
    message, _ = thinker.ask()
    assert (message.reasoning_content, message.content) == (thinker.thought, ANSWER)
    plain, _ = thinker.ask(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert (getattr(plain, "reasoning_content", None), plain.content) == (None, ANSWER)
    again, _ = thinker.ask(messages=[*ASKED, message.to_dict(), *ASKED])
    assert again.content == ANSWER


def test_thinking_that_is_cut(thinker: Thinker) -> None:
    """There is no answer, and the finish reason says why."""
    message, reason = thinker.ask(max_tokens=2)
    assert thinker.thought.startswith(message.reasoning_content)
    assert (message.content, reason) == ("", "length")


@pytest.mark.parametrize("tool", [STRICT, {"type": "function", "function": FUNCTION}])
def test_a_call_after_thinking(thinker: Thinker, tool: dict[str, Any]) -> None:
    """As the model likes, also where a strict tool has a grammar hold its calls; and back."""
    message, reason = thinker.ask(tools=[tool], extra_body={"logit_bias": thinker.calls})
    assert message.reasoning_content == thinker.thought
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS]
    assert reason == "tool_calls"
    came = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    after, _ = thinker.ask(tools=[tool], messages=[*ASKED, message.to_dict(), came])
    assert (after.reasoning_content, after.content) == (thinker.thought, ANSWER)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"guided_regex": r'\{"city": "Paris"\}'}},
        {"extra_body": {"guided_choice": [ARGUMENTS, "no"]}},
        {"extra_body": {"guided_grammar": 'root ::= "{" [a-zA-Z:" ]+ "}"'}},
    ],
)
def test_what_must_match_comes_after_thinking(thinker: Thinker, fields: dict[str, Any]) -> None:
    """A grammar holds the answer, not the thinking before it; without thinking, all of it."""
    message, _ = thinker.ask(**fields)
    assert (message.reasoning_content, message.content) == (thinker.thought, ARGUMENTS)
    body = fields.get("extra_body", {})
    for quick in ({"separate_reasoning": False}, {"reasoning_effort": "none"}):
        plain, _ = thinker.ask(**{**fields, "extra_body": {**body, **quick}})
        assert getattr(plain, "reasoning_content", None) is None
        assert plain.content == ARGUMENTS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": FUNCTION}])
def test_calls_that_must_come_follow_thinking(thinker: Thinker, choice: Any) -> None:
    """By a choice of the client."""
    tools = [{"type": "function", "function": FUNCTION}]
    message, _ = thinker.ask(tools=tools, tool_choice=choice)
    assert message.reasoning_content == thinker.thought
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS]
