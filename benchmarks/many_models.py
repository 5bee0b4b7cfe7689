"""Seconds for many small models at a time: `client.map` on Dask, training in turn, joblib and Ray Tune.

    python benchmarks/many_models.py [--names N] [--rounds N]

Peers: pip install -e '.[peers]'. The task is that of notebook 08: an LSTM on pet names for each of eight settings, one
thread each, two at a time (in turn: one). All train with the same function, one after the other in each round. The
clusters and joblib's processes start, and import PyTorch, outside the clock; so does a first model of each.
A contestant counts only if its losses are those of training in turn.
"""

import importlib.util
import math
import statistics
import tempfile
import time
from contextlib import ExitStack
from itertools import product

import click
import torch
from record import versions, write_result
from torch.nn.functional import cross_entropy

from workshop_utils.pet_names import NameLSTM, expand, find_names, split_names

SETTINGS = [{"lr": lr, "dropout": dropout} for lr, dropout in product((0.001, 0.003, 0.01, 0.03), (0.0, 0.2))]
AT_ONCE, N_EPOCHS = 2, 2
TOLERANCE = 1e-4  # of a validation loss, relative


def train(setting, data):
    """Return the validation loss of one model, as notebook 08 trains it, on one thread."""
    torch.set_num_threads(1)
    prefixes, targets, val_prefixes, val_targets = data
    torch.manual_seed(0)
    model = NameLSTM(dropout=setting["dropout"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting["lr"])
    for epoch in range(N_EPOCHS):
        torch.manual_seed(epoch)  # for the order and the dropout
        for chosen in torch.randperm(len(targets)).split(64):
            cross_entropy(model(prefixes[chosen]), targets[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.inference_mode():
        return cross_entropy(model(val_prefixes), val_targets).item()


def on_dask(stack, data):
    from distributed import Client, LocalCluster

    cluster = LocalCluster(n_workers=AT_ONCE, threads_per_worker=1, dashboard_address=None)
    client = stack.enter_context(Client(stack.enter_context(cluster)))
    there = client.scatter(data, broadcast=True, hash=False)
    return lambda settings: client.gather(client.map(train, settings, data=there, pure=False))


def in_turn(stack, data):
    return lambda settings: [train(setting, data) for setting in settings]


def with_joblib(stack, data):
    from joblib import Parallel, delayed

    parallel = stack.enter_context(Parallel(n_jobs=AT_ONCE))
    return lambda settings: parallel(delayed(train)(setting, data) for setting in settings)


def with_ray_tune(stack, data):
    import ray
    from ray import tune

    ray.init(num_cpus=AT_ONCE, include_dashboard=False, log_to_driver=False, logging_level="error")
    stack.callback(ray.shutdown)
    there, folder = ray.put(data), stack.enter_context(tempfile.TemporaryDirectory())

    def run(settings):
        def trial(config):
            tune.report({"number": config["number"], "val_loss": train(settings[config["number"]], ray.get(there))})

        numbers = tune.grid_search(list(range(len(settings))))
        results = tune.Tuner(
            tune.with_resources(trial, {"cpu": 1}),
            param_space={"number": numbers},
            tune_config=tune.TuneConfig(reuse_actors=True),  # else each trial starts a process and imports PyTorch
            run_config=tune.RunConfig(verbose=0, storage_path=folder),
        ).fit()
        of = {result.metrics["number"]: result.metrics["val_loss"] for result in results}
        return [of[number] for number in range(len(settings))]

    return run


CONTESTANTS = {"sequential": (in_turn, "torch"), "Dask": (on_dask, "dask")}
CONTESTANTS |= {"joblib": (with_joblib, "joblib"), "Ray Tune": (with_ray_tune, "ray")}


@click.command()
@click.option("--names", "n_names", default=1500, show_default=True, help="Pet names that each model learns from.")
@click.option("--rounds", default=5, show_default=True, help="Times each contestant trains all models.")
def main(n_names, rounds):
    train_names, val_names = split_names(find_names().names[:n_names], 0.1, seed=0)
    data = (*expand(train_names), *expand(val_names))
    runs, not_run, losses = {}, {}, {}
    with ExitStack() as stack:
        for name, (start, package) in CONTESTANTS.items():
            if importlib.util.find_spec(package) is None:
                not_run[name] = f"{package} is not installed: pip install -e '.[peers]'"
                continue
            runs[name] = start(stack, data)
            runs[name](SETTINGS[:AT_ONCE])  # outside the clock
        seconds = {name: [] for name in runs}
        for number in range(rounds):
            for name, run in runs.items():
                begin = time.perf_counter()
                losses[name] = run(SETTINGS)
                seconds[name].append(time.perf_counter() - begin)
            click.echo(f"round {number + 1} of {rounds} done", err=True)
    for name in runs:
        if not all(map(same, losses[name], losses["sequential"])):
            not_run[name] = f"its losses are {losses[name]}, not {losses['sequential']}"
            del seconds[name]
    report(n_names, rounds, seconds, not_run, losses["sequential"])


def same(loss, expected):
    return math.isclose(loss, expected, rel_tol=TOLERANCE)


def report(n_names, rounds, seconds, not_run, losses):
    lines = [f"{name:12}{statistics.median(values):8.2f} s" for name, values in seconds.items()]
    lines += [f"{name:12}not run: {why}" for name, why in not_run.items()]
    print("\n".join(lines))
    result = {"names": n_names, "models": len(SETTINGS), "epochs": N_EPOCHS, "at_once": AT_ONCE, "rounds": rounds}
    result |= {"versions": versions(["joblib", "ray"]), "losses": losses, "seconds": seconds, "not_run": not_run}
    path = write_result("many-models", {**result, "printed": lines})
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
