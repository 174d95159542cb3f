"""What an application does with instructor: an object of a class of its own, in every mode that
an OpenAI endpoint has. Reads its task (JSON) from a file, prints what it got as one line of
JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import instructor
import openai
from pydantic import BaseModel, Field

task = json.loads(Path(sys.argv[1]).read_text())
MESSAGES: Any = [{"role": "user", "content": task["told"]}]


class Person(BaseModel):
    """What is asked for."""

    person: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    city: str = Field(max_length=12)


def main() -> dict[str, Any]:
    """Use the client in every way that it offers."""
    plain = openai.OpenAI(base_url=task["url"] + "/v1", api_key="none", max_retries=0)
    settings: dict[str, Any] = {"model": task["model"], "temperature": 0, "max_tokens": 200}
    got: dict[str, Any] = {}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        person = client.chat.completions.create(
            messages=MESSAGES, response_model=Person, max_retries=0, **settings
        )
        got[mode.name] = person.model_dump()
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    parts = client.chat.completions.create_partial(
        messages=MESSAGES, response_model=Person, max_retries=0, **settings
    )
    *_, last = parts
    got["partial"] = last.model_dump()
    return {"structured": got}


print(json.dumps(main()))
