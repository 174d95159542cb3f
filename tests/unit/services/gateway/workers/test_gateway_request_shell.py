"""One request's shell by itself, and the answer that is made of its tokens: what its consumer is
woken for, and what it hears first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from services.gateway.core.admission.admission import Admission, Admit
from services.gateway.core.admission.overload import (
    ChosenPair,
    Overload,
    OverloadMode,
    ReportedSpeeds,
)
from services.gateway.core.admission.tenants import Terms
from services.gateway.core.lifecycle import Leg
from services.gateway.core.routing.sides import Sides
from services.gateway.core.worker import Role, Worker
from services.gateway.front.answers import HELD_TOKENS, Answers, Choice, TextDelta, open_answers
from services.gateway.mesh import GenerationRequest, Take, Tokens
from services.gateway.workers.delivery import Delivery
from services.gateway.workers.session import LegShell, RequestShell
from services.gateway.workers.timeline import Timeline
from shared.errors import WorkerLost, WouldBeLate
from shared.ids import RequestId
from shared.request import AnswerToken, FinishReason, SamplingParams
from shared.schedule.plan import PromptTimes
from tests.support.routing import a_worker
from tests.support.tiny_tokenizer import tiny_text_model, tiny_tokenizer
from tests.unit.services.gateway.core.admission.test_gateway_admission import an_admission

REQUEST = GenerationRequest(
    request_id=RequestId(bytes(16)),
    label="",
    token_ids=(1, 2),
    sampling=SamplingParams(max_tokens=1000),
    deadline_at=None,
    cache_salt=b"",
    arrived_at=0.0,
)


def a_shell(take: Take, admission: Admission | None = None) -> RequestShell:
    """A request that was dispatched to a colocated worker."""
    shell = RequestShell(
        REQUEST,
        take,
        cast("Any", None),
        Timeline(0.0),
        Delivery(),
        admission or an_admission(),
        list,
        max_attempts=1,
        pair_wait_s=1.0,
        failover_wait_s=1.0,
    )
    shell.lifecycle.dispatched(is_whole=True)
    return shell


class OneRequest:
    """A mesh of one request. shell: once it is asked for."""

    shell: RequestShell

    @asynccontextmanager
    async def generate(
        self, request: GenerationRequest, take: Take
    ) -> AsyncGenerator[RequestShell]:
        self.shell = a_shell(take)
        yield self.shell


@asynccontextmanager
async def an_answer(stop: tuple[str, ...] = ()) -> AsyncGenerator[tuple[RequestShell, Answers]]:
    """A running answer of which nobody reads a part."""
    mesh: Any = OneRequest()
    text = tiny_text_model()
    answer_text = text.new_answer(REQUEST.sampling, stop=stop)
    choice = Choice(index=0, prompt_idx=0, request=REQUEST, text=answer_text)
    async with open_answers(mesh, [choice]) as answers:
        answers.hold()
        yield mesh.shell, answers
    text.close()


def arrive(
    shell: RequestShell,
    position: int,
    finish: FinishReason = FinishReason.NONE,
    token_id: int = 0,
) -> None:
    """Bring a token."""
    token = AnswerToken(position, token_id or position, finish)
    shell.apply(shell.lifecycle.token_arrived(0, Leg.WHOLE, token))


async def step(shell: RequestShell, position: int, token_id: int = 0) -> None:
    """Bring a token, and deliver it at the end of the loop's turn."""
    arrive(shell, position, token_id=token_id)
    await asyncio.sleep(0)


async def next_positions(answers: Answers) -> list[int] | None:
    """What the consumer has after two turns of the loop, if anything."""
    waiting = asyncio.get_running_loop().create_task(answers.next())
    for _ in range(2):
        await asyncio.sleep(0)
    if waiting.done():
        return [token.index for delta in waiting.result() for token in delta.tokens]
    waiting.cancel()
    await asyncio.wait([waiting])
    return None


async def test_a_failed_consumer_is_heard_and_gets_no_more() -> None:
    """Its tokens are lost: an answer that went on to its end would have a hole."""
    taken: list[int] = []

    def take(tokens: Tokens) -> bool:
        taken.append(tokens[0].index)
        if tokens[0].index:
            raise ValueError(f"token {tokens[0].token_id}")
        return True

    shell = a_shell(take)
    await step(shell, 0)
    assert await shell.wait()
    await step(shell, 1)
    arrive(shell, 2, FinishReason.STOP)
    with pytest.raises(ValueError, match="token 1"):
        await shell.wait()
    assert taken == [0, 1]


async def test_who_reads_no_part_is_woken_for_many_tokens_or_the_end() -> None:
    """Not for each step; all tokens come, in order."""
    async with an_answer() as (shell, answers):
        for position in range(HELD_TOKENS - 1):
            await step(shell, position)
        assert await next_positions(answers) is None
        await step(shell, HELD_TOKENS - 1)
        assert await next_positions(answers) == [*range(HELD_TOKENS)]
        await step(shell, HELD_TOKENS)
        assert await next_positions(answers) is None
        arrive(shell, HELD_TOKENS + 1, FinishReason.STOP)
        assert await next_positions(answers) == [HELD_TOKENS, HELD_TOKENS + 1]
        assert await answers.next() == []


class OpenSink:
    """Takes all that it is given."""

    def __init__(self) -> None:
        self.written: list[str] = []

    def has_room(self) -> bool:
        return True

    def write(self, delta: TextDelta) -> None:
        self.written.append(delta.text)


async def test_nothing_follows_a_stop_string_whoever_told_it() -> None:
    """The mesh knows of none, so tokens come until the consumer has left: here it has had the
    answer's end from ``next``, and writes it to its client."""
    the, other = (tiny_tokenizer().token_to_id(token) for token in ("the", "and"))
    async with an_answer(stop=("e",)) as (shell, answers):
        sink = OpenSink()
        await step(shell, 0, the)
        (delta,) = await answers.next()
        assert (delta.text, delta.finish_reason) == ("th", FinishReason.STOP)
        answers.write_to(sink)
        await step(shell, 1, other)
        assert sink.written == []
        assert await answers.next() == []


async def test_who_reads_no_part_hears_of_a_failure() -> None:
    """What had come until then, then the error."""
    async with an_answer() as (shell, answers):
        arrive(shell, 0)
        shell.apply(shell.lifecycle.leg_failed(0, Leg.WHOLE, WorkerLost("gone"), lost=True))
        assert await next_positions(answers) == [0]
        with pytest.raises(WorkerLost):
            await answers.next()


async def test_who_is_refused_early_is_asked_about_again_whoever_says_so_and_when() -> None:
    """The planner has requests refused that would be late, of a gateway that was not told to: one
    whose answer would be too slow ends as its prompt is computed."""
    overload = Overload(OverloadMode.OFF, Slow())
    key, worker, session = REQUEST.request_id, a_worker(Role.DECODE, 1, bit=1), Session()
    alone = Sides([worker], [1], [worker])
    admission = Admission(
        max_running=1, max_waiting=0, max_wait_s=1.0, overload=overload, sides=lambda: alone
    )
    shell = a_shell(lambda tokens: True, admission)
    assert admission.arrive(key, 0.0, terms=Terms(tpot_s=0.1)) == [Admit(key)]
    admission.pair_found(key, ChosenPair(worker, worker), 0.0)
    leg = shell._legs[Leg.WHOLE] = LegShell(shell, 0, Leg.WHOLE, cast("Any", session))
    overload.mode = OverloadMode.EARLY
    leg.first_token(AnswerToken(0, 5, FinishReason.NONE), PromptTimes(0.0, 0.0, 0))
    with pytest.raises(WouldBeLate):
        await shell.wait()
    assert session.num_cancelled == 1


class Slow(ReportedSpeeds):
    """A second a step."""

    def step_s(self, worker: Worker, num_others: int, num_tokens: int) -> float:
        return 1.0


class Session:
    """A worker's session, which is told to stop."""

    num_cancelled = 0

    def cancel(self, stream_id: int) -> None:
        self.num_cancelled += 1


async def test_an_event_without_effect_wakes_nobody() -> None:
    """Decode's grant before token 1, for one."""
    shell = a_shell(lambda tokens: True)
    waiting = asyncio.get_running_loop().create_task(shell.wait())
    await asyncio.sleep(0)
    waiter = shell._waiter
    assert waiter is not None
    shell.apply(shell.lifecycle.granted(0))
    assert not waiter.done()
    waiting.cancel()
    await asyncio.wait([waiting])
