"""What one looks up: the search, the glossary, the reference, the ways to deploy, the cheat sheet."""

import importlib
import inspect
import re

import pytest
from built import ROOT, Page, build

GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
TAUGHT = re.findall(r"^### (.+)\n\n.+\n\nTaught in .*\(\.\./(.+)\.ipynb#", GLOSSARY, re.MULTILINE)
MODULES = re.findall(r"^   workshop_utils\.(\w+)$", (ROOT / "docs/reference/index.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def found(browser, site):
    """Return the search's results for a word: their titles, best first."""
    page = browser.new_page()

    def search(word):
        page.goto(f"{site}/search.html?q={word}")
        page.locator("#search-results p.search-summary", has_text="found").wait_for()
        page.locator("#search-results li a").first.wait_for()
        return page.locator("#search-results li a").evaluate_all(
            "links => links.map(link => link.getAttribute('href'))"
        )

    yield search
    page.close()


@pytest.mark.parametrize(("word", "notebook"), [("rank", "06"), ("DDP", "06"), ("future", "02"), ("shard", "11")])
def test_the_search_finds_a_word_first_in_the_glossary_and_where_it_is_taught(found, word, notebook):
    first = found(word)[:3]
    assert any("docs/glossary.html" in link for link in first) and any(f"/{notebook}-" in link for link in first), first


def test_the_search_finds_a_function_and_the_ways_to_deploy(found):
    assert any("docs/reference/ddp.html" in link for link in found("launch")[:3])
    assert any("deploy/README.html" in link for link in found("Slurm"))


def test_most_words_say_where_they_are_taught():
    assert len(TAUGHT) >= 0.85 * GLOSSARY.count("\n### ")


@pytest.mark.parametrize(("term", "docname"), TAUGHT)
def test_the_page_that_teaches_a_word_leads_to_its_entry_and_back(pages, term, docname):
    anchor = re.sub(r"[^\w -]", "", term.lower()).replace(" ", "-")
    there = [link["href"] for link in pages[f"{docname}.html"].all("a", "term")]
    assert f"../docs/glossary.html#{anchor}" in there
    entry = pages["docs/glossary.html"].text.split(f'id="{anchor}"')[1].split("<section")[0]
    assert f'href="../{docname}.html#' in entry


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_all_that_is_public_with_types(pages, module):
    page, code = pages[f"docs/reference/{module}.html"], importlib.import_module(f"workshop_utils.{module}")
    for name, value in vars(code).items():
        mine = getattr(value, "__module__", None) == code.__name__ and (
            inspect.isfunction(value) or inspect.isclass(value)
        )
        if mine and not name.startswith("_"):
            assert f"{code.__name__}.{name}" in page.ids, f"{name} has no docstring"
    assert page.all("dl", "field-list")
    assert "<em" in page.text, "no type is shown"


def test_a_job_and_its_errors_are_in_the_reference(pages):
    ids = pages["docs/reference/ddp.html"].ids
    wanted = ["Job", "Job.rows", "Job.explain", "JobError", "WorkerDied", "WorkersBusy"]
    assert {f"workshop_utils.job.{name}" for name in wanted} <= ids
    assert {f"workshop_utils.loop.settings.Settings.{name}" for name in ("lr", "compression")} <= (
        pages["docs/reference/training.html"].ids
    )


def test_links_to_deploy_stay_in_the_book(pages):
    targets = [link["href"] for link in pages["docs/instructor/room.html"].all("a") if "deploy" in link.get("href", "")]
    assert "../../deploy/gateway.html" in targets
    assert {"deploy/README.html", "deploy/kubernetes/README.html", "deploy/gateway.html"} <= set(pages)


def test_links_of_deploy_to_scripts_lead_to_the_source_where_the_repository_is_known(tmp_path):
    options = ["-D", "include_patterns=deploy/*.md", "-D", "root_doc=deploy/README"]
    folder = build(tmp_path / "small", *options, repository="https://github.com/someone/workshop")
    links = Page((folder / "deploy/README.html").read_text()).all("a")
    assert "https://github.com/someone/workshop/blob/main/deploy/slurm/cluster.py" in [
        link.get("href") for link in links
    ]


def test_the_cheat_sheet_is_two_pages_of_paper(browser, site):
    page = browser.new_page()
    page.goto(f"{site}/docs/cheat-sheet.html")
    paper = page.pdf(format="A4", prefer_css_page_size=True)
    page.close()
    assert len(re.findall(rb"/Type\s*/Page\b", paper)) <= 2


@pytest.mark.parametrize("path", sorted((ROOT / "notebook_output").glob("[0-9]*.ipynb")), ids=lambda path: path.stem)
def test_a_lesson_begins_with_a_box_and_ends_with_its_sentence(pages, path):
    page, tags = pages[f"notebook_output/{path.stem}.html"], path.read_text(encoding="utf-8")
    assert len(page.all("div", "lesson")) == 1 and len(page.all("blockquote", "epigraph")) == 1
    box = re.sub("<[^>]*>", "", page.text.split('class="lesson')[1].split("To the key points")[0])
    guesses, exercises = (tags.count(f'"{tag}"') for tag in ("guess", "exercise"))
    assert "Necessary:" in box and "minutes in class" in box
    assert f"{exercises} exercise" in box and f"{guesses} guess" in box
