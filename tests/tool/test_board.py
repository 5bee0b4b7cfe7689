"""What the board makes of reports: who is stuck, since when, and what a spreadsheet may get."""

import importlib
import inspect
import io
from pathlib import Path

import pytest
from PIL import Image

from workshop_utils.tool.board import MOST_ATTENDEES, Board, Exercise, RoomIsFull, read_exercises

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
BONES, DARKEST = Exercise("01-start", "start", "bones"), Exercise("01-start", "start", "darkest")


class Room:
    def __init__(self):
        self.minute = 0
        self.log = io.StringIO(newline="")
        self.board = Board([BONES, DARKEST], clock=lambda: 60 * self.minute, log=self.log)

    def report(self, minute, nickname, state, exercise=BONES):
        self.minute = minute
        self.board.report(nickname, exercise.module, exercise.name, state)

    def cell(self, nickname, column=0):
        return next(row for row in self.board.rows() if row["nickname"] == nickname)["cells"][column]


@pytest.fixture
def room():
    return Room()


def test_the_columns_are_the_checks_of_the_notebooks():
    found = read_exercises(NOTEBOOKS)
    n_of = {path.stem: sum(one.notebook == path.stem for one in found) for path in NOTEBOOKS.glob("[01]*.ipynb")}
    assert n_of and min(n_of.values()) >= 1, n_of
    for one in found:
        module = importlib.import_module(f"workshop_utils.exercises.{one.module}")
        check = getattr(module, f"check_{one.name}")
        assert inspect.unwrap(check).__module__ == module.__name__, "this is what a check cell reports"
    assert len({(one.module, one.name) for one in found}) == len(found)


def test_who_is_stuck_longest_comes_first_and_who_is_not_comes_by_name(room):
    for minute, nickname, state in ((1, "Zoe", "passed"), (2, "Bob", "not yet"), (3, "ada", "solution")):
        room.report(minute, nickname, state)
    room.report(1, "Eve", "not yet")
    room.report(4, "Bob", "not yet")
    room.minute = 7
    rows = room.board.rows()
    assert [row["nickname"] for row in rows] == ["Eve", "Bob", "ada", "Zoe"]
    assert [row["stuck_s"] for row in rows] == [360, 300, None, None]  # since the first of tries that failed in a row
    assert [row["seen_s"] for row in rows] == [360, 180, 240, 360]
    assert rows[1]["cells"] == [("not yet", 300, 2), None]


def test_who_goes_on_to_another_exercise_is_not_stuck(room):
    room.report(0, "Ada", "not yet")
    room.report(5, "Ada", "passed", DARKEST)
    (row,) = room.board.rows()
    assert (row["stuck_s"], row["here"]) == (None, 1) and row["cells"][0] == ("not yet", 300, 1)


def test_what_is_passed_stays_passed_and_a_solution_can_still_be_passed(room):
    for state in ("passed", "not yet", "solution"):
        room.report(0, "Ada", state)
    for state in ("solution", "not yet"):
        room.report(0, "Bob", state)
    assert room.cell("Ada")[0] == "passed" and room.cell("Bob")[0] == "not yet"
    room.report(0, "Bob", "passed")
    assert room.cell("Bob")[0] == "passed"


def test_a_full_board_takes_no_more_attendees_and_goes_on_for_those_it_has(room):
    for number in range(MOST_ATTENDEES):
        room.report(0, f"attendee {number}", "not yet")
    with pytest.raises(RoomIsFull):
        room.report(1, "one more", "not yet")
    room.report(1, "attendee 7", "passed")
    assert len(room.board.rows()) == 500 and room.cell("attendee 7")[0] == "passed"


def test_the_csv_has_no_formula(room):
    room.report(0, "=1+1", "not yet")
    room.report(0, "Ada", "passed", DARKEST)
    room.report(0, "=1+1", "solution")
    assert room.log.getvalue().splitlines() == [
        "nickname,notebook,exercise,state,tries",
        "'=1+1,01-start,bones,not yet,1",
        "Ada,01-start,darkest,passed,1",
        "'=1+1,01-start,bones,solution,2",
    ]


def test_the_picture_of_a_room_shows_the_exercises_that_there_are():
    with Image.open(NOTEBOOKS.parent / "img/room.png") as picture:
        heads = [head.strip() for head in picture.text["exercises"].splitlines()]
    names = [one.name.replace("_", " ") for one in read_exercises(NOTEBOOKS)]
    assert [head for head in heads if head in names] == names and len(heads) < 2 * len(names), "tools/room_picture.py"
