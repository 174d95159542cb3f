"""One TOML file for all services: ``[mesh]`` for what they share, ``[gateway]``, ``[prefill]`` and
``[decode]`` for what is one role's own.

Keys are the names of the records in ``config.py``; values are plain numbers in the unit that the
name ends with, or text with a unit (``"30 s"``, ``"4 GiB"``). A role's section wins over
``[mesh]``. The whole file is checked when it is read, whoever reads it, so that a mistake in
``[decode]`` is found on the gateway's machine, too. Flags and variables are not known here.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, cast, get_args, get_type_hints

from shared.config import DecodeConfig, GatewayConfig, PrefillConfig, ServiceConfig, WorkerConfig
from shared.errors import InvalidRequest
from shared.quantity import read_quantity, unit_of

MESH: Final = "mesh"
ROLES: Final[Mapping[str, type[ServiceConfig]]] = {
    "gateway": GatewayConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}

MAX_FILE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class FileValue:
    """One value of a file, in the unit of its setting. section: where it stands."""

    value: Any
    section: str


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that was read and found right."""

    path: Path
    sections: Mapping[str, Mapping[str, Any]]

    def values(self, kind: type[ServiceConfig]) -> dict[str, FileValue]:
        """Return what the file says for one role: its own section wins over ``[mesh]``."""
        found: dict[str, FileValue] = {}
        for section in (MESH, role_of(kind)):
            for name, value in self.sections.get(section, {}).items():
                if name in field_types(kind):
                    found[name] = FileValue(value, section)
        return found


def role_of(kind: type[ServiceConfig]) -> str:
    """Return the name of the section of a service's configuration."""
    return next(role for role, known in ROLES.items() if issubclass(kind, known))


def field_types(kind: type[ServiceConfig]) -> dict[str, type]:
    """Return every setting of a service with its type; ``Path | None`` counts as Path."""
    hints = get_type_hints(kind)
    types: dict[str, type] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, UnionType):
            hint = next(part for part in get_args(hint) if part is not type(None))
        types[field.name] = hint
    return types


def section_fields(section: str) -> dict[str, type]:
    """Return what a section of its own has: for ``[mesh]`` whatever means the same to every
    service that knows it, for a role's section the rest."""
    # The gateway counts requests in max_running, a worker sequences: one number for both is wrong.
    own = {name for kind in ROLES.values() for name in inspect.get_annotations(kind)}
    shared = field_types(ServiceConfig) | field_types(WorkerConfig)
    mesh = {name: kind for name, kind in shared.items() if name not in own}
    if section == MESH:
        return mesh
    return {name: kind for name, kind in field_types(ROLES[section]).items() if name not in mesh}


def read_config_file(path: Path) -> ConfigFile:
    """Read a file and check all of it.

    Raises InvalidRequest, naming file, section and key: it cannot be read, or anything in it is
    wrong.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} is larger than {MAX_FILE_BYTES} bytes", param="config")
        document = tomllib.loads(text.decode())
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise InvalidRequest(
            f"cannot read the configuration {path} ({reason})", param="config"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not valid TOML: {error}", param="config") from None
    sections = {name: _read_section(path, name, content) for name, content in document.items()}
    file = ConfigFile(path, sections)
    for kind in ROLES.values():
        _check_ranges(file, kind)
    return file


def _read_section(path: Path, name: str, content: Any) -> dict[str, Any]:
    if name not in (MESH, *ROLES):
        raise InvalidRequest(_unknown_section(path, name), param=name)
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path}: [{name}] must be a section", param=name)
    known = section_fields(MESH) if name == MESH else field_types(ROLES[name])
    values: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", content).items():
        if key not in known:
            raise InvalidRequest(f"{path}: [{name}] {key}: {_unknown_key(name, key)}", param=key)
        try:
            values[key] = _read_value(key, known[key], value)
        except ValueError as error:
            raise InvalidRequest(f"{path}: [{name}] {key} {error}", param=key) from None
    return values


def _read_value(name: str, kind: type, value: Any) -> Any:
    """Raises ValueError: not of the setting's type; the message goes on after the setting's
    name."""
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {value!r}")
        return value
    if kind in (str, Path):
        if not isinstance(value, str):
            raise ValueError(f"must be text in quotes, not {value!r}")
        return (Path(value) if value else None) if kind is Path else value
    unit = unit_of(name)
    if isinstance(value, str) and unit:
        value = read_quantity(value, unit)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, not {value!r}")
    if kind is int:
        if value != int(value):
            unit_words = f" of {unit}" if unit else ""
            raise ValueError(f"must be a whole number{unit_words}")
        return int(value)
    return float(value)


def _check_ranges(file: ConfigFile, kind: type[ServiceConfig]) -> None:
    found = file.values(kind)
    try:
        kind(**{name: one.value for name, one in found.items()}).check()
    except InvalidRequest as error:
        # The file alone is at fault: the defaults beside it are in range.
        section = found[error.param].section if error.param in found else role_of(kind)
        flag = f"--{error.param.replace('_', '-')} "
        rule = error.message.removeprefix(flag)
        raise InvalidRequest(
            f"{file.path}: [{section}] {error.param} {rule}", param=error.param
        ) from None


def _unknown_section(path: Path, name: str) -> str:
    homes = [s for s in (MESH, *ROLES) if name in section_fields(s)]
    if homes:
        return f"{path}: {name} stands outside a section: it belongs in {_brackets(homes)}"
    near = difflib.get_close_matches(name, (MESH, *ROLES), n=1, cutoff=0.5)
    remedy = f"did you mean [{near[0]}]?" if near else f"there are {_brackets((MESH, *ROLES))}"
    return f"{path}: [{name}] is no section; {remedy}"


def _unknown_key(section: str, key: str) -> str:
    known = section_fields(MESH) if section == MESH else field_types(ROLES[section])
    homes = [s for s in (MESH, *ROLES) if s != section and key in section_fields(s)]
    if homes:
        return f"belongs in {_brackets(homes)}"
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}?" if near else "`pdmesh config --example` lists all"
    return f"there is no such setting; {remedy}"


def _brackets(sections: tuple[str, ...] | list[str]) -> str:
    return " or ".join(f"[{section}]" for section in sections)
