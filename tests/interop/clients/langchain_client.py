"""What an application does with langchain-openai. Reads its task (JSON) from a file, prints what it
got as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import openai
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

task = json.loads(Path(sys.argv[1]).read_text())
settings: dict[str, Any] = {
    "model": task["model"],
    "base_url": task["url"] + "/v1",
    "api_key": "none",
    "max_retries": 0,
    "temperature": 0,
    "max_tokens": task["max_tokens"],
}
chat = ChatOpenAI(**settings, stream_usage=True)
prompts: list[str] = task["prompts"]


def failure(**changes: Any) -> dict[str, Any]:
    """The exception that an application sees."""
    try:
        ChatOpenAI(**(settings | changes)).invoke("Hello!")
    except openai.APIStatusError as error:
        return {"name": type(error).__name__, "status": error.status_code, "code": error.code}
    return {}


def bound_failure(runnable: Any) -> dict[str, Any]:
    """Likewise of something that langchain adds to the request."""
    try:
        runnable.invoke("Hello!")
    except openai.APIStatusError as error:
        return {"name": type(error).__name__, "param": error.param}
    return {}


def main() -> dict[str, Any]:
    """Use the client in every way that it offers."""
    first = chat.invoke(prompts[0])
    streamed = None
    for chunk in chat.stream(prompts[0]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    entries = chat.bind(logprobs=True, top_logprobs=2).invoke(prompts[0])
    chain = ChatPromptTemplate([("human", "{text}")]) | chat | StrOutputParser()
    text = OpenAI(**settings)
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
    schema = {
        "title": "Answer",
        "type": "object",
        "properties": {"a": {"enum": ["yes", "no"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    return {
        "first": first.text,
        "finish": first.response_metadata["finish_reason"],
        "usage": first.usage_metadata,
        "streamed": streamed.text,
        "streamed_usage": streamed.usage_metadata,
        "num_logprobs": len(entries.response_metadata["logprobs"]["content"]),
        "batch": [answer.text for answer in chat.batch(prompts, {"max_concurrency": 4})],
        "abatch": [answer.text for answer in asyncio.run(chat.abatch(prompts))],
        "chain": chain.invoke({"text": prompts[0]}),
        "completion": text.invoke(task["text"]),
        "wrong_model": failure(model="no-such-model"),
        "wrong_value": failure(temperature=9),
        "too_long": failure(max_tokens=1_000_000),
        "tools": bound_failure(chat.bind_tools([tool])),
        "structured": chat.with_structured_output(schema, method="json_schema").invoke("Hello!"),
    }


print(json.dumps(main()))
