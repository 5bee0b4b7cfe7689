"""How `make book` builds the site from docs/ and notebook_output/: offline, and nothing is executed.

sphinx-build -c docs -b html -W --keep-going . build/book

The address of the repository comes from WORKSHOP_REPOSITORY, such as https://github.com/OWNER/NAME, or from what GitHub
Actions sets. Without it, pages have no launch links and no links to the source. WORKSHOP_BOOK is the address at which
the book is served.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE / "_ext"), str(ROOT / "tools")]

project = "Introduction to PyTorch with Dask"
author = "the authors of this workshop"
copyright = "its authors, BSD 3-Clause"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinxext.opengraph",
    "book",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebook_output/**",
    "deploy/*.md",
    "deploy/*/*.md",
    "daskrun/README.md",
    "benchmarks/NOTES.md",
    "CONTRIBUTING.md",
]
FOLDERS = {"docs", "notebook_output", "deploy", "daskrun", "benchmarks"}
# Sphinx walks the whole source folder: keep it out of virtual environments and builds.
exclude_patterns = [
    ".*",
    "docs/_*",
    "docs/slides",
    "daskrun/[a-z]*",
    "benchmarks/[a-z]*",
    "**/.ipynb_checkpoints",
    *(folder.name for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in FOLDERS),
]
templates_path = ["_templates"]
# Hints leave parts of a line open with "…", which is no Python; such a line is coloured as far as it goes.
# `launch` in a docstring is a link, and the reference has two of them.
suppress_warnings = ["misc.highlighting_failure", "ref.python"]

myst_enable_extensions = ["colon_fence", "tasklist"]
myst_heading_anchors = 4
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"  # beside each parameter: a signature with them is too long for a phone
autodoc_inherit_docstrings = False  # PyTorch says of each `forward` how to write one
autosummary_generate = False
add_module_names = False  # the page has the name
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show our solution"
nb_code_prompt_hide = "Hide our solution"
copybutton_exclude = ".linenos, .gp, .go"

book_repository = os.environ.get("WORKSHOP_REPOSITORY") or (
    f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}" if "GITHUB_REPOSITORY" in os.environ else ""
)
book_branch = os.environ.get("WORKSHOP_BRANCH", "main")

ogp_site_url = os.environ.get("WORKSHOP_BOOK", "")  # what shows a link to a page wants whole addresses
ogp_image = "_static/kill.png"
ogp_social_cards = {"enable": False}

linkcheck_ignore = ["^(?!https?://)"]  # the tests follow those within the book

html_theme = "sphinx_book_theme"
html_title = project
html_favicon = "_static/favicon.svg"
html_static_path = ["_static", "../img/kill.webm", "../img/kill.png"]
html_css_files = ["book.css"]
html_js_files = [(name, {"defer": "defer"}) for name in ("book.js", "phone.js")]
html_extra_path = ["_root"]
html_domain_indices = False  # the reference lists its modules itself
html_show_sphinx = False
html_context = {"default_mode": "auto"}  # light or dark as the reader's system
html_logo = html_favicon
html_sidebars = {"**": ["logo.html", "search-button-field.html", "menu.html"]}
html_theme_options = {
    # Without entries the theme draws no bar at the top, whose buttons, hidden, would take the clicks of the page's.
    **{f"navbar_{place}": [] for place in ("start", "center", "end", "persistent")},
    "logo": {"text": project, "alt_text": "One process above three, the mark of the workshop"},
    "show_toc_level": 2,
    "max_navbar_depth": 1,  # what opens deeper levels has no name for a screen reader
    "toc_title": "On this page",
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "github-dark-high-contrast",
    "footer_content_items": ["verified.html"],
    **(
        {"repository_url": book_repository, "use_repository_button": True}
        if book_repository.startswith("https://github.com/")
        else {}
    ),
}
