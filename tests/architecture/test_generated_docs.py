"""Generated pages are what the code says now, and a site with a dangling link is not built; `make
docs` builds ours."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.tour_stops import STOPS, place_of
from shared import wire
from shared.messages.codec import PROTOCOL_VERSION
from tools.explored_states import explore, worker_moves
from tools.generate_docs import DOCS, PAGES, ROOT, render, request

LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w./]+)\)")


@pytest.mark.parametrize("name", PAGES)
def test_every_generated_part_is_fresh(name: str) -> None:
    """As `make check` sees it."""
    page = (DOCS / name).read_text()
    assert render(page, PAGES[name]) == page, "run `make proto`"


def test_a_stale_part_is_seen() -> None:
    """A diagram that differs by one word is not taken for fresh."""
    page = (DOCS / "states.md").read_text()
    assert render(page.replace("waiting --> running", "waiting --> done"), PAGES["states.md"]) == (
        page
    )


def test_a_part_that_nobody_writes_is_an_error() -> None:
    """A page and its generator name the same parts."""
    with pytest.raises(LookupError, match="nothing"):
        render("<!-- generated: nothing -->\n<!-- end -->", {})
    with pytest.raises(LookupError, match="sender"):
        render("no part", {"sender": str})


def test_every_file_that_the_tour_names_defines_its_object() -> None:
    """Checked by reading the file, not by the way in which the page was made."""
    named = LINK.findall((DOCS / "tour.md").read_text())
    assert len(named) == 2 * len(STOPS)
    for name, file in named:
        defined = rf"^ *(async )?(def|class) {name.rpartition('.')[2]}\b"
        assert re.search(defined, (ROOT / file).read_text(), re.MULTILINE), (name, file)


def test_a_renamed_object_breaks_the_tour() -> None:
    """Loudly, and with its name."""
    with pytest.raises(AttributeError, match="no_such_thing"):
        place_of("services.gateway.core.routing.routing:no_such_thing")


def test_the_sequence_names_messages_that_exist() -> None:
    """Every arrow of the drawing in the protocol is a message of proto/."""
    page = (DOCS / "protocol.md").read_text()
    drawing = re.search(r"sequenceDiagram\n(.*?)```", page, re.DOTALL)
    assert drawing is not None
    messages = set(re.findall(r": ([A-Z]\w+)", drawing[1]))
    assert len(messages) >= 12
    missing = [name for name in messages if not hasattr(wire, name)]
    assert not missing


def test_the_version_of_the_protocol_is_the_codes() -> None:
    """Who writes a worker of another make goes by the page, who upgrades by the changelog."""
    for page, words in (("docs/protocol.md", "`protocol_version` is"), ("CHANGELOG.md", "version")):
        assert f"{words} {PROTOCOL_VERSION}" in (ROOT / page).read_text(), page


def test_exploring_finds_a_state_that_was_forgotten() -> None:
    """Events that do not reach every state are not all events."""
    with pytest.raises(LookupError, match="unreachable"):
        explore("a", (), state_of=str, key_of=str, states=["a", "unreachable"])


def test_a_request_can_only_end_once() -> None:
    """The drawing has no arrow out of an end; so has the core."""
    drawn = request()
    for end in ("finished", "failed"):
        assert f"{end} --> [*]" in drawn
        assert not re.search(rf"{end} --> \w", drawn)


def test_a_worker_that_has_left_does_not_come_back() -> None:
    """A process that joins again is another entry."""
    assert worker_moves()["left"] == {}


# --- the site -----------------------------------------------------------------------------------


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build a site as `make docs` does."""
    pytest.importorskip("sphinx")
    return subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q"),
            *("-c", str(root / "docs"), str(root), str(site)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


GOOD = ("../code.py#L2", "other.md#here")
WRONG = {
    "../no_such_file.py": "leads to nothing",
    "../code.py#L3": "no such line",
    "../code.py#top": "no such line",
    "../folder": "folder without README.md",
    "other.md#no-such-heading": "no-such-heading",
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [{}, WRONG], ids=["good", "wrong"])
def test_a_dangling_link_fails_the_build(wrong: dict[str, str], tmp_path: Path) -> None:
    """Into the tree, to a line, to a folder, to a heading; not in code. So does a page that the
    contents lack."""
    docs = tmp_path / "tree" / "docs"
    shutil.copytree(DOCS / "_extensions", docs / "_extensions")
    shutil.copy(DOCS / "conf.py", docs)
    (docs.parent / "folder").mkdir()
    (docs.parent / "code.py").write_text("one = 1\ntwo = 2\n")
    lines = ["# Index", "[other](other.md)", *(f"[x]({it})" for it in (*GOOD, *wrong))]
    lines.append("```\n[x](../no_such_file.py)\n```")
    (docs / "index.md").write_text("\n\n".join(lines))
    (docs / "other.md").write_text("# Other\n\n## Here\n")
    if wrong:
        (docs / "lost.md").write_text("# Lost\n")
    built = build(docs.parent, tmp_path / "site")
    assert (built.returncode != 0) is bool(wrong), built.stderr
    said = [line for line in built.stderr.splitlines() if "index.md" in line]
    assert len(said) == len(wrong)
    for line, complaint in zip(said, wrong.values(), strict=True):
        assert complaint in line
    assert ("lost.md" in built.stderr) is bool(wrong)
    if not wrong:
        page = (tmp_path / "site/docs/index.html").read_text()
        linked = re.search(r'href="\.\./(_listings/[\w./]+\.html)#L-2"', page)
        assert linked is not None
        assert 'id="L-2"' in (tmp_path / "site" / linked[1]).read_text()
