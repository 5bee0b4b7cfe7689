"""What the tests of this folder measured, as a table at the end and, with WORKSHOP_FAULTS_TABLE=FILE, as JSON."""

import json
import os
from pathlib import Path

import pytest

ROWS = pytest.StashKey[list]()


@pytest.fixture
def told(request):
    """Note (what was done, what came of it), for the table."""
    rows = request.config.stash.setdefault(ROWS, [])
    return lambda done, outcome: rows.append({"fault": done, "outcome": outcome})


def pytest_terminal_summary(terminalreporter, config):
    rows = config.stash.get(ROWS, [])
    for row in rows:
        terminalreporter.write_line(f"{row['fault']}: {row['outcome']}")
    if (path := os.environ.get("WORKSHOP_FAULTS_TABLE")) and rows:
        Path(path).write_text(json.dumps(rows, indent=1) + "\n")
