"""One request's shell by itself: what its consumer is woken for, and what it hears first."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.gateway.core.lifecycle import Leg
from services.gateway.mesh import GenerationRequest, Tokens
from services.gateway.workers.delivery import Delivery
from services.gateway.workers.session import HELD_TOKENS, RequestShell
from services.gateway.workers.timeline import Timeline
from shared.errors import WorkerLost
from shared.ids import RequestId
from shared.request import AnswerToken, FinishReason, SamplingParams
from tests.support.answer_tokens import answer_tokens
from tests.unit.services.gateway.core.test_gateway_admission import an_admission


def a_shell(max_tokens: int = 1000) -> RequestShell:
    """A request that was dispatched to a colocated worker."""
    request = GenerationRequest(
        request_id=RequestId(bytes(16)),
        label="",
        token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=max_tokens),
        deadline_at=None,
        cache_salt=b"",
        arrived_at=0.0,
    )
    shell = RequestShell(
        request,
        cast("Any", None),
        Timeline(0.0),
        Delivery(),
        an_admission(),
        max_attempts=1,
        pair_wait_s=1.0,
        failover_wait_s=1.0,
    )
    shell.lifecycle.dispatched(is_whole=True)
    return shell


def arrive(shell: RequestShell, position: int, finish: FinishReason = FinishReason.NONE) -> None:
    """Bring a token."""
    token = AnswerToken(position, position, finish)
    shell.apply(shell.lifecycle.token_arrived(0, Leg.WHOLE, token))


async def step(shell: RequestShell, position: int) -> None:
    """Bring a token, and deliver it at the end of the loop's turn."""
    arrive(shell, position)
    await asyncio.sleep(0)


async def next_tokens(shell: RequestShell) -> Tokens | None:
    """What the consumer has after two turns of the loop, if anything."""
    waiting = asyncio.get_running_loop().create_task(anext(shell))
    for _ in range(2):
        await asyncio.sleep(0)
    if waiting.done():
        return waiting.result()
    waiting.cancel()
    await asyncio.wait([waiting])
    return None


async def test_a_failed_sink_is_heard_before_what_came_after_it() -> None:
    """Its tokens are lost: an answer that went on to its end would have a hole."""

    def refuse(tokens: Tokens) -> bool:
        raise ValueError(f"token {tokens[0].token_id}")

    shell = a_shell()
    arrive(shell, 0)
    assert await anext(shell) == [AnswerToken(0, 0)]
    shell.offer_to(refuse)
    await step(shell, 1)
    arrive(shell, 2, FinishReason.STOP)
    with pytest.raises(ValueError, match="token 1"):
        await anext(shell)


async def test_who_reads_no_part_is_woken_for_many_tokens_or_the_end() -> None:
    """Not for each step; all tokens come, in order."""
    shell = a_shell()
    shell.hold()
    arrive(shell, 0)
    for position in range(1, HELD_TOKENS - 1):
        await step(shell, position)
    assert await next_tokens(shell) is None
    await step(shell, HELD_TOKENS - 1)
    assert await next_tokens(shell) == answer_tokens(range(HELD_TOKENS))
    await step(shell, HELD_TOKENS)
    assert await next_tokens(shell) is None
    arrive(shell, HELD_TOKENS + 1, FinishReason.STOP)
    last = HELD_TOKENS, HELD_TOKENS + 1
    assert await next_tokens(shell) == answer_tokens(last, FinishReason.STOP, first=HELD_TOKENS)


async def test_who_holds_hears_of_a_failure() -> None:
    """What had come until then, then the error."""
    shell = a_shell()
    shell.hold()
    arrive(shell, 0)
    shell.apply(shell.lifecycle.leg_failed(0, Leg.WHOLE, WorkerLost("gone"), lost=True))
    assert await anext(shell) == [AnswerToken(0, 0)]
    with pytest.raises(WorkerLost):
        await anext(shell)


async def test_an_event_without_effect_wakes_nobody() -> None:
    """Decode's grant before token 1, for one."""
    shell = a_shell()
    waiting = asyncio.get_running_loop().create_task(anext(shell))
    await asyncio.sleep(0)
    wakes = 0
    wake = shell._wake

    def count() -> None:
        nonlocal wakes
        wakes += 1

    wake.set = count  # type: ignore[method-assign]
    shell.apply(shell.lifecycle.granted(0))
    assert wakes == 0
    waiting.cancel()
    await asyncio.wait([waiting])
