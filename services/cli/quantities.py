"""Flags that are times, sizes, or what a link carries: how they are written, read and shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

from cyclopts import Parameter, Token

from services.cli.words import speed
from services.planner.core.kv_size import read_link
from shared.errors import InvalidRequest
from shared.quantity import read_quantity, write_quantity

MOST_BYTES: Final = 1 << 50
"""As of a worker's own settings."""


def _quantity(flag: str, text: str, unit: str) -> float:
    try:
        return float(read_quantity(text, unit))
    except ValueError as error:
        raise InvalidRequest(f"{flag} {error}") from None


def seconds(flag: str, text: str) -> float:
    """Return a time: '500ms', '30 s', '2 min'; a bare number is seconds. Raises InvalidRequest."""
    is_bare = text.replace(".", "", 1).isdigit()
    return _quantity(flag, f"{text} s" if is_bare else text, "s")


def _step_seconds(flag: str, text: str) -> float:
    """A time that is too short to be written in seconds."""
    return _quantity(flag, text, "s")


def _limit(flag: str, text: str) -> float:
    if not (found := seconds(flag, text)):
        raise InvalidRequest(f"{flag} must be above 0: nobody could keep 0")
    return found


def size(flag: str, text: str) -> int:
    """Return a size: '4GB', '512 MiB'; a bare number is bytes. Raises InvalidRequest."""
    found = int(_quantity(flag, f"{text} B" if text.lstrip("-").isdigit() else text, "B"))
    if found > MOST_BYTES:
        raise InvalidRequest(f"{flag} must be at most {MOST_BYTES} bytes, not {text!r}")
    return found


def _read_by(read: Callable[[str, str], float]) -> Parameter:
    def convert(_: Any, tokens: Sequence[Token]) -> float:
        return read(tokens[0].keyword or "a quantity", tokens[0].value)

    return Parameter(converter=convert, n_tokens=1, accepts_keys=False)


_SHOWN: Final = Parameter(show_default=lambda value: value and write_quantity(value, "s"))

Seconds = Annotated[float, _read_by(seconds), _SHOWN]
StepSeconds = Annotated[float, _read_by(_step_seconds), _SHOWN]
Size = Annotated[int, _read_by(size)]
LinkRate = Annotated[
    float, _read_by(read_link), Parameter(show_default=lambda value: value and speed(value / 1e9))
]
"""Bytes a second."""

TtftFlag = Annotated[
    float, _read_by(_limit), _SHOWN, Parameter(help="Limit of the time to first token: 500ms, 2s.")
]
TpotFlag = Annotated[
    float,
    _read_by(_limit),
    _SHOWN,
    Parameter(help="Limit of the mean time of a further token: 50ms."),
]
