"""The book's pages as files: all are there, nothing leads nowhere or elsewhere, and the reference is complete."""

import importlib
import inspect
import json
import re
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from built import ROOT, Page, build

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebook_output").glob("*.ipynb"))
LESSONS = [name for name in NOTEBOOKS if name[0].isdigit()]
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
TAUGHT = re.findall(r"^### (.+)\n\n.+\n\nTaught in .*\(\.\./(.+)\.ipynb#", GLOSSARY, re.MULTILINE)
MODULES = re.findall(r"^   workshop_utils\.(\w+)$", (ROOT / "docs/reference/index.md").read_text(), re.MULTILINE)
ADDRESS = "https://github.com/someone/workshop"


def test_every_notebook_and_page_is_in_the_book(pages):
    written = {f"docs/{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    assert written | {f"notebook_output/{name}.html" for name in NOTEBOOKS} <= set(pages)
    assert {"deploy/README.html", "deploy/kubernetes/README.html", "deploy/gateway.html"} <= set(pages)
    assert 'url=docs/index.html"' in pages["index.html"].text


def test_no_link_and_no_picture_leads_nowhere(book, pages):
    missing = []
    for path, page in pages.items():
        for tag, name in (("a", "href"), ("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src")):
            for target in filter(None, (attributes.get(name) for attributes in page.all(tag))):
                if urlsplit(target).scheme:
                    continue
                to, anchor = urldefrag(unquote(target))
                file = (book / path).parent / to.split("?")[0] if to else book / path
                relative = file.resolve().relative_to(book.resolve()).as_posix()
                there = file.is_file() and (relative not in pages or not anchor or anchor in pages[relative].ids)
                if not there and not relative.startswith("slides"):  # `make book` builds those beside the book
                    missing.append(f"{path}: {target}")
    assert not missing


def test_the_book_needs_no_network_no_kernel_and_no_eyes(pages):
    for path, page in pages.items():
        assert not page.all("iframe") and "jupyter.widget" not in page.text, path
        for tag in ("img", "script"):
            assert not [found for found in page.all(tag) if "//" in found.get("src", "")], path
        sheets = [link["href"] for link in page.all("link") if link.get("rel") == "stylesheet"]
        assert not [href for href in sheets if "//" in href], path
        assert not [image["src"] for image in page.all("img") if len(image.get("alt") or "") < 20], path


def test_hints_and_solutions_are_folded(pages):
    for name in LESSONS:
        cells = json.loads((ROOT / f"notebook_output/{name}.ipynb").read_text())["cells"]
        n_solutions = sum("solution" in cell["metadata"].get("tags", []) for cell in cells)
        n_hints = sum("".join(cell["source"]).count("<details") for cell in cells)
        folds = pages[f"notebook_output/{name}.html"].all("details")
        assert len(folds) >= n_solutions + n_hints and n_solutions >= 2, name
        assert not [fold for fold in folds if "open" in fold], name


def test_the_page_that_teaches_a_word_leads_to_its_entry_and_back(pages):
    assert len(TAUGHT) >= 0.85 * GLOSSARY.count("\n### ")
    for term, docname in TAUGHT:
        anchor = re.sub(r"[^\w -]", "", term.lower()).replace(" ", "-")
        there = [link["href"] for link in pages[f"{docname}.html"].all("a", "term")]
        assert f"../docs/glossary.html#{anchor}" in there, term
        entry = pages["docs/glossary.html"].text.split(f'id="{anchor}"')[1].split("<section")[0]
        assert f'href="../{docname}.html#' in entry, term


def test_the_reference_has_all_that_is_public_with_types(pages):
    assert MODULES
    for module in MODULES:
        page, code = pages[f"docs/reference/{module}.html"], importlib.import_module(f"workshop_utils.{module}")
        for name, value in vars(code).items():
            mine = getattr(value, "__module__", None) == code.__name__
            if mine and (inspect.isfunction(value) or inspect.isclass(value)) and not name.startswith("_"):
                assert f"{code.__name__}.{name}" in page.ids, f"{module}.{name} has no docstring"
        assert page.all("dl", "field-list") and "<em" in page.text, f"{module}: no type is shown"
    wanted = ("Job", "Job.rows", "Job.explain", "JobError", "WorkerDied", "WorkersBusy")  # defined elsewhere
    assert {f"workshop_utils.job.{name}" for name in wanted} <= pages["docs/reference/ddp.html"].ids


def test_the_guide_has_a_row_for_each_guess_in_class_in_the_order_of_the_notebook(pages):
    guide = (ROOT / "docs/instructor/notebooks.md").read_text(encoding="utf-8")
    for name in LESSONS:
        cells = json.loads((ROOT / f"notebook_output/{name}.ipynb").read_text())["cells"]
        in_class = "\n".join("".join(cell["source"]) for cell in cells).partition("\n## Going further")[0]
        part = guide.partition(f"\n## {name[:2]} ·")[2].partition("\n## ")[0]
        rows = re.findall(r"\{stored\}`(\d\d) (\w+)` \|$", part, re.MULTILINE)
        assert rows == [(name[:2], guess) for guess in re.findall(r"^(my_guess\w*) = None", in_class, re.M)], name


def test_without_a_repository_no_page_guesses_one(pages):
    for path, page in pages.items():
        assert not re.search(r"codespaces\.new|blob/main|Source of this page", page.text), path


@pytest.mark.weekly
def test_with_a_repository_a_notebook_opens_elsewhere_and_pages_name_their_sources(tmp_path):
    chosen = "docs/architecture.md,docs/glossary.md,notebook_output/05*,deploy/README.md"  # a small book
    options = ["-D", f"include_patterns={chosen}", "-D", "root_doc=docs/architecture"]
    folder = build(tmp_path / "small", *options, repository=ADDRESS)
    page = Page((folder / "notebook_output/05-training-data.html").read_text())
    targets = [link["href"] for link in page.all("a", "badge-link")]
    assert targets == ["https://codespaces.new/someone/workshop?quickstart=1"]
    files = [link["href"] for link in page.all("a") if "/blob/" in link.get("href", "")]
    assert f"{ADDRESS}/blob/main/notebook_output/06-distributed-training.ipynb" in files, "the small book lacks it"
    assert f"{ADDRESS}/blob/main/notebooks/05-training-data.ipynb" in files
    deploy = Page((folder / "deploy/README.html").read_text()).all("a")
    assert f"{ADDRESS}/blob/main/deploy/slurm/cluster.py" in [link.get("href") for link in deploy]
