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

from workshop_utils.cluster import start_cluster
from workshop_utils.exercises import (
    NotYet,
    dask_basics,
    distributed_training,
    exercise,
    getting_started,
    horovod,
    learning_results,
    many_models,
    parallel_inference,
    single_inference,
    training_data,
)

CATEGORIES = ["ant", "bee", "cat", "dog", "eel"]
LOGITS = torch.tensor([0.1, 3.0, 2.0, 4.0, -1.0])


def cube(x):
    return x**3


def puzzle(x):
    return 1 / (x % 3)


def test_a_check_that_fails_itself_gives_a_hint_with_the_reason():
    @exercise
    def check(answer):
        answer.mean()

    with pytest.raises(NotYet, match="the check cannot read this answer .AttributeError: 'int' object has no"):
        check(3)


class Client:
    """What a check asks of a client: of one whose workers have so many Dask threads, and PyTorch three in each."""

    def __init__(self, *threads):
        self.threads = dict(enumerate(threads))

    def nthreads(self):
        return self.threads

    def run(self, function):
        return dict.fromkeys(self.threads, 3)


@pytest.mark.parametrize(
    ("answer", "hint"), [(None, "still None"), ({"a": 3, "b": 3}, "add up the dict's values"), (3, "3 is not the sum")]
)
def test_no_wrong_sum_of_threads_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        getting_started.check_total_threads(answer, Client(1, 1))


def test_the_sum_of_threads_passes():
    getting_started.check_total_threads(6, Client(1, 1))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [(None, "still None"), (3, "one of the paths"), (["aa"], "one of the paths"), ("aaa", "there is a darker one")],
)
def test_no_wrong_photo_is_the_darkest(answer, hint):
    with pytest.raises(NotYet, match=hint):
        getting_started.check_darkest(answer, ["aaa", "aa", "aaaa"], len)


def test_the_darkest_photo_passes():
    getting_started.check_darkest("aa", ["aaa", "aa", "aaaa"], len)


def cubes(n):
    return [dask.delayed(cube)(x) for x in range(n)]


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (36, "a number already"),
        (dask.delayed(sum)(map(cube, range(4))), "does not look into generators"),
        (cubes(4), "one Delayed"),
        (dask.delayed(cube)(1), "has one task"),
        (dask.delayed(sum)(cubes(3)), "has 4 tasks; make one for each"),
        (dask.delayed(max)(cubes(4)), "another number"),
        (dask.delayed(sum)(*cubes(4)), "cannot read this answer .*sum.. takes at most 2 arguments"),
    ],
)
def test_no_wrong_graph_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        dask_basics.check_one_graph(answer, [cube(x) for x in range(4)])


def test_the_graph_of_a_sum_passes():
    dask_basics.check_one_graph(dask.delayed(sum)(cubes(4)), [cube(x) for x in range(4)])


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ([0.1, 0.2], "a list of three"),
        ("abc", "a list of three"),
        ([object(), 0.1, 0.2], "not the future"),
        ([0.1, 0.1, 0.2], "twice"),
        ([0.1, 0.2, 0.9], "waited for the longest nap"),
    ],
)
def test_no_wrong_first_three_pass(answer, hint):
    with pytest.raises(NotYet, match=hint):
        dask_basics.check_first_three(answer, [0.9, 0.1, 0.2, 0.3], Client(1, 1))


def test_the_first_three_pass():
    dask_basics.check_first_three([0.1, 0.3, 0.2], [0.9, 0.1, 0.2, 0.3], Client(1, 1))


def test_on_one_thread_the_longest_nap_may_be_among_the_first():
    dask_basics.check_first_three([0.9, 0.1, 0.2], [0.9, 0.1, 0.2, 0.3], Client(1))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ([], "it is empty"),
        (3, "should be a list"),
        ([1, 2], "is 'error'"),
        ([(0, "error")], "numbers, not futures"),
        ([ZeroDivisionError()], "numbers, not futures"),
        ([0, 3], "is 'error'"),
    ],
)
def test_no_wrong_list_of_culprits_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        dask_basics.check_culprits(answer, list(range(7)), puzzle)


def test_the_culprits_pass_in_any_order():
    dask_basics.check_culprits([6, 0, 3], list(range(7)), puzzle)


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (lambda logits, names: None, "returns None"),
        (lambda logits, names: zip(["dog", "bee"], [0.5, 0.4], strict=True), "returned 2 entries"),
        (lambda logits, names: ["dog", "bee", "cat"], "return pairs"),
        (lambda logits, names: {"dog": 0.5, "bee": 0.3, "cat": 0.2}, "return pairs"),
        (lambda logits, names: [("dog", "66%"), ("bee", "24%"), ("cat", "9%")], "as a number"),
        (lambda logits, names: [(names[i], 0.1) for i in range(3)], "not the three likeliest"),
        (
            lambda logits, names: [(p.item(), names[i]) for p, i in zip(*logits.softmax(0).topk(3), strict=True)],
            "return pairs",
        ),
        (
            lambda logits, names: [(names[i], 100 * p) for p, i in zip(*logits.softmax(0).topk(3), strict=True)],
            "the numbers are not",
        ),
        (
            lambda logits, names: [(names[i], p) for p, i in zip(*LOGITS.softmax(0).topk(3), strict=True)],
            "given other logits",
        ),
    ],
)
def test_no_wrong_top_three_passes(function, hint):
    with pytest.raises(NotYet, match=hint):
        single_inference.check_top_three(function, LOGITS, CATEGORIES)


def test_a_top_three_may_hold_tensors_or_be_an_iterator():
    def top_three(logits, names):
        return ([names[i], p] for p, i in zip(*logits.softmax(0).topk(3), strict=True))

    single_inference.check_top_three(top_three, LOGITS, CATEGORIES)


ROWS = torch.eye(5)[[0, 1, 2, 3]]
TRUTH = torch.tensor([0, 1, 2, 4])


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("75%", "the text '75%'; it should be a number"),
        (75, "between 0 and 1"),
        (0.5, "largest logit"),
        (ROWS.argmax(1) == TRUTH, "take their mean"),
    ],
)
def test_no_wrong_accuracy_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        single_inference.check_batch_accuracy(answer, ROWS, TRUTH)


@pytest.mark.parametrize("answer", [0.75, np.float64(0.75), torch.tensor(0.75)])
def test_a_right_accuracy_passes_in_any_type(answer):
    single_inference.check_batch_accuracy(answer, ROWS, TRUTH)


SEEN = pd.DataFrame(
    {"breed": ["pug", "pug", "boxer", "pug"], "prediction": ["boxer", "boxer", "pug", "pug"]}
).assign(correct=pd.array([False, False, False, True], dtype="boolean"))


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("pug", "should be a tuple"),
        (["pug", "boxer"], "should be a tuple"),
        (("boxer", "pug"), "1 time.*another is commoner"),
        (("pug", "pug"), "never happened"),
        (("cat", "dog"), "never happened"),
    ],
)
def test_no_wrong_confusion_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        parallel_inference.check_confusion(answer, SEEN)


def test_the_commonest_confusion_passes():
    parallel_inference.check_confusion(("pug", "boxer"), SEEN)


CHECKED = pd.DataFrame({"path": ["f/a.jpg", "f/empty.jpg", "f/letter.jpg"], "error": [None, "empty", "no image"]})


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (CHECKED, "all the rows"),
        (CHECKED[:1], "error.notna"),
        (CHECKED[1:2], "other bad files"),
        (CHECKED[["error"]][1:], "all the columns"),
        (["f/empty.jpg"], "should be a DataFrame"),
    ],
)
def test_no_wrong_choice_of_bad_files_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        parallel_inference.check_bad_files(answer, list(CHECKED.path))


def test_the_bad_files_pass():
    parallel_inference.check_bad_files(CHECKED[1:], list(CHECKED.path))


CLASSES = ["n02085620-Chihuahua", "n02106166-Border_collie", "n02113186-Cardigan"]


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ([151], "1 entries"),
        ([0, 1, 2], "the labels themselves"),
        ([151, 231, 264], "Border_collie does not become 231"),
        ([151, 232, 474], "Cardigan does not become 474"),
        ([264, 232, 151], "their order is not"),
        ({}, "0 entries"),
        (151, "151 is one value; make a list"),
        (["a"] * 3, "cannot read this answer .*'a'"),
    ],
)
def test_no_wrong_join_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        training_data.check_to_imagenet(answer, CLASSES)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_the_join_by_id_passes_in_any_type(kind):
    training_data.check_to_imagenet(kind([151, 232, 264]), CLASSES)


def sampled(n_photos, told=True, **how):
    def order(rank, epoch):
        sampler = DistributedSampler(range(n_photos), **{"num_replicas": 2, "rank": rank, **how})
        sampler.set_epoch(epoch * told)
        return list(sampler)

    return order


@pytest.mark.parametrize(
    ("order", "hint"),
    [
        (lambda rank, epoch: None, "returns None"),
        (lambda rank, epoch: range(rank, 10, 2), "returns a range"),
        (lambda rank, epoch: list(range(rank, 10, 2)), "epoch 1 has epoch 0's order"),
        (lambda rank, epoch: torch.randperm(10).tolist()[rank::2], "both ranks visit|it answers differently"),
        (lambda rank, epoch: sampled(10)(rank, 0 if rank else epoch), "both ranks visit the same"),
        (sampled(10, told=False), "call set_epoch"),
        (sampled(10, rank=0), "both ranks visit the same"),
        (sampled(10, num_replicas=3), "both ranks visit|together they visit"),
        (sampled(8), "together they visit 8 of 10"),
        (sampled(10, num_replicas=1, rank=0), "rank 0 visits every photo"),
        (lambda rank, epoch: [index + 1000 for index in sampled(10)(rank, epoch)], "indices go from 0 to 9"),
        (lambda rank, epoch: sampled(10, shuffle=False)(rank, epoch), "leave shuffling on"),
    ],
)
def test_no_wrong_order_passes(order, hint):
    with pytest.raises(NotYet, match=hint):
        training_data.check_order(order, 10)


@pytest.mark.parametrize("n_photos, how", [(10, {}), (9, {}), (9, {"drop_last": True}), (10, {"seed": 7})])
def test_a_right_order_passes(n_photos, how):
    training_data.check_order(sampled(n_photos, **how), n_photos)


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


@pytest.mark.parametrize(
    ("reduce", "hint"),
    [
        (lambda dist, total: None, "returns None"),
        (lambda dist, total: total, "returned .10.0, 20.0"),
        (summed_only, "that is the sum"),
        (of_rank_0_alone, "had .10.0, 20.0. and returned .15.0,"),
    ],
)
def test_no_wrong_mean_passes(reduce, hint, client):
    with by_value(), pytest.raises(NotYet, match=hint):
        distributed_training.check_global_mean(mean_by(reduce), client)


def test_the_mean_over_all_ranks_passes_as_a_tensor(client):
    with by_value():
        distributed_training.check_global_mean(mean_by(all_reduced), client)


def test_a_mean_on_a_single_worker_is_no_sum():
    client = start_cluster(1)
    try:
        with by_value():
            distributed_training.check_global_mean(mean_by(all_reduced), client)
    finally:
        client.shutdown()


@contextmanager
def by_value():
    """Send this module's functions to the workers by value, as a notebook's are, since they cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(
    ("share", "hint"),
    [
        (lambda n, rank, world: None, "returns None"),
        (lambda n, rank, world: list(range(n)), "counted twice"),
        (lambda n, rank, world: list(range(rank * (n // world), (rank + 1) * (n // world))), "somebody has to take"),
        (lambda n, rank, world: list(range(rank, n + n % world, world)), "there is no such image"),
        (lambda n, rank, world: list(range(rank, n, 2)), "with 96 images and 4 ranks.*counted twice"),
        (lambda n, rank, world: list(range(n)) if rank == 0 else [], "waits for the longest"),
        (lambda n, rank, world: list(DistributedSampler(range(n), world, rank, shuffle=False)), "counted twice"),
    ],
)
def test_no_wrong_share_passes(share, hint):
    with pytest.raises(NotYet, match=hint):
        distributed_training.check_my_share(share)


@pytest.mark.parametrize(
    "share",
    [
        lambda n, rank, world: range(rank, n, world),
        lambda n, rank, world: np.array_split(np.arange(n), world)[rank].tolist(),
    ],
)
def test_any_even_share_passes(share):
    distributed_training.check_my_share(share)


LOG = pd.DataFrame(
    [
        (data, run_of, workers, 1, accuracy, seconds)
        for data, times in [("sketches", (40.0, 30.0, 25.0)), ("photos", (9.0, 8.0, 7.0))]
        for (run_of, workers), goal in zip([("one", 1), ("two", 2), ("four", 4)], times, strict=True)
        for accuracy, seconds in [(0.5, goal / 2), (0.95, goal), (0.99, goal + 10)]
    ],
    columns=["data", "run_of", "workers", "threads", "val_accuracy", "seconds"],
)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        ("one", "took 40.0 s, and another run was quicker"),
        ("three", "no run on sketches"),
        (25.0, "the name of a run, such as 'four'"),
        (("sketches", "four"), "the name of a run"),
    ],
)
def test_no_wrong_quickest_run_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        learning_results.check_quickest(answer, LOG)


def test_the_quickest_run_passes():
    learning_results.check_quickest("four", LOG)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (None, "still None"),
        (40.0, "should be a Series"),
        ([40, 60, 50], "should be a Series"),
        (pd.Series({"one": 40, "two": 60}), "the index should be the runs"),
        (pd.Series({"one": 40, "two": 30, "four": 25}), "these are seconds"),
        (pd.Series({"one": 40, "two": 60, "four": 100}), "more workers than the machine has cores"),
        (pd.Series({"one": 40, "two": 60, "four": 51}), "seconds times workers times threads"),
        (pd.Series({"one": "a", "two": "b", "four": "c"}), "cannot read this answer .*could not convert"),
    ],
)
def test_no_wrong_cost_passes(answer, hint):
    with pytest.raises(NotYet, match=hint):
        learning_results.check_cost(answer, LOG, 2)


def test_the_cost_passes_in_any_order():
    learning_results.check_cost(pd.Series({"four": 50.0, "one": 40, "two": 60}), LOG, 2)


def test_on_one_core_the_cost_is_the_seconds():
    learning_results.check_cost(pd.Series({"four": 25.0, "one": 40, "two": 30}), LOG, 1)


def test_a_hint_is_one_line_in_a_notebook(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    result = shell.run_cell("from workshop_utils.exercises import expect\nexpect(False, 'look at the index.')")
    assert isinstance(result.error_in_exec, NotYet)
    assert capsys.readouterr().out == "Not yet: look at the index.\n"


def best(losses, n):
    return sorted(losses, key=losses.get)[:n]


@pytest.mark.parametrize(
    ("survivors", "hint"),
    [
        (lambda losses, factor: None, "returns None"),
        (lambda losses, factor: best(losses, 1)[0], "returns the text 'b'"),
        (lambda losses, factor: best(losses, 1), "it should be 3 of 6"),
        (lambda losses, factor: best(losses, max(1, len(losses) // 2)), "it should be 2 of 6"),
        (lambda losses, factor: best(losses, len(losses) // factor), "at least one has to"),
        (lambda losses, factor: sorted(losses, key=losses.get)[len(losses) // factor :], "a smaller loss is better"),
        (lambda losses, factor: sorted(losses.values())[: max(1, len(losses) // factor)], "return the names"),
        (lambda losses, factor: sorted(losses)[: max(1, len(losses) // factor)], "a smaller loss is better"),
        (lambda losses, factor: list(losses), "it should be 3 of 6"),
        (lambda losses, factor: [["a"]], "cannot read this answer .*unhashable"),
    ],
)
def test_no_wrong_survivors_pass(survivors, hint):
    with pytest.raises(NotYet, match=hint):
        many_models.check_survivors(survivors)


@pytest.mark.parametrize("kind", [list, tuple, set, pd.Index, dict.fromkeys])
def test_the_best_pass_in_any_type(kind):
    def survivors(losses, factor):
        return kind(sorted(losses, key=losses.get)[: max(1, len(losses) // factor)])

    many_models.check_survivors(survivors)


@pytest.mark.parametrize(
    ("at_temperature", "hint"),
    [
        (lambda logits, t: None, "returns None"),
        (lambda logits, t: logits.softmax(0), "divide the logits by the temperature first"),
        (lambda logits, t: (logits * t).softmax(0), "the other way round"),
        (lambda logits, t: logits.softmax(0) / t, "sum to 1"),
        (lambda logits, t: logits / t, "sum to 1"),
        (lambda logits, t: (logits / t).argmax(), "its shape is .., not .3,."),
        (lambda logits, t: (logits / t).exp(), "sum to 1"),
        (lambda logits, t: (logits / t).exp() / (logits / t).exp().sum(), "large logits overflow"),
        (lambda logits, t: torch.zeros(32), "its shape is .32,."),
        (lambda logits, t: "likely", "cannot read this answer .*invalid data type 'str'"),
    ],
)
def test_no_wrong_probabilities_pass(at_temperature, hint):
    with pytest.raises(NotYet, match=hint):
        many_models.check_at_temperature(at_temperature)


@pytest.mark.parametrize("kind", [torch.Tensor.double, torch.Tensor.numpy, torch.Tensor.tolist])
def test_right_probabilities_pass_in_any_type(kind):
    many_models.check_at_temperature(lambda logits, t: kind((logits / t).softmax(0)))


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
        horovod.check_plan(plan)


def test_a_right_plan_passes_in_any_type(capsys):
    def plan(size, accumulate):
        images = 16 * size * accumulate
        return torch.tensor(images), np.float64(0.01 * images / 16), float(640 // images)

    horovod.check_plan(plan)
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
        horovod.check_global_accuracy(answer)


def test_a_right_global_accuracy_passes(capsys):
    horovod.check_global_accuracy(lambda right, count, mean: torch.tensor(mean(right) / mean(count)))
    assert capsys.readouterr().out.startswith("Correct. ")
