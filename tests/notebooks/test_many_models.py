"""Notebook 08 promises: a task gives the same losses again, and no failed or killed model changes another's."""

import ast
import os
import signal

import pytest
from distributed import wait
from lessons import ROOT, code_cells, read

from workshop_utils.cluster import start_cluster
from workshop_utils.pet_names import find_names, ngram_loss, split_names

LESSON = ROOT / "notebooks/08-many-models.ipynb"
PLAIN = {"lr": 0.003, "batch_size": 256}
OTHER = {"lr": 0.01, "batch_size": 64}


@pytest.fixture(scope="module")
def lesson():
    """The functions that notebook 08 defines, by name; workers get them by value, as from a notebook."""
    cells = code_cells(read(LESSON))
    nodes = [node for cell in cells for node in ast.parse(cell.source).body]
    kept = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef))]
    defined = {"__name__": "__main__"}
    exec(compile(ast.Module(kept, []), LESSON.name, "exec"), defined)
    return defined


@pytest.fixture(scope="module")
def trained(lesson):
    """A function that submits 2 epochs on 600 names, from the first state or another; on a cluster of its own."""
    client = start_cluster(2)
    data = client.submit(lesson["make_data"], find_names().names[:600])
    first = client.submit(lesson["make_first_state"], 0)

    def submit(setting, n_epochs=2, state=first, train=lesson["train_epochs"]):
        return client.submit(train, state, data, setting, n_epochs, pure=False)

    yield submit
    client.wait_for_workers(2, timeout=240)  # one that still starts would not hear the shutdown
    client.shutdown()


def losses_of(future):
    return future.result()["losses"]


@pytest.fixture(scope="module")
def undisturbed(trained):
    return losses_of(trained(OTHER))


def test_a_task_that_runs_again_gives_the_same_losses(trained, undisturbed):
    assert len(undisturbed) == 2 and losses_of(trained(OTHER)) == undisturbed


def test_a_chain_of_two_tasks_is_one_task_and_leaves_its_state_alone(trained, undisturbed):
    half_way = trained(OTHER, n_epochs=1)
    assert losses_of(trained(OTHER, n_epochs=1, state=half_way)) == undisturbed
    assert losses_of(half_way) == undisturbed[:1]
    assert losses_of(trained(OTHER, n_epochs=1, state=half_way)) == undisturbed, "also the optimizer's memory"


def test_a_failing_and_a_killed_model_leave_the_others_results_as_they_were(trained, undisturbed, lesson, tmp_path):
    train, killed = lesson["train_epochs"], tmp_path / "killed"

    def train_and_die_once(state, data, setting, n_epochs):
        if not killed.exists():
            killed.touch()
            train(state, data, setting, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return train(state, data, setting, n_epochs)

    plain = losses_of(trained(PLAIN))
    other, fails, again = trained(OTHER, train=train_and_die_once), trained({"lr": 0.01}), trained(PLAIN)
    wait([other, fails, again], timeout=120)
    assert killed.exists() and isinstance(fails.exception(), KeyError)
    assert losses_of(again) == plain and losses_of(other) == undisturbed


def test_counting_does_better_than_a_blind_guess_and_longer_contexts_help():
    names = split_names(find_names().names, 0.1, seed=0)
    letters, pairs, longer = (ngram_loss(*names, n) for n in (1, 2, 5))
    assert longer == pytest.approx(2.249, abs=0.001), "NOTES.md has this number"
    assert longer < pairs < letters < 3.43
