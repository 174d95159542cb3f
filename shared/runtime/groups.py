"""One error out of a TaskGroup: callers of our blocks see the error, not a group round it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import cast


def first_error(error: BaseException) -> BaseException:
    """Return the first leaf of a group: the error that came first and cancelled the rest."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return first_error(group.exceptions[0])
    return error


@contextlib.contextmanager
def plain_errors() -> Generator[None]:
    """Put this round an ``async with TaskGroup()`` whose callers expect plain exceptions.

    A cancellation from outside that met an error in the group wins: before Python 3.13 the error
    replaces it, and whoever retries after errors would never hear that it was cancelled.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        error = first_error(cast("BaseException", group))
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError from error
        raise error from error.__cause__
