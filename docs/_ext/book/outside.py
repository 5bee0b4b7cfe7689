"""Links from a page to what is not in the book: to the repository where it is known, otherwise plain text."""

import posixpath
import re
from pathlib import Path
from urllib.parse import quote

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

TO_FILL_IN = "https://github.com/OWNER/NAME"  # for a reader of the files; the book fills it in where it can
HOW_TO_FILL_IN = re.compile(r"^# Replace OWNER/NAME.*\n", re.MULTILINE)
CODESPACES = "https://codespaces.new/{owner_and_name}?quickstart=1"


def repository_url(app: Sphinx, path: str) -> str:
    """Return the address of a file or folder of the repository, or "" where the repository is not known."""
    kind = "tree" if Path(app.srcdir, path).is_dir() else "blob"
    return f"{app.config.book_repository}/{kind}/{app.config.book_branch}/{path}" if app.config.book_repository else ""


def source_notebook(app: Sphinx, docname: str) -> str:
    """Return the path of the notebook that a page was rendered from, or "" for a page that is none."""
    path = f"notebooks/{docname.removeprefix('notebook_output/')}.ipynb"
    return path if docname.startswith("notebook_output/") and Path(app.srcdir, path).exists() else ""


def resolve_links(app: Sphinx, doctree: nodes.document) -> None:
    """Replace each relative link that leaves the book, before Sphinx looks for its target."""
    docname = app.env.docname
    for node in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        path = _target(app, docname, node)
        twin = (
            f"notebook_output/{Path(path).with_suffix('').relative_to('notebooks')}"
            if path.startswith("notebooks/")
            else ""
        )
        if twin in app.env.found_docs:
            node.replace_self(_to_page(twin, docname, node))
        elif path and Path(app.srcdir, path).exists() and _is_outside(app.env, path):
            url = repository_url(app, path)
            text = node.children
            named = nodes.inline("", "", *text, classes=["outside"])  # a test finds those that name no file
            node.replace_self(nodes.reference("", "", *_bare(text), refuri=url) if url else named)


def add_badge(app: Sphinx, doctree: nodes.document) -> None:
    """Put a link to Codespaces under the title of the first page and of notebooks, if the repository is on GitHub."""
    repository, page = app.config.book_repository, app.env.docname
    if not repository.startswith("https://github.com/") or not (
        page == app.config.root_doc or source_notebook(app, page)
    ):
        return
    url = CODESPACES.format(owner_and_name=repository.removeprefix("https://github.com/"))
    html = f'<p class="launch"><a class="badge-link" href="{url}">Open in Codespaces</a></p>'
    line = nodes.raw("", html, format="html")  # which is left out of the page's description
    title = next(doctree.findall(nodes.title))
    title.parent.insert(title.parent.index(title) + 1, line)


def fill_in_repository(app: Sphinx, doctree: nodes.document) -> None:
    """Write the repository's address into commands, where it is known."""
    for block in [*doctree.findall(nodes.literal_block), *doctree.findall(nodes.literal)]:
        if app.config.book_repository and TO_FILL_IN in block.astext():
            text = HOW_TO_FILL_IN.sub("", block.astext()).replace(TO_FILL_IN, app.config.book_repository)
            block.rawsource, block.children = text, []
            block += nodes.Text(text)


def add_links_below(app: Sphinx, pagename: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    """Give a template the addresses of the file to edit, for a notebook the one without outputs, and for feedback."""
    path = source_notebook(app, pagename) or (pagename in app.env.found_docs and f"{pagename}.md")
    context["source_url"] = repository_url(app, path) if path else ""
    context["feedback_url"] = f"{app.config.book_repository}/issues/new?title={quote(f'On the page {path}')}"


def setup(app: Sphinx) -> None:
    """Have Sphinx call these."""
    app.connect("doctree-read", resolve_links, priority=100)  # before Sphinx collects files to download
    app.connect("doctree-read", add_badge)
    app.connect("doctree-read", fill_in_repository)
    app.connect("html-page-context", add_links_below)


def _target(app: Sphinx, docname: str, node: nodes.Element) -> str:
    if node.get("reftype") != "myst" or "://" in node["reftarget"]:
        return ""
    if node.get("refdomain") == "doc":  # MyST found the file, and took it for a page
        return next((node["reftarget"] + end for end in (".md", ".ipynb") if _exists(app, node["reftarget"] + end)), "")
    path = node["reftarget"].split("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(docname), path)) if path else ""


def _exists(app: Sphinx, path: str) -> bool:
    return Path(app.srcdir, path).exists()


def _is_outside(env: BuildEnvironment, path: str) -> bool:
    return env.path2doc(str(Path(env.srcdir, path))) not in env.found_docs


def _to_page(target: str, docname: str, node: nodes.Element) -> nodes.Element:
    xref = addnodes.pending_xref(
        "",
        *node.children,
        refdomain="doc",
        reftarget=target,
        reftargetid=None,
        refdoc=docname,
        reftype="myst",
        refexplicit=True,
    )
    return xref


def _bare(children: list[nodes.Node]) -> list[nodes.Node]:
    return [child.deepcopy() for child in children]
