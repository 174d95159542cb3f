"""Documents name files that exist, and the house says what each of its rooms is for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from services.cli import help_texts
from tests.support.house import ROOT
from tests.support.pages import Block, blocks_of

DOCUMENTS = {
    path.relative_to(ROOT): path.read_text()
    for pattern in ("*.md", "docs/**/*.md", "bench/**/*.md", "examples/*.md")
    for path in sorted(ROOT.glob(pattern))
}
_IN_CODE = re.compile(r"`((?:services|shared|tests|tools|proto|docs|bench)/[\w./-]+)`")
COMMAND_PAGES = ("README.md", "docs/quickstart.md", "docs/cli.md")
MODULES = sorted(
    path.relative_to(ROOT)
    for top in ("services", "shared", "tools")
    for path in (ROOT / top).rglob("*.py")
    if "wire" not in path.parts
)
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def test_every_path_that_a_document_names_exists() -> None:
    """A renamed module must be renamed in the documents, too."""
    missing: list[str] = []
    for document, text in DOCUMENTS.items():
        named = [ROOT / path for path in _IN_CODE.findall(text)]
        linked = [(ROOT / document).parent / path for path in _LINK.findall(text)]
        missing += [f"{document}: {path}" for path in named + linked if not path.exists()]
    assert not missing


_FENCED = re.compile(r"^ *(```+).*?^ *\1`*$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def _anchors(page: str) -> set[str]:
    """The headings of a page as links name them: GitHub's rule, and Sphinx's here."""
    found: dict[str, int] = {}
    anchors: set[str] = set()
    for heading in _HEADING.findall(_FENCED.sub("", page)):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        num = found[slug] = found.get(slug, -1) + 1
        anchors.add(f"{slug}-{num}" if num else slug)
    return anchors


def test_every_heading_that_is_linked_exists() -> None:
    """In another page or its own; Sphinx knows those of docs/ alone."""
    missing: list[str] = []
    num_links = 0
    for document, text in DOCUMENTS.items():
        for page, heading in re.findall(
            r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", _FENCED.sub("", text)
        ):
            target = (ROOT / document).parent / page if page else ROOT / document
            num_links += 1
            if target.suffix == ".md" and heading not in _anchors(target.read_text()):
                missing.append(f"{document}: {page}#{heading}")
    assert num_links > 100
    assert missing == []


def test_a_bare_file_name_stands_beside_the_path_before_it() -> None:
    """`services/gateway/http/door.py`, `sse.py` names two files of one folder."""
    missing: list[str] = []
    lines = [(page, line) for page, text in DOCUMENTS.items() for line in text.splitlines()]
    for document, line in lines:
        for cell in line.split("|") if line.startswith("|") else [line]:
            folder: Path | None = None
            for name in re.findall(r"`([\w./]+\.py)`", cell):
                if "/" in name and (ROOT / name).exists():
                    folder = (ROOT / name).parent
                elif folder is not None and not (
                    (folder / name).exists() or (folder.parent / name).exists()
                ):
                    missing.append(f"{document}: {folder.relative_to(ROOT)}/{name}")
    assert not missing


def test_every_module_and_package_says_what_it_is() -> None:
    """A stranger who opens a file, or a folder, reads its purpose first."""
    silent = [
        str(module)
        for module in MODULES
        if not re.search("[.:]", ast.get_docstring(ast.parse((ROOT / module).read_text())) or "")
    ]
    assert not silent


def test_every_package_is_on_the_map() -> None:
    """ARCHITECTURE.md names every room, or the room that it is a part of."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    packages = {module.parent for module in MODULES if module.parts[0] != "tools"}
    missing = [
        str(package)
        for package in sorted(packages)
        if not any(str(room) in page for room in (package, package.parent) if len(room.parts) > 1)
    ]
    assert [m for m in missing if m not in ("services", "shared")] == []


@pytest.mark.parametrize("page", COMMAND_PAGES)
def test_every_command_that_a_newcomer_reads_is_run_or_says_why_not(page: str) -> None:
    """See tests/support/pages.py; tests/process/test_pages.py runs them."""
    blocks = blocks_of(ROOT / page)
    unmarked = [f"{page}:{block.line}" for block in blocks if _lacks_mark(block)]
    assert not unmarked


def _lacks_mark(block: Block) -> bool:
    if block.mark == "not run":
        return not block.detail
    return block.needs_mark and block.mark != "run"


_LEAVES_THE_MACHINE = re.compile(
    r"--api-keys? |--mesh-host (?!127\.)|(?:prefill|decode) .*--(?:host|gateway) (?!127\.|local)"
)
_SERVICE = re.compile(r"^.*\bpdmesh (?:gateway|prefill|decode) .*$", re.MULTILINE)


def test_every_service_that_a_page_starts_beyond_one_machine_would_start() -> None:
    """It has the secret that it needs, and workers on several hosts the flag without which they
    pair with nobody. An ellipsis stands for further flags, of which the secret may be one."""
    helps = {**help_texts.EXAMPLES, "pdmesh": help_texts.EPILOGUE}
    blocks = {f"{page}:{b.line}": b.code for page in DOCUMENTS for b in blocks_of(ROOT / page)}
    lacking: list[str] = []
    num_checked = 0
    for where, text in {**blocks, **helps}.items():
        for command in _SERVICE.findall(text.replace("\\\n", " ")):
            if not _LEAVES_THE_MACHINE.search(command):
                continue
            num_checked += 1
            has_more = re.search("--config|--mesh-secret-file|…", command)
            if not has_more and "PDMESH_MESH_SECRET" not in text:
                lacking.append(f"{where}: a secret: {command}")
            is_worker = "pdmesh gateway" not in command
            if is_worker and not re.search("--allow-unencrypted-kv|--config|…$", command):
                lacking.append(f"{where}: --allow-unencrypted-kv: {command}")
    assert num_checked > 9
    assert lacking == []


_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_row_of_the_audit_names_tests_that_exist() -> None:
    """A claim of docs/security.md without a test, or with one that was renamed, is found."""
    page = (ROOT / "docs/security.md").read_text()
    rows = [line for line in page.splitlines() if re.match(r"\| (?!asset \|)", line)]
    assert len(rows) > 10
    assert [row for row in rows if not _TEST.search(row)] == []
    missing = [
        f"{path}::{name}"
        for path, name in _TEST.findall(page)
        if f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert missing == []
