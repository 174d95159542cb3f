"""One error out of a TaskGroup: callers of our blocks see the error, not a group round it."""

from __future__ import annotations

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
    """Put this round an ``async with TaskGroup()`` whose callers expect plain exceptions."""
    try:
        yield
    except BaseExceptionGroup as group:
        error = first_error(cast("BaseException", group))
        raise error from error.__cause__
