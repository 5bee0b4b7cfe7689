"""The quiz: questions that explain each answer, as its stored page asks them."""

import json
from collections import Counter

import pytest
from lessons import RENDERED, ROOT, SOURCES, read
from render import render

QUESTIONS = json.loads((ROOT / "docs/quiz.json").read_text(encoding="utf-8"))
LESSONS = {path.stem[:2]: RENDERED / path.name for path in SOURCES}
NAMES = [f"{one['notebook']} {one['question'][:40]}" for one in QUESTIONS]
each_question = pytest.mark.parametrize("question", QUESTIONS, ids=NAMES)


@each_question
def test_every_answer_says_why_and_the_question_says_how_many_are_right(question):
    assert all(answer["feedback"] for answer in question["answers"])
    several, n_right = question["type"] == "many_choice", sum(answer["correct"] for answer in question["answers"])
    assert n_right > 1 if several else n_right == 1
    assert several == ("There is more than one." in question["question"])


@each_question
def test_code_is_marked_as_the_quiz_shows_it(question):
    texts = [question["question"], *(answer[key] for answer in question["answers"] for key in ("answer", "feedback"))]
    assert not [text for text in texts if "`" in text], "the quiz shows HTML: write <code>…</code>"


def test_there_are_different_questions_about_all_notebooks():
    assert len(QUESTIONS) == len({one["question"] for one in QUESTIONS})
    of_notebooks = Counter(one["notebook"] for one in QUESTIONS)
    assert set(of_notebooks) == set(LESSONS) and min(of_notebooks.values()) >= 2


def test_neither_its_place_nor_its_length_gives_the_right_answer_away():
    single = [one for one in QUESTIONS if one["type"] == "multiple_choice"]
    places = Counter([answer["correct"] for answer in one["answers"]].index(True) for one in single)
    assert set(places) == {0, 1, 2, 3} and max(places.values()) <= 2 * min(places.values())
    longest = [max(one["answers"], key=lambda answer: len(answer["answer"])) for one in single]
    assert sum(answer["correct"] for answer in longest) <= len(single) / 3


def test_the_stored_page_asks_these_questions(tmp_path):
    assert render(ROOT / "notebooks/quiz.ipynb", tmp_path).error is None
    assert read(tmp_path / "quiz.ipynb").cells == read(RENDERED / "quiz.ipynb").cells, "run: tools/render.py quiz"
