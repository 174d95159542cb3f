"""Chat templates that clients bring, rendered in a process that may be ended (``bounded_work.py``):
a template is a program, and its sandbox bounds neither its time nor its memory.

This module is both ends: ``ClientTemplates`` in the gateway, ``main`` in the child.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from services.gateway.limits import refusal
from services.gateway.text.bounded_work import (
    MAX_MEMORY_BYTES,
    Unfinished,
    WorkProcess,
    WorkQueue,
    answer_all,
)
from services.gateway.text.chat_template import ChatTemplate, Rendering
from shared.errors import InvalidRequest, Overloaded
from shared.model_folder import SpecialTokens

QUICK_S = 0.1
"""Processor time of nearly all renderings: what takes longer waits for its like alone."""

MAX_RENDER_S = 0.5
"""Most processor time of one rendering."""

GIVE_UP_S = 10.0
"""Longest wait for one: on a busy machine its processor time takes longer."""


class ClientTemplates:
    """Renders for one gateway. Close it at the end."""

    def __init__(self, special_tokens: SpecialTokens) -> None:
        self._special_tokens = special_tokens
        self._quick, self._slow = (
            WorkQueue(
                WorkProcess(__name__, limit_s, give_up_s=GIVE_UP_S),
                "chat templates",
                gives_up=gives_up,
            )
            for limit_s, gives_up in ((QUICK_S, False), (MAX_RENDER_S, True))
        )

    async def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
        """Return the prompt by the rendering's own template.

        Raises InvalidRequest: see ``ChatTemplate``, or it takes more than it may. Overloaded: too
        many wait, or the machine is busy.
        """

        def outcome(process: WorkProcess) -> bytes:
            work = asdict(self._special_tokens), messages, asdict(rendering)
            return process.outcome(json.dumps(work).encode())

        try:
            try:
                answer = await self._quick.run(outcome)
            except Unfinished as error:
                if error.why not in ("slow", "late"):
                    raise
                answer = await self._slow.run(outcome)
        except Unfinished as error:
            if error.why in ("late", "lost"):
                why = "the chat template was not rendered in time"
                raise Overloaded(why, retry_after_s=1.0) from None
            limit = f"{MAX_RENDER_S:g} s of processor time"
            if error.why == "large":
                limit = f"{MAX_MEMORY_BYTES >> 30} GiB of memory"
            why = f"takes more than {limit} to render: make it simpler"
            raise refusal("chat_template", why) from None
        text, *refused = json.loads(answer)
        if refused:
            param, code = refused
            raise InvalidRequest(text, param=param, code=code)
        return text

    def close(self) -> None:
        """End the threads and their processes; renderings in progress fail."""
        self._quick.close()
        self._slow.close()


def _outcome(work: bytes) -> bytes:
    """Return the text, or a refusal's message, param and code."""
    special_tokens, messages, given = json.loads(work)
    rendering = Rendering(**given)
    assert rendering.chat_template is not None
    try:
        template = ChatTemplate(
            rendering.chat_template, SpecialTokens(**special_tokens), of_client=True
        )
        said = (template.render(messages, rendering),)
    except InvalidRequest as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        said = (error.message, error.param, error.code)
    return json.dumps(said).encode()


def main() -> None:
    answer_all(_outcome)


if __name__ == "__main__":
    main()
