"""Configuration from environment variables and the TOML file that ``PDMESH_CONFIG`` names, and
back: ``PDMESH_MAX_RUNNING=8`` sets ``max_running``.

Works for every record of ``config.py``: strings, numbers, booleans and paths. Variables win over
the file, the file over the defaults. It checks no values; the record does (``check``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from shared.config import ServiceConfig
from shared.config_file import field_types, read_config_file
from shared.errors import InvalidRequest

PREFIX: Final = "PDMESH_"
CONFIG_VARIABLE: Final = "PDMESH_CONFIG"

Config = TypeVar("Config", bound=ServiceConfig)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it comes from: origin 'flag', 'env', 'file' or 'default'; where: which
    flag, which variable, which section of which file."""

    value: Any
    origin: str = "default"
    where: str = ""


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


def settings_from_environment(
    kind: type[ServiceConfig], environment: Mapping[str, str]
) -> dict[str, Setting]:
    """Return every setting of a service: variables that are set and not empty, then the file, then
    the defaults.

    Raises InvalidRequest, naming the variable, or file and key: a value cannot be read.
    """
    settings = {field.name: Setting(field.default) for field in dataclasses.fields(kind)}
    path = environment.get(CONFIG_VARIABLE, "").strip()
    if path:
        for name, found in read_config_file(Path(path)).values(kind).items():
            settings[name] = Setting(found.value, "file", f"{path} [{found.section}]")
    for name, type_ in field_types(kind).items():
        variable = PREFIX + name.upper()
        text = environment.get(variable, "").strip()
        if not text:
            continue
        read, what = _READERS[type_]
        try:
            settings[name] = Setting(read(text), "env", variable)
        except (ValueError, KeyError):
            raise InvalidRequest(f"{variable} must be {what}, not {text!r}", param=name) from None
    return settings


def config_from_environment(kind: type[Config], environment: Mapping[str, str]) -> Config:
    """Return the checked configuration that ``settings_from_environment`` finds.

    Raises InvalidRequest, naming the variable, the flag, or file and key: a value cannot be read
    or is out of range.
    """
    settings = settings_from_environment(kind, environment)
    config = kind(**{name: setting.value for name, setting in settings.items()})
    config.check()
    return config


def environment_of(config: ServiceConfig) -> dict[str, str]:
    """Return the variables that give a child process this configuration and no other: one a field,
    and no file."""
    variables = {CONFIG_VARIABLE: ""}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        text = "" if value is None else str(value)
        variables[PREFIX + field.name.upper()] = text.lower() if isinstance(value, bool) else text
    return variables
