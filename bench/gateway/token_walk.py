"""CPU of one streamed token inside the gateway, without sockets.

    python -m bench.gateway.token_walk            # 256 answers, 20 windows of 100 steps
    python -m bench.gateway.token_walk 64 50      # so many answers, so many windows

From a step's message as ``WorkerSession`` gets it (parsed) to the bytes of each answer's event at
its connection: what a token costs beside the kernel, in a process that a noisy machine disturbs
less than two with sockets between them. The lowest window is told.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import uvloop
from prometheus_client import CollectorRegistry

from services.gateway.core.admission.admission import Admission
from services.gateway.core.admission.overload import Overload, OverloadMode
from services.gateway.core.lifecycle import Leg
from services.gateway.front.answers import Choice, open_answers
from services.gateway.http.answering import _Chunks
from services.gateway.http.openai_answers import AnswerHead, CompletionFormat
from services.gateway.http.sse import EventStream
from services.gateway.mesh import GenerationRequest, Take
from services.gateway.text.text_model import TextModel
from services.gateway.workers.answer_metrics import AnswerMetrics
from services.gateway.workers.delivery import DELIVERIES_A_TURN, Delivery
from services.gateway.workers.peers import WorkerSession
from services.gateway.workers.session import LegShell, RequestShell
from services.gateway.workers.timeline import Timeline
from shared import wire
from shared.ids import Incarnation, RequestId, StreamId
from shared.log import configure_logs
from shared.messages.columns import pack_u8, pack_u32
from shared.model_folder import ModelFolder, resolve_model
from shared.request import SamplingParams

STEPS = 100
NOBODY: Any = None


class Connection:
    """Where the bytes end; also the request that came over it."""

    is_http11 = True

    def __init__(self) -> None:
        self.num_writes = 0
        self.transport = self

    def is_closing(self) -> bool:
        """It never does."""
        return False

    def get_write_buffer_size(self) -> int:
        """Its client reads everything at once."""
        return 0

    def write(self, data: bytes) -> None:
        """Take an event."""
        self.num_writes += 1


class OneShell:
    """The ``Mesh`` and the stay in it, of one answer. new_shell: begins it. request_id: of its
    call."""

    request_id = RequestId(bytes(16))

    def __init__(self, new_shell: Callable[[Take], RequestShell]) -> None:
        self._new_shell = new_shell
        self.caller = self

    def generate(self, request: GenerationRequest, take: Take) -> OneShell:
        """See ``Mesh``."""
        self._shell = self._new_shell(take)
        return self

    async def __aenter__(self) -> RequestShell:
        return self._shell

    async def __aexit__(self, *failure: object) -> None: ...


class Walk:
    """Answers in their midst, all on one worker."""

    def __init__(self, num_answers: int) -> None:
        self.text = TextModel.load(ModelFolder(resolve_model("demo")))
        self.connection = Connection()
        self.num_answers = num_answers
        self._ids = range(num_answers)
        self._words = [at for at in range(2000) if self.text.piece(at).text[1:].isalpha()]
        worker = SimpleNamespace(model=SimpleNamespace(vocab_size=1 << 20))
        self._session = WorkerSession(cast("Any", worker), NOBODY, Incarnation(1), lambda: None)
        watchers = (AnswerMetrics(CollectorRegistry()),)
        self._delivery = Delivery(watchers)
        self._watchers = watchers
        self._admission = Admission(
            max_running=1, max_waiting=0, max_wait_s=1.0, sides=NOBODY,
            overload=Overload(OverloadMode.OFF),
        )  # fmt: skip
        self._position = 0

    async def begin(self) -> None:
        """Open the answers; each has said its first token."""
        for stream_id in self._ids:
            request = GenerationRequest(
                request_id=OneShell.request_id, label="", token_ids=(1,),
                sampling=SamplingParams(max_tokens=1 << 30), deadline_at=None, cache_salt=b"",
                arrived_at=0.0,
            )  # fmt: skip
            begin = partial(self._shell, request, StreamId(stream_id))
            choice = Choice(
                index=0, prompt_idx=0, request=request, text=self.text.new_answer(request.sampling)
            )
            mesh: Any = OneShell(begin)
            answers = await open_answers(mesh, [choice]).__aenter__()
            events = EventStream(cast("Any", self.connection), {})
            events._transport = cast("Any", self.connection)
            head = AnswerHead(id=f"cmpl-{stream_id:032x}", model="demo", created=1)
            answer_format = CompletionFormat(head, self.text, [choice], None)
            answers.write_to(_Chunks(events, answer_format, mesh, answers))
        self.arrive(self.step())
        await self.deliver()

    def _shell(self, request: GenerationRequest, stream_id: StreamId, take: Take) -> RequestShell:
        """Return an answer that runs on the worker."""
        timeline = Timeline(0.0, watchers=self._watchers)
        shell = RequestShell(
            request, take, NOBODY, timeline, self._delivery, self._admission, lambda effects: None,
            max_attempts=1, pair_wait_s=1.0, failover_wait_s=1.0,
        )  # fmt: skip
        shell.lifecycle.dispatched(is_whole=True)
        self._session._legs[stream_id] = LegShell(shell, 0, Leg.WHOLE, self._session)
        return shell

    def step(self) -> wire.WorkerEvent:
        position, self._position = self._position, self._position + 1
        count = len(self._ids)
        words = self._words
        token_ids = [words[(position + index) % len(words)] for index in self._ids]
        tokens = wire.StepTokens(
            stream_ids=pack_u32(self._ids), indices=pack_u32([position] * count),
            token_ids=pack_u32(token_ids), finish_reasons=pack_u8([0] * count),
        )  # fmt: skip
        return wire.WorkerEvent(tokens=tokens)

    def arrive(self, step: wire.WorkerEvent) -> None:
        """The worker says this."""
        self._session._on_event(step)

    async def deliver(self) -> None:
        """Give the loop the turns that it takes."""
        for _ in range(len(self._ids) // DELIVERIES_A_TURN + 2):
            await asyncio.sleep(0)


async def window(walk: Walk) -> tuple[float, float]:
    """Return the CPU us a token of some steps: until it is in its answer, and from there on."""
    steps = [walk.step() for _ in range(STEPS)]
    arrival_ns = delivery_ns = 0
    before = walk.connection.num_writes
    for step in steps:
        start = time.process_time_ns()
        walk.arrive(step)
        middle = time.process_time_ns()
        await walk.deliver()
        arrival_ns += middle - start
        delivery_ns += time.process_time_ns() - middle
    num_tokens = walk.connection.num_writes - before
    assert num_tokens == STEPS * walk.num_answers, "an event a token"
    return arrival_ns / num_tokens / 1e3, delivery_ns / num_tokens / 1e3


async def measure(num_answers: int, num_windows: int) -> None:
    walk = Walk(num_answers)
    await walk.begin()
    gc.freeze()
    gc.set_threshold(20_000)  # as the gateway does
    windows = [await window(walk) for _ in range(num_windows)]
    arrival, delivery = (min(column) for column in zip(*windows, strict=True))
    print(f"{num_answers} answers, CPU us a token, lowest of {num_windows} windows:")
    print(f"  into its answer {arrival:.2f}   to its client {delivery:.2f}")
    print(f"  both {min(map(sum, windows)):.2f}")


if __name__ == "__main__":
    configure_logs(service="bench", level="warning")
    sizes = [int(text) for text in sys.argv[1:]]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(*(sizes + [256, 20][len(sizes) :])))
