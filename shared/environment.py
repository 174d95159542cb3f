"""Configuration from environment variables, and back: ``PDMESH_MAX_RUNNING=8`` sets
``max_running``.

Works for every record of ``config.py``: strings, numbers, booleans and paths. It checks no values;
the record does (``check``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from shared.config import ServiceConfig
from shared.errors import InvalidRequest

PREFIX = "PDMESH_"

Config = TypeVar("Config", bound=ServiceConfig)


def _boolean(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return values[text.lower()]


_READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    str: (str, "text"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (_boolean, "true or false"),
    Path: (Path, "a path"),
}


def config_from_environment(kind: type[Config], environment: Mapping[str, str]) -> Config:
    """Return a checked configuration: variables that are set and not empty, defaults for the rest.

    Raises InvalidRequest, naming the variable or the flag: a value cannot be read or is out of
    range.
    """
    values: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        text = environment.get(PREFIX + field.name.upper(), "").strip()
        if not text:
            continue
        hint = hints[field.name]
        if isinstance(hint, UnionType):
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        read, what = _READERS[hint]
        try:
            values[field.name] = read(text)
        except (ValueError, KeyError):
            raise InvalidRequest(
                f"{PREFIX}{field.name.upper()} must be {what}, not {text!r}", param=field.name
            ) from None
    config = kind(**values)
    config.check()
    return config


def environment_of(config: ServiceConfig) -> dict[str, str]:
    """Return the variables that give a child process this configuration: one a field."""
    variables: dict[str, str] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        text = "" if value is None else str(value)
        variables[PREFIX + field.name.upper()] = text.lower() if isinstance(value, bool) else text
    return variables
