"""What the tests of this folder measured, as a table at the end; `make faults` keeps it for the book."""

import json
import os
from datetime import date
from pathlib import Path

import pytest

ROWS = pytest.StashKey[dict]()


@pytest.fixture
def told(request):
    """Note what was done and what came of it, for the table."""
    rows = request.config.stash.setdefault(ROWS, {})
    return lambda done, outcome: rows.update({done: {"outcome": outcome, "date": date.today().isoformat()}})


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(ROWS, {})
    for done, row in rows.items():
        terminalreporter.write_line(f"{done}: {row['outcome']}")
    if rows and (path := os.environ.get("WORKSHOP_FAULTS_TABLE")):  # rows of tests that did not run stay
        before = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        Path(path).write_text(json.dumps(before | rows, indent=1) + "\n")
