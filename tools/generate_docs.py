"""Writes the generated parts of docs/: state diagrams and tables, timers, errors, the tour's stops.

``python tools/generate_docs.py`` rewrites what stands between ``<!-- generated: name -->`` and
``<!-- end -->`` in every page; ``--check`` compares and fails, for `make check`. Everything is read
from the code that runs: transition tables, timing records, the error table, and for what is
concluded from several facts what it does when it is played (``explored_states.py``).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PART = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

sys.path.insert(0, str(ROOT))

Moves = Mapping[str, Mapping[str, list[str]]]
"""State -> event -> states after it."""


def states(moves: Moves) -> str:
    """Return a diagram of the moves, and a table of what is legal in a state and changes none."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {next(iter(moves))}"]
    for state, row in moves.items():
        targets: dict[str, list[str]] = {}
        for event, afters in row.items():
            for after in afters:
                if after != state:
                    targets.setdefault(after, []).append(event)
        for after, events in targets.items():
            lines.append(f"    {state} --> {after}: {', '.join(events)}")
        if not targets:
            lines.append(f"    {state} --> [*]")
    lines.append("```")
    stays = {
        state: [event for event, afters in row.items() if state in afters]
        for state, row in moves.items()
    }
    if any(stays.values()):
        lines += ["", "| state | stays on |", "|---|---|"]
        lines += [f"| **{s}** | {', '.join(events)} |" for s, events in stays.items() if events]
    return "\n".join(lines)


def _of_table(table: Mapping[Any, Mapping[Any, Any]]) -> Moves:
    return {
        state.value: {event.value: [after.value] for event, after in row.items()}
        for state, row in table.items()
    }


def sender() -> str:
    """Prefill's end of a transfer."""
    from shared.transfer.machine import SENDER_TABLE

    return states(_of_table(SENDER_TABLE))


def receiver() -> str:
    """Decode's end of a transfer."""
    from shared.transfer.machine import RECEIVER_TABLE

    return states(_of_table(RECEIVER_TABLE))


def _of_moves(
    moves: Mapping[tuple[Any, Any], Any],
    states: Iterable[Any],
    events: Iterable[Any],
    ignored: Container[tuple[Any, Any]] = frozenset(),
) -> Moves:
    table: dict[str, dict[str, list[str]]] = {state.value: {} for state in states}
    for state, event in itertools.product(states, events):
        if (after := moves.get((state, event))) is not None:
            table[state.value][event.value] = [after.value]
        elif (state, event) in ignored:
            table[state.value][event.value] = [state.value]
    return table


def request() -> str:
    """A request at the gateway."""
    from services.gateway.core.lifecycle import IGNORED, MOVES, Event, State

    return states(_of_moves(MOVES, State, Event, IGNORED))


def life() -> str:
    """A request on a worker."""
    from shared.worker.core.life import IGNORED, MOVES, LifeEvent, LifeState

    moves = {at: move.to for at, move in MOVES.items()}
    return states(_of_moves(moves, LifeState, LifeEvent, IGNORED))


def sequence() -> str:
    """A token list with a worker's scheduler."""
    from shared.schedule.sequence import MOVES, SequenceEvent, SequenceState

    return states(_of_moves(MOVES, SequenceState, SequenceEvent))


def lease() -> str:
    """A reservation on a decode worker."""
    from shared.worker.core.lease import MOVES, LeaseEvent, LeaseState

    return states(_of_moves(MOVES, LeaseState, LeaseEvent))


def pair() -> str:
    """A pair, at one of its ends."""
    from shared.worker.core.pairs import MOVES, PairEvent, PairState

    return states(_of_moves(MOVES, PairState, PairEvent))


def worker() -> str:
    """A worker, as a gateway sees it."""
    from tools.explored_states import worker_moves

    return states(worker_moves())


def peer() -> str:
    """A peer on a stream."""
    from tools.explored_states import peer_moves

    return states(peer_moves())


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
    """Each error over HTTP, SSE and gRPC, and what the gateway and a client may do about it."""
    from shared.errors import ERROR_TYPES
    from shared.rpc.status import STATUS_TABLE

    lines = [
        "| type | finer codes | HTTP | `error.type` | gRPC | gateway tries | client may retry |",
        "|---|---|---|---|---|---|---|",
    ]
    codes = finer_codes()
    for name, row in STATUS_TABLE.items():
        cls = ERROR_TYPES.get(name)
        finer = " ".join(f"`{code}`" for code in sorted(codes.get(name, ()))) or "-"
        retry = "-" if cls is None else cls.retry.value.replace("_", " ")
        again = "yes" if row.may_retry else "no"
        cells = (f"`{name}`", finer, row.http, f"`{row.openai_type}`", row.grpc.name, retry, again)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def finer_codes() -> dict[str, set[str]]:
    """Error type -> every ``code=`` that our code gives to errors of that type, itself or by a
    function that returns one."""
    from shared.errors import ERROR_TYPES

    names = {cls.__name__: cls.type for cls in ERROR_TYPES.values()}
    found: dict[str, set[str]] = {}
    paths = [*ROOT.glob("shared/**/*.py"), *ROOT.glob("services/**/*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name, returns=ast.Name(id=of)) if of in names:
                names[name] = names[of]
            case _:
                pass
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)):
            continue
        called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        for keyword in node.keywords:
            if keyword.arg == "code" and called in names:
                codes = _texts(keyword.value)
                found.setdefault(names[called], set()).update(codes)
    return found


def _texts(value: ast.expr) -> list[str]:
    """The texts that an expression may be, as far as they stand in it."""
    if isinstance(value, ast.IfExp):
        return [*_texts(value.body), *_texts(value.orelse)]
    return [str(value.value)] if isinstance(value, ast.Constant) and value.value else []


def tour() -> str:
    """The stops of ``pdmesh tour``, with links to the code as it stands."""
    from services.cli.tour_stops import STOPS, place_of

    lines: list[str] = []
    for number, stop in enumerate(STOPS, 1):
        links: list[str] = []
        for what, name in (("Decided by", stop.decides), ("done by", stop.acts)):
            # Without the line: an edit anywhere above it would make the page stale.
            file, _ = place_of(name)
            links.append(f"{what} [`{name.partition(':')[2]}`](../{file})")
        indent = " " * len(f"{number}. ")
        lines += [
            f"{number}. **{stop.process} · {stop.phase}** (`{stop.moment.value}`). {stop.text}",
            f"{indent}{', '.join(links)}.",
        ]
    return "\n".join(lines)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "protocol.md": {"sender": sender, "receiver": receiver, "timers": timers, "errors": errors},
    "states.md": {
        "request": request,
        "life": life,
        "sequence": sequence,
        "lease": lease,
        "pair": pair,
        "worker": worker,
        "peer": peer,
    },
    "tour.md": {"tour": tour},
}


def render(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with its generated parts fresh.

    Raises LookupError: the page names a part that nobody writes, or has no place for one.
    """
    named = {part[2] for part in PART.finditer(page)}
    if wrong := named ^ set(parts):
        raise LookupError(f"parts that the page or the generator lacks: {', '.join(sorted(wrong))}")
    return PART.sub(lambda part: f"{part[1]}\n{parts[part[2]]()}\n\n{part[3]}", page)


def main() -> int:
    """Write, or with ``--check`` compare; the exit code is 1 if something is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a page is not up to date")
    arguments = parser.parse_args()
    is_stale = False
    for name, parts in PAGES.items():
        page = (DOCS / name).read_text(encoding="utf-8")
        fresh = render(page, parts)
        if fresh == page:
            continue
        if arguments.check:
            is_stale = True
            sys.stderr.write(f"docs/{name} is stale: run `make proto`\n")
        else:
            (DOCS / name).write_text(fresh, encoding="utf-8")
    return 1 if is_stale else 0


if __name__ == "__main__":
    sys.exit(main())
