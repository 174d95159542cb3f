"""All questions, one after the other, and one table of goals at the end.

python -m bench                    # the quick runs: `make bench`
python -m bench --full transfer    # one question as its README's results were made
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.record import PROJECT, Goal, cpu_name, environment, table

QUESTIONS = tuple(sorted(path.parent.name for path in (PROJECT / "bench").glob("*/run.py")))


def main() -> None:
    """Run, collect, print; the exit code says whether every question could be asked."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=", ".join(QUESTIONS))
    parser.add_argument("--full", action="store_true", help="not --quick: hours, writes results/")
    asked = parser.parse_args()
    chosen = asked.questions or QUESTIONS
    if unknown := sorted(set(chosen) - set(QUESTIONS)):
        parser.error(f"no question {', '.join(unknown)}; there are {', '.join(QUESTIONS)}")
    failed: list[str] = []
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
            if subprocess.run(command, env=environ, cwd=PROJECT, check=False).returncode:
                failed.append(name)
            print(f"({time.monotonic() - began_at:.0f} s)", flush=True)
        entries = [json.loads(line) for line in Path(goals_file.name).read_text().splitlines()]
    about = environment()
    place = f"{cpu_name()}, {about['cores']} cores ({about['machine']})"
    print(f"\n{about['at']}  {about['commit']}  {place}")
    print(table(Goal(**entry) for entry in entries))
    for name in failed:
        print(f"✗     {name} could not be measured; see above")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
