"""Tenants: who shares the mesh, and on what terms. One tenant per API key, named as that is.

The terms stand in a TOML file, a table ``[tenants.NAME]`` each; ``settings.py`` lets them stand in
the configuration file, too. What a request asks for itself is an ``Asked``; the gateway's core
(``core/admission/tenants.py``) puts the two together. Times are milliseconds here, as clients
write them.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, cast

import msgspec

from shared.errors import InvalidRequest

MAX_PRIORITY: Final = 7
DEFAULT_PRIORITY: Final = 3
"""Of a request that names none: there is room above and below."""
MAX_LIMIT_MS: Final = 600_000.0
"""The longest that a request may give its first token, and each one after: ten minutes."""
MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0
MAX_FILE_BYTES: Final = 1 << 20

TABLE: Final = "tenants"

LimitMs = Annotated[float, msgspec.Meta(gt=0, le=MAX_LIMIT_MS)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """weight: its share of the mesh beside others'. ttft_ms, tpot_ms: limits of requests that bring
    none. max_priority: the highest that its requests may ask for. max_running: requests at once in
    each gateway process, None = no limit; more wait."""

    weight: Annotated[float, msgspec.Meta(ge=MIN_WEIGHT, le=MAX_WEIGHT)] = 1.0
    ttft_ms: LimitMs | None = None
    tpot_ms: LimitMs | None = None
    max_priority: Annotated[int, msgspec.Meta(ge=0, le=MAX_PRIORITY)] = MAX_PRIORITY
    max_running: Annotated[int, msgspec.Meta(ge=1, le=65_536)] | None = None


class Asked(NamedTuple):
    """What a request asks for, in ranges already checked; None = as its tenant has it."""

    tenant: str = ""
    priority: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None


NOTHING_ASKED: Final = Asked()


def read_tenants(path: Path) -> dict[str, Tenant]:
    """Return the tenants of a TOML file; other tables in it are not looked at.

    Raises InvalidRequest, naming file, table and key: it cannot be read, or breaks a rule.
    """
    document = read_toml(path, f"the tenants in {path}", param=TABLE)
    if document and TABLE not in document:  # nothing at all is nobody
        raise InvalidRequest(f"{path} has no section [{TABLE}.NAME]", param=TABLE)
    return tenants_of(document.get(TABLE, {}), path)


def read_toml(path: Path, what: str, *, param: str) -> dict[str, Any]:
    """Return a TOML file; ``what`` and ``param`` name it in errors.

    Raises InvalidRequest: it cannot be read, is too large, or no TOML.
    """
    try:
        if stat.S_ISFIFO(path.stat().st_mode):
            reason = "it is a pipe, which is empty when it is read again: write it to a file"
            raise InvalidRequest(f"cannot read {what} ({reason})", param=param)
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise InvalidRequest(f"{path} is larger than {MAX_FILE_BYTES} bytes", param=param)
        return tomllib.loads(text.decode("utf-8-sig"))
    except OSError as error:
        reason = os.strerror(error.errno or 0).lower()
        raise InvalidRequest(f"cannot read {what} ({reason})", param=param) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} is not valid TOML: {error}", param=param) from None


def tenants_of(tables: Any, path: Path) -> dict[str, Tenant]:
    """Return the tenants of the table ``tenants``. Raises InvalidRequest: see ``read_tenants``."""
    if not isinstance(tables, dict):
        raise InvalidRequest(f"{path}: [{TABLE}.NAME] must be a section", param=TABLE)
    found: dict[str, Tenant] = {}
    for name, table in cast("Mapping[str, Any]", tables).items():
        try:
            found[name] = msgspec.convert(table, Tenant)
        except msgspec.ValidationError as error:
            rule, _, where = str(error).partition(" - at `$.")
            key = f"{where.rstrip('`')} " if where else ""
            raise InvalidRequest(
                f"{path}: [{TABLE}.{name}] {key}{rule[:1].lower()}{rule[1:]}; there are "
                f"{', '.join(Tenant.__struct_fields__)}",
                param=f"{TABLE}.{name}",
            ) from None
    return found


def require_keys(tenants: Collection[str], keys: Collection[str], path: Path | None) -> None:
    """Raise InvalidRequest, with the remedy, unless every tenant has an API key. path: of the
    tenants' file."""
    strangers = sorted(set(tenants).difference(keys))
    if strangers:
        raise InvalidRequest(
            f"{path}: [{TABLE}.{strangers[0]}]: no API key has this name, so nobody could be this "
            f"tenant: `pdmesh hash-key {strangers[0]}` makes one for --api-keys, or remove the "
            "table",
            param=TABLE,
        )
