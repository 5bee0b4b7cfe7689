"""A terminal's command has a home of its own, and all that it started ends with it, and with its notebook."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import until

from workshop_utils.local_hosts import Terminal

TYPIST = """
from workshop_utils.local_hosts import Terminal
terminal = Terminal("a")
terminal.run("sleep 600 & echo $! >pid; wait")
print(terminal.home, flush=True)
input()
"""
TWO_SLEEPERS = "echo $$ >pids; sleep 600 & echo $! >>pids; echo done >>pids; wait"


def sleepers(terminal):
    """Return the processes that TWO_SLEEPERS started, once they are there."""
    file = terminal.home / "pids"
    until(lambda: file.exists() and "done" in file.read_text())
    return [psutil.Process(int(pid)) for pid in file.read_text().split()[:2]]


def all_ended(processes):
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


@pytest.fixture
def terminal():
    terminal = Terminal("a")
    yield terminal
    terminal.end()


@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_command_ends_with_all_that_it_started(terminal, how):
    terminal.run(TWO_SLEEPERS)
    started = sleepers(terminal)
    assert terminal.is_running
    getattr(terminal, how)()
    until(lambda: all_ended(started))
    assert not terminal.is_running


def test_a_command_ends_when_the_process_that_typed_it_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", TYPIST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as typist:
        file = Path(typist.stdout.readline().strip()) / "pid"
        until(lambda: file.exists() and file.read_text().strip())
        sleeper = psutil.Process(int(file.read_text()))
        typist.kill()
    until(lambda: all_ended([sleeper]))
