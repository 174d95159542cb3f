"""Where a flag's value comes from if it was not given: of a service's setting what
``shared/settings.py`` reads, of any other flag its own variable. Cyclopts asks these in turn for
every command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, get_args

from cyclopts import App, ArgumentCollection, Group, Parameter, Token
from cyclopts.config import Env

from shared.config import PrefillConfig
from shared.errors import InvalidRequest
from shared.settings import CONFIG_VARIABLE, PREFIX, ROLES, read_settings, text_of

OUTPUT: Final = Group("Output", sort_key=8)
PLAIN: Final = Parameter(show_env_var=False)
QUIET: Final = Parameter(show_env_var=False, negative="", show_default=False)

ConfigFlag = Annotated[
    Path | None,
    Parameter(
        name="--config",
        group=Group("Configuration file", sort_key=9),
        help="TOML file with the sections [mesh], [gateway], [prefill] and [decode]; flags and "
        "variables win over it. pdmesh config --example prints one.",
    ),
]
"""The parameter ``file`` of every command that starts a service."""

JsonFlag = Annotated[bool, QUIET, Parameter(name="--json", help="Print JSON.", group=OUTPUT)]
"""The parameter ``as_json`` of every command that has something to tell programs."""


def flag_of(name: str) -> str:
    """Return the flag of a setting: 'max_running' is --max-running."""
    return f"--{name.replace('_', '-')}"


def with_config_file(file: Path | None) -> Mapping[str, str]:
    """Return our environment with the file that a flag named."""
    return os.environ if file is None else {**os.environ, CONFIG_VARIABLE: str(file)}


class Settings:
    """The settings of a command that is one service."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what no flag has set. Raises InvalidRequest."""
        kind = {**ROLES, "profile": PrefillConfig}.get(commands[-1] if commands else "")
        if kind is None:
            return
        (file, *_) = arguments.match("--config")
        path = Path(file.tokens[0].value) if file.tokens else None
        for name, setting in read_settings(kind, with_config_file(path)).items():
            (argument, *_) = arguments.match(flag_of(name))
            if not argument.tokens and setting.origin != "default" and setting.value is not None:
                text, origin = text_of(setting.value), setting.origin
                argument.append(Token(keyword=setting.where, value=text, source=origin))


class Variables(Env):
    """PDMESH_* for every flag that shows its variable: what a client's flag shares its name with a
    service's setting has none."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what no flag has set."""
        named = (argument for argument in arguments if argument.parameter.show_env_var)
        super().__call__(app, commands, ArgumentCollection(named))


def whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise InvalidRequest for 1.5 where a whole number is asked for: cyclopts would round it."""
    for argument in arguments:
        if int not in (argument.hint, *get_args(argument.hint)) or argument.parameter.converter:
            continue
        for token in argument.tokens:
            try:
                is_whole = "." not in token.value or float(token.value).is_integer()
            except ValueError:
                continue  # cyclopts says so
            if not is_whole:
                name = token.keyword or argument.name
                raise InvalidRequest(f"{name} must be a whole number, not {token.value!r}")


SOURCES: Final = (Settings(), Variables(PREFIX, command=False), whole_numbers)
