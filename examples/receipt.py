"""Read a stream of events without any client library, and draw the receipt: where the time to the
first token went.

pip install aiohttp
"""

import asyncio
import json
import os
import sys

import aiohttp

URL = os.environ.get("PDMESH_URL", "http://127.0.0.1:8000")
PHASES = ("queue_s", "route_s", "retry_s", "prefill_queue_s", "prefill_s", "handover_s")


def draw(receipt: dict) -> None:
    """One bar a phase; together they are the time to the first token."""
    for phase in PHASES:
        share = receipt[phase] / receipt["ttft_s"]
        print(f"{phase:>16} {receipt[phase] * 1000:8.2f} ms  {'█' * round(40 * share)}")
    print(f"{'ttft_s':>16} {receipt['ttft_s'] * 1000:8.2f} ms")
    print(
        f"{receipt['transfer_bytes']:,} bytes of KV over {receipt['lane'] or 'no link: none moved'}"
    )


async def main() -> None:
    """Ask once."""
    body = {
        "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "stream": True,
        "stream_options": {"include_receipt": True},
    }
    headers = {"Authorization": f"Bearer {os.environ.get('PDMESH_API_KEY', 'none')}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(URL + "/v1/chat/completions", json=body) as response,
    ):
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if not data or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:  # a refusal, or a stream that broke: never a short answer
                sys.exit(event["error"]["message"])
            for choice in event["choices"]:
                print(choice["delta"].get("content", ""), end="", flush=True)
            if "receipt" in event:
                print()
                draw(event["receipt"])


asyncio.run(main())
