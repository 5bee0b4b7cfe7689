"""What plausible wrong answers get: a hint, never a traceback; and right answers pass in any sensible type."""

import sys
from contextlib import contextmanager

import cloudpickle
import dask
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DistributedSampler

from workshop_utils import exercises
from workshop_utils.cluster import start_cluster
from workshop_utils.exercises import NotYet

CATEGORIES = ["ant", "bee", "cat", "dog", "eel"]
LOGITS = torch.tensor([0.1, 3.0, 2.0, 4.0, -1.0])


def cube(x):
    return x**3


def puzzle(x):
    return 1 / (x % 3)


@pytest.mark.parametrize(
    "answer",
    [None, 36, dask.delayed(sum)(map(cube, range(4))), [dask.delayed(cube)(x) for x in range(4)], dask.delayed(cube)(1)]
    + [dask.delayed(sum)(*[dask.delayed(cube)(x) for x in range(4)])],
)
def test_no_wrong_graph_passes(answer):
    with pytest.raises(NotYet):
        exercises.check_one_graph(answer, [cube(x) for x in range(4)])


@pytest.mark.parametrize("answer", [None, [], 3, [1, 2], [(0, "error")], [ZeroDivisionError()], [0, 3]])
def test_no_wrong_list_of_culprits_passes(answer):
    with pytest.raises(NotYet):
        exercises.check_culprits(answer, list(range(7)), puzzle)


@pytest.mark.parametrize(
    "function",
    [
        lambda logits, names: None,
        lambda logits, names: zip(["dog", "bee"], [0.5, 0.4], strict=True),
        lambda logits, names: ["dog", "bee", "cat"],
        lambda logits, names: {"dog": 0.5, "bee": 0.3, "cat": 0.2},
        lambda logits, names: [("dog", "66%"), ("bee", "24%"), ("cat", "9%")],
        lambda logits, names: [(p.item(), names[i]) for p, i in zip(*logits.softmax(0).topk(3), strict=True)],
        lambda logits, names: [(names[i], 100 * p) for p, i in zip(*logits.softmax(0).topk(3), strict=True)],
        lambda logits, names: [(names[i], p) for p, i in zip(*LOGITS.softmax(0).topk(3), strict=True)],
    ],
)
def test_no_wrong_top_three_passes(function):
    with pytest.raises(NotYet):
        exercises.check_top_three(function, LOGITS, CATEGORIES)


def test_a_top_three_may_hold_tensors_or_be_an_iterator():
    def top_three(logits, names):
        return ([names[i], p] for p, i in zip(*logits.softmax(0).topk(3), strict=True))

    exercises.check_top_three(top_three, LOGITS, CATEGORIES)


ROWS = torch.eye(5)[[0, 1, 2, 3]]
TRUTH = torch.tensor([0, 1, 2, 4])


@pytest.mark.parametrize("answer", [None, "75%", 75, 0.5, ROWS.argmax(1) == TRUTH])
def test_no_wrong_accuracy_passes(answer):
    with pytest.raises(NotYet):
        exercises.check_batch_accuracy(answer, ROWS, TRUTH)


@pytest.mark.parametrize("answer", [0.75, np.float64(0.75), torch.tensor(0.75)])
def test_a_right_accuracy_passes_in_any_type(answer):
    exercises.check_batch_accuracy(answer, ROWS, TRUTH)


SEEN = pd.DataFrame(
    {"breed": ["pug", "pug", "boxer", "pug"], "prediction": ["boxer", "boxer", "pug", "pug"]}
).assign(correct=pd.array([False, False, False, True], dtype="boolean"))


@pytest.mark.parametrize("answer", [None, "pug", ["pug", "boxer"], ("boxer", "pug"), ("pug", "pug"), ("cat", "dog")])
def test_no_wrong_confusion_passes(answer):
    with pytest.raises(NotYet):
        exercises.check_confusion(answer, SEEN)


def test_the_commonest_confusion_passes():
    exercises.check_confusion(("pug", "boxer"), SEEN)


CHECKED = pd.DataFrame({"path": ["f/a.jpg", "f/empty.jpg", "f/letter.jpg"], "error": [None, "empty", "no image"]})


@pytest.mark.parametrize("answer", [None, CHECKED, CHECKED[:1], CHECKED[1:2], CHECKED[["error"]][1:], ["f/empty.jpg"]])
def test_no_wrong_choice_of_bad_files_passes(answer):
    with pytest.raises(NotYet):
        exercises.check_bad_files(answer, list(CHECKED.path))


def test_the_bad_files_pass():
    exercises.check_bad_files(CHECKED[1:], list(CHECKED.path))


CLASSES = ["n02085620-Chihuahua", "n02106166-Border_collie", "n02113186-Cardigan"]


@pytest.mark.parametrize(
    "answer", [None, [151], [0, 1, 2], [151, 231, 264], [151, 232, 474], [264, 232, 151], {}, ["a"] * 3, 151]
)
def test_no_wrong_join_passes(answer):
    with pytest.raises(NotYet):
        exercises.check_to_imagenet(answer, CLASSES)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_the_join_by_id_passes_in_any_type(kind):
    exercises.check_to_imagenet(kind([151, 232, 264]), CLASSES)


def sampled(n_photos, told=True, **how):
    def order(rank, epoch):
        sampler = DistributedSampler(range(n_photos), **{"num_replicas": 2, "rank": rank, **how})
        sampler.set_epoch(epoch * told)
        return list(sampler)

    return order


@pytest.mark.parametrize(
    "order",
    [
        lambda rank, epoch: None,
        lambda rank, epoch: range(rank, 10, 2),
        lambda rank, epoch: list(range(rank, 10, 2)),
        lambda rank, epoch: torch.randperm(10).tolist()[rank::2],
        lambda rank, epoch: sampled(10)(rank, 0 if rank else epoch),
        sampled(10, told=False),
        sampled(10, rank=0),
        sampled(10, num_replicas=3),
        sampled(8),
        sampled(10, num_replicas=1, rank=0),
        lambda rank, epoch: [index + 1000 for index in sampled(10)(rank, epoch)],
        lambda rank, epoch: sampled(10, shuffle=False)(rank, epoch),
    ],
)
def test_no_wrong_order_passes(order):
    with pytest.raises(NotYet):
        exercises.check_order(order, 10)


@pytest.mark.parametrize("n_photos, how", [(10, {}), (9, {}), (9, {"drop_last": True}), (10, {"seed": 7})])
def test_a_right_order_passes(n_photos, how):
    exercises.check_order(sampled(n_photos, **how), n_photos)


def mean_by(reduce):
    def global_mean(value):
        import torch.distributed as dist

        total = torch.tensor([value])
        return reduce(dist, total)

    return global_mean


def all_reduced(dist, total):
    dist.all_reduce(total)
    return total / dist.get_world_size()


def summed_only(dist, total):
    dist.all_reduce(total)
    return total.item()


def of_rank_0_alone(dist, total):
    dist.reduce(total, 0)
    return total.item() / dist.get_world_size()


@pytest.mark.parametrize("reduce", [lambda dist, total: None, lambda dist, total: total, summed_only, of_rank_0_alone])
def test_no_wrong_mean_passes(reduce, client):
    with by_value(), pytest.raises(NotYet):
        exercises.check_global_mean(mean_by(reduce), client)


def test_the_mean_over_all_ranks_passes_as_a_tensor(client):
    with by_value():
        exercises.check_global_mean(mean_by(all_reduced), client)


def test_a_mean_on_a_single_worker_is_no_sum():
    client = start_cluster(1)
    try:
        with by_value():
            exercises.check_global_mean(mean_by(all_reduced), client)
    finally:
        client.shutdown()


@contextmanager
def by_value():
    """Send this module's functions to the workers by value, as a notebook's are, since they cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    "share",
    [
        lambda n, rank, world: None,
        lambda n, rank, world: list(range(n)),
        lambda n, rank, world: list(range(rank * (n // world), (rank + 1) * (n // world))),
        lambda n, rank, world: list(range(rank, n + n % world, world)),
        lambda n, rank, world: list(range(rank, n, 2)),
        lambda n, rank, world: list(range(n)) if rank == 0 else [],
        lambda n, rank, world: list(DistributedSampler(range(n), world, rank, shuffle=False)),
    ],
)
def test_no_wrong_share_passes(share):
    with pytest.raises(NotYet):
        exercises.check_my_share(share)


@pytest.mark.parametrize(
    "share",
    [
        lambda n, rank, world: range(rank, n, world),
        lambda n, rank, world: np.array_split(np.arange(n), world)[rank].tolist(),
    ],
)
def test_any_even_share_passes(share):
    exercises.check_my_share(share)


LOG = pd.DataFrame(
    [
        (data, run_of, workers, 1, accuracy, seconds)
        for data, times in [("sketches", (40.0, 30.0, 25.0)), ("photos", (9.0, 8.0, 7.0))]
        for (run_of, workers), goal in zip([("one", 1), ("two", 2), ("four", 4)], times, strict=True)
        for accuracy, seconds in [(0.5, goal / 2), (0.95, goal), (0.99, goal + 10)]
    ],
    columns=["data", "run_of", "workers", "threads", "val_accuracy", "seconds"],
)


@pytest.mark.parametrize("answer", [None, "one", "three", 25.0, ("sketches", "four")])
def test_no_wrong_quickest_run_passes(answer):
    with pytest.raises(NotYet):
        exercises.check_quickest(answer, LOG)


def test_the_quickest_run_passes():
    exercises.check_quickest("four", LOG)


@pytest.mark.parametrize(
    "answer",
    [None, 40.0, [40, 60, 50]]
    + [pd.Series(cost) for cost in ({"one": 40, "two": 60}, {"one": 40, "two": 30, "four": 25})]
    + [pd.Series({"one": 40, "two": 60, "four": 100}), pd.Series({"one": "a", "two": "b", "four": "c"})],
)
def test_no_wrong_cost_passes(answer):
    with pytest.raises(NotYet):
        exercises.check_cost(answer, LOG, 2)


def test_the_cost_passes_in_any_order():
    exercises.check_cost(pd.Series({"four": 50.0, "one": 40, "two": 60}), LOG, 2)


def test_on_one_core_the_cost_is_the_seconds():
    exercises.check_cost(pd.Series({"four": 25.0, "one": 40, "two": 30}), LOG, 1)


def test_a_hint_is_one_line_in_a_notebook(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    result = shell.run_cell("from workshop_utils.exercises import expect\nexpect(False, 'look at the index.')")
    assert isinstance(result.error_in_exec, NotYet)
    assert capsys.readouterr().out == "Not yet: look at the index.\n"


@pytest.mark.parametrize(
    "survivors",
    [
        lambda losses, factor: None,
        lambda losses, factor: sorted(losses, key=losses.get)[0],
        lambda losses, factor: sorted(losses, key=losses.get)[:1],
        lambda losses, factor: sorted(losses, key=losses.get)[: max(1, len(losses) // 2)],
        lambda losses, factor: sorted(losses, key=losses.get)[: len(losses) // factor],
        lambda losses, factor: sorted(losses, key=losses.get)[len(losses) // factor :],
        lambda losses, factor: sorted(losses.values())[: max(1, len(losses) // factor)],
        lambda losses, factor: sorted(losses)[: max(1, len(losses) // factor)],
        lambda losses, factor: list(losses),
        lambda losses, factor: [["a"]],
    ],
)
def test_no_wrong_survivors_pass(survivors):
    with pytest.raises(NotYet):
        exercises.check_survivors(survivors)


@pytest.mark.parametrize("kind", [list, tuple, set, pd.Index, dict.fromkeys])
def test_the_best_pass_in_any_type(kind):
    def survivors(losses, factor):
        return kind(sorted(losses, key=losses.get)[: max(1, len(losses) // factor)])

    exercises.check_survivors(survivors)


@pytest.mark.parametrize(
    "at_temperature",
    [
        lambda logits, t: None,
        lambda logits, t: logits.softmax(0),
        lambda logits, t: (logits * t).softmax(0),
        lambda logits, t: logits.softmax(0) / t,
        lambda logits, t: logits / t,
        lambda logits, t: (logits / t).argmax(),
        lambda logits, t: (logits / t).exp(),
        lambda logits, t: (logits / t).exp() / (logits / t).exp().sum(),
        lambda logits, t: torch.zeros(32),
        lambda logits, t: "likely",
    ],
)
def test_no_wrong_probabilities_pass(at_temperature):
    with pytest.raises(NotYet):
        exercises.check_at_temperature(at_temperature)


@pytest.mark.parametrize("kind", [torch.Tensor.double, torch.Tensor.numpy, torch.Tensor.tolist])
def test_right_probabilities_pass_in_any_type(kind):
    exercises.check_at_temperature(lambda logits, t: kind((logits / t).softmax(0)))


@pytest.mark.parametrize(
    ("plan", "hint"),
    [
        (lambda size, accumulate: None, "still None"),
        (lambda size, accumulate: (16 * size, 0.01 * size, 640 // (16 * size)), "each rank computes 4 times 16"),
        (lambda size, accumulate: (16 * size * accumulate, 0.01 * size, 640 // (16 * size * accumulate)), "the rate"),
        (lambda size, accumulate: (16 * size * accumulate, 0.01 * size * accumulate, 40 / size / accumulate), "whole"),
        (lambda size, accumulate: 16 * size, "cannot read"),
    ],
)
def test_wrong_plans_get_a_hint(plan, hint):
    with pytest.raises(NotYet, match=hint):
        exercises.check_plan(plan)


def test_a_right_plan_passes_in_any_type(capsys):
    def plan(size, accumulate):
        images = 16 * size * accumulate
        return torch.tensor(images), np.float64(0.01 * images / 16), float(640 // images)

    exercises.check_plan(plan)
    assert capsys.readouterr().out.startswith("Correct. ")


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (lambda right, count, mean: None, "still None"),
        (lambda right, count, mean: right / count, "own accuracy"),
        (lambda right, count, mean: mean(right / count), "mean of the accuracies"),
        (lambda right, count, mean: mean(right), "is not 12 of 16"),
        (lambda right, count, mean: 0.75, "is not 13 of 16"),
        (lambda right, count, mean: mean("many"), "cannot read"),
    ],
)
def test_wrong_global_accuracies_get_a_hint(answer, hint):
    with pytest.raises(NotYet, match=hint):
        exercises.check_global_accuracy(answer)


def test_a_right_global_accuracy_passes(capsys):
    exercises.check_global_accuracy(lambda right, count, mean: torch.tensor(mean(right) / mean(count)))
    assert capsys.readouterr().out.startswith("Correct. ")
