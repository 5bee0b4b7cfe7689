"""Ranks that stay: a cell at a time, errors, hangs, deaths; and in a real kernel, with its stop button."""

import os
import signal
import sys
import threading
import time

import cloudpickle
import nbformat
import pytest
import torch
from jupyter_client.manager import start_new_kernel
from processes import dask_cluster, has_ended
from waiting import GIVE_UP_S, owned, until

import daskrun
from daskrun import CellFailed, JobError, WorkerDied
from daskrun.client import job as job_module

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it


@pytest.fixture
def ranks(client):
    with daskrun.interactive(client, n_workers=2) as ranks:
        yield ranks


def test_cells_keep_their_variables_and_print_with_their_rank(ranks, capfd):
    ranks.run("import torch, torch.distributed as dist\nloss = torch.ones(2) * dist.get_rank()\nprint('made')")
    ranks.run("dist.all_reduce(loss)\nloss")
    assert sorted(capfd.readouterr().out.splitlines()) == [
        "[rank0]: made", "[rank0]: tensor([1., 1.])", "[rank1]: made", "[rank1]: tensor([1., 1.])"
    ]  # fmt: skip
    assert all(torch.equal(loss, torch.ones(2)) for loss in ranks["loss"]) and ranks["dist.get_rank()"] == [0, 1]
    ranks.run("loss += 1", [1])
    assert [loss.sum().item() for loss in ranks["loss"]] == [2, 4]
    assert len(ranks) == 2


def test_what_is_pushed_is_there(ranks):
    class OfTheNotebook:
        def double(self, number):
            return 2 * number

    ranks.push(model=torch.nn.Linear(2, 1), helper=OfTheNotebook())
    ranks.run("answer = helper.double(dist_rank := int(__import__('os').environ['RANK'])), model.in_features")
    assert ranks["answer"] == [(0, 2), (2, 2)]


@pytest.mark.parametrize(
    ("cell", "line", "kind"),
    [
        ("import os\nif os.environ['RANK'] == '1':\n    raise KeyError('missing')", 3, "KeyError"),
        ("def inner():\n    return 1 / (int(__import__('os').environ['RANK']) - 1)\n\ninner()", 2, "ZeroDivisionError"),
    ],
)
def test_an_error_has_its_rank_and_line_and_the_others_go_on(ranks, cell, line, kind):
    with pytest.raises(CellFailed) as failed:
        ranks.run(cell)
    assert [(rank, error.kind, error.line) for rank, error in failed.value.errors.items()] == [(1, kind, line)]
    ranks.run("alive = True")
    assert ranks["alive"] == [True, True]


def test_cells_that_cannot_be_compiled_or_answered(ranks):
    for cell, kind in (("x = (1,", "SyntaxError"), ("raise SystemExit(3)", "SystemExit")):
        with pytest.raises(CellFailed) as failed:
            ranks.run(cell)
        assert {error.kind for error in failed.value.errors.values()} in ({kind}, {"_IncompleteInputError"})
    with pytest.raises(CellFailed):
        ranks["missing"]
    ranks.run("import threading; lock = threading.Lock()")
    with pytest.raises(CellFailed):  # it can't be sent
        ranks["lock"]
    with pytest.raises(ValueError):
        ranks.run("1", [2])
    assert ranks["1 + 1"] == [2, 2]


def test_magics_and_top_level_await_work(ranks):
    ranks.run("import asyncio\nx = await asyncio.sleep(0.01, 'slept')\n%alias_magic t time\nfiles = !echo found")
    assert ranks["x"] == ["slept"] * 2 and ranks["list(files)"] == [["found"]] * 2


def test_a_dead_rank_says_how_it_died(ranks):
    with pytest.raises(WorkerDied) as died:
        ranks.run("import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)")
    assert died.value.deaths[1].code == -signal.SIGKILL
    with pytest.raises(WorkerDied):
        ranks.run("1")


def test_idle_ranks_end_and_free_their_workers(client):
    ranks = daskrun.interactive(client, n_workers=2, idle_timeout=0.2)
    until(ranks.job.done)
    with pytest.raises(JobError):
        ranks.run("1")
    until(lambda: set(owned(client).values()) <= {None})


def press_stop_when(condition):
    """Interrupt this process's main thread, as the notebook's stop button does, once a condition holds."""

    def press():
        until(condition)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    return pressing


def test_a_cell_of_python_that_is_interrupted_keeps_the_variables(ranks):
    ranks.run("import time; kept = 5")
    pressing = press_stop_when(lambda: "cell" in ranks.job.stacks())
    with pytest.raises(KeyboardInterrupt):
        ranks.run("print('sleeping', flush=True)\ntime.sleep(1000)")
    pressing.join()
    assert ranks["kept"] == [5, 5]


def test_a_collective_that_hangs_is_explained_and_the_ranks_are_usable_again(ranks, capfd):
    pressing = press_stop_when(lambda: "waits in all_reduce" in ranks.job.explain())
    with pytest.raises(KeyboardInterrupt):
        ranks.run(
            "import torch, torch.distributed as dist\n"
            "if dist.get_rank() == 0:\n    dist.all_reduce(torch.ones(1))  # and rank 1 doesn't"
        )
    pressing.join()
    said = capfd.readouterr().out
    assert "Rank 0 waits in all_reduce" in said and "Rank 1 has not called it" in said
    ranks.run("import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x)")
    assert [x.item() for x in ranks["x"]] == [2, 2]


def test_an_error_that_another_rank_waits_for_is_shown_while_that_hangs(ranks, capfd):
    ranks.run("import torch, torch.distributed as dist; ones = torch.ones(1)")

    def hangs():
        said = ranks.job.explain()
        return "Rank 0 waits in all_reduce" in said and "waits for the next" in said

    pressing = press_stop_when(hangs)
    with pytest.raises(KeyboardInterrupt):
        ranks.run("if dist.get_rank() == 1:\n    raise ValueError('of rank 1')\ndist.all_reduce(ones)")
    pressing.join()
    assert "of rank 1" in capfd.readouterr().err


def test_a_second_stop_starts_ranks_again_that_are_still_ending(ranks, capfd):
    ranks.run("import time; kept = 1")
    pressing = press_stop_when(lambda: "sleep" in ranks.job.stacks())

    def press_again():
        pressing.join()
        until(lambda: ranks.job.stacks().count("time.sleep(2000)"))
        os.kill(os.getpid(), signal.SIGINT)

    again = threading.Thread(target=press_again)
    again.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run("try:\n    time.sleep(1000)\nfinally:\n    time.sleep(2000)")
    again.join()
    assert ranks["'kept' in globals()"] == [False, False]


def test_a_breakpoint_in_a_cell_steps_to_its_next_lines(ranks, monkeypatch):
    said, lines = [], ["n", "n", "c"]
    monkeypatch.setattr(job_module, "can_ask", lambda: True)
    monkeypatch.setattr(job_module, "line_for", lambda rank, text: (said.append(text), lines.pop(0) + "\n")[1])
    ranks.run("breakpoint()\ny = 5\nz = y + 1", [1])
    assert (
        not lines and "-> y = 5" in said[1] and "-> z = y + 1" in said[2] and ranks["globals().get('z')"] == [None, 6]
    )


def test_ranks_that_were_closed_and_exit_say_so(ranks, capfd):
    ranks.run("exit()")
    assert "close" in capfd.readouterr().out
    ranks.close()
    with pytest.raises(JobError):
        ranks.run("1")


def test_another_call_takes_the_place_of_the_ranks_before(client, ranks):
    with daskrun.interactive(client, n_workers=2) as others:
        others.run("x = 1")
        assert ranks.job.done() and others["x"] == [1, 1]


# --- in a kernel


@pytest.fixture
def kernel():
    manager, client = start_new_kernel(kernel_name="python3")
    yield Kernel(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


class Kernel:
    """A notebook's kernel, cell by cell."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def run(self, source, answers=(), stop_after=None):
        """Run a cell; return its outputs.

        Args:
            answers: Lines for its prompts.
            stop_after: A text of its output, after which the stop button is pressed.
        """
        answers, outputs, said = list(answers), [], ""

        def hears(message):
            nonlocal said
            kind = message["header"]["msg_type"]
            if kind in ("stream", "error", "display_data", "execute_result"):
                outputs.append(nbformat.v4.output_from_msg(message))
                said += message["content"].get("text", "")
            if stop_after and stop_after in said:
                said = ""
                self.manager.interrupt_kernel()

        def asks(message):
            self.client.input(answers.pop(0))

        self.client.execute_interactive(
            source, allow_stdin=True, output_hook=hears, stdin_hook=asks, timeout=GIVE_UP_S, stop_on_error=False
        )
        assert not answers
        return outputs

    def text(self, source, **how):
        return "".join(output.get("text", "") for output in self.run(source, **how))


START = """
import daskrun, os
client = daskrun.start_local(2)
ranks = daskrun.interactive(client)
%load_ext daskrun
"""


def test_a_notebook_talks_to_its_ranks(kernel):
    kernel.run(START)
    assert "[rank1]: tensor([2.])" in kernel.text(
        "%%ranks\nimport torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\nx"
    )
    assert kernel.text("%%ranks 1\nprint('one', dist.get_rank())") == "[rank1]: one 1\n"
    [error] = [output for output in kernel.run("%%ranks\n\n1 / dist.get_rank()") if output.output_type == "error"]
    assert error.ename == "CellFailed" and "line 3" in error.evalue
    outputs = kernel.run("%%ranks\nimport matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    assert [set(output.data) & {"image/png"} for output in outputs if output.output_type == "display_data"] == [
        {"image/png"}
    ]
    start = time.monotonic()
    outputs = kernel.run("%%ranks\nprint('begun')\nif dist.get_rank() == 0: dist.all_reduce(x)", stop_after="begun")
    assert time.monotonic() < start + 30
    assert outputs[-1].output_type == "error"
    assert kernel.text("%%ranks\nprint('again')").count("again") == 2


def test_no_process_outlives_a_kernel_that_was_restarted(kernel):
    kernel.run(START)
    kernel.run("ranks.run('import os; pid = os.getpid()')")
    [result] = kernel.run("ranks['pid']")
    pids = eval(result.data["text/plain"])
    assert len(pids) == 2
    kernel.manager.restart_kernel(now=True)
    until(lambda: all(map(has_ended, pids)))


def test_a_breakpoint_is_stepped_through_in_a_notebook(kernel):
    kernel.run(START + "ranks.close()")
    kernel.run("def train():\n    rank = int(os.environ['RANK'])\n    if rank == 1:\n        breakpoint()\n"
               "    loss = rank + 41\n    return loss")  # fmt: skip
    said = kernel.text("print(daskrun.run(client, train))", answers=["n", "p loss", "w", "c"])
    assert "-> loss = rank + 41" in said and "42" in said and "[41, 42]" in said


def test_ranks_of_another_cluster_end_with_their_client(tmp_path):
    with dask_cluster(tmp_path, 2) as (client, _):
        ranks = daskrun.interactive(client)
        ranks.run("import os; pid = os.getpid()")
        pids = ranks["pid"]
        client.close()
        until(lambda: all(map(has_ended, pids)))
