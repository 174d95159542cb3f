"""What only the garbage collector frees: objects that know each other in a circle."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_OURS = ("services.", "shared.", "grpclib.", "h2.")


@contextmanager
def no_collections() -> Iterator[None]:
    """Have the collector free nothing in between; what there was before is freed first."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def garbage() -> Counter[str]:
    """Count, by kind, what of our code, of our libraries' connections, tasks and errors nobody
    reaches any more and the collector alone would free. It is freed."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return Counter(_name(it) for it in gc.garbage if _counts(it))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()


def num_alive(kinds: Iterable[type]) -> Counter[str]:
    """Count what there is of these kinds, reached or not."""
    wanted = frozenset(kinds)
    # By type(): some objects of other libraries do things when they are asked for their class.
    return Counter(_name(it) for it in gc.get_objects() if type(it) in wanted)


def _counts(it: object) -> bool:
    kind = type(it)
    return kind.__module__.startswith(_OURS) or issubclass(kind, asyncio.Task | BaseException)


def _name(it: object) -> str:
    return f"{type(it).__module__}.{type(it).__qualname__}"


async def left_by(
    ending: Callable[[], Awaitable[Any]], kinds: Iterable[type] = (), *, settle_s: float = 0.1
) -> Counter[str]:
    """Return what an ending leaves: garbage, and how much more there is of these kinds
    ``settle_s`` after it.

    It happens three times: what is made once and kept, at the first one, is no matter of it.
    """
    await ending()
    await asyncio.sleep(settle_s)
    with no_collections():
        before = num_alive(kinds)
        for _ in range(2):
            await ending()
            await asyncio.sleep(settle_s)
        more = num_alive(kinds) - before
        return garbage() + more
