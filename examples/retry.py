"""Be a good client under overload: wait as long as the mesh asks for, and add some chance, so that
refused clients do not all come back at once.

OpenAI's client does this by itself (`max_retries`); this is the rule for everybody else.

pip install aiohttp
"""

import asyncio
import os
import random
import sys
from typing import Any

import aiohttp

URL = os.environ.get("PDMESH_URL", "http://127.0.0.1:8000")
ATTEMPTS = 6


async def ask(session: aiohttp.ClientSession, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer. Raises RuntimeError: what a retry does not mend, or refused too often."""
    for attempt in range(ATTEMPTS):
        async with session.post(URL + "/v1/chat/completions", json=body) as response:
            answer = await response.json()
            if response.status == 200:
                return answer
            error = answer["error"]
            # 503 and 429: nothing was computed, or the mesh has already tried on its own.
            if response.status not in (429, 503):
                raise RuntimeError(f"{response.status}: {error['message']}")
            hint = float(response.headers.get("Retry-After", 2**attempt / 4))
        wait = hint * random.uniform(1.0, 1.5)
        print(f"refused ({error['code']}): again in {wait:.1f} s", file=sys.stderr)
        await asyncio.sleep(wait)
    raise RuntimeError(f"refused {ATTEMPTS} times")


async def main() -> None:
    """Ask once."""
    headers = {"Authorization": f"Bearer {os.environ.get('PDMESH_API_KEY', 'none')}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        messages = [{"role": "user", "content": "What is 17 + 25?"}]
        answer = await ask(session, {"messages": messages, "temperature": 0})
        print(answer["choices"][0]["message"]["content"])


asyncio.run(main())
