"""One word for one thing: a class name means the same wherever it is read."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.support.house import ROOT


def test_every_class_name_is_defined_once() -> None:
    """In services and shared together; generated messages are apart."""
    found: dict[str, list[str]] = defaultdict(list)
    for room in ("services", "shared"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if (ROOT / "shared" / "wire") in path.parents:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: where for name, where in found.items() if len(where) > 1} == {}
