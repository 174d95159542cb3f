"""Our engine, asked by ``run.py`` in lines of JSON: real scheduler, engine, sampler and threads.

Decode steps are those of the decode service's own loop: plan, a step on the compute thread, commit,
on uvloop. Everything that is not a call of a kernel is counted as overhead.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TextIO

import torch
import uvloop

from bench.engine.model import MAX_LEN
from shared.config import DecodeConfig
from shared.engine.base import Engine
from shared.engine.load import load_engine
from shared.engine.torch_engine import TorchEngine
from shared.engine.work_thread import run_and_end
from shared.engine.worker import ThreadCompute
from shared.errors import MeshError
from shared.kv.pool import BlockPool
from shared.request import SamplingParams, WorkItem
from shared.schedule.budget import TokenBudget
from shared.schedule.plan import Failure, NewToken, StepPlan
from shared.schedule.scheduler import SchedulePolicy, Scheduler
from shared.schedule.sequence import Sequence as TokenSequence
from shared.telemetry.worker import DecodeMetrics
from shared.worker.process import SWITCH_INTERVAL_S
from shared.worker.stepper import Stepper


class KernelClock:
    """Adds up the time inside the kernels, by standing in front of their calls."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        forward = engine.forward if isinstance(engine, TorchEngine) else None
        library = getattr(forward, "_library", None)
        for name in ("forward", "embed", "first_half", "second_half", "logits") if library else ():
            setattr(library, name, self._timed(getattr(library, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            began_at = time.perf_counter()
            call(*args)
            self.seconds += time.perf_counter() - began_at

        return timed


class Sink:
    """Takes tokens and stops the loop after so many steps."""

    def __init__(self, clock: KernelClock) -> None:
        self.clock = clock
        self.wanted = 0
        self.stopped = asyncio.Event()
        self.steps: list[tuple[float, float, int]] = []  # at, seconds in kernels so far, tokens

    def admitted(self, sequences: Sequence[TokenSequence]) -> None:
        pass

    def announce(self, plan: StepPlan) -> tuple[()]:
        return ()

    def step_done(self, tokens: Sequence[NewToken], pushes: object, done: object) -> None:
        self.steps.append((time.perf_counter(), self.clock.seconds, len(tokens)))
        if len(self.steps) == self.wanted:
            self.stopped.set()

    def sequences_failed(self, failures: Sequence[Failure]) -> None:
        raise AssertionError(failures)

    def rests(self) -> None:
        """Nothing is left to do."""

    def fail_all(self, error: MeshError) -> None:
        raise error


class End:
    """One engine; a scheduler for each question."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        self.engine, self.vocab = engine, vocab
        self.rng = random.Random(0)
        self.clock = KernelClock(engine)
        self.compute = ThreadCompute(engine)
        self.rows = self.context = 0

    def scheduler(self, budget: int) -> Scheduler:
        pool = BlockPool(self.engine.num_blocks, self.engine.block_size)
        policy = SchedulePolicy(
            max_model_len=self.engine.spec.max_model_len, budget=TokenBudget(budget)
        )
        return Scheduler(pool, policy)

    def sequence(self, tokens: int, wanted: int) -> TokenSequence:
        prompt = [self.rng.randrange(self.vocab) for _ in range(tokens)]
        return TokenSequence(
            WorkItem(
                token_ids=tuple(prompt),
                num_prompt_tokens=tokens,
                sampling=SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True),
            )
        )

    async def fill(self, job: dict[str, Any]) -> dict[str, Any]:
        self.running = self.scheduler(2048)
        for _ in range(job["rows"]):
            self.running.add(self.sequence(job["context"], 1 << 20))
        while True:
            plan = self.running.plan()
            if plan.num_prefill_tokens == 0:
                break
            self.running.commit(plan, await self.compute.begin(plan.rows).results())
        # The plan is made and cannot be taken back: run it, so that decoding goes on after it.
        self.running.commit(plan, await self.compute.begin(plan.rows).results())
        self.rows = job["rows"]
        return {}

    async def decode(self, job: dict[str, Any]) -> dict[str, Any]:
        sink = Sink(self.clock)
        sink.wanted = job["steps"] + 1
        metrics = DecodeMetrics()
        stepper = Stepper(
            compute=self.compute,
            scheduler=self.running,
            metrics=metrics,
            sink=sink,
            on_step=lambda plan, seconds: None,
            look_ahead=job.get("look_ahead", True),
        )
        async with asyncio.TaskGroup() as group:
            task = group.create_task(stepper.run())
            await sink.stopped.wait()
            task.cancel()
        steps = sink.steps[: sink.wanted]
        assert all(tokens == self.rows for _, _, tokens in steps)
        await self.take_begun()
        pairs = list(pairwise(steps))
        seconds = [after[0] - before[0] for before, after in pairs]
        kernels = [after[1] - before[1] for before, after in pairs]
        return {
            "seconds": seconds,
            "overhead": [whole - part for whole, part in zip(seconds, kernels, strict=True)],
        }

    async def take_begun(self) -> None:
        """The loop has begun one more step, or two: run them again, they write the same, and take
        them."""
        while (plan := self.running._plan) is not None:
            self.running.commit(plan, await self.compute.begin(plan.rows).results())

    async def prefill(self, job: dict[str, Any]) -> dict[str, Any]:
        took: list[float] = []
        for _ in range(job["times"] + 1):
            scheduler = self.scheduler(job.get("budget", 1 << 20))
            sequence = self.sequence(job["tokens"], 1)
            began_at = time.perf_counter()
            scheduler.add(sequence)
            while scheduler.unfinished:
                plan = scheduler.plan()
                scheduler.commit(plan, await self.compute.begin(plan.rows).results())
            took.append(time.perf_counter() - began_at)
        return {"seconds": took[1:]}


async def serve(end: End, out: TextIO) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        job = json.loads(line)
        answer = await getattr(end, job["do"])(job)
        print(json.dumps(answer), file=out, flush=True)


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # answers alone, no log line
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--vllm-args", default="")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--num-blocks", type=int, default=64 * 140)
    parser.add_argument("--vocab", type=int, required=True)
    asked = parser.parse_args()
    config = DecodeConfig(
        engine=asked.engine,
        vllm_args=asked.vllm_args,
        model=asked.folder,
        device="cpu",
        dtype="bfloat16",
        threads=asked.threads,
        num_blocks=asked.num_blocks,
        kernels=asked.kernels,
        max_running=64,
        token_budget=MAX_LEN,
    )
    engine = asyncio.run(run_and_end("load", lambda: load_engine(config)))
    assert engine.spec.dtype == "bfloat16"
    about = dict(engine.machine)
    if isinstance(engine, TorchEngine):
        assert {weight.dtype for weight in engine.forward.weights} == {torch.bfloat16}
        about = {"forward": type(engine.forward).__name__}
    print(json.dumps(about), file=out, flush=True)
    # As the decode service's process does.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(End(engine, asked.vocab), out))


if __name__ == "__main__":
    main()
