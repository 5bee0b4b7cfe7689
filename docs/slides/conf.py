"""The slides, as `make book` builds them; measured.py reads their numbers, ../conf.py the repository's address."""

import runpy
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "_ext"), str(HERE.parents[1] / "benchmarks")]

from measured import numbers  # noqa: E402, as it is beside this file


def begin(address):
    """Return what to type first, and where the workshop is; this build may know no address."""
    copied = f"git clone {address} workshop\ncd workshop" if address else "cd workshop  # your copy of the repository"
    links = ['<a href="../docs/index.html">The workshop\'s pages</a>']
    if address:
        links.insert(0, f"[{address.partition('://')[2]}]({address})")
    return {
        "begin": f"```sh\n{copied}\nmake lab\n```",
        "address": "{.address}\n" + " · ".join(links),
    }


def print_pdf(app, error):
    """Print the slides as slides.pdf beside them, where there is a Chromium."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if error or app.builder.name != "revealjs" or not chromium:
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.add_init_script("addEventListener('pdf-ready', () => window.laidOut = true)")
        page.goto(f"{Path(app.outdir, 'index.html').as_uri()}?print-pdf")
        page.wait_for_function("window.laidOut")
        page.pdf(path=Path(app.outdir, "slides.pdf"), prefer_css_page_size=True, print_background=True)
        browser.close()


def setup(app):
    app.connect("build-finished", print_pdf)


project = "Introduction to PyTorch with Dask"
html_title = project
extensions = ["myst_parser", "sphinx_revealjs"]
myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "substitution"]
myst_substitutions = numbers() | begin(runpy.run_path(str(HERE.parent / "conf.py"))["book_repository"])
highlight_language = "python"
revealjs_style_theme = "white"
revealjs_static_path = ["_static"]
revealjs_css_files = ["slides.css"]
revealjs_script_plugins = [
    {"name": "RevealNotes", "src": "revealjs/plugin/notes/notes.js"},
    {"name": "RevealHighlight", "src": "revealjs/plugin/highlight/highlight.js"},
]
revealjs_script_conf = {
    "width": 1280,
    "height": 720,
    "margin": 0,
    "center": False,
    "hash": True,
    "slideNumber": "c",
    "transition": "none",
    "pdfSeparateFragments": False,
    "showNotes": False,
}
