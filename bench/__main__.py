"""All questions, one after the other, and one table of goals at the end.

python -m bench                    # the quick runs: `make bench`
python -m bench --full transfer    # one question as its README's results were made
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import headlines
from bench.plots import save
from bench.record import NOT_HERE, PROJECT, Goal, cpu_name, environment, table

QUESTIONS = tuple(sorted(path.parent.name for path in (PROJECT / "bench").glob("*/run.py")))


README = PROJECT / "bench" / "README.md"
GOALS = PROJECT / "bench" / "GOALS.md"

TITLES = {
    1: "decode steps beside vLLM and llama.cpp",
    2: "prompts beside vLLM, linear layers beside torch.mm",
    3: "overhead of a step",
    4: "transfer beside ucx_perftest, NIXL and Mooncake",
    5: "what a layer-wise push leaves exposed",
    6: "tokens 1 and 2 at the client",
    7: "gateway: CPU a token and a request, latency",
    8: "how late the event loops are",
    9: "apart beside the best together",
    10: "start-up, memory",
    11: "how long a client waits when something dies",
    12: "steps over vLLM beside vLLM",
    13: "a routing decision, the index of prefixes, an idle gateway",
    14: "pools that move beside fixed roles",
    15: "one host beside vLLM's server",
    16: "which worker gets a prompt whose prefix others have",
    17: "conversations through real workers: policies, predictions, KV below the pool",
    18: "the simulator's CPU a request",
    19: "the autoscaler beside an oracle",
    20: "a live mesh beside its simulation",
    21: "what a grammar costs a step",
}
"""What each goal's number asks."""


def results(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return a question's recorded runs, the oldest first: their files and what is in them."""
    found = [(path, json.loads(path.read_text())) for path in folder.glob("results/*.json")]
    return sorted(found, key=lambda run: run[1]["environment"]["at"])


@dataclass(frozen=True, slots=True)
class Measured:
    """A goal as a run found it. before: as the newest run of an earlier day found it on a machine
    of the same name."""

    goal: Goal
    day: str
    commit: str
    machine: str
    before: Measured | None = None

    @property
    def run(self) -> str:
        return f"{self.day} {self.commit} {self.machine}"

    @property
    def is_confirmed(self) -> bool:
        """Whether an earlier day said the same of it: held, or missed."""
        return self.before is not None and self.before.goal.is_met == self.goal.is_met


def newest_goals(runs: list[tuple[Path, dict[str, Any]]]) -> list[Measured]:
    """Return a question's goals, each as the newest of these runs found that asked for it: a run
    may ask for a part only. A goal that no run asks for any more stays for as long as an old file
    has it."""
    goals: dict[str, Measured] = {}
    for _, content in runs:
        about = content["environment"]
        day, machine = about["at"][:10], about["machine"]
        for found in content["goals"]:
            goal = Goal(**{name: value for name, value in found.items() if name != "is_met"})
            before = goals.get(goal.what)
            if before is not None and before.day == day:
                before = before.before
            if before is not None and before.machine != machine:
                before = None
            goals[goal.what] = Measured(goal, day, about["commit"], machine, before)
    return list(goals.values())


def draw(question: str) -> None:
    """Draw the pictures of a question's results again."""
    pictures_of = getattr(importlib.import_module(f"bench.{question}.run"), "pictures_of", None)
    if pictures_of is None:
        return
    for path, content in results(PROJECT / "bench" / question):
        save(pictures_of(content["rows"]), path)
        print(f"drawn beside {path.relative_to(PROJECT)}")


def fill() -> None:
    """Write the ten rows of bench/README.md, and the goals of all questions' newest results into
    bench/GOALS.md."""
    found = {name: results(PROJECT / "bench" / name) for name in QUESTIONS}
    entries = [entry for runs in found.values() for entry in newest_goals(runs)]
    runs = {name: [run for _, run in own] for name, own in found.items()}
    _write_between(README, "headlines", headlines.table(runs))
    _write_between(GOALS, "goals", standing(entries))
    print(f"written to {README.relative_to(PROJECT)} and {GOALS.relative_to(PROJECT)}")


def standing(entries: Sequence[Measured]) -> list[str]:
    """Return how many goals hold, and of each number the goals themselves, a table for each run
    that found them."""
    num_met = sum(entry.goal.is_met for entry in entries)
    num_again = sum(entry.is_confirmed for entry in entries)
    lines = [f"{num_met} of {len(entries)} goals hold; {num_again} were so on an earlier day, too."]
    for row in sorted({entry.goal.row for entry in entries}):
        own = [entry for entry in entries if entry.goal.row == row]
        count = f"{sum(entry.goal.is_met for entry in own)} of {len(own)}"
        lines += ["", f"### {row}: {TITLES[row]} ({count})"]
        for run in dict.fromkeys((entry.goal.question, entry.run) for entry in own):
            found = [entry for entry in own if (entry.goal.question, entry.run) == run]
            lines += ["", f"{run[0]}, {run[1]}", *_tables(found)]
    return lines


def _tables(entries: Sequence[Measured]) -> list[str]:
    """Return a run's goals as tables: what a goal's name says behind its last colon is a column,
    what all of a column ask for stands at its head, and cases with other columns have a table of
    their own."""
    cases: dict[str, dict[str, Measured]] = {}
    for entry in entries:
        case, colon, column = entry.goal.what.rpartition(": ")
        case, column = (case, column) if colon else (column, "measured")
        cases.setdefault(case, {})[column] = entry
    lines: list[str] = []
    for columns in dict.fromkeys(tuple(found) for found in cases.values()):
        rows = {case: found for case, found in cases.items() if tuple(found) == columns}
        bounds = {
            column: {_bound(found[column].goal) for found in rows.values()} for column in columns
        }
        heads = [
            f"{column}, {' '.join(asked)}" if len(asked) == 1 else column
            for column, asked in bounds.items()
        ]
        lines += ["", f"| | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
        for case, found in rows.items():
            cells = [_cell(found[column], len(bounds[column]) > 1) for column in columns]
            lines.append(f"| {case} | {' | '.join(cells)} |")
    return lines


def _bound(goal: Goal) -> str:
    return f"{goal.relation} {goal.bound:g}"


def _cell(entry: Measured, with_bound: bool) -> str:
    """Return whether it holds, the figure and its range, and what an earlier day found."""
    goal, before = entry.goal, entry.before
    text = f"{'✓' if goal.is_met else '✗'} {goal.value:.3g}"
    if goal.lowest is not None:
        text += f" [{goal.lowest:.3g}–{goal.highest:.3g}]"
    if with_bound:
        text += f", {_bound(goal)}"
    if before is not None:
        text += f"; earlier {'✓' if before.goal.is_met else '✗'} {before.goal.value:.3g}"
    return text


def _write_between(page: Path, name: str, lines: Sequence[str]) -> None:
    """Replace what stands between two marks of a page."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, rest = page.read_text().split(begin)
    after = rest.split(end)[1]
    page.write_text(before + begin + "\n".join(lines) + "\n" + end + after)


def main() -> None:
    """Run, collect, print; the exit code says whether every question could be asked."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.add_argument("--full", action="store_true", help="not --quick: hours, writes results/")
    parser.add_argument(
        "--fill", action="store_true", help="measure nothing, fill README.md and GOALS.md"
    )
    parser.add_argument(
        "--draw", action="store_true", help="measure nothing, draw what is recorded"
    )
    asked = parser.parse_args()
    chosen = asked.questions or QUESTIONS
    if unknown := sorted(set(chosen) - set(QUESTIONS)):
        parser.error(f"no question {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
    if asked.draw:
        for name in chosen:
            draw(name)
    if asked.fill:
        fill()
    if asked.draw or asked.fill:
        return
    failed: list[str] = []
    not_here: list[str] = []
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as goals_file:
        environ = {**os.environ, "PDMESH_BENCH_GOALS": goals_file.name}
        for number, name in enumerate(chosen, 1):
            began_at = time.monotonic()
            print(f"\n[{number}/{len(chosen)}] {name}", flush=True)
            command = [
                sys.executable,
                "-m",
                f"bench.{name}.run",
                *([] if asked.full else ["--quick"]),
            ]
            match subprocess.run(command, env=environ, cwd=PROJECT, check=False).returncode:
                case 0:
                    pass
                case code if code == NOT_HERE:
                    not_here.append(name)
                case _:
                    failed.append(name)
            print(f"({time.monotonic() - began_at:.0f} s)", flush=True)
        entries = [json.loads(line) for line in Path(goals_file.name).read_text().splitlines()]
    about = environment()
    place = f"{cpu_name()}, {about['cores']} cores ({about['machine']})"
    print(f"\n{about['at']}  {about['commit']}  {place}")
    print(table(Goal(**entry) for entry in entries))
    for name in not_here:
        print(f"–     {name} cannot be measured on this machine; see above")
    for name in failed:
        print(f"✗     {name} could not be measured; see above")
    if asked.full:
        fill()
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
