"""Regenerates shared/wire from proto/: betterproto2 messages and one descriptor set.

``python tools/generate_wire.py`` writes; ``--check`` writes to a temporary folder and compares, for
`make check`. Services are not generated: ``shared/rpc`` serves and calls on raw grpclib streams.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
WIRE = ROOT / "shared" / "wire"

INIT = '''"""Generated messages; never edited. `make proto` writes them from proto/."""

from .pdmesh.v1 import *  # noqa: F403
'''


def generate(out: Path) -> None:
    """Write the generated package into the empty folder ``out``. Raises CalledProcessError."""
    out.mkdir(parents=True, exist_ok=True)
    protos = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", "-I", str(PROTO)),
        f"--python_betterproto2_out={out}",
        "--python_betterproto2_opt=client_generation=none,server_generation=none",
        "--include_imports",
        f"--descriptor_set_out={out / 'pdmesh.binpb'}",
        *protos,
    ]
    # The plugin must be the one of this interpreter, whether or not its environment is activated.
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for path in out.rglob("*.py"):
        path.write_text(without_prose(path.read_text()))
    (out / "__init__.py").write_text(INIT)


def without_prose(text: str) -> str:
    """Return generated code without docstrings, and with a line between classes alone: what a
    message means is told once, in proto/."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            dropped = [no for no in range(node.lineno, node.end_lineno or 0) if not lines[no]]
            for it in node.body:
                if isinstance(it, ast.Expr) and isinstance(it.value, ast.Constant):
                    dropped += range(it.lineno - 1, it.end_lineno or 0)
            for no in dropped:
                lines[no] = "-"
    kept = "\n".join(line for line in lines if line != "-")
    return re.sub(r"\n{3,}", "\n\n", kept).lstrip() + "\n"


def files_of(folder: Path) -> dict[str, bytes]:
    """Return path -> content of everything generated under the folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def stale_files() -> list[str]:
    """Return the generated files that differ from what proto/ says, as paths in shared/wire."""
    with tempfile.TemporaryDirectory() as temporary:
        fresh_folder = Path(temporary) / "wire"
        generate(fresh_folder)
        fresh, present = files_of(fresh_folder), files_of(WIRE)
    return sorted(
        name for name in fresh.keys() | present.keys() if fresh.get(name) != present.get(name)
    )


def main() -> int:
    """Write or check; the exit code is 1 if something is stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    args = parser.parse_args()
    if args.check:
        stale = stale_files()
        for name in stale:
            print(f"shared/wire/{name} is stale: run `make proto`", file=sys.stderr)
        return 1 if stale else 0
    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary) / "wire"
        generate(fresh)
        shutil.rmtree(WIRE, ignore_errors=True)
        shutil.copytree(fresh, WIRE)
    print(f"wrote {WIRE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
