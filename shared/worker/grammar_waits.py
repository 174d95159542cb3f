"""Who has a grammar that is being made ready on another thread, which may take a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from shared.schedule.scheduler import Scheduler
from shared.schedule.sequence import Sequence


def wait_for_grammar(
    sequence: Sequence,
    expect: Callable[[str], Future[Any]],
    scheduler: Scheduler,
    on_ready: Callable[[], None],
) -> None:
    """Have the scheduler pass a prompt or an answer over until its grammar is ready, if it has one.

    expect: ``Engine.expect``: nearly always it is ready at once, or was used before.
    """
    guide = sequence.guide
    if guide is None:
        return
    guide.ready = ready = expect(guide.grammar)
    if ready.done():
        return
    scheduler.await_grammar(sequence)
    loop = asyncio.get_running_loop()

    def go_on() -> None:
        scheduler.grammar_ended(sequence)
        on_ready()

    def is_ready(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and the worker with it
            loop.call_soon_threadsafe(go_on)

    ready.add_done_callback(is_ready)
