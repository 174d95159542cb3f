"""Measures a machine with the worker's own engine, copies and transport, in a second or two.

    steps     of 16 tokens, 32, 64, ... as far as the time reaches    -> saturating_tokens
    copies    one step alone, one while KV is copied beside it, ...   -> interference
    message   a header to this process itself, as a frame goes        -> message_s

Nobody may hold blocks of the pool yet. The engine's own clock times steps, so that no loop and no
thread's turn is in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from statistics import quantiles

from shared.engine.base import Engine
from shared.engine.memory import staging
from shared.engine.worker import ComputeRunner
from shared.errors import TransferFailed
from shared.profile import machine
from shared.profile.machine import MachineProfile, Sample
from shared.profile.step_rows import step_s
from shared.step import StepRow
from shared.transfer.frames import HEADER_BYTES
from shared.transfer.plan import FrameRule, plan_frames
from shared.transport.base import Outcome, Transport
from shared.transport.pairing import close_endpoint

SHORTEST = 16
"""Tokens of the first prompt; each is twice the one before it."""

SWEEP_S, COPIES_S = 1.2, 0.4
"""Seconds for the steps of all lengths, and for those beside copies."""

CHECK_S = 0.2
"""Seconds for the steps that a kept profile is held against."""

OUTDONE_BY = 1.5
"""So much quicker no later step is where nothing disturbed the first ones."""

_MOST_ROUNDS, _LEAST_PAIRS, _NUM_MESSAGES = 20, 9, 50

Stopwatch = Callable[[], float]


async def measure(
    engine: Engine,
    compute: ComputeRunner,
    transport: Transport,
    stopwatch: Stopwatch,
    *,
    most_tokens: int,
) -> MachineProfile:
    """Return what this machine can do. most_tokens: no longer prompt is tried.

    Takes ``SWEEP_S`` and ``COPIES_S`` at most, unless a single step takes longer.
    Raises EngineFailed: the device failed. TransferFailed: no message to ourselves came through.
    """
    samples = await sweep(engine, compute, stopwatch, lengths=doubled(SHORTEST, most_tokens))
    return MachineProfile(
        saturating_tokens=machine.saturating_tokens(samples),
        tokens_per_s=machine.tokens_per_s(samples),
        message_s=await _message_s(engine, compute, transport, stopwatch),
        interference=await _interference(engine, compute, stopwatch, samples),
        samples=tuple(samples),
    )


async def sweep(
    engine: Engine,
    compute: ComputeRunner,
    stopwatch: Stopwatch,
    *,
    lengths: Sequence[int],
    limit_s: float = SWEEP_S,
) -> list[Sample]:
    """Time the step of one prompt of each length, ascending, as far as the pool and the time reach:
    a length is begun if it will leave half of what is left to repeat them all.

    The quickest of all repetitions counts: what disturbs a step only ever slows it. At least the
    first length is timed, or a shorter one if the pool is that small.
    Raises EngineFailed: the device failed.
    """
    room = min(engine.spec.max_model_len - 1, engine.num_blocks * engine.block_size)
    rows = [_prompt(engine, min(count, room)) for count in lengths[:1]]
    rows += [_prompt(engine, count) for count in lengths[1:] if count <= room]
    await step_s(compute, [rows[0]])  # kernels are compiled at their first use
    ends_at = stopwatch() + limit_s
    quickest_s: list[float] = []
    for row in rows:
        if quickest_s and 2 * quickest_s[-1] > (ends_at - stopwatch()) / 2:
            break
        quickest_s.append(await step_s(compute, [row]))
    # Round after round, not length after length: a disturbance then costs every length one sample.
    for _ in range(_MOST_ROUNDS):
        for at, row in enumerate(rows[: len(quickest_s)]):
            if stopwatch() + quickest_s[at] < ends_at:
                quickest_s[at] = min(quickest_s[at], await step_s(compute, [row]))
    return [(len(row.token_ids), s) for row, s in zip(rows, quickest_s, strict=False)]


async def is_outdone(
    engine: Engine, compute: ComputeRunner, stopwatch: Stopwatch, samples: Sequence[Sample]
) -> bool:
    """Whether a step is now so much quicker that something disturbed the machine when it was
    measured. That one is slower tells nothing: it may be disturbed now. Raises EngineFailed."""
    if not samples:
        return False
    known = dict(samples)
    now = await sweep(engine, compute, stopwatch, lengths=list(known), limit_s=CHECK_S)
    return any(seconds * OUTDONE_BY < known.get(count, 0.0) for count, seconds in now)


def doubled(shortest: int, longest: int) -> list[int]:
    """Return lengths up to the longest, each twice the one before it."""
    num_doublings = max(1, longest // shortest).bit_length()
    return [min(shortest, longest) << count for count in range(num_doublings)]


def _prompt(engine: Engine, num_tokens: int) -> StepRow:
    num_blocks = -(-num_tokens // engine.block_size)
    token_ids = [1 % engine.spec.vocab_size] * num_tokens
    return StepRow(token_ids=token_ids, start=0, block_table=range(num_blocks))


async def _interference(
    engine: Engine, compute: ComputeRunner, stopwatch: Stopwatch, samples: Sequence[Sample]
) -> float:
    """Steps, every other one while frames of a prompt as long are gathered, one after the other:
    what a push does but for the wire. Steps as long as time allows: a short one sees few copies."""
    lengths = [count for count, seconds in samples if seconds <= COPIES_S / _LEAST_PAIRS / 2]
    most_tokens = engine.num_blocks // 2 * engine.block_size
    num_tokens = min(max(lengths, default=samples[0][0]), most_tokens)
    if not num_tokens:
        return 0.0  # a pool of one block: nothing can be copied beside a step
    row = _prompt(engine, num_tokens)
    used = len(row.block_table)
    copy = _frame_copier(engine, range(used, 2 * used), num_tokens)
    ends_at = stopwatch() + COPIES_S
    alone_s: list[float] = []
    beside_s: list[float] = []
    # By turns, so that what else the machine does falls on both alike.
    while not alone_s or stopwatch() < ends_at:
        alone_s.append(await step_s(compute, [row]))
        async with asyncio.TaskGroup() as tasks:
            step = tasks.create_task(step_s(compute, [row]))
            while not step.done():
                await compute.copy(copy)
        beside_s.append(step.result())
    return machine.interference(alone_s, beside_s)


def _frame_copier(engine: Engine, table: range, num_tokens: int) -> Callable[[], None]:
    """Return what the copy thread does for one frame of a push."""
    frame = plan_frames(FrameRule(layout=engine.layout), 0, num_tokens, skip=0, first_idx=0)[0]
    slot = engine.new_buffer(frame.num_bytes)
    payload = staging.payload(slot, frame.payload_bytes)
    header = bytes(HEADER_BYTES)
    has_digest = not staging.is_on_device(slot)

    def copy() -> None:
        engine.gather(table, frame.start, frame.stop, frame.first_layer, frame.last_layer, payload)
        if has_digest:
            staging.digest(payload)
        staging.write(slot, header)

    return copy


async def _message_s(
    engine: Engine, compute: ComputeRunner, transport: Transport, stopwatch: Stopwatch
) -> float:
    """A header to ourselves, from the loop through the copy thread until its send settles: no wire,
    for the latency of a wire is hidden when frames follow each other, and these costs are not."""
    slot, inbox = engine.new_buffer(HEADER_BYTES), engine.new_buffer(HEADER_BYTES)
    header = bytes(HEADER_BYTES)
    seconds: list[float] = []
    endpoint = await transport.connect(transport.address, lambda: None)
    try:
        for tag in range(_NUM_MESSAGES):
            arrival = transport.receive(endpoint, inbox, HEADER_BYTES, tag)
            began_at = stopwatch()
            await compute.copy(lambda: staging.write(slot, header))
            sent = endpoint.send(slot, HEADER_BYTES, tag)
            outcome = await sent.settled()
            seconds.append(stopwatch() - began_at)
            if outcome is not Outcome.DONE:
                raise TransferFailed(f"no message to ourselves: {sent.error}", code="profile")
            await arrival.settled()
    finally:
        await close_endpoint(endpoint)
    return quantiles(seconds)[0]  # what disturbs a message only ever slows it
