"""Notebook 08 promises: equal seeds give equal losses, and no failed or killed model changes another's."""

import ast
import os
import signal

import pandas as pd
import pytest
from distributed import wait
from lessons import ROOT, code_cells, read

from workshop_utils.cluster import start_cluster
from workshop_utils.names import find_names

LESSON, RECORD = ROOT / "notebooks/08-many-models.ipynb", ROOT / "benchmarks/results/cpu2-many-models.csv"
PLAIN = {"model": "plain", "batch": 256, "lr": 0.003, "seed": 0}
OTHER = {"model": "other", "batch": 64, "lr": 0.01, "seed": 0}
FAILS = {"model": "fails", "batch": 64, "lr": 10.0, "seed": 0}


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

    submit.client = client
    yield submit
    client.wait_for_workers(2, timeout=240)  # one that still starts would not hear the shutdown
    client.shutdown()


@pytest.fixture(scope="module")
def undisturbed(trained):
    return {setting["model"]: trained(setting).result()["rows"] for setting in (PLAIN, OTHER)}


def test_the_same_seed_gives_the_same_losses_and_another_seed_others(trained, undisturbed):
    assert [row["epoch"] for row in undisturbed["plain"]] == [1, 2]
    assert trained(PLAIN).result()["rows"] == undisturbed["plain"]
    assert trained({**PLAIN, "seed": 1}).result()["rows"] != undisturbed["plain"]


def test_two_rounds_of_one_epoch_are_one_round_of_two(trained, undisturbed):
    half_way = trained(OTHER, n_epochs=1)
    assert trained(OTHER, n_epochs=1, state=half_way).result()["rows"] == undisturbed["other"]
    assert half_way.result()["rows"] == undisturbed["other"][:1]
    again = trained(OTHER, n_epochs=1, state=half_way)  # the optimizer's memory is as the first one found it
    assert again.result()["rows"] == undisturbed["other"]


def test_the_best_weights_are_those_of_the_epoch_with_the_lowest_validation_loss(trained, lesson):
    state = trained({**OTHER, "lr": 0.1}, n_epochs=6).result()  # a rate at which validation soon gets worse
    losses = [row["val_loss"] for row in state["rows"]]
    model = lesson["NameLSTM"]()
    model.load_state_dict(state["best"])
    _, _, prefixes, targets = lesson["make_data"](find_names().names[:600])
    with lesson["torch"].inference_mode():
        kept = lesson["cross_entropy"](model.eval()(prefixes), targets).item()
    assert kept == pytest.approx(min(losses), abs=1e-3) and min(losses) < losses[-1]


def test_a_failing_and_a_killed_model_leave_the_others_results_as_they_were(trained, undisturbed, lesson, tmp_path):
    train, killed = lesson["train_epochs"], tmp_path / "killed"

    def train_and_die_once(state, data, setting, n_epochs):
        if not killed.exists():
            killed.touch()
            train(state, data, setting, 1)
            os.kill(os.getpid(), signal.SIGKILL)
        return train(state, data, setting, n_epochs)

    other, fails, plain = trained(OTHER, train=train_and_die_once), trained(FAILS), trained(PLAIN)
    wait([other, fails, plain], timeout=120)
    assert killed.exists() and isinstance(fails.exception(), ArithmeticError)
    assert plain.result()["rows"] == undisturbed["plain"]
    assert other.result()["rows"] == undisturbed["other"]


def test_the_recorded_losses_are_those_of_the_notebooks_own_training(trained, lesson):
    recorded = pd.read_csv(RECORD, index_col=["seed", "model"])
    seed, model = recorded.index[-1]
    _, lr, _, batch = model.replace(",", "").split()
    data = trained.client.submit(lesson["make_data"], find_names().names)
    first = trained.client.submit(lesson["make_first_state"], int(seed))
    setting = {"model": model, "lr": float(lr), "batch": int(batch), "seed": int(seed)}
    state = trained.client.submit(lesson["train_epochs"], first, data, setting, 1, pure=False).result()
    assert state["rows"][0]["val_loss"] == pytest.approx(recorded.loc[(seed, model), "1"], abs=0.02)


def test_a_model_that_failed_is_missing_among_the_losses_and_stops_nobody(trained, undisturbed, lesson):
    futures = {setting["model"]: trained(setting) for setting in (FAILS, PLAIN)}
    lesson["client"] = trained.client  # the notebook's own
    assert lesson["lowest_losses"](futures) == {"plain": min(row["val_loss"] for row in undisturbed["plain"])}
