"""Writes what the Helm chart's values.schema.json says of the services' settings.

``python tools/generate_chart.py`` rewrites the definitions whose names end with ``_settings``;
``--check`` compares and fails, for `make check`. The rest of the schema is written by hand. What is
read is ``shared/config.py``; a setting that the chart chooses itself is none that a user may give.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "deploy/helm/pdmesh/values.schema.json"

sys.path.insert(0, str(ROOT))

from shared.bounds import AboveZero, Between, OneOf  # noqa: E402
from shared.config import rules_of  # noqa: E402
from shared.settings import MESH, ROLES, SECTIONS, field_types, section_fields  # noqa: E402

CHOSEN = {
    "addresses": ("host", "port", "advertise", "gateway", "metrics_port", "metrics_address",
                  "mesh_host", "mesh_port", "http_port", "grpc_port"),
    "files": ("mesh_secret_file", "mesh_tls_cert", "mesh_tls_key", "mesh_tls_ca", "api_keys",
              "tls_cert", "tls_key", "tls_client_ca", "profile_file"),
    "values of their own": ("model", "model_name", "drain_s", "dram_cache", "ssd_cache",
                            "ssd_cache_size", "log_format"),
    "one process a pod": ("gateway_processes", "share_http_port", "process_port"),
    "a secret, which no values file should hold": ("api_key",),
    "needs a limit that Kubernetes cannot raise": ("realtime",),
}  # fmt: skip
"""What is no line under `settings`, by the reason."""

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", Path: "string"}


def settings_schema(section: str) -> dict[str, Any]:
    """Return the JSON schema of one section's settings; a role's own may have those of all."""
    fields = section_fields(section)
    kinds = [ROLES[section]] if section != MESH else list(ROLES.values())
    if section != MESH:
        fields = section_fields(MESH) | fields
    chosen = {name for names in CHOSEN.values() for name in names}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: _property(next(k for k in kinds if name in field_types(k)), name)
            for name in fields
            if name not in chosen and any(name in field_types(kind) for kind in kinds)
        },
    }


def _property(kind: Any, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"type": _TYPES[field_types(kind)[name]]}
    match rules_of(kind).get(name):
        case OneOf(words=words):
            found["enum"] = list(words)
        case Between(low, high):
            found["minimum"] = low
            if high != float("inf"):
                found["maximum"] = high
        case AboveZero(high):
            found |= {"exclusiveMinimum": 0, "maximum": high}
        case _:
            pass
    return found


def main() -> int:
    """Write, or with ``--check`` compare; the exit code is 1 if the schema is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if it is not up to date")
    arguments = parser.parse_args()
    before = SCHEMA.read_text(encoding="utf-8")
    schema = json.loads(before)
    for section in SECTIONS:
        schema["$defs"][f"{section}_settings"] = settings_schema(section)
    fresh = json.dumps(schema, indent=2) + "\n"
    if fresh == before:
        return 0
    if arguments.check:
        sys.stderr.write(f"{SCHEMA.relative_to(ROOT)} is stale: run `make proto`\n")
        return 1
    SCHEMA.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
