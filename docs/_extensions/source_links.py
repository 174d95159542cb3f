"""Links from pages into the source tree: each is checked, and leads to a listing of that file.

Pages link to code as ``../services/gateway/mesh.py#L12``, which a code forge understands. Here
such a link becomes one to a highlighted listing with that line marked. A file that is not there, or
a line beyond its end, is a warning, and so fails the build. A link to a folder leads to its
README.md.

Three pages are tables of contents: the pages that they link to are their children, section by
section, so that nothing of Sphinx stands in a page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging

CONTENTS = ("docs/index", "docs/adr/README", "bench/README")
FOLDER = "_listings"
SCHEME = "source:"

_log = logging.getLogger(__name__)
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)(\[[^\]]*\])\(([^)#\s:]+)(?:#([^)\s]*))?\)")
_LINE = re.compile(r"L(\d+)")


def rewrite_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Before a page is parsed: give links into the tree a scheme of their own."""
    root = Path(app.srcdir)
    folder = (root / docname).parent

    def rewrite(link: re.Match[str]) -> str:
        text, path, anchor = link[1], link[2], link[3] or ""
        target = Path(os.path.normpath(folder / path))
        if not target.exists():
            _log.warning("a link leads to nothing: %s", path, location=docname)
            return text
        if target.is_dir():
            target, path = target / "README.md", f"{path.rstrip('/')}/README.md"
            if not target.exists():
                _log.warning("a link to a folder without README.md: %s", path, location=docname)
                return text
        if target.suffix == ".md" and str(target.relative_to(root))[:-3] in app.env.found_docs:
            return f"{text}({path}{'#' + anchor if anchor else ''})"
        line = _LINE.fullmatch(anchor)
        num_lines = len(target.read_bytes().splitlines())
        if anchor and (line is None or not 1 <= int(line[1]) <= num_lines):
            _log.warning("no such line: %s#%s", path, anchor, location=docname)
        return f"{text}({SCHEME}{target.relative_to(root)}{'#' + anchor if anchor else ''})"

    parts: list[str] = []
    end = 0
    for fence in _FENCE.finditer(source[0]):
        parts += [_LINK.sub(rewrite, source[0][end : fence.start()]), fence[0]]
        end = fence.end()
    page = "".join([*parts, _LINK.sub(rewrite, source[0][end:])])
    source[0] = page + _children(page) if docname in CONTENTS else page


def _children(page: str) -> str:
    """Return one hidden toctree a section, of the pages that it links to."""
    trees: list[str] = []
    seen: set[str] = set()
    for section in re.split(r"^## ", _FENCE.sub("", page), flags=re.MULTILINE):
        caption, _, _ = section.partition("\n")
        pages = [link[2].removesuffix(".md") for link in _LINK.finditer(section)]
        entries = [p for p in dict.fromkeys(pages) if SCHEME not in p and p not in seen]
        seen |= set(entries)
        if entries:
            title = f":caption: {caption}\n" if not caption.startswith("#") else ""
            trees.append(f"\n```{{toctree}}\n:hidden:\n{title}\n" + "\n".join(entries) + "\n```\n")
    return "".join(trees)


def resolve_links(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """After a page is resolved: point its links at the listings, and note which are needed."""
    depth = docname.count("/")
    for reference in doctree.findall(nodes.reference):
        uri = reference.get("refuri", "")
        if uri.startswith(SCHEME):
            path, _, anchor = uri.removeprefix(SCHEME).partition("#")
            number = anchor.removeprefix("L")
            fragment = f"#L-{number}" if number else ""
            reference["refuri"] = f"{'../' * depth}{FOLDER}/{path}.html{fragment}"
            app.env.pdmesh_listings.add(path)  # type: ignore[attr-defined]


def prepare(app: Sphinx) -> None:
    """Start with no listings."""
    app.env.pdmesh_listings = set()  # type: ignore[attr-defined]


def write_listings(app: Sphinx, error: Exception | None) -> None:
    """At the end: one page a file that is linked to, and a way in at the top."""
    if error is not None or app.builder.format != "html":
        return
    start = f'<meta http-equiv="refresh" content="0; url={app.config.root_doc}.html">\n'
    (Path(app.outdir) / "index.html").write_text(start, encoding="utf-8")
    for path in sorted(app.env.pdmesh_listings):  # type: ignore[attr-defined]
        code = (Path(app.srcdir) / path).read_text(encoding="utf-8", errors="replace")
        try:
            lexer = get_lexer_for_filename(path)
        except ClassNotFound:
            lexer = TextLexer()
        formatter = HtmlFormatter(full=True, title=path, linenos="inline", lineanchors="L")
        page = Path(app.outdir) / FOLDER / f"{path}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(highlight(code, lexer, formatter), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("builder-inited", prepare)
    app.connect("source-read", rewrite_links)
    app.connect("doctree-resolved", resolve_links)
    app.connect("build-finished", write_listings)
    return {"parallel_read_safe": False, "parallel_write_safe": False}
