"""One error out of a TaskGroup: callers of our blocks see the error, not a group round it.

An error keeps the frames that it came through, and these what their names say: where a name says
the error, or the task that it ended, only the garbage collector would free them. No name here does.
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import Any, cast


def first_error(error: BaseException) -> BaseException:
    """Return the first leaf of a group: the error that came first and cancelled the rest."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return first_error(group.exceptions[0])
    return error


class TaskGroup(asyncio.TaskGroup):
    """A group whose task counts no cancellation that the group made itself: before Python 3.13 one
    stays (``Task.cancelling``) where a child fails after the body has ended, and looks like one
    from outside."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        group: Any = self
        is_missed = sys.version_info < (3, 13) and not group._parent_cancel_requested
        try:
            await super().__aexit__(kind, error, traceback)
        except (BaseExceptionGroup, asyncio.CancelledError) as failure:
            failure.__traceback__ = None  # a frame of asyncio's that names it, before Python 3.13
            if isinstance(error, asyncio.CancelledError):
                error.__traceback__ = None  # a frame of contextlib's that names it, since 3.13
            raise
        finally:
            if is_missed and group._parent_cancel_requested:
                group._parent_task.uncancel()
            group._parent_task = None
            del error, traceback


class _PlainErrors:
    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(failure, BaseExceptionGroup):
            return
        error = first_error(cast("BaseException", failure))
        task = asyncio.current_task()
        try:
            if task is not None and task.cancelling():
                raise asyncio.CancelledError from error
            raise error from error.__cause__
        finally:
            error.__context__ = None  # the group that holds it
            del error, failure, traceback, task


def plain_errors() -> _PlainErrors:
    """Put this round an ``async with TaskGroup()``, of ours, whose callers expect plain exceptions.

    A cancellation from outside that met an error in the group wins: before Python 3.13 the error
    replaces it, and whoever retries after errors would never hear that it was cancelled.
    """
    return _PlainErrors()
