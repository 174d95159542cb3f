"""What Anthropic's client makes of refusals and of a stream that breaks. Reads its task (JSON: URL,
key, and what to ask) from a file, prints class, status and body of each exception as one line of
JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anthropic

task = json.loads(Path(sys.argv[1]).read_text())


def refused(fields: Any) -> Any:
    """The exception of one request. Streams are read to their end."""
    client = anthropic.Anthropic(
        base_url=task["url"], api_key=fields.pop("key", task["key"]), max_retries=0
    )
    asked: Any = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}
    try:
        answer: Any = client.messages.create(**asked | fields)
        events = [event.type for event in answer]
    except anthropic.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.body]
    return events


print(json.dumps([refused(fields) for fields in task["asks"]]))
