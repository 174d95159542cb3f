"""What is known to be true of the bundled model: codes that it recalls from its prompt."""

from __future__ import annotations

from typing import Any

from tools.demo_model.data import RecallPrompt, recall_prompt

MODEL = "demo"
MAX_TOKENS = 24
"""More than the longest answer has."""


def recall_prompts(count: int) -> list[RecallPrompt]:
    """Return prompts short enough that the model gets every one right (docs/demo-model.md)."""
    return [recall_prompt(5_000_000 + index, 3, 120) for index in range(count)]


def client_task(url: str, prompts: list[RecallPrompt]) -> dict[str, Any]:
    """Return what the programs in ``tests/interop/clients`` are asked to do."""
    return {
        "url": url,
        "model": MODEL,
        "max_tokens": MAX_TOKENS,
        "prompts": [prompt.messages[0]["content"] for prompt in prompts],
        "text": prompts[0].text,
    }
