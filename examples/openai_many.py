"""Ask many questions at once over one client.

pip install openai
"""

import asyncio
import os

from openai import AsyncOpenAI

URL = os.environ.get("PDMESH_URL", "http://127.0.0.1:8000")
QUESTIONS = [f"What is {a} + {b}?" for a in range(11, 19) for b in (25, 40)]


async def ask(client: AsyncOpenAI, model: str, question: str) -> str:
    """Return the answer to one question."""
    answer = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0
    )
    return answer.choices[0].message.content or ""


async def main() -> None:
    """Ask them all; the mesh batches them."""
    key = os.environ.get("PDMESH_API_KEY", "none")
    async with AsyncOpenAI(base_url=URL + "/v1", api_key=key) as client:
        model = (await client.models.list()).data[0].id
        # If one question fails, the group cancels the others, and the mesh stops computing them.
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(client, model, question)) for question in QUESTIONS]
    for question, task in zip(QUESTIONS, asked, strict=True):
        print(f"{question}  {task.result()}")


asyncio.run(main())
