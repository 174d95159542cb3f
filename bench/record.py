"""What every benchmark here writes down: samples, the machine, goals and whether they were met.

A question's ``run.py`` makes one ``Record``, adds what it measured, and ends with ``finish``, which
prints the goals, writes ``results/<date>-<commit>-<machine>.json`` and its pictures. Nothing here
measures.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from bench.plots import Pictures, save
from shared.engine.native.build import cpu_flags

PROJECT = Path(__file__).resolve().parent.parent

NOT_HERE = 2
"""Exit code of a question that this machine cannot be asked."""

_PACKAGES = (
    "torch",
    "numpy",
    "uvloop",
    "aiohttp",
    "grpclib",
    "ucxx-cu13",
    "ucxx-cu12",
    "transformers",
)


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the table that `make bench` prints.

    row: the goal's number in bench/GOALS.md. question: the folder that measured it.
    relation: how ``value`` must stand to ``bound``. value: a ratio wherever there is a peer or a
    limit; else in the unit that ``what`` names.
    """

    row: int
    what: str
    value: float
    relation: Literal[">=", "<=", ">", "<"]
    bound: float
    lowest: float | None = None
    highest: float | None = None
    question: str = ""

    @property
    def is_met(self) -> bool:
        """Whether the median keeps the bound."""
        match self.relation:
            case ">=":
                return self.value >= self.bound
            case "<=":
                return self.value <= self.bound
            case ">":
                return self.value > self.bound
            case "<":
                return self.value < self.bound


def arguments(doc: str | None, quick: str) -> argparse.ArgumentParser:
    """Return a question's command line. doc: of its module; quick: what --quick leaves out."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--record", action="store_true", help="write results of a quick run too")
    return parser


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": [float(f"{value:.5g}") for value in values],
    }


def grouped(rows: Iterable[Mapping[str, Any]], name: str, *more: str) -> dict[Any, list[Any]]:
    """Return rows by what they say under a name, or under several, each in the order in which they
    came; those that say nothing are left out."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        if all(one in row for one in (name, *more)):
            key = (row[name], *(row[one] for one in more)) if more else row[name]
            found.setdefault(key, []).append(row)
    return found


def span(found: Mapping[str, Any], form: str) -> str:
    """Say what ``spread`` returned: 1.05 [0.98 .. 1.12]. form: of each number, as .2f."""
    median, low, high = (format(found[name], form) for name in ("median", "min", "max"))
    return f"{median} [{low} .. {high}]"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Spread of ours / theirs, taken within each repetition: what disturbs one disturbs both."""
    return spread([one / other for one, other in zip(ours, theirs, strict=True)])


@dataclass(slots=True)
class Record:
    """One run of one question. is_written: beside other results, and as it grows."""

    folder: Path
    is_quick: bool
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    is_written: bool = False
    stem: str = field(init=False)
    """Name of this run's files: date, commit, machine."""

    @classmethod
    def of(cls, file: str, asked: argparse.Namespace, **about: Any) -> Record:
        """Begin what a program was asked by ``arguments``: a quick run is not written, unless that
        is asked for, too. about: what a reader needs beside ``environment``."""
        is_written = asked.record or not asked.quick
        return cls(Path(file).parent, asked.quick, about, is_written=is_written)

    def __post_init__(self) -> None:
        self.environment = {**environment(), **self.environment}
        self.stem = f"{datetime.date.today()}-{self.environment['commit']}-{machine_name()}"

    def goal(
        self,
        row: int,
        what: str,
        measured: dict[str, Any] | float,
        relation: Literal[">=", "<=", ">", "<"],
        bound: float,
    ) -> Goal:
        """Note one goal; ``measured`` is a number or what ``spread`` returned."""
        if isinstance(measured, dict):
            value, low, high = measured["median"], measured["min"], measured["max"]
        else:
            value, low, high = float(measured), None, None
        goal = Goal(row, what, value, relation, bound, low, high, self.folder.name)
        self.goals.append(goal)
        return goal

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row, and what there is so far on disk: a long run may be ended."""
        self.rows.append(row)
        if self.is_written:
            self.save()

    def finish(self, pictures_of: Callable[[list[dict[str, Any]]], Pictures] | None = None) -> None:
        """Print the goals, write the results and draw them.

        ``PDMESH_BENCH_GOALS`` names a file that gets the goals as one JSON line each: how
        ``python -m bench`` collects them. ``PDMESH_BENCH_OUT`` names a folder that gets the whole
        record, of a quick run as well: how ``bench.gpu.check`` does.
        """
        if self.goals:
            print(table(self.goals))
        if collector := os.environ.get("PDMESH_BENCH_GOALS"):
            with Path(collector).open("a") as file:
                for goal in self.goals:
                    file.write(json.dumps(asdict(goal)) + "\n")
        if out := os.environ.get("PDMESH_BENCH_OUT"):
            self.save(Path(out)).rename(Path(out) / f"{self.folder.name}-{self.stem}.json")
        if not self.is_written:
            return
        partial = self.save()
        path, number = partial.with_suffix(""), 1
        while path.exists():  # another run of this day and commit, perhaps of another load
            number += 1
            path = path.with_name(f"{self.stem}-{number}.json")
        partial.replace(path)
        print(f"written to {path.relative_to(PROJECT)}")
        if pictures_of is not None:
            save(pictures_of(self.rows), path)

    def save(self, folder: Path | None = None) -> Path:
        """Write what there is so far beside the results; nothing reads it."""
        self.environment["load_after"] = os.getloadavg()
        path = (folder or self.folder / "results") / f"{self.stem}.json.partial"
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = [{**asdict(goal), "is_met": goal.is_met} for goal in self.goals]
        content = {"environment": self.environment, "goals": entries, "rows": self.rows}
        path.write_text(as_text(content))
        return path


def as_text(content: dict[str, Any]) -> str:
    """JSON with a line for each row: small, and a change of one shows as one."""
    parts: list[str] = []
    for name, value in content.items():
        if isinstance(value, list):
            inner = ",\n".join(json.dumps(row) for row in value)
            parts.append(f"{json.dumps(name)}: [\n{inner}\n]")
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value, indent=1)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def table(goals: Iterable[Goal]) -> str:
    """Lay the goals out as lines; ✓ or ✗ first."""
    lines: list[str] = []
    for goal in sorted(goals, key=lambda one: one.row):
        mark = "✓" if goal.is_met else "✗"
        value = f"{goal.value:.3g}"
        if goal.lowest is not None:
            value += f" [{goal.lowest:.3g} .. {goal.highest:.3g}]"
        what = f"{goal.question}: {goal.what}"
        bound = f"goal {goal.relation} {goal.bound:g}"
        lines.append(f"{mark} {goal.row:2}  {what:62} {value:24} {bound}")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """What a reader needs to place the numbers."""
    return {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        # A path says something of this machine, and nothing to a reader: its name is enough.
        "arguments": [os.path.basename(one) if os.sep in one else one for one in sys.argv[1:]],
        "machine": machine_name(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "flags": vector_flags(),
        "memory_gib": round(
            os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1
        ),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": installed(_PACKAGES),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if re.match(r"(UCX_|OMP_|MKL_|ONEDNN_|KMP_|PDMESH_(?!BENCH_|PEERS_)|VLLM_)", name)
        },
        "load_before": os.getloadavg(),
    }


def installed(names: Sequence[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def commit() -> str:
    """Short name of the tree, with + if it was changed."""
    run = ["git", "-C", str(PROJECT), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(run, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "none"


def machine_name() -> str:
    """A name for the files: the GPU's if there is one, else how many cores."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        if name := found.stdout.strip().splitlines()[:1]:
            return file_name(name[0])
    return f"cpu{os.cpu_count()}"


def file_name(device: str) -> str:
    """Return a device's name for files: NVIDIA H100 PCIe becomes nvidia-h100-pcie."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def cpu_name() -> str:
    """The processor in its maker's words."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def vector_flags() -> list[str]:
    """Those vector extensions that decide which kernels run."""
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
    return [flag for flag in wanted if flag in cpu_flags()]
