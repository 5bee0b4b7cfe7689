"""The quiz: questions that explain each answer and agree with the notebooks, in a page that needs no network."""

import json
import re
from collections import Counter

import pytest
from lessons import RENDERED, ROOT, SOURCES, code_cells, read
from render import render

QUESTIONS = json.loads((ROOT / "docs/quiz.json").read_text(encoding="utf-8"))
LESSONS = {path.stem[:2]: RENDERED / path.name for path in SOURCES}
WITH_QUESTIONS = sorted(LESSONS)[:12]  # a later notebook brings its own
NAMES = [f"{one['notebook']} {one['question'][:40]}" for one in QUESTIONS]
each_question = pytest.mark.parametrize("question", QUESTIONS, ids=NAMES)


def right(question):
    return [answer["answer"] for answer in question["answers"] if answer["correct"]]


@each_question
def test_every_answer_says_why_it_is_right_or_wrong(question):
    assert 4 <= len(question["answers"]) <= 5
    for answer in question["answers"]:
        assert set(answer) == {"answer", "correct", "feedback"}
        assert len(answer["feedback"]) >= 40 and answer["feedback"].endswith((".", "?"))


@each_question
def test_it_has_one_right_answer_or_says_that_there_are_more(question):
    several = question["type"] == "many_choice"
    assert len(right(question)) > 1 if several else len(right(question)) == 1
    assert several == ("There is more than one." in question["question"])


@each_question
def test_the_notebook_that_it_asks_about_says_so(question):
    notebook = read(LESSONS[question["notebook"]])
    printed = [output.get("text", "") for cell in code_cells(notebook) for output in cell.outputs]
    assert question["evidence"] in "\n".join([*(cell.source for cell in notebook.cells), *printed])


def test_there_are_35_different_questions_about_all_notebooks():
    assert len(QUESTIONS) == 35 == len({one["question"] for one in QUESTIONS})
    of_notebooks = Counter(one["notebook"] for one in QUESTIONS)
    assert sorted(of_notebooks) == WITH_QUESTIONS and min(of_notebooks.values()) >= 2


def test_neither_its_place_nor_its_length_gives_the_right_answer_away():
    single = [one for one in QUESTIONS if one["type"] == "multiple_choice"]
    places = Counter([answer["correct"] for answer in one["answers"]].index(True) for one in single)
    assert set(places) == {0, 1, 2, 3} and max(places.values()) <= 2 * min(places.values())
    longest = [max(one["answers"], key=lambda answer: len(answer["answer"])) for one in single]
    assert sum(answer["correct"] for answer in longest) <= len(single) / 3


def test_the_numbers_in_right_answers_come_out_as_computed():
    answers = " ".join(answer for one in QUESTIONS for answer in right(one))
    feedback = " ".join(answer["feedback"] for one in QUESTIONS for answer in one["answers"])
    assert "About 31" in answers and f"{50 / 8 + 1 + 24} ms" in feedback
    assert "600 ms" in answers and 150 + 250 + 200 == 600
    one, sixteen = (5 / 60 + 3.6 / n for n in (1, 16))  # hours
    assert "A twelfth of the time" in answers and round(one / sixteen) == 12
    assert "a third more money" in answers and round(16 * sixteen / one - 1, 2) == 0.34
    assert "78, nearly twice" in answers and f"{2 * 7 / 8 * 44.7:.1f} MB" in feedback


def test_the_stored_page_asks_these_questions_and_another_run_stores_the_same(tmp_path):
    source = ROOT / "notebooks/quiz.ipynb"
    before = source.read_bytes()
    assert render(source, tmp_path).error is None
    assert source.read_bytes() == before, "sections have no minutes here: their headings do not begin with ##"
    assert read(tmp_path / "quiz.ipynb").cells == read(RENDERED / "quiz.ipynb").cells, "run: tools/render.py quiz"


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The stored outputs as a static page, with what it tried to fetch as `page.fetched`."""
    outputs = [output for cell in code_cells(read(RENDERED / "quiz.ipynb")) for output in cell.outputs]
    shown = [output.data for output in outputs if "data" in output]
    parts = [data.get("text/html") or f"<script>{data['application/javascript']}</script>" for data in shown]
    path = tmp_path_factory.mktemp("page") / "quiz.html"
    divs = "".join(f"<div>{part}</div>" for part in parts)
    path.write_text(f"<!doctype html><meta charset='utf-8'><body>{divs}", encoding="utf-8")
    page = browser.new_page(viewport={"width": 900, "height": 900})
    page.fetched = []
    page.on("request", lambda request: page.fetched.append(request.url))
    page.goto(path.as_uri())
    page.locator(".Quiz").nth(len(QUESTIONS) - 1).wait_for()
    return page


def test_the_page_shows_all_questions_and_fetches_nothing(page):
    shown = " ".join(page.locator(".Quiz").all_inner_texts())
    for one in QUESTIONS:
        assert plain(one["question"]) in shown
    assert page.locator(".Quiz").count() == len(QUESTIONS)
    assert [url for url in page.fetched if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("correct", [False, True])
def test_a_click_on_an_answer_shows_why_it_is_right_or_wrong(page, correct):
    question = QUESTIONS[0]
    answer = next(answer for answer in question["answers"] if answer["correct"] == correct)
    asked = page.locator(".Quiz", has_text=plain(question["question"]))
    asked.locator(".MCButton", has_text=answer["answer"]).click()
    said = asked.locator(".Feedback.correct" if correct else ".Feedback.incorrect")
    assert said.inner_text() == plain(answer["feedback"])


def test_a_question_with_several_right_answers_counts_them(page):
    question = next(one for one in QUESTIONS if one["type"] == "many_choice")
    asked = page.locator(".Quiz", has_text=plain(question["question"]))
    for found, answer in enumerate(right(question), start=1):
        asked.locator(".MCButton").get_by_text(plain(answer), exact=True).click()
        assert f"[{found}/{len(right(question))}]" in asked.locator(".Feedback").inner_text()


def plain(html):
    return re.sub(r"</?code>", "", html)
