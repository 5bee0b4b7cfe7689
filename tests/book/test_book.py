"""The book's pages as files: nothing leads nowhere, each says when it was run, and what they count is right."""

import json
import re
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from built import ROOT, Page, build

NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebook_output").glob("*.ipynb"))
LESSONS = [name for name in NOTEBOOKS if name[0].isdigit()]
MADE_BY_SPHINX = {"genindex.html", "search.html", "index.html"}


def lesson(pages, name):
    return pages[f"notebook_output/{name}.html"]


def test_every_notebook_and_page_is_in_the_book(pages):
    written = {f"docs/{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    assert written | {f"notebook_output/{name}.html" for name in NOTEBOOKS} <= set(pages)
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


def test_nothing_is_fetched_from_elsewhere(pages):
    for path, page in pages.items():
        for tag, name in (("img", "src"), ("script", "src"), ("iframe", "src")):
            assert not [found for found in page.all(tag) if "//" in found.get(name, "")], path
        sheets = [link["href"] for link in page.all("link") if link.get("rel") == "stylesheet"]
        assert not [href for href in sheets if "//" in href], path


def test_every_picture_has_alt_text(pages):
    for path, page in pages.items():
        bad = [image["src"] for image in page.all("img") if len(image.get("alt") or "") < 20]
        assert not bad, path


def test_every_page_says_when_and_with_what_it_was_last_run(pages):
    for name in NOTEBOOKS:
        run = json.loads((ROOT / f"notebook_output/{name}.ipynb").read_text())["metadata"]["verified"]
        said = f"last run on {run['date']}, with Python {run['python']}, PyTorch {run['torch']} and Dask {run['dask']}"
        assert said in lesson(pages, name).text
    for path in set(pages) - MADE_BY_SPHINX:
        assert "last run" in pages[path].text, path


def test_a_notebook_that_was_not_rendered_ends_the_build_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/_ext")
    from book.verified import last_run

    (tmp_path / "12-new.ipynb").write_text('{"metadata": {}}')
    with pytest.raises(Exception, match="12-new.ipynb.*tools/render.py 12"):
        last_run(tmp_path / "12-new.ipynb")


@pytest.mark.parametrize("name", LESSONS)
def test_hints_and_solutions_are_folded(pages, name):
    page = lesson(pages, name)
    cells = json.loads((ROOT / f"notebook_output/{name}.ipynb").read_text())["cells"]
    n_solutions = sum("solution" in cell["metadata"].get("tags", []) for cell in cells)
    n_hints = sum("".join(cell["source"]).count("<details") for cell in cells)
    folds = page.all("details")
    assert len(folds) >= n_solutions + n_hints and not [fold for fold in folds if "open" in fold]
    assert page.text.count("Show our solution") >= n_solutions >= 2


def test_the_quiz_does_not_call_its_set_up_a_solution(pages):
    page = pages["notebook_output/quiz.html"]
    assert "Show our solution" not in page.text and "Show the code behind this page" in page.text


@pytest.mark.parametrize("name", LESSONS)
def test_words_of_the_glossary_are_links_with_their_meaning_once_each(pages, name):
    links = lesson(pages, name).all("a", "term")
    assert len(links) >= 5 and len({link["href"] for link in links}) == len(links)
    assert all(link["href"].startswith("../docs/glossary.html#") and len(link["title"]) > 20 for link in links)


@pytest.mark.parametrize("word", ["rank", "world size", "process group", "all-reduce", "checkpoint"])
def test_a_word_is_linked_where_it_is_first_used(pages, word):
    text = lesson(pages, "06-distributed-training").text
    before = text[text.index("<article") : re.search(rf'<a class="term[^>]*><?[^>]*>?{word}', text).start()]
    before = re.sub(r"<(h[1-6]|pre|code)\b.*?</\1>|<[^>]*>", "", before, flags=re.DOTALL)
    assert not re.search(rf"\b{word}\b", before)


def test_no_live_output_or_widget_is_left(pages):
    for path, page in pages.items():
        assert not page.all("iframe"), path
        assert "Loading widget" not in page.text and "jupyter.widget" not in page.text, path


def test_learning_paths_add_up_what_the_notebooks_say_of_themselves(pages):
    texts = {name[:2]: (ROOT / f"notebook_output/{name}.ipynb").read_text() for name in LESSONS}
    minutes = {number: int(re.search(r"\*\*Time:\*\* (\d+)", text).group(1)) for number, text in texts.items()}
    for numbers in ("01 02 03 04", "01 02 03 05 06 07"):
        hours, rest = divmod(sum(minutes[number] for number in numbers.split()), 60)
        said = f"{hours} hours" + (f" and {rest} minutes" if rest else "")
        assert said in pages["docs/learning-paths.html"].text and said in pages["docs/index.html"].text


def test_the_glossary_has_one_to_three_sentences_a_word():
    text = (ROOT / "docs/glossary.md").read_text()
    words = re.findall(r"^### (.+)\n\n(.+)\n", text, flags=re.MULTILINE)
    assert len(words) == text.count("### ") >= 35
    for word, meaning in words:
        assert 1 <= len(re.findall(r"[.](?= |$)", meaning)) <= 3, word


def test_without_a_repository_no_page_guesses_one(pages):
    for path, page in pages.items():
        assert not re.search(r"codespaces\.new|blob/main|Source of this page", page.text), path


def test_with_a_repository_a_notebook_opens_elsewhere_and_names_its_source(tmp_path):
    chosen = "docs/architecture.md,docs/glossary.md,notebook_output/05*"  # a small book
    options = ["-D", f"include_patterns={chosen}", "-D", "root_doc=docs/architecture"]
    folder = build(tmp_path / "small", *options, repository="https://github.com/someone/workshop")
    page = Page((folder / "notebook_output/05-training-data.html").read_text())
    targets = [link["href"] for link in page.all("a", "badge-link")]
    assert targets == ["https://codespaces.new/someone/workshop?quickstart=1"]
    files = [link["href"] for link in page.all("a") if "/blob/" in link.get("href", "")]
    at = "https://github.com/someone/workshop/blob/main"
    assert f"{at}/notebook_output/06-distributed-training.ipynb" in files, "the small book does not have it"
    assert f"{at}/notebooks/05-training-data.ipynb" in files
