"""The numbers in the instructor's page on rooms are those that the benchmark recorded."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def room():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        import room

        return room


def figures():
    rows = [(1, 10.0, 5.0), (2, 12.0, 8.0), (4, 25.0, 11.0)]
    seats = [
        {"seats": n, "mib": 900.0 + n, "seconds": {"classify": {"median": a}, "train": {"median": b}}}
        for n, a, b in rows
    ]
    machine = {"processor": "a processor", "cores": 2, "date": "2026-11-21"}
    return {"machine": machine, "seats": seats, "server_mib": 96.0}


def test_the_page_has_the_recorded_numbers_or_says_that_there_are_none(room, tmp_path):
    page = tmp_path / "room.md"
    page.write_text(room.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    room.fill(page, room.newest())
    assert page.read_text(encoding="utf-8") == room.PAGE.read_text(encoding="utf-8"), "python benchmarks/room.py --page"


def test_seats_fit_while_no_cell_takes_more_than_twice_as_long_as_alone(room):
    block = room.block(figures())
    assert "| 2 | 12.0 | 8.0 | 1.6 | 902 |" in block and "| 4 | 25.0 | 11.0 | 2.5 | 904 |" in block
    assert "up to 2 seats share 2 cores" in block
    assert f"| 32 | 32 | {32 * (904 + 96) / 1024:.0f} |" in block and "Computed from that, not measured" in block


def test_without_figures_the_page_says_how_to_measure(room):
    assert "Not measured yet" in room.block(None) and "workshop bench room" in room.block(None)


def test_a_linked_environment_leaves_a_seats_checkout_clean(tmp_path):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    (tmp_path / ".venv").symlink_to("/opt/workshop/.venv")
    status = subprocess.run(["git", "status", "--short"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert status.stdout == "?? .gitignore\n"
