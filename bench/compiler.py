"""The C compiler, for what benchmarks need compiled at first use: mocks, clients, probes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def compile_c(source: Path, output: Path, *flags: str) -> Path:
    """Compile one file with warnings shown; exits with a sentence if there is no compiler.

    Returns ``output``. Raises CalledProcessError: the file does not compile.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        sys.exit(f"this benchmark needs a C compiler for {source.name}: install cc")
    command = [compiler, "-O2", "-Wall", "-Wextra", *flags, "-o", str(output), str(source)]
    subprocess.run(command, check=True)
    return output
