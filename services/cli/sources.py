"""Where a flag's value comes from if it was not given: its variable, then the TOML file of
``--config``. Cyclopts asks these in turn for every command."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

from cyclopts import App, ArgumentCollection, Group, Parameter, Token
from cyclopts.config import Env

from shared.config_file import ROLES, read_config_file
from shared.environment import CONFIG_VARIABLE, PREFIX

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

JsonFlag = Annotated[
    bool,
    Parameter(
        name="--json", negative="", show_env_var=False, show_default=False, help="Print JSON."
    ),
]
"""The parameter ``as_json`` of every command that has something to tell programs."""


def flag_of(name: str) -> str:
    """Return the flag of a setting: 'max_running' is --max-running."""
    return f"--{name.replace('_', '-')}"


def with_config_file(file: Path | None) -> Mapping[str, str]:
    """Return our environment with the file that a flag named."""
    return os.environ if file is None else {**os.environ, CONFIG_VARIABLE: str(file)}


class FileSource:
    """The sections of ``--config FILE`` for a command that is one service."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what neither a flag nor a variable has set. Raises InvalidRequest."""
        role = commands[-1] if commands else ""
        if role not in ROLES:
            return
        (file, *_) = arguments.match("--config")
        if not file.tokens:
            return
        path = file.tokens[0].value
        for name, found in read_config_file(Path(path)).values(ROLES[role]).items():
            (argument, *_) = arguments.match(flag_of(name))
            if not argument.tokens and found.value is not None:
                text = str(found.value)
                argument.append(
                    Token(
                        keyword=f"{path} [{found.section}]",
                        value=text.lower() if isinstance(found.value, bool) else text,
                        source="file",
                    )
                )


class Variables(Env):
    """PDMESH_* for every flag that shows its variable: what a client's flag shares its name with a
    service's setting has none."""

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what no flag has set."""
        named = (argument for argument in arguments if argument.parameter.show_env_var)
        super().__call__(app, commands, ArgumentCollection(named))


SOURCES: Final = (Variables(PREFIX, command=False), FileSource())
