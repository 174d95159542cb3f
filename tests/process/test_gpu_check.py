"""``make gpu-check``: parts in processes of their own, with limits, resumed, told on one page."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import check
from bench.gpu.check import PARTS, Answer, Part, ask
from bench.record import NOT_HERE, PROJECT

ABOUT = {"device": "A Device 100", "commit": "abc1234"}


def a_part(folder: Path, program: str, **changes: Any) -> Part:
    """A part whose process runs this program."""
    path = folder / "part.py"
    path.write_text(program)
    options: dict[str, Any] = {"limits_s": (20, 20), **changes}
    return Part("one", "Is it so?", str(path), **options)


def asked_of(part: Part, folder: Path) -> Answer:
    return ask(part, device="cuda", is_quick=True, folder=folder)


def run_check(
    folder: Path, parts: Sequence[Part], about: dict[str, Any] = ABOUT, **changes: Any
) -> list[Answer]:
    asked = argparse.Namespace(out=folder, device="cuda", quick=True, again=False, only=[])
    return check.check(argparse.Namespace(**(vars(asked) | changes)), about, parts)


def test_without_a_device_one_line_says_what_it_would_do() -> None:
    """All parts and the time they take, exit code 2."""
    no_device = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.check"],
        capture_output=True, text=True, cwd=PROJECT, env=no_device, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == NOT_HERE, done.stderr
    (line,) = done.stdout.splitlines()
    assert "no device cuda" in line
    assert line.endswith(", ".join(part.name for part in PARTS))


def test_all_limits_together_keep_the_promise() -> None:
    """12 minutes with --quick, 40 without."""
    assert sum(part.limits_s[0] for part in PARTS) <= check.QUICK_MINUTES * 60
    assert sum(part.limits_s[1] for part in PARTS) <= check.WHOLE_MINUTES * 60


def test_every_program_of_a_part_is_there() -> None:
    """A file or a module that was moved would fail on the first device only."""
    for part in PARTS:
        for line in filter(None, (part.command, part.cpu_command)):
            words = line.split()
            assert words[0] == "-m"
            assert words[1] == "pytest" or any(
                (PROJECT / (words[1].replace(".", "/") + end)).exists() for end in (".py", "/")
            )
            assert all((PROJECT / word).exists() for word in words if word.startswith("tests/"))


def test_a_part_is_right_if_it_ends_well_and_says_what_it_must(tmp_path: Path) -> None:
    """An exit code alone is not enough: tests that were all skipped end well, too."""
    good = a_part(tmp_path, "print('3 passed')", must_say=r"\d+ passed")
    assert asked_of(good, tmp_path).verdict == "right"
    skipped = asked_of(a_part(tmp_path, "print('3 skipped')", must_say=r"\d+ passed"), tmp_path)
    assert skipped.verdict == "wrong"
    assert "passed" in skipped.says[-1]
    failed = asked_of(a_part(tmp_path, "raise SystemExit('no kernel')"), tmp_path)
    assert (failed.verdict, failed.says) == ("wrong", ["no kernel"])


def test_a_part_out_of_time_leaves_no_process(tmp_path: Path) -> None:
    """Its children are ended with it, and the check goes on."""
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    answer = asked_of(a_part(tmp_path, program, limits_s=(2.0, 2.0)), tmp_path)
    assert answer.verdict == "out of time"
    assert answer.seconds < 20
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    until = time.monotonic() + 10
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until


def test_what_cannot_be_asked_here_is_left_out_by_name(tmp_path: Path) -> None:
    """A tool that is not installed, a part of CUDA alone, and a program that says so itself."""
    tool = a_part(tmp_path, "", needs_program="no-such-sanitizer")
    assert asked_of(tool, tmp_path).says == ["no-such-sanitizer is not installed"]
    on_cpu = ask(a_part(tmp_path, ""), device="cpu", is_quick=True, folder=tmp_path)
    assert (on_cpu.verdict, on_cpu.says) == ("left out", [check.CUDA_ONLY])
    itself = asked_of(a_part(tmp_path, f"raise SystemExit({NOT_HERE})"), tmp_path)
    assert itself.verdict == "left out"


COUNTED = """
import json, os, pathlib
count = pathlib.Path({count!r})
count.write_text(count.read_text() + "x" if count.exists() else "x")
out = pathlib.Path(os.environ["PDMESH_BENCH_OUT"])
out.mkdir()
goal = {{"what": "a share", "relation": ">=", "bound": 0.9, "value": 0.95, "is_met": True}}
(out / "one.json").write_text(json.dumps({{"goals": [goal], "rows": []}}))
"""


def test_a_check_goes_on_where_it_was_and_is_told_on_one_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was right is kept, what was wrong is asked again; another commit, and code of none, asks
    all again."""
    count = tmp_path / "count"
    good = a_part(tmp_path, COUNTED.format(count=str(count)))
    (tmp_path / "bad").mkdir()
    bad = Part(
        "two", "And this?", a_part(tmp_path / "bad", "raise SystemExit('broken')").command, (20, 20)
    )
    out = tmp_path / "out"
    for _ in range(2):
        answers = run_check(out, [good, bad])
        assert [answer.verdict for answer in answers] == ["right", "wrong"]
    assert count.read_text() == "x"
    assert "kept from before" in capsys.readouterr().out
    page = (out / "a-device-100.md").read_text()
    assert page.startswith("# A Device 100\n")
    assert "| ✓ | a share | >= 0.9 | 0.95 |" in page
    assert "## two: wrong" in page
    content = json.loads((out / "a-device-100.json").read_text())
    assert content["about"] == ABOUT
    assert content["parts"][0]["records"][0]["goals"][0]["value"] == 0.95
    run_check(out, [good, bad], {**ABOUT, "commit": "def5678"})
    assert count.read_text() == "xx"
    run_check(out, [good, bad], {**ABOUT, "commit": "def5678"}, again=True)
    assert count.read_text() == "xxx"
    run_check(out, [good, bad], {**ABOUT, "commit": "def5678"}, again=True, only=["two"])
    assert count.read_text() == "xxx"
    for _ in range(2):
        run_check(out, [good], {**ABOUT, "commit": "def5678+"})
    assert count.read_text() == "xxxxx"


def test_a_broken_file_of_an_earlier_check_is_no_obstacle(tmp_path: Path) -> None:
    """It is asked anew and written over."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "a-device-100.json").write_text("{")
    (answer,) = run_check(out, [a_part(tmp_path, "print('fine')")])
    assert answer.says == ["fine"]
    assert json.loads((out / "a-device-100.json").read_text())["parts"][0]["verdict"] == "right"
