"""What a question takes for an answer of a server."""

from __future__ import annotations

import aiohttp
import pytest

from bench.autoscaler.live import LiveLoad
from bench.autoscaler.run import Ask
from bench.servers import events
from tests.support.openai_mock import OpenAiMock, openai_mock


@pytest.mark.parametrize("fate", ["", "refuse", "break", "cut"])
async def test_an_answer_is_whole_or_an_error(fate: str) -> None:
    """Of three tokens and an end."""
    async with (
        openai_mock(OpenAiMock(fate=lambda number: fate)) as mock,
        aiohttp.ClientSession() as session,
        session.post(f"{mock.url}/v1/completions", json={"max_tokens": 3, "prompt": "x"}) as came,
    ):
        if not fate:
            assert len([event async for event in events(came)]) == 4
            return
        with pytest.raises((RuntimeError, aiohttp.ClientError)):
            [event async for event in events(came)]


async def test_what_breaks_was_not_kept_by_the_autoscaler() -> None:
    """An event with an error is no token."""
    mock = OpenAiMock(takes_ids=True, is_strict=False, fate=lambda number: "break")
    async with openai_mock(mock), aiohttp.ClientSession() as session:
        load = LiveLoad(session, mock.url)
        with pytest.raises(RuntimeError, match="the worker is gone"):
            await load._ask(0, Ask(0.0, 40, 41))
        assert not load.felt
