"""Writes the generated parts of docs/protocol.md: state tables, diagrams, timers and errors.

``python tools/protocol_docs.py`` rewrites what stands between ``<!-- generated: name -->`` and
``<!-- end -->``; ``--check`` compares and fails, for `make check`. Everything is read from the code
that runs: the transition tables, the timing records and the error table.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "protocol.md"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

sys.path.insert(0, str(ROOT))


def transitions(table: Mapping[Any, Mapping[Any, Any]]) -> str:
    """Return a diagram of the moves, and a table of all that is legal in each state."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {_first(table).value}"]
    for state, row in table.items():
        targets: dict[Any, list[str]] = {}
        for event, after in row.items():
            if after is not state:
                targets.setdefault(after, []).append(event.value)
        for after, events in targets.items():
            lines.append(f"    {state.value} --> {after.value}: {', '.join(events)}")
        if not row:
            lines.append(f"    {state.value} --> [*]")
    lines += ["```", "", "| state | moves | stays |", "|---|---|---|"]
    for state, row in table.items():
        moves = [f"{e.value} → **{after.value}**" for e, after in row.items() if after is not state]
        stays = [event.value for event, after in row.items() if after is state]
        lines.append(
            f"| **{state.value}** | {', '.join(moves) or '-'} | {', '.join(stays) or '-'} |"
        )
    return "\n".join(lines)


def _first(table: Mapping[Any, Any]) -> Enum:
    return next(iter(table))


def sender() -> str:
    """Prefill's end of a transfer."""
    from shared.transfer.machine import SENDER_TABLE

    return transitions(SENDER_TABLE)


def receiver() -> str:
    """Decode's end of a transfer."""
    from shared.transfer.machine import RECEIVER_TABLE

    return transitions(RECEIVER_TABLE)


def timers() -> str:
    """Every timer of pairs and transfers, with its default."""
    from shared.liveness import LivenessRule
    from shared.transfer.effects import ReceiverTiming, SenderTiming

    lines = ["| record | timer | seconds |", "|---|---|---|"]
    for record in (LivenessRule(), SenderTiming(), ReceiverTiming()):
        for field in dataclasses.fields(record):
            seconds = getattr(record, field.name)
            lines.append(f"| `{type(record).__name__}` | `{field.name}` | {seconds:g} |")
    return "\n".join(lines)


def errors() -> str:
    """Each error over HTTP and gRPC, and what the gateway and a client may do about it."""
    from shared.errors import ERROR_TYPES
    from shared.rpc.status import STATUS_TABLE

    lines = ["| type | HTTP | gRPC | gateway tries | client may retry |", "|---|---|---|---|---|"]
    for name, row in STATUS_TABLE.items():
        cls = ERROR_TYPES.get(name)
        retry = "-" if cls is None else cls.retry.value.replace("_", " ")
        again = "yes" if row.may_retry else "no"
        lines.append(f"| `{name}` | {row.http} | {row.grpc.name} | {retry} | {again} |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "sender": sender,
    "receiver": receiver,
    "timers": timers,
    "errors": errors,
}


def render(page: str) -> str:
    """Return the page with its generated parts fresh.

    Raises KeyError: the page names a part that nobody writes.
    """
    return PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", page)


def main() -> int:
    """Write, or with ``--check`` compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    missing = set(PARTS) - {part[2] for part in PART.finditer(page)}
    if missing:
        sys.stderr.write(f"{PAGE.name} has no place for: {', '.join(sorted(missing))}\n")
        return 1
    fresh = render(page)
    if arguments.check and fresh != page:
        sys.stderr.write(f"{PAGE.name} is stale: run tools/protocol_docs.py (make proto)\n")
        return 1
    if not arguments.check:
        PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
