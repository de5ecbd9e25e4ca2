"""Settings of the documentation site: `make docs` writes it to build/docs.

In: the Markdown files of this folder, and the README of each part. Out: HTML with search, which
needs no network. The source folder is the repository, so links work on the site as they do in the
files. A link to code leads to a page that shows this code. Sphinx and its theme are the extra
`docs`.
"""

import re
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes

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
html_js_files = ["site.js"]
html_math_renderer = "mathml"  # all browsers show MathML; MathJax would be two megabytes
highlight_language = "none"  # of blocks that name no language
html_extra_path = ["site"]  # its index.html leads to docs/index.html
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # links to headings, as on GitHub

ROOT = Path(__file__).parents[1]
CODE = {".py": "python", ".json": "json", ".txt": "text"}


def name_quotes(app, page: str, source: list[str]) -> None:
    """Show above quoted code the file that it comes from."""
    block = r"```{code-block} python\n:caption: \1\n\n"
    source[0] = re.sub(r'^```python title="([^"]+)"\n', block, source[0], flags=re.MULTILINE)


def link_code(app, tree: nodes.document) -> None:
    """Let links to code, and the names above quotes, lead to the pages of `code_pages`."""
    shown = app.env.__dict__.setdefault("shown", set())

    def link(path: str, line: int, *inside: nodes.Node) -> nodes.reference:
        shown.add(path)
        uri = app.builder.get_relative_uri(app.env.docname, path) + f"#line-{line}" * bool(line)
        return nodes.reference("", "", *inside, internal=True, refuri=uri)

    for node in list(tree.findall(addnodes.download_reference)):
        path, _ = app.env.relfn2path(node["reftarget"])
        if Path(path).suffix in CODE:
            node.replace_self(link(path, 0, *node.children))
    for node in list(tree.findall(addnodes.pending_xref)):
        if (ROOT / app.env.relfn2path(node["reftarget"])[0]).is_dir():
            node.replace_self(node.children)  # a folder has no page
    for node in list(tree.findall(nodes.caption)):
        if (ROOT / node.astext()).is_file():
            first = node.parent[1].astext().strip().partition("\n")[0].strip()
            lines = [line.strip() for line in (ROOT / node.astext()).read_text().splitlines()]
            text = link(node.astext(), lines.index(first) + 1, *node.children)
            node.children = []
            node += text


def code_pages(app):
    """Yield a page for each file that a page links to."""
    for path in sorted(app.env.shown):
        text, kind = (ROOT / path).read_text(), CODE[Path(path).suffix]
        code = app.builder.highlighter.highlight_block(
            text, kind, linenos="inline", linespans="line", location=path
        )
        body = f'<h1>{path}</h1><div class="highlight-{kind} notranslate">{code}</div>'
        yield path, {"title": path, "body": body}, "page.html"


def show_pictures(app, page: str, template: str, context: dict, tree) -> None:
    """Let a link to a picture show it. Sphinx would let the browser download it."""
    if "body" in context:
        context["body"] = re.sub(r' download=""( href="[^"]+\.png")', r"\1", context["body"])


def math(block: bool):
    def write(html, node) -> None:
        html.body.append(tex2mathml(node.astext(), as_block=block))
        raise nodes.SkipNode

    return write, None


def setup(app) -> None:
    app.connect("source-read", name_quotes)
    app.connect("doctree-read", link_code, priority=400)  # before Sphinx collects the downloads
    app.connect("html-collect-pages", code_pages)
    app.connect("html-page-context", show_pictures)
    app.add_html_math_renderer("mathml", math(block=False), math(block=True))
