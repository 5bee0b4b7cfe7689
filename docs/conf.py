"""How `make book` builds the site from docs/ and notebook_output/: offline, and nothing is executed.

sphinx-build -c docs -b html -W --keep-going . build/book

The address of the repository comes from WORKSHOP_REPOSITORY, such as https://github.com/OWNER/NAME, or from what GitHub
Actions sets. Without it, pages have no launch links and no links to the source.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE / "_ext"))

project = "Introduction to PyTorch with Dask"
author = "the authors of this workshop"
copyright = "its authors, BSD 3-Clause"
language = "en"

extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton", "book"]
root_doc = "docs/index"
include_patterns = ["docs/**", "notebook_output/**"]
# Sphinx walks the whole source folder: keep it out of virtual environments and builds.
exclude_patterns = [
    ".*",
    "docs/_*",
    "docs/slides",
    "**/.ipynb_checkpoints",
    *(folder.name for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in ("docs", "notebook_output")),
]
templates_path = ["_templates"]
# Hints leave parts of a line open with "…", which is no Python; such a line is coloured as far as it goes.
suppress_warnings = ["misc.highlighting_failure"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show our solution"
nb_code_prompt_hide = "Hide our solution"
copybutton_exclude = ".linenos, .gp, .go"

book_repository = os.environ.get("WORKSHOP_REPOSITORY") or (
    f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}" if "GITHUB_REPOSITORY" in os.environ else ""
)
book_branch = os.environ.get("WORKSHOP_BRANCH", "main")

html_theme = "sphinx_book_theme"
html_title = project
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_extra_path = ["_root"]
html_show_sphinx = False
html_context = {"default_mode": "auto"}  # light or dark as the reader's system
html_sidebars = {"**": ["search-button-field.html", "sbt-sidebar-nav.html"]}
html_theme_options = {
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "toc_title": "On this page",
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_content_items": ["verified.html"],
    **(
        {"repository_url": book_repository, "use_repository_button": True, "use_issues_button": True}
        if book_repository.startswith("https://github.com/")
        else {}
    ),
}
