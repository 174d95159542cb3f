"""What an application does with litellm's SDK. Reads its task (JSON) from a file, prints what it
got as one line of JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import litellm

task = json.loads(Path(sys.argv[1]).read_text())
settings: dict[str, Any] = {
    "model": "openai/" + task["model"],
    "api_base": task["url"] + "/v1",
    "api_key": "none",
    "temperature": 0,
    "max_tokens": task["max_tokens"],
}
prompts: list[str] = task["prompts"]
litellm.num_retries = 0


def ask(prompt: str, **changes: Any) -> dict[str, Any]:
    """The arguments of a chat."""
    return settings | {"messages": [{"role": "user", "content": prompt}]} | changes


async def ask_all() -> list[str]:
    """All at once."""
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(litellm.acompletion(**ask(prompt))) for prompt in prompts]
    return [task.result().choices[0].message.content for task in asked]


def failure(prompt: str = "Hello!", **changes: Any) -> str:
    """The name of the exception that an application sees."""
    try:
        litellm.completion(**ask(prompt, **changes))
    except Exception as error:
        return type(error).__name__
    return ""


def main() -> dict[str, Any]:
    """Use the client in every way that it offers."""
    whole = litellm.completion(**ask(prompts[0]))
    chunks = list(
        litellm.completion(**ask(prompts[0], stream=True, stream_options={"include_usage": True}))
    )
    text = litellm.text_completion(**(settings | {"prompt": task["text"]}))
    return {
        "first": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "usage": whole.usage.model_dump(include={"prompt_tokens", "completion_tokens"}),
        "streamed": "".join(
            choice.delta.content or "" for chunk in chunks for choice in chunk.choices
        ),
        "streamed_usage": chunks[-1].usage.model_dump(
            include={"prompt_tokens", "completion_tokens"}
        ),
        "all": asyncio.run(ask_all()),
        "completion": text.choices[0].text,
        "wrong_model": failure(model="openai/no-such-model"),
        "wrong_value": failure(temperature=9),
        "too_long": failure(max_tokens=1_000_000),
    }


print(json.dumps(main()))
