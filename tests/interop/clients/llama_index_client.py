"""What an application does with llama-index: an agent with a tool, and answers of a class. Reads
its task (JSON) from a file, prints what it got as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from llama_index.core import set_global_tokenizer
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

task = json.loads(Path(sys.argv[1]).read_text())
called: list[str] = []
set_global_tokenizer(str.split)  # the default one would be downloaded


class Person(BaseModel):
    """What is asked for."""

    person: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    city: str = Field(max_length=12)


def get_weather(city: str) -> str:
    """The weather of a city."""
    called.append(city)
    return "sunny"


def an_llm(**more: Any) -> OpenAILike:
    """The model that is served."""
    return OpenAILike(
        model=task["model"],
        api_base=task["url"] + "/v1",
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        max_tokens=200,
        temperature=0,
        max_retries=0,
        **more,
    )


async def main() -> dict[str, Any]:
    """Use the client in every way that it offers."""
    told = [ChatMessage(role="user", content=task["told"])]
    got: dict[str, Any] = {
        # A call that must come: "required".
        "tool": an_llm().as_structured_llm(Person).chat(told).raw.model_dump(),
        # JSON of the schema: response_format.
        "json_schema": an_llm(should_use_structured_outputs=True)
        .as_structured_llm(Person)
        .chat(told)
        .raw.model_dump(),
    }
    tool = FunctionTool.from_defaults(get_weather)
    asked = an_llm().chat_with_tools([tool], user_msg=task["question"])
    (selection,) = an_llm().get_tool_calls_from_response(asked)
    agent = FunctionAgent(tools=[get_weather], llm=an_llm(), streaming=True)
    final = await agent.run(task["question"])
    return {
        "structured": got,
        "selected": [selection.tool_name, selection.tool_kwargs],
        "called": called,
        "final": str(final),
    }


print(json.dumps(asyncio.run(main())))
