"""The loop that sends: every request at the time that was planned for it, whatever comes back.

Nothing here waits for an answer before it sends the next request, so a slow server meets the load
that it would meet in life. What the client itself is late is measured and never hidden: a request's
latencies count from the time when it was due.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

from services.cli.bench.endpoints import ServerEndpoint
from services.cli.bench.prompts import DEFAULT_VOCAB, Prompts
from services.cli.bench.records import Ending, Record, Run
from services.cli.bench.workload import Workload
from shared.runtime.service import allow_many_connections
from shared.telemetry.loop_lag import watch_loop_lag

ANSWER_WITHIN_S = 600.0
LOOK_EVERY_S = 0.01
"""At the client's own event loop: ten times as often as a service does, for runs are short."""

COARSE_S = 0.001
"""Timers of event loops are late by up to about a millisecond; the rest is waited for awake."""

PREPARED_AT_ONCE = 50
"""Requests, until the loop may hear a Ctrl-C: a run of many takes a minute to prepare."""


async def run_open_loop(
    endpoints: Sequence[ServerEndpoint],
    workload: Workload,
    *,
    run: Run | None = None,
    answer_within_s: float = ANSWER_WITHIN_S,
    prompt_seed: int = 0,
    vocab: int = DEFAULT_VOCAB,
    chosen: Sequence[int] | None = None,
) -> Run:
    """Send a workload and wait for every answer.

    chosen: the place of each request's endpoint; None = they get requests in turn.
    run: filled in as it goes, so that who is cancelled keeps what there is; its last requests are
    UNFINISHED then.
    """
    run = run or Run(workload, rate=workload.rate)
    run.prompt_seed = prompt_seed
    places = chosen or [at % len(endpoints) for at in range(len(workload.asks))]
    servers = [endpoints[at] for at in places]
    requests = await _prepare(servers, workload, prompt_seed, vocab)
    allow_many_connections()

    async def ask(record: Record, endpoint: ServerEndpoint, request: bytes) -> None:
        record.sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(answer_within_s):
                await endpoint.answer(request, record)
        except TimeoutError:
            record.fail(Ending.TIMEOUT, f"no end within {answer_within_s:g} s")
        record.ended_at = time.perf_counter()
        run.num_ended += 1

    async with _measured(run), asyncio.TaskGroup() as tasks:
        for index, planned in enumerate(workload.asks):
            due_at = run.started_at + planned.due_s
            await _until(due_at)
            endpoint = servers[index]
            record = Record(planned, index, due_at, endpoint.description.url)
            run.records.append(record)
            tasks.create_task(ask(record, endpoint, requests[index]))
    return run


async def _prepare(
    servers: Sequence[ServerEndpoint], workload: Workload, seed: int, vocab: int
) -> list[bytes]:
    """Build all requests now, each for its server: later it would delay answers that are being
    read."""
    requests: list[bytes] = []
    by_ratio: dict[float, Prompts] = {}  # replicas with one tokenizer share the drawn blocks
    for index, endpoint in enumerate(servers):
        ratio = endpoint.description.tokens_per_word
        prompts = by_ratio.setdefault(ratio, Prompts(workload, seed, vocab, ratio))
        requests.append(endpoint.prepare(prompts, index))
        if index % PREPARED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return requests


@contextlib.asynccontextmanager
async def _measured(run: Run) -> AsyncGenerator[None]:
    """Take the client's own time and lag for the length of the block."""
    async with asyncio.TaskGroup() as tasks:
        lags = watch_loop_lag(run.loop_lags.append, interval_s=LOOK_EVERY_S)
        watch = tasks.create_task(lags)
        cpu_s = time.process_time()
        run.started_at = time.perf_counter()
        try:
            yield
        except asyncio.CancelledError:
            run.is_interrupted = True
            raise
        finally:
            run.ended_at = time.perf_counter()
            run.cpu_s = time.process_time() - cpu_s
            watch.cancel()


async def _until(at: float) -> None:
    """Return at a time of the stopwatch, within microseconds if the loop is free."""
    while (left_s := at - time.perf_counter()) > 0:  # noqa: ASYNC110  a time is no event
        await asyncio.sleep(left_s - COARSE_S if left_s > 2 * COARSE_S else 0)
