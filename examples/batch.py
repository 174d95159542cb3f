"""Answer a file of prompts, a few at a time: batch.py PROMPTS.jsonl ANSWERS.jsonl

Each line of the input has a "prompt", and an "id" to know the answer by; answers are written as
they come.

pip install openai
"""

import asyncio
import json
import os
import sys
from typing import Any, TextIO

from openai import APIError, AsyncOpenAI

URL = os.environ.get("PDMESH_URL", "http://127.0.0.1:8000")
AT_ONCE = 16
"""More do not make it faster: they would wait in the gateway's queue, or be refused."""


async def work(client: AsyncOpenAI, model: str, rows: Any, answers: TextIO) -> None:
    """Answer rows until none is left. The client itself retries what is worth a retry."""
    for row in rows:
        record: dict[str, Any] = {"id": row["id"]}
        try:
            answer = await client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": row["prompt"]}], temperature=0
            )
            record["answer"] = answer.choices[0].message.content
        except APIError as error:
            record["error"] = error.message
        answers.write(json.dumps(record) + "\n")


async def answer_all(rows: Any, answers: TextIO) -> None:
    """Answer every row."""
    key = os.environ.get("PDMESH_API_KEY", "none")
    async with AsyncOpenAI(base_url=URL + "/v1", api_key=key, max_retries=5) as client:
        model = (await client.models.list()).data[0].id
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work(client, model, rows, answers))


with open(sys.argv[1]) as prompts, open(sys.argv[2], "w") as answers:
    # Lines are read as they are needed: the file may be large.
    asyncio.run(answer_all((json.loads(line) for line in prompts if line.strip()), answers))
