"""`breakpoint()` in a rank, and pdb's prompt on the client."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from waiting import GIVE_UP_S, until

import daskrun
from daskrun import JobError, NoDebugger
from daskrun.client import job as job_module

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it

BIN = Path(sys.executable).parent


@pytest.fixture
def type_in(monkeypatch):
    """Return a function that sets the lines which answer prompts, and the list of what was asked."""
    said, lines = [], []

    def answer(rank, text):
        said.append(f"[rank{rank}] {text}")
        return lines.pop(0) + "\n"

    monkeypatch.setattr(job_module, "line_for", answer)
    monkeypatch.setattr(job_module, "can_ask", lambda: True)

    def type_in(*given):
        lines[:] = given
        return said

    return type_in


def train(stops):
    rank = int(os.environ["RANK"])
    if rank in stops:
        breakpoint()
    loss = rank + 41
    return loss


def test_a_waiting_program_gets_the_prompt_and_steps_through_its_rank(client, type_in):
    said = type_in("p rank", "n", "p loss", "w", "loss = 7", "c")
    assert daskrun.run(client, train, [1]) == [41, 7]
    assert len(said) == 6 and all(text.startswith("[rank1]") and text.endswith("(Pdb) ") for text in said)
    assert "loss = rank + 41" in said[0] and "1\n" in said[1] and "42\n" in said[3]
    assert "main.py" not in said[4]  # w shows the program's frames alone


def test_each_rank_that_stops_has_its_turn(client, type_in):
    said = type_in("c", "c")
    assert daskrun.run(client, train, [0, 1]) == [41, 42]
    assert {text[:7] for text in said} == {"[rank0]", "[rank1]"}


def test_a_job_in_the_background_is_debugged_on_call_and_explains_itself(client, type_in):
    job = daskrun.launch(client, train, [1])
    until(lambda: 1 in job._control.prompts)
    assert "job.debug(1)" in job.explain()
    type_in("loss", "c")
    job.debug(1)
    assert job.result() == [41, 42]
    with pytest.raises(JobError):
        job.debug(1)


def test_a_rank_that_is_left_by_q_fails(client, type_in):
    type_in("q")
    with pytest.raises(Exception, match=".*") as failed:
        daskrun.run(client, train, [1])
    assert type(failed.value).__name__ == "BdbQuit"


def test_with_debug_error_the_prompt_opens_where_a_rank_raised(client, type_in):
    def fail():
        secret = 17 + int(os.environ["RANK"])
        if secret == 18:
            raise ValueError("too large")

    said = type_in("p secret", "q")
    with pytest.raises(ValueError, match="too large"):
        daskrun.run(client, fail, debug="error")
    assert "ValueError: too large" in said[0] and "18\n" in said[1]


def test_with_debug_error_each_rank_that_failed_can_be_looked_at(client, type_in):
    def fail():
        raise ValueError(f"of rank {os.environ['RANK']}")

    said = type_in("p 1 + 1", "c", "p 1 + 1", "c")
    with pytest.raises(ValueError, match="of rank"):
        daskrun.run(client, fail, debug="error")
    assert len(said) == 4 and {text[:7] for text in said} == {"[rank0]", "[rank1]"}


@pytest.mark.parametrize("last", ["n", "s", "c"])
def test_stepping_off_the_end_goes_on(client, type_in, last):
    said = type_in("n", "n", last)
    assert daskrun.run(client, train, [1]) == [41, 42]
    assert "--Return--" in said[2]


def test_where_nobody_can_answer_the_rank_goes_on_with_an_error(client):
    with pytest.raises(NoDebugger) as failed:  # pytest's standard input is no terminal
        daskrun.run(client, train, [1])
    assert failed.value.rank == 1 and failed.value.place.startswith("test_debugger.py:")


def test_a_rank_that_nobody_answers_in_time_goes_on_with_an_error(client):
    job = daskrun.launch(client, train, [1], debug_timeout=0.3)
    until(job.done)
    with pytest.raises(NoDebugger):
        job.result()


def test_a_job_may_be_cancelled_while_a_rank_is_in_the_debugger(client):
    job = daskrun.launch(client, train, [0, 1])
    until(lambda: len(job._control.prompts) == 2)
    job.cancel()
    assert daskrun.run(client, train, []) == [41, 42]


def test_a_script_is_debugged_in_the_terminal(tmp_path):
    (tmp_path / "script.py").write_text(
        "import os\nrank = int(os.environ['RANK'])\nif rank == 1:\n    breakpoint()\n"
        "loss = rank + 41\nprint('loss', loss)\n"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(  # setsid --ctty: the terminal is that of the process, as a shell's
        ["setsid", "--ctty", "--wait", BIN / "daskrun", "-n", "2", "script.py"],
        cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    shown = ""

    def shows(text):
        nonlocal shown
        shown += os.read(ours, 1000).decode()
        return text in shown

    until(lambda: shows("(Pdb) "))
    os.write(ours, b"p rank + 99\n")
    until(lambda: shows("100"))
    os.write(ours, b"c\n")
    until(lambda: shows("loss 42"))
    assert process.wait(GIVE_UP_S) == 0
    os.close(ours)
