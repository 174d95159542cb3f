"""``pdmesh config``: what each service would run with and where each value comes from, and an
example of a file with every setting.

Both are TOML, made from the records of ``shared/config.py`` alone: what is printed can be read back
with ``--config``.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import Parameter

from services.cli.flags import field_texts
from services.cli.sources import OUTPUT, QUIET, ConfigFlag, JsonFlag, with_config_file
from services.cli.words import print_json
from shared.config import SECRET_SETTINGS
from shared.quantity import unit_of, write_quantity
from shared.settings import MESH, ROLES, Setting, read_config, read_settings, section_fields

EXAMPLE_HEAD: Final = """\
# One file for all services: pdmesh gateway --config mesh.toml, and so on, or PDMESH_CONFIG.
# Every setting is here with its default; remove the # before what you change.
# Flags win over PDMESH_* variables, those over this file, and this over the defaults.
# Durations: us, ms, s, min, h. Sizes: B, KiB, MiB, GiB, TiB, kB, MB, GB, TB. Or a plain number in
# the unit that the name ends with: drain_s = 30.
"""

HIDDEN: Final = "(hidden)"
"""Stands for a secret."""

_SECTION_HEADS: Final = {
    MESH: "What services share. A role's own section may set any of these for that role alone.",
    "gateway": "Clients on one side, workers on the other.",
    "prefill": "Computes prompts and pushes their KV.",
    "decode": "Receives KV, runs the batch, streams tokens.",
}


def config(
    *,
    file: ConfigFlag = None,
    example: Annotated[bool, QUIET, Parameter(group=OUTPUT)] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the configuration that the services would run with, and where each value is from.

    It is checked like at a start.

    Parameters
    ----------
    example
        Print a file with every setting explained.
    """
    if example:
        print(example_file(), end="")
        return
    environment = with_config_file(file)
    settings: dict[str, dict[str, Setting]] = {}
    for role, kind in ROLES.items():
        read_config(kind, environment)
        settings[role] = {
            name: dataclasses.replace(one, value=HIDDEN)
            if name in SECRET_SETTINGS and one.value
            else one
            for name, one in read_settings(kind, environment).items()
        }
    if as_json:
        print_json(settings)
        return
    for role, found in settings.items():
        print(f"[{role}]")
        pairs = {name: f"{name} = {toml_value(name, one.value)}" for name, one in found.items()}
        width = max(map(len, pairs.values()))
        for name, one in found.items():
            origin = f"{one.origin}: {one.where}" if one.where else one.origin
            print(f"{pairs[name]:<{width}}  # {origin}")
        print()


def example_file() -> str:
    """Return a file with every setting, its help and its default; settings are commented out as
    ``#name = value``, prose as ``# text``."""
    lines = [EXAMPLE_HEAD.rstrip()]
    for section in (MESH, *ROLES):
        lines += ["", f"# {_SECTION_HEADS[section]}", f"[{section}]"]
        roles = [section] if section in ROLES else list(ROLES)
        for name in section_fields(section):
            # Whoever knows the setting has the same help and default for it.
            role = next(r for r in reversed(roles) if hasattr(ROLES[r], name))
            text = " ".join(field_texts(ROLES[role])[name].split())
            default = next(it.default for it in dataclasses.fields(ROLES[role]) if it.name == name)
            lines += ["", *textwrap.wrap(text, 98, initial_indent="# ", subsequent_indent="# ")]
            lines.append(f"#{name} = {toml_value(name, default)}")
    return "\n".join(lines) + "\n"


def toml_value(name: str, value: Any) -> str:
    """Write a setting's value so that the file reads it back; quantities with their unit."""
    if value is None or isinstance(value, str | Path):
        return json.dumps("" if value is None else str(value), ensure_ascii=False)
    if isinstance(value, bool):
        return str(value).lower()
    unit = unit_of(name)
    return json.dumps(write_quantity(value, unit)) if unit else repr(value)
