"""The one reader of settings: variables (``PDMESH_MAX_RUNNING=8`` sets ``max_running``), then the
TOML file that ``PDMESH_CONFIG`` names, then the defaults of the records in ``config.py``; and back.

The file is one for all services: ``[mesh]`` for what they share, ``[gateway]``, ``[prefill]`` and
``[decode]`` for what is one role's own, which wins over ``[mesh]``; ``[tenants.NAME]`` for the
gateway's tenants (``tenants.py``). Values are plain numbers in the
unit that the name ends with, or text with a unit (``"30 s"``, ``"4 GiB"``). All of it is checked
when it is read, whoever reads it, so that a mistake in ``[decode]`` is found on the gateway's
machine, too. The command line (``services/cli/sources.py``) lays its flags over what is read here.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Final, TypeVar, cast, get_args, get_type_hints

from shared.config import DecodeConfig, GatewayConfig, PrefillConfig, ServiceConfig, WorkerConfig
from shared.errors import InvalidRequest
from shared.quantity import read_quantity, unit_of
from shared.tenants import TABLE, read_toml, tenants_of

PREFIX: Final = "PDMESH_"
CONFIG_VARIABLE: Final = "PDMESH_CONFIG"

MESH: Final = "mesh"
ROLES: Final[Mapping[str, type[ServiceConfig]]] = {
    "gateway": GatewayConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
}
SECTIONS: Final = (MESH, *ROLES)

Config = TypeVar("Config", bound=ServiceConfig)
Sections = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it comes from: origin 'env', 'file' or 'default'; where: which variable,
    which section of which file."""

    value: Any
    origin: str = "default"
    where: str = ""


def read_settings(kind: type[ServiceConfig], environment: Mapping[str, str]) -> dict[str, Setting]:
    """Return every setting of a service; a variable that is empty counts as not set.

    Raises InvalidRequest, naming the variable, or file and key: a value cannot be read.
    """
    settings = {field.name: Setting(field.default) for field in dataclasses.fields(kind)}
    path = environment.get(CONFIG_VARIABLE, "").strip()
    if path:
        sections = read_config_file(Path(path))
        for name, (value, section) in _of_role(sections, kind).items():
            settings[name] = Setting(value, "file", f"{path} [{section}]")
        if TABLE in sections and TABLE in settings and settings[TABLE].origin == "default":
            settings[TABLE] = Setting(Path(path), "file", f"{path} [{TABLE}]")
    for name, type_ in field_types(kind).items():
        variable = PREFIX + name.upper()
        text = environment.get(variable, "").strip()
        if text:
            read, what = _SIZE if unit_of(name) == "B" else _TEXTS[type_]
            try:
                settings[name] = Setting(read(text), "env", variable)
            except (ValueError, KeyError):
                words = f"{variable} must be {what}, not {text!r}"
                raise InvalidRequest(words, param=name) from None
    return settings


def read_config(kind: type[Config], environment: Mapping[str, str]) -> Config:
    """Return the configuration that ``read_settings`` finds, checked.

    Raises InvalidRequest, naming the variable, the flag, or file and key: a value cannot be read
    or is out of range.
    """
    settings = read_settings(kind, environment)
    config = kind(**{name: setting.value for name, setting in settings.items()})
    config.check()
    return config


def environment_of(config: ServiceConfig) -> dict[str, str]:
    """Return the variables that give a child process this configuration and no other: one a field,
    and no file."""
    fields = dataclasses.fields(config)
    variables = {PREFIX + f.name.upper(): text_of(getattr(config, f.name)) for f in fields}
    return {CONFIG_VARIABLE: "", **variables}


def text_of(value: Any) -> str:
    """Return the text that a variable or a flag says a value with."""
    text = "" if value is None else str(value)
    return text.lower() if isinstance(value, bool) else text


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


# --- the file -----------------------------------------------------------------------------------


def read_config_file(path: Path) -> Sections:
    """Read a file and check all of it.

    Raises InvalidRequest, naming file, section and key: it cannot be read, or anything in it is
    wrong.
    """
    document = read_toml(path, f"the configuration {path}", param="config")
    tenants = document.pop(TABLE, None)
    sections = {name: _section(path, name, content) for name, content in document.items()}
    if tenants is not None:
        sections[TABLE] = dict[str, Any](tenants_of(tenants, path))
    for kind in ROLES.values():
        found = _of_role(sections, kind)
        try:
            kind(**{name: value for name, (value, _) in found.items()}).check()
        except InvalidRequest as error:
            # The file alone is at fault: the defaults beside it are in range.
            _, section = found.get(error.param, (None, role_of(kind)))
            rule = error.message.removeprefix(f"--{error.param.replace('_', '-')} ")
            raise _mistake(path, section, error.param, rule) from None
    return sections


def _of_role(sections: Sections, kind: type[ServiceConfig]) -> dict[str, tuple[Any, str]]:
    """What a file says for one role, with the section where it stands."""
    known = field_types(kind)
    return {
        name: (value, section)
        for section in (MESH, role_of(kind))
        for name, value in sections.get(section, {}).items()
        if name in known
    }


def _section(path: Path, name: str, content: Any) -> dict[str, Any]:
    if name not in SECTIONS:
        raise InvalidRequest(f"{path}: {_no_section(name)}", param=name)
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path}: [{name}] must be a section", param=name)
    known = section_fields(MESH) if name == MESH else field_types(ROLES[name])
    values: dict[str, Any] = {}
    for key, value in cast("dict[str, Any]", content).items():
        if key not in known:
            raise _mistake(path, name, f"{key}:", _no_setting(name, key, known))
        try:
            values[key] = _value(key, known[key], value)
        except (ValueError, OverflowError) as error:
            raise _mistake(path, name, key, str(error)) from None
    return values


def _mistake(path: Path, section: str, key: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: [{section}] {key} {rule}", param=key.rstrip(":"))


def _value(name: str, kind: type, value: Any) -> Any:
    """Raises ValueError: not of the setting's type; the message goes on after its name."""
    if kind is bool or kind in (str, Path):
        wanted, what = (bool, "true or false") if kind is bool else (str, "text in quotes")
        if not isinstance(value, wanted):
            raise ValueError(f"must be {what}, not {value!r}")
        return (Path(cast("str", value)) if value else None) if kind is Path else value
    unit = unit_of(name)
    if isinstance(value, str) and unit:
        value = read_quantity(value, unit)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, not {value!r}")
    if kind is int and value != int(value):
        raise ValueError(f"must be a whole number{f' of {unit}' if unit else ''}")
    return kind(value)


def _no_section(name: str) -> str:
    homes = [section for section in SECTIONS if name in section_fields(section)]
    if homes:
        return f"{name} stands outside a section: it belongs in {_brackets(homes)}"
    near = difflib.get_close_matches(name, SECTIONS, n=1, cutoff=0.5)
    remedy = f"did you mean [{near[0]}]?" if near else f"there are {_brackets(SECTIONS)}"
    return f"[{name}] is no section; {remedy}"


def _no_setting(section: str, key: str, known: Mapping[str, type]) -> str:
    homes = [home for home in SECTIONS if home != section and key in section_fields(home)]
    if homes:
        return f"belongs in {_brackets(homes)}"
    near = difflib.get_close_matches(key.lower().replace("-", "_"), known, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]}?" if near else "`pdmesh config --example` lists all"
    return f"there is no such setting; {remedy}"


def _brackets(sections: Sequence[str]) -> str:
    return " or ".join(f"[{section}]" for section in sections)


def _boolean(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    return values[text.lower()]


def _size(text: str) -> int:
    return int(read_quantity(f"{text} B" if text.isdigit() else text, "B"))


_SIZE: Final = (_size, "a size, as 4GB")

_TEXTS: Final[dict[type, tuple[Callable[[str], Any], str]]] = {
    str: (str, "text"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (_boolean, "true or false"),
    Path: (Path, "a path"),
}
