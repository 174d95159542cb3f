"""OpenAI's own Python client against the gateway: what it sends is understood, what it gets it
understands."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from services.gateway.front.auth import KeyRing, hash_key
from shared.errors import Overloaded, WorkerLost
from tests.interop.conftest import HttpTarget
from tests.support.scripted_mesh import ScriptedMesh, failing_after, http_gateway

HI: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell a story."}]
FIXED: Any = {"temperature": 0, "max_tokens": 24}


async def test_models(client: AsyncOpenAI, model: str) -> None:
    """The list and the single model agree."""
    assert (await client.models.retrieve(model)).id == model


@pytest.mark.quick
async def test_a_chat_streamed_is_the_chat_whole(client: AsyncOpenAI, model: str) -> None:
    """Text, finish reason and usage are the same both ways."""
    whole = await client.chat.completions.create(model=model, messages=HI, **FIXED)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert whole.choices[0].message.role == "assistant"
    stream = await client.chat.completions.create(
        model=model, messages=HI, stream=True, stream_options={"include_usage": True}, **FIXED
    )
    text, finish, usage = "", None, None
    async for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason in ("stop", "length")
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_a_completion_streamed_is_the_completion_whole(
    client: AsyncOpenAI, model: str
) -> None:
    """The older endpoint, with echo."""
    fields: Any = {"model": model, "prompt": "Once upon", "echo": True, **FIXED}
    whole = await client.completions.create(**fields)
    assert whole.choices[0].text.startswith("Once upon")
    stream = await client.completions.create(stream=True, **fields)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text


async def test_chat_logprobs(client: AsyncOpenAI, model: str) -> None:
    """One entry a token; its bytes join to the text; the greedy token leads the alternatives."""
    answer = await client.chat.completions.create(
        model=model, messages=HI, logprobs=True, top_logprobs=2, temperature=0, max_tokens=4
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert answer.usage is not None
    assert len(entries) == answer.usage.completion_tokens
    data = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert data.startswith((choice.message.content or "").encode())
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob


async def test_completion_logprobs_of_the_prompt(client: AsyncOpenAI, model: str) -> None:
    """lm-eval's request: ids in, log-probabilities of every one of them out."""
    answer = await client.completions.create(
        model=model,
        prompt=[[10, 11, 12]],
        max_tokens=1,
        logprobs=1,
        echo=True,
        seed=1,
        temperature=0,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == 4
    assert logprobs.token_logprobs[0] is None  # pyright: ignore[reportUnnecessaryComparison]
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert max(logprobs.top_logprobs[-1].values()) == logprobs.token_logprobs[-1]


async def test_several_answers(client: AsyncOpenAI, model: str) -> None:
    """n answers come back in order, streamed or not."""
    fields: Any = {"model": model, "messages": HI, "n": 3, "seed": 5, "max_tokens": 8}
    whole = await client.chat.completions.create(**fields)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = ["", "", ""]
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


async def test_a_stop_string_ends_the_answer(client: AsyncOpenAI, model: str) -> None:
    """The text before the stop string, and nothing after it."""
    fields: Any = {"model": model, "prompt": "Once upon", **FIXED}
    text = (await client.completions.create(**fields)).choices[0].text
    stop = text[4:7]
    stopped = await client.completions.create(stop=stop, **fields)
    assert stopped.choices[0].text == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


@pytest.mark.quick
async def test_errors_arrive_as_the_clients_own(client: AsyncOpenAI, model: str) -> None:
    """Each status becomes the exception that applications catch, with our code."""
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="no-such-model", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model=model, messages=HI, temperature=9)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await client.chat.completions.create(model=model, messages=HI, max_tokens=10_000_000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model=model, messages=HI, modalities=["audio"])
    with pytest.raises(openai.NotFoundError):
        await client.embeddings.create(model=model, input="hi")


async def test_overload_is_a_retryable_error(
    http_target: HttpTarget, client: AsyncOpenAI, model: str
) -> None:
    """503 with a hint, which the client's own retries honour."""
    http_target.scripted().refusal = Overloaded("full", retry_after_s=3)
    with pytest.raises(openai.InternalServerError) as full:
        await client.chat.completions.create(model=model, messages=HI, stream=True)
    assert full.value.status_code == 503
    assert full.value.response.headers["Retry-After"] == "3"


async def test_an_error_in_a_stream_is_raised_by_the_client(
    http_target: HttpTarget, client: AsyncOpenAI, model: str
) -> None:
    """A broken stream is an exception, never a short answer."""
    http_target.scripted().script = failing_after("the", WorkerLost("the decode worker is lost"))
    stream = await client.chat.completions.create(model=model, messages=HI, stream=True)
    text = ""

    async def read() -> None:
        nonlocal text
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""

    with pytest.raises(openai.APIError, match="decode worker is lost") as lost:
        await read()
    assert text == "the"
    assert lost.value.code == "worker_lost"


async def test_leaving_a_stream_cancels_it(
    http_target: HttpTarget, client: AsyncOpenAI, model: str
) -> None:
    """Closing the stream early reaches the mesh."""
    mesh = http_target.scripted()
    stream = await client.chat.completions.create(model=model, messages=HI, stream=True)
    await stream.close()
    await mesh.wait_running(0)


async def test_api_keys(tmp_path: Any) -> None:
    """The client's key is checked, and its absence is an AuthenticationError."""
    path = tmp_path / "keys"
    path.write_text(hash_key("alice", "secret"))
    async with http_gateway(ScriptedMesh(), KeyRing(path)) as url:
        for key, is_known in (("secret", True), ("wrong", False)):
            async with AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as client:
                if is_known:
                    assert (await client.models.list()).data
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await client.models.list()
