"""Stream a chat with OpenAI's client, and say afterwards where the time went.

pip install openai
"""

import os

from openai import OpenAI

URL = os.environ.get("PDMESH_URL", "http://127.0.0.1:8000")
client = OpenAI(base_url=URL + "/v1", api_key=os.environ.get("PDMESH_API_KEY", "none"))
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[
        {
            "role": "user",
            "content": "The code of the red door is 4821. What is the code of the red door?",
        }
    ],
    stream=True,
    # `include_receipt` is ours: the client passes on what it does not know.
    stream_options={"include_usage": True, "include_receipt": True},  # type: ignore[typeddict-unknown-key]
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:  # the last chunk
        receipt = (chunk.model_extra or {})["receipt"]
        print(
            f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out; "
            f"first token after {receipt['ttft_s'] * 1000:.0f} ms"
        )
