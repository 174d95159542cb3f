"""Sphinx: the pages of this repository as a site, built offline by `make docs`.

The source folder is the root, so that pages keep the relative links by which they read well in a
plain checkout. Warnings are errors: a link that leads nowhere fails the build.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "_extensions"))

project = "pdmesh"
copyright = "the pdmesh authors, Apache-2.0"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "bench/*.md", "bench/*/README.md"]
exclude_patterns = [".*", ".*/**", "build", "dist", "**/node_modules", "**/site-packages"]

extensions = ["myst_parser", "sphinxcontrib.mermaid", "source_links"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
myst_url_schemes = ["http", "https", "mailto", "source"]

html_theme = "furo"
html_title = "pdmesh"
html_copy_source = False
html_show_sphinx = False
# Diagrams are text here and are drawn by the reader's browser; nothing is fetched by the build.
mermaid_output_format = "raw"
highlight_language = "text"
