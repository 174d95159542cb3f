"""Questions whose right answers are known, and clients who ask them and compare.

The bundled model finds codes in its prompt and counts (docs/demo-model.md); greedy and in float32
every one of these answers is right in one process, so any other answer is a fault of the mesh.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc
from openai import AsyncOpenAI, OpenAIError

from shared import wire
from tools.demo_model.data import recall_prompt

NUM_RECALLS = 240
LONGEST_COUNT = 28
"""Some 100 tokens: long enough to be under way when something dies."""

ANSWER_WITHIN_S = 120.0
MAX_TOKENS = 128


@dataclass(frozen=True)
class Question:
    """A user's message and the only right answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Answer:
    """What a client got. Times are of time.monotonic."""

    text: str
    finish: str
    receipt: dict[str, Any]


@dataclass(frozen=True)
class Door:
    """Where one gateway is reached: host:port of both APIs."""

    http: str
    grpc: str


def question(number: int) -> Question:
    """Every third counts; the rest finds a code amid 60 to 250 tokens."""
    if number % 3 == 0:
        last = LONGEST_COUNT - number // 3 % 10
        numbers = ", ".join(map(str, range(1, last + 1)))
        return Question(f"Count from 1 to {last}.", f"{numbers}.")
    index = number % NUM_RECALLS
    is_long = index % 2 == 0
    prompt = recall_prompt(
        9_000_000 + index, 10 if is_long else 3, 60 + 60 * is_long + index * 37 % 130
    )
    return Question(prompt.messages[0]["content"], prompt.expected_reply)


async def ask_openai(client: AsyncOpenAI, text: str) -> Answer:
    """Ask for a whole answer."""
    reply = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        extra_body={"include_receipt": True},
    )
    choice, extra = reply.choices[0], reply.model_extra or {}
    return Answer(choice.message.content or "", choice.finish_reason, extra["receipt"])


async def ask_openai_stream(client: AsyncOpenAI, text: str) -> Answer:
    """Ask for a stream."""
    options: Any = {"include_usage": True, "include_receipt": True}
    stream = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options=options,
    )
    parts: list[str] = []
    finish, receipt = "", {}
    async for chunk in stream:
        receipt = (chunk.model_extra or {}).get("receipt", receipt)
        for choice in chunk.choices:
            parts.append(choice.delta.content or "")
            finish = choice.finish_reason or finish
    return Answer("".join(parts), finish, receipt)


async def ask_grpc(channel: grpc.aio.Channel, text: str) -> Answer:
    """Ask over gRPC."""
    generate: Any = channel.unary_stream(
        "/pdmesh.v1.Inference/Generate", bytes, wire.GenerateResponse.parse
    )
    call = generate(
        wire.GenerateRequest(
            messages=[wire.ChatMessage(role="user", content=text)],
            params=wire.GenerateParams(temperature=0.0, max_tokens=MAX_TOKENS),
        ),
        timeout=ANSWER_WITHIN_S,
    )
    received = [message async for message in call]
    receipt = json.loads(dict(await call.trailing_metadata())["pdmesh-receipt"])
    is_stop = received[-1].finish_reason == wire.FinishReason.STOP
    text = "".join(message.text for message in received)
    return Answer(text, "stop" if is_stop else "other", receipt)


@dataclass
class Tally:
    """What clients got so far. errors: of attempts that were taken up elsewhere, by their types.
    failures: what clients saw, and how long they had waited for it."""

    num_right: int = 0
    wrong: list[str] = field(default_factory=list)
    failures: list[tuple[str, float]] = field(default_factory=list)
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    lanes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def take(self, asked: Question, answer: Answer) -> None:
        """Compare an answer and keep what its receipt says."""
        if (answer.text, answer.finish) == (asked.answer, "stop"):
            self.num_right += 1
        else:
            self.wrong.append(f"{asked.text[-80:]!r}: {answer.text!r} ({answer.finish!r})")
        self.pairs[answer.receipt["prefill"], answer.receipt["decode"]] += 1
        self.lanes[answer.receipt["lane"]] += 1
        self.errors.update(answer.receipt["errors"])
        async with self.news:
            self.news.notify_all()

    async def more(self, num_answers: int) -> None:
        """Wait until so many more right answers are in, or something is wrong."""
        goal = self.num_right + num_answers
        async with asyncio.timeout(ANSWER_WITHIN_S), self.news:
            await self.news.wait_for(
                lambda: self.num_right >= goal or bool(self.wrong or self.failures)
            )

    async def until_failures(self, number: int) -> None:
        """Wait until so many clients have failed."""
        async with asyncio.timeout(ANSWER_WITHIN_S), self.news:
            await self.news.wait_for(lambda: len(self.failures) >= number)

    def check(self) -> None:
        """Nothing was wrong and nothing failed."""
        assert not self.wrong
        assert not self.failures


@asynccontextmanager
async def clients(doors: Sequence[Door], number: int) -> AsyncGenerator[Tally]:
    """So many clients of all kinds ask one question after another until the block ends; the first
    error of a client is its end. Begins when each kind has had an answer."""
    tally, stop, numbers = Tally(), asyncio.Event(), count()

    async def client(door: Door, kind: int) -> None:
        async with (
            AsyncOpenAI(
                base_url=f"http://{door.http}/v1",
                api_key="none",
                max_retries=0,
                timeout=ANSWER_WITHIN_S,
            ) as openai,
            grpc.aio.insecure_channel(door.grpc) as channel,
        ):
            kinds: tuple[Callable[[str], Awaitable[Answer]], ...] = (
                lambda text: ask_openai(openai, text),
                lambda text: ask_openai_stream(openai, text),
                lambda text: ask_grpc(channel, text),
            )
            ask = kinds[kind % len(kinds)]
            while not stop.is_set():
                asked, began_at = question(next(numbers)), time.monotonic()
                try:
                    answer = await ask(asked.text)
                except (OpenAIError, grpc.RpcError, OSError) as error:
                    said = f"{type(error).__name__}: {error}"
                    tally.failures.append((said, time.monotonic() - began_at))
                    async with tally.news:
                        tally.news.notify_all()
                    return
                await tally.take(asked, answer)

    async with asyncio.TaskGroup() as tasks:
        for index in range(number):
            tasks.create_task(client(doors[index % len(doors)], index // len(doors)))
        try:
            await tally.more(number)
            yield tally
        finally:
            stop.set()
