"""Who passed which exercise, who did not yet, and since when: the reports of check cells, kept in memory."""

import csv
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TextIO

from workshop_utils.exercises.reporting import is_nickname

STATES = ("passed", "not yet", "solution")
MOST_ATTENDEES = 500
IMPORT = r"^from workshop_utils\.exercises import (\w+) as exercises$"


class Exercise(NamedTuple):
    """One column. notebook: the file's stem. module: the check's module. name: the check's name without `check_`."""

    notebook: str
    module: str
    name: str


class RoomIsFull(Exception):
    """The board has MOST_ATTENDEES rows."""


@dataclass
class _Cell:
    state: str
    since: float
    n_tries: int = 0


@dataclass
class _Attendee:
    nickname: str
    cells: dict[int, _Cell] = field(default_factory=dict)  # by column; the exercise that was tried last comes last
    seen: float = 0.0


class Board:
    """A table of attendees and exercises.

    clock: Returns seconds, which never go back.
    log: Gets a CSV line for each report as it comes, so that it has everything even if this process is killed.
    """

    def __init__(
        self, exercises: list[Exercise], clock: Callable[[], float] = time.monotonic, log: TextIO | None = None
    ):
        self.exercises = exercises
        self._log = csv.writer(log) if log else None
        if self._log:
            self._log.writerow(("nickname", "notebook", "exercise", "state", "tries"))
        self._column = {(one.module, one.name): number for number, one in enumerate(exercises)}
        self._attendees: dict[str, _Attendee] = {}
        self._clock = clock

    def report(self, nickname: str, notebook: str, exercise: str, state: str) -> None:
        """Note what a check said; what an attendee has passed stays passed.

        notebook: the module of the check. Raises KeyError for an exercise that no notebook has, ValueError for an
        unknown state or a text that is no nickname, and RoomIsFull for one attendee too many.
        """
        column, now = self._column[notebook, exercise], self._clock()
        if state not in STATES or not is_nickname(nickname):
            raise ValueError(f"{nickname!r}, {state!r}")
        if nickname not in self._attendees and len(self._attendees) >= MOST_ATTENDEES:
            raise RoomIsFull
        attendee = self._attendees.setdefault(nickname, _Attendee(nickname))
        cell = attendee.cells.pop(column, None) or _Cell(state, now)
        if cell.state not in (state, "passed"):
            cell.state, cell.since = state, now
        cell.n_tries += 1
        attendee.cells[column], attendee.seen = cell, now
        if self._log:
            # A spreadsheet would run such a nickname as a formula.
            name = f"'{nickname}" if nickname.startswith(("=", "+", "-", "@")) else nickname
            self._log.writerow((name, self.exercises[column].notebook, exercise, cell.state, cell.n_tries))

    def rows(self) -> list[dict]:
        """Return a dict for each attendee: first those whose last try failed, the longest stuck on top; then by name.

        here: the column tried last. stuck_s: seconds for which the exercise there has not been passed, or None where it
        has. seen_s: seconds since the last report. cells: for each column None or (state, seconds in it, tries).
        """
        now = self._clock()
        return [self._row(one, now) for one in sorted(self._attendees.values(), key=_urgency)]

    def _row(self, attendee, now):
        cells: list[tuple | None] = [None] * len(self.exercises)
        for column, cell in attendee.cells.items():  # after the loop, column is where the attendee is
            cells[column] = (cell.state, int(now - cell.since), cell.n_tries)
        return {
            "nickname": attendee.nickname,
            "here": column,
            "stuck_s": int(now - cell.since) if cell.state == "not yet" else None,
            "seen_s": int(now - attendee.seen),
            "cells": cells,
        }


def _urgency(attendee):
    last = list(attendee.cells.values())[-1]
    stuck = last.state == "not yet"
    return not stuck, last.since if stuck else 0, attendee.nickname.casefold()


def read_exercises(folder: Path) -> list[Exercise]:
    """Return the exercises of a folder's notebooks in order: the checks that their cells tagged `check` call."""
    found = []
    for path in sorted(folder.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        checks = ["".join(cell["source"]) for cell in cells if "check" in cell["metadata"].get("tags", ())]
        if module := re.search(IMPORT, "\n".join(code), re.MULTILINE):
            names = re.findall(r"\bexercises\.check_(\w+)\(", "\n".join(checks))
            found += [Exercise(path.stem, module[1], name) for name in dict.fromkeys(names)]
    return found
