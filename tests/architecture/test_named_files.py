"""Docstrings and comments that name a file name one that exists."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.house import ROOT

ROOMS = ("services", "shared", "bench", "tools", "tests")

NAMED = re.compile(
    r"(?<![\w./:*{-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|proto|toml|cpp|yaml|js))\b(?!\w|\()"
)
MODULE = re.compile(r"``((?:services|shared|bench|tools)(?:\.\w+)+)``")

SEE = re.compile(r"see ``([a-z_]+)\.([a-z_]+)``")

ELSEWHERE = ("transformers/", "h11/", "llama.cpp")
"""Files of other projects are named with their project."""


def files() -> list[str]:
    """Every file of the repository, as git knows them."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


FILES = files()
ENDS = {name[at:] for name in FILES for at in [0, *(m.end() for m in re.finditer("/", name))]}
"""Every file by each of its endings: a reader who knows the room needs no more."""


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module, with the line on which each begins."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str(text))):
                yield node.lineno, text
            case _:
                pass
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def unknown(text: str) -> list[str]:
    """What a text names and nobody has."""
    return [
        *(it for it in NAMED.findall(text) if it not in ENDS and not it.startswith(ELSEWHERE)),
        *(dotted for dotted in MODULE.findall(text) if not is_known(dotted.split("."))),
        *(f"{it}.{of}" for it, of in SEE.findall(text) if f"{it}.py" not in ENDS and of != "py"),
    ]


def missing(path: Path) -> Iterator[str]:
    """What a module's docstrings and comments name and nobody has; most have no such name anywhere,
    and need not be parsed."""
    if unknown(path.read_text()):
        for line, text in texts(path):
            yield from (f"{path.relative_to(ROOT)}:{line}: {name}" for name in unknown(text))


def is_known(parts: list[str]) -> bool:
    """Whether a dotted name is a package, a module, or something that a module has."""
    for count in range(len(parts), 0, -1):
        place, rest = ROOT.joinpath(*parts[:count]), parts[count:]
        if place.is_dir():
            return not rest
        module = place.with_suffix(".py")
        if module.exists():
            return not rest or re.search(rf"\b{rest[0]}\b", module.read_text()) is not None
    return False


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_that_a_docstring_or_a_comment_names_exists(room: str) -> None:
    """By its path from the root or any ending of it."""
    modules = [
        ROOT / name for name in FILES if name.startswith(f"{room}/") and name.endswith(".py")
    ]
    assert modules
    assert [one for path in modules for one in missing(path)] == []
