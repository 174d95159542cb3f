"""A first hour on a new GPU, by one command: does it start, is it right, how near its limits is it?

    make gpu-check ARGS="--quick --out gpu-check"     # or: python -m bench.gpu.check

Asks one part after the other, each in processes of its own and with a time limit, and writes after
every part one page and one JSON file with the device's name. What was right before, at this commit,
is not asked again, so an interrupted check goes on where it was. Without a device it says what it
would do and exits with 2; ``--device cpu`` rehearses those parts that a CPU can be asked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.device import add_device
from bench.record import NOT_HERE, PROJECT, environment, file_name

INTERRUPTED = 130
QUICK_MINUTES, WHOLE_MINUTES = 12, 40
"""What the time limits of all parts together keep to."""

CUDA_ONLY = "only a CUDA device can be asked this"
Verdict = Literal["right", "wrong", "out of time", "left out"]


@dataclass(frozen=True, slots=True)
class Part:
    """One question of the check.

    command: "{quick}" becomes --quick or nothing, "{device}" the device. limits_s: with --quick,
    and without. environment: on top of ours. must_say: a pattern that its output has to match.
    cpu_command: how a CPU is asked instead; "" = it cannot be.
    """

    name: str
    question: str
    command: str
    limits_s: tuple[float, float]
    environment: Mapping[str, str] = field(default_factory=dict)
    must_say: str = ""
    needs_program: str = ""
    cpu_command: str = ""


@dataclass(slots=True)
class Answer:
    """What became of a part. says: the last lines of its output. records: what its benchmarks
    wrote, with every sample."""

    name: str
    verdict: Verdict
    seconds: float
    says: list[str]
    records: list[dict[str, Any]] = field(default_factory=list)


_TESTS = "-m pytest -q -p no:cacheprovider --no-header -rs"
_COMPILED = {"TRITON_INTERPRET": "0"}
"""Even where no /dev/nvidia* is to be seen, from which tests/conftest.py concludes that there is no
device."""

_LANES = "-m bench.gpu.apart --device {device} --quick"
_TOLD_LANES = {"UCX_PROTO_INFO": "y"}

PARTS = (
    Part(
        "machine",
        "Are the driver, torch, UCX and the way between processes as a mesh needs them?",
        "-m services.cli doctor",
        (30, 60),
        cpu_command="-m services.cli doctor",
    ),
    Part(
        "kernels",
        "Do Triton's kernels compile for this device and agree with the reference?",
        f"{_TESTS} tests/engine/test_triton_attention.py tests/engine/test_triton_layers.py",
        (120, 240),  # an H200 with 16 cores took more than 50
        environment=_COMPILED,
        must_say=r"\d+ passed",
        cpu_command=f"{_TESTS} tests/engine/test_triton_layers.py",
    ),
    Part(
        "tests",
        "Are the engine's answers on this device right, and KV that crossed from it to it?",
        f"{_TESTS} tests/gpu",
        (120, 300),
        environment=_COMPILED,
        must_say=r"\d+ passed",
    ),
    Part(
        "memory",
        "Does compute-sanitizer find a fault in replayed graphs and marks?",
        f"{_TESTS} tests/gpu -k layers_are_marked",
        (40, 240),
        environment=_COMPILED,
        must_say=r"ERROR SUMMARY: 0 errors",
        needs_program="compute-sanitizer",
    ),
    Part(
        "lane",
        "Does KV go from device memory to device memory by cuda_ipc, and what says UCX itself?",
        _LANES,
        (40, 90),
        environment=_TOLD_LANES,
        must_say=r"handed over by [^;]*cuda_ipc",
        cpu_command=_LANES,
    ),
    Part(
        "other-lane",
        "Is KV right and its lane named where cuda_ipc is not to be had?",
        _LANES,
        (40, 90),
        environment={**_TOLD_LANES, "UCX_TLS": "^posix,cuda_ipc"},
        must_say=r"handed over by (?!\S*cuda_ipc)\S",
        cpu_command=_LANES,
    ),
    Part(
        "transfer",
        "What does device-to-device reach beside ucx_perftest -m cuda and cudaMemcpy?",
        "-m bench.transfer.run {quick} --lanes cuda_ipc --pin -1 -1",
        (80, 300),
        cpu_command="-m bench.transfer.run {quick} --lanes sysv --pin -1 -1",
    ),
    Part(
        "steps",
        "How near its bandwidth and its product rate do steps come?",
        "-m bench.gpu.run {quick} --device {device}",
        (60, 600),
        cpu_command="-m bench.gpu.run {quick} --device {device}",
    ),
    Part(
        "exact",
        "What do products and attention of one shape for any batch cost?",
        "-m bench.gpu.run --quick --exact --device {device} --batches 1 32",
        (30, 60),
    ),
    Part(
        "apart",
        "Do two processes on the device say what one says?",
        "-m bench.gpu.apart --device {device} {quick}",
        (40, 240),
        cpu_command="-m bench.gpu.apart --device {device} {quick}",
    ),
    Part(
        "idle",
        "Where is the device idle within decode, and which length of a prompt fills it?",
        "-m bench.gpu.idle --device {device} {quick}",
        (40, 180),
        cpu_command="-m bench.gpu.idle --device {device} {quick}",
    ),
)


def plan(parts: Sequence[Part], device: str) -> str:
    """Return what would be asked, in one line."""
    names = ", ".join(part.name for part in parts)
    return (
        f"gpu-check: torch sees no device {device}, so nothing was measured (exit {NOT_HERE}); "
        f"with one it would ask, within {WHOLE_MINUTES} minutes ({QUICK_MINUTES} with --quick): "
        f"{names}"
    )


def ask(part: Part, *, device: str, is_quick: bool, folder: Path) -> Answer:
    """Ask one part; its whole output goes to ``folder/NAME.log``.

    A part out of time is ended with all its processes.
    """
    on_cpu = device == "cpu"
    command = part.cpu_command if on_cpu else part.command
    if not command:
        return Answer(part.name, "left out", 0.0, [CUDA_ONLY])
    if part.needs_program and shutil.which(part.needs_program) is None:
        return Answer(part.name, "left out", 0.0, [f"{part.needs_program} is not installed"])
    prefix = [part.needs_program] if part.needs_program else []
    records = folder / f"{part.name}.records"
    shutil.rmtree(records, ignore_errors=True)
    surroundings = {**os.environ, "PDMESH_BENCH_OUT": str(records)}
    if not on_cpu:
        surroundings |= part.environment
    log = folder / f"{part.name}.log"
    words = command.format(device=device, quick="--quick" if is_quick else "").split()
    began_at = time.monotonic()
    with log.open("wb") as out:
        limit_s = part.limits_s[0 if is_quick else 1]
        code = _run([*prefix, sys.executable, *words], surroundings, out, limit_s)
    said = log.read_text(errors="replace").splitlines()
    verdict: Verdict = "right" if code == 0 else "wrong"
    if code is None:
        verdict = "out of time"
        said.append(f"ended after {time.monotonic() - began_at:.0f} s")
    elif code == NOT_HERE:
        verdict = "left out"
    elif not on_cpu and not code and not re.search(part.must_say, "\n".join(said)):
        verdict = "wrong"
        said.append(f"nothing in its output matches {part.must_say!r}")
    found = [json.loads(path.read_text()) for path in sorted(records.glob("*.json"))]
    shutil.rmtree(records, ignore_errors=True)
    return Answer(part.name, verdict, time.monotonic() - began_at, said[-40:], found)


def _run(
    command: Sequence[str], surroundings: Mapping[str, str], out: Any, limit_s: float
) -> int | None:
    """Return the exit code, None = it was out of time; nothing of it is left running."""
    process = subprocess.Popen(
        command, env=surroundings, stdout=out, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, cwd=PROJECT, start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def page(about: Mapping[str, Any], answers: Iterable[Answer], parts: Sequence[Part]) -> str:
    asked = {answer.name: answer for answer in answers}
    lines = [f"# {about['device']}", ""]
    lines += [f"* {name}: {value}" for name, value in about.items() if name != "device"]
    lines += ["", "| part | | seconds | question |", "|---|---|---|---|"]
    for part in parts:
        answer = asked.get(part.name)
        state = f"{answer.verdict} | {answer.seconds:.0f}" if answer else "not asked yet | "
        lines.append(f"| {part.name} | {state} | {part.question} |")
    for part in parts:
        if (answer := asked.get(part.name)) is not None:
            lines += ["", f"## {part.name}: {answer.verdict}", "", part.question, ""]
            lines += _goals(answer.records)
            lines += ["```text", *answer.says, "```"]
    return "\n".join(lines) + "\n"


def _goals(records: Iterable[Mapping[str, Any]]) -> list[str]:
    goals = [goal for record in records for goal in record["goals"]]
    if not goals:
        return []
    lines = ["| | goal | bound | measured |", "|---|---|---|---|"]
    for goal in goals:
        mark = "✓" if goal["is_met"] else "✗"
        bound = f"{goal['relation']} {goal['bound']:g}"
        lines.append(f"| {mark} | {goal['what']} | {bound} | {goal['value']:.3g} |")
    return [*lines, ""]


def read_answers(path: Path, about: Mapping[str, Any], *, is_quick: bool) -> dict[str, Answer]:
    """Return what an earlier check of the same device, code and length has; {} if it was another,
    or if the code is of no commit and so may have changed since.

    What was out of time or wrong is asked again.
    """
    if about["commit"].endswith("+") or about["commit"] == "none":
        return {}
    try:
        content = json.loads(path.read_text())
        if content["about"] != dict(about) or content["is_quick"] != is_quick:
            return {}
        found = [Answer(**entry) for entry in content["parts"]]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {one.name: one for one in found if one.verdict in ("right", "left out")}


def facts(device: str) -> dict[str, Any]:
    """Return what names the device and the code; {} if torch does not see it."""
    found = subprocess.run(
        [sys.executable, "-m", "shared.engine.probe"],
        capture_output=True, text=True, cwd=PROJECT, check=True,
    )  # fmt: skip
    torch_facts = json.loads(found.stdout.splitlines()[-1])
    around = environment()
    about: dict[str, Any] = {"device": f"CPU ({around['cpu']}, {around['cores']} cores)"}
    if device != "cpu":
        index = int(device.partition(":")[2] or 0)
        if index >= len(torch_facts["devices"]):
            return {}
        one = torch_facts["devices"][index]
        about = {"device": one["name"], "memory GiB": round(one["total_gib"], 1)}
        about["driver"] = _driver(index)
    about["torch"] = torch_facts["version"]
    about["CUDA of torch"] = torch_facts["cuda_built"] or "none"
    about |= {"python": around["python"], "packages": around["packages"]}
    return {**about, "commit": around["commit"]}


def _driver(index: int) -> str:
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError):
        said = subprocess.run(query, capture_output=True, text=True, check=False)
        return said.stdout.strip()
    return ""


def check(
    asked: argparse.Namespace, about: Mapping[str, Any], parts: Sequence[Part] = PARTS
) -> list[Answer]:
    """Ask what is still to be asked, and write page and JSON after every part."""
    folder: Path = asked.out
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / file_name(about["device"])
    answers = {} if asked.again else read_answers(
        stem.with_suffix(".json"), about, is_quick=asked.quick
    )  # fmt: skip
    for part in parts:
        if asked.only and part.name not in asked.only:
            continue
        if (answer := answers.get(part.name)) is not None:
            print(f"  {part.name:11} {answer.verdict:12} kept from before", flush=True)
            continue
        print(f"  {part.name:11} {part.question}", flush=True)
        answer = ask(part, device=asked.device, is_quick=asked.quick, folder=folder)
        answers[part.name] = answer
        print(f"  {'':11} {answer.verdict}, {answer.seconds:.0f} s", flush=True)
        if answer.verdict in ("wrong", "out of time"):
            print(f"  {'':11} {folder / part.name}.log: {' | '.join(answer.says[-2:])}")
        content = {
            "about": about,
            "is_quick": asked.quick,
            "parts": [asdict(one) for one in answers.values()],
        }
        stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
        stem.with_suffix(".md").write_text(page(about, answers.values(), parts))
    print(f"written to {stem}.md and {stem}.json")
    return list(answers.values())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog="parts: " + "; ".join(f"{part.name}: {part.question}" for part in PARTS),
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"within {QUICK_MINUTES} minutes instead of {WHOLE_MINUTES}",
    )
    add_device(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu-check"), help="folder of page, JSON and logs"
    )
    parser.add_argument(
        "--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART", default=[]
    )
    parser.add_argument("--again", action="store_true", help="ask what was asked before, too")
    return parser.parse_args(arguments)


def main() -> None:
    """Check, print, write. Exit code 1: a part was wrong or out of time; 2: no device."""
    asked = parse()
    about = facts(asked.device)
    if not about:
        print(plan(PARTS, asked.device))
        sys.exit(NOT_HERE)
    print(f"{about['device']}: {'quick' if asked.quick else 'whole'} check, into {asked.out}")
    try:
        answers = check(asked, about)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here")
        sys.exit(INTERRUPTED)
    sys.exit(int(any(answer.verdict in ("wrong", "out of time") for answer in answers)))


if __name__ == "__main__":
    main()
