"""Answers as text: what HTTP and gRPC stream to a client, made from the tokens of one or several
generations.

Tokens come here as they arrive. Where a sink has room they leave at once, as text; else they stay
until the task that waits for the answer asks for them. Several answers run in a TaskGroup of their
own and meet in a bounded queue (full: tokens stay with their answer). The others begin once the
first was admitted, and the request with it. The first failure ends all of them, and comes out as
one MeshError. Knows no JSON and no protobuf.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import msgspec

from services.gateway.mesh import Generation, GenerationRequest, Mesh, Tokens
from services.gateway.text.detokenizer import AnswerText
from shared.errors import InvariantViolated, MeshError
from shared.request import AnswerToken, FinishReason, TokenLogprobs
from shared.runtime.groups import TaskGroup, plain_errors

HELD_TOKENS = 64
"""So many tokens become text at once where nobody reads a part of an answer: waking a task costs
several tokens' text, and the text of more would hold the loop."""


AT_ONCE = 64
"""So many answers of one request run at a time; the others wait their turn, not in the mesh's queue
with requests of others."""

MAX_LOGPROBS_ON_LOOP = 2048
"""So many, at about 3 us each, are written at once; a long prompt has ten thousands, which would
hold up every other answer for as long."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """What tokens that arrived together added to one answer. choice: index of the answer.

    text may lag behind the tokens while a character or a possible stop string is incomplete. The
    answer's finish_reason may come from a stop string, which no token knows. stop_reason: the stop
    string or token id that ended the answer, None for an end-of-sequence token. prompt_logprobs:
    with the first token if asked for, one entry a prompt token, the first NaN.
    """

    choice: int
    text: str
    tokens: Tokens
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """One entry a token, when asked for."""
        return [token.logprobs for token in self.tokens if token.logprobs is not None]


class TokenCounts(NamedTuple):
    """Token counts; a prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True, kw_only=True)
class Choice:
    """One answer to make. prompt_idx: which prompt of the request it continues.

    is_echo_only: the client asked for no token at all, only for what is known of its prompt; one
    token is generated, because a step needs one, and dropped. structure_param: the field that says
    what it must match, if it must.
    """

    index: int
    prompt_idx: int
    request: GenerationRequest
    text: AnswerText
    is_echo_only: bool = False
    structure_param: str = ""
    generation: Generation | None = field(default=None, init=False, repr=False)

    @property
    def finish_reason(self) -> FinishReason:
        """NONE, which is false, while the answer is not over."""
        return self.text.finish_reason

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far."""
        return 0 if self.is_echo_only else self.text.num_tokens

    def take(self, tokens: Tokens) -> TextDelta:
        """Turn tokens into text."""
        answer = self.text
        text = answer.feed(tokens)
        finish_reason, first = answer.finish_reason, tokens[0]
        if self.is_echo_only:
            nothing: Tokens = ()
            return TextDelta(
                self.index, "", nothing, FinishReason.LENGTH, None, first.prompt_logprobs
            )
        if finish_reason:
            tokens = tokens[: answer.num_tokens - first.index]  # a stop string leaves the rest
        return TextDelta(
            self.index, text, tokens, finish_reason, answer.stop_reason, first.prompt_logprobs
        )


class DeltaSink(Protocol):
    """Where a running answer may go at once, past the task that waits for it."""

    def has_room(self) -> bool:
        """Whether ``write`` may be called now: the answer has begun and nothing has to wait."""
        ...

    def write(self, delta: TextDelta) -> None:
        """Take a delta, at once."""
        ...


class Answers(ABC):
    """The running answers of one request; made by ``open_answers``."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices = choices

    @abstractmethod
    async def next(self) -> list[TextDelta]:
        """Return everything that has arrived, at least one delta; [] once all answers are over.

        Raises MeshError: the request failed; nothing follows.
        """
        ...

    def write_to(self, sink: DeltaSink) -> None:  # noqa: B027  only one answer has one
        """Give deltas of one single answer to the sink whenever it has room; all others still come
        from ``next``."""

    def hold(self) -> None:  # noqa: B027  likewise
        """Nobody reads a part of an answer: ``next`` may wait for more of it. It does not where a
        stop string may end the answer early."""

    @property
    def first_token_at(self) -> float | None:
        """Loop time at which the first token of all answers arrived; None = not yet."""
        times = [
            choice.generation.first_token_at
            for choice in self.choices
            if choice.generation is not None
        ]
        return min((at for at in times if at is not None), default=None)

    @property
    def usage(self) -> TokenCounts:
        prompts: dict[int, Choice] = {}
        for choice in self.choices:
            prompts.setdefault(choice.prompt_idx, choice)
        return TokenCounts(
            sum(len(choice.request.token_ids) for choice in prompts.values()),
            sum(choice.num_tokens for choice in self.choices),
            sum(
                choice.generation.cached_tokens
                for choice in prompts.values()
                if choice.generation is not None
            ),
        )

    def receipts(self) -> list[dict[str, Any]]:
        """Return where each answer's time went; ask after the block of ``open_answers`` has
        ended."""
        return [
            choice.generation.receipt() for choice in self.choices if choice.generation is not None
        ]


class _OneAnswer(Answers):
    """Of one choice: opens it, too, because nearly every request is one."""

    def __init__(self, mesh: Mesh, choice: Choice) -> None:
        super().__init__((choice,))
        self._choice = choice
        self._sink: DeltaSink | None = None
        self._arrived: list[AnswerToken] = []  # not text yet
        self._fewest = 1  # of them that somebody is woken for
        self._mesh = mesh

    async def __aenter__(self) -> _OneAnswer:
        stay = self._mesh.generate(self._choice.request, self._take)
        self._choice.generation = self._generation = await stay.__aenter__()
        self._stay = stay
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stay = self._stay
        # They know this answer, too: only the garbage collector would free them.
        del self._stay
        self._sink = None
        await stay.__aexit__(kind, failure, traceback)

    def _take(self, tokens: Tokens) -> bool:
        if self._choice.finish_reason:
            return True  # after a stop string, of which the mesh knows nothing, more comes
        sink = self._sink
        # If some wait here already, these wait behind them, or they would overtake them.
        if sink is None or self._arrived or not sink.has_room():
            self._arrived += tokens
            return len(self._arrived) >= self._fewest
        delta = self._choice.take(tokens)
        sink.write(delta)
        return bool(delta.finish_reason)

    async def next(self) -> list[TextDelta]:
        choice = self._choice
        while len(self._arrived) < self._fewest and not choice.finish_reason:
            try:
                if not await self._generation.wait():
                    break
            except MeshError:
                if not self._arrived:
                    raise
                break  # what had come goes first
        if choice.finish_reason:
            return []
        if not self._arrived:
            raise InvariantViolated("a generation ended without a finish reason")
        tokens, self._arrived = self._arrived, []
        return [choice.take(tokens)]

    def write_to(self, sink: DeltaSink) -> None:
        self._sink = sink

    def hold(self) -> None:
        if not self._choice.text.has_stop:
            self._fewest = HELD_TOKENS


class _ManyAnswers(Answers):
    def __init__(self, choices: Sequence[Choice]) -> None:
        super().__init__(choices)
        self._queue: asyncio.Queue[TextDelta] = asyncio.Queue(2 * min(len(choices), AT_ONCE))
        self._num_running = len(choices)
        self.is_let_in = asyncio.Event()

    async def next(self) -> list[TextDelta]:
        if not self._num_running:
            return []
        deltas = [await self._queue.get()]
        while not self._queue.empty():
            deltas.append(self._queue.get_nowait())
        self._num_running -= sum(bool(delta.finish_reason) for delta in deltas)
        return deltas

    async def run(self, choices: Iterator[Choice], mesh: Mesh) -> None:
        """Generate one answer after the other into the queue."""
        for choice in choices:
            async with _OneAnswer(mesh, choice) as answer:
                self.is_let_in.set()
                while deltas := await answer.next():
                    await self._queue.put(deltas[0])  # one answer's ``next`` never has more


def open_answers(mesh: Mesh, choices: Sequence[Choice]) -> AbstractAsyncContextManager[Answers]:
    """Start all answers; leaving the block cancels what still runs.

    Raises MeshError, from the block as a whole: see ``Mesh.generate`` and ``Answers.next``. With
    several answers, a failure of one reaches the block's body as a cancellation and leaves the
    block as the error, so errors are caught around the block, never inside.
    """
    return _OneAnswer(mesh, choices[0]) if len(choices) == 1 else _open_many(mesh, choices)


@asynccontextmanager
async def _open_many(mesh: Mesh, choices: Sequence[Choice]) -> AsyncGenerator[Answers]:
    answers = _ManyAnswers(choices)
    with plain_errors():
        async with TaskGroup() as group:
            waiting = iter(choices)
            tasks = [group.create_task(answers.run(waiting, mesh), name="answers-0")]
            # A request is refused with its first answer or not at all (``core/admission``).
            await answers.is_let_in.wait()
            tasks += [
                group.create_task(answers.run(waiting, mesh), name=f"answers-{idx}")
                for idx in range(1, min(len(choices), AT_ONCE))
            ]
            yield answers
            for task in tasks:
                task.cancel()
