"""Settings of the documentation site: `make docs` writes it to build/docs.

In: the Markdown files of this folder, and the README of each part. Out: HTML with search. The
source folder is the repository, so links work on the site as they do in the files. Sphinx and its
theme are the extra `docs`.
"""

import re

project = "nanogrpo"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "*/*.md", "docs/log/*.md", "examples/*/*.md"]
# folders that are not searched; a clone may contain environments and runs
exclude_patterns = [".*", "runs", "build", "typings", "tests"]

html_theme = "furo"
html_title = "nanogrpo"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
highlight_language = "none"  # of blocks that name no language
html_extra_path = ["site"]  # its index.html leads to docs/index.html
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # links to headings, as on GitHub


def name_quotes(app, page: str, source: list[str]) -> None:
    """Show above quoted code the file that it comes from."""
    block = r"```{code-block} python\n:caption: \1\n\n"
    source[0] = re.sub(r'^```python title="([^"]+)"\n', block, source[0], flags=re.MULTILINE)


def setup(app) -> None:
    app.connect("source-read", name_quotes)
