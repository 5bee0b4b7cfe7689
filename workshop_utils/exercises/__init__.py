"""What the check cells call: each function passes on a right answer, and on a wrong one says where to look."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import wraps

import pandas as pd


class NotYet(AssertionError):
    """The answer is not right yet; the message is a hint."""

    def _render_traceback_(self):
        # IPython shows these lines instead of a traceback, which would point into this module.
        return [f"Not yet: {self}"]


def expect(condition, hint):
    """Raise NotYet(hint) unless `condition` holds."""
    if not condition:
        raise NotYet(hint)


def passed(message):
    """Print that an exercise is done."""
    print(f"Correct. {message}")


def exercise(check):
    """Make `check` answer whatever it cannot make sense of with a hint, too, instead of a traceback from in here."""

    @wraps(check)
    def checked(*args, **named):
        try:
            check(*args, **named)
        except NotYet:
            raise
        except Exception as error:
            raise NotYet(f"the check cannot read this answer ({type(error).__name__}: {error}).") from None

    return checked


# 01 getting-started


@exercise
def check_total_threads(answer, client):
    import torch

    expect(answer is not None, "total_threads is still None.")
    expect(not isinstance(answer, dict), "that is one answer per worker; add up the dict's values.")
    expect(answer == sum(client.run(torch.get_num_threads).values()), f"{answer!r} is not the sum over all workers.")
    passed("PyTorch may use that many cores at once.")


@exercise
def check_darkest(answer, paths, brightness):
    expect(answer is not None, "darkest is still None.")
    expect(answer in paths, "darkest should be one of the paths in `some`: neither a number nor a list.")
    expect(answer == min(paths, key=brightness), "there is a darker one: take the path with the smallest value.")
    passed("The workers looked at all of them; only the numbers came back.")


# 02 dask-basics


@exercise
def check_one_graph(answer, expected):
    from dask.delayed import Delayed

    expect(answer is not None, "total is still None.")
    expect(not isinstance(answer, (int, float)), "total is a number already: leave out compute(), the check calls it.")
    expect(isinstance(answer, Delayed), "total should be one Delayed: the delayed sum of a list of delayed cubes.")
    n_tasks = len(dict(answer.__dask_graph__()))
    expect(n_tasks > 1, "the graph has one task: give the delayed sum a list, as Dask does not look into generators.")
    expect(n_tasks > len(expected), f"the graph has {n_tasks} tasks; make one for each number and one for the sum.")
    expect(answer.compute() == sum(expected), "the graph computes another number; does each call go through delayed?")
    passed(f"{n_tasks} tasks in one graph, computed in one call.")


@exercise
def check_first_three(answer, naps, client):
    expect(answer is not None, "first_three is still None.")
    expect(isinstance(answer, list) and len(answer) == 3, "first_three should be a list of three results.")
    expect(set(answer) <= set(naps), "append future.result(), not the future.")
    expect(len(set(answer)) == 3, "the same result is there twice.")
    alone = sum(client.nthreads().values()) == 1  # then naps end in the order in which they were submitted
    expect(alone or max(naps) not in answer, "you waited for the longest nap: start the naps in the cell that loops "
           "over as_completed(sleepers); naps that are over before you look come in any order.")
    passed("No need to wait for the longest nap.")


@exercise
def check_culprits(answer, inputs, function):
    expect(answer is not None, "culprits is still None.")
    expect(isinstance(answer, list), "culprits should be a list of inputs.")
    expect(answer, "it is empty: wait(futures) first, and then look at each future's status.")
    expect(all(isinstance(value, int) for value in answer), "collect the inputs: numbers, not futures or exceptions.")
    failing = [value for value in inputs if _fails(function, value)]
    expect(sorted(answer) == sorted(failing), "collect x where the status of its future is 'error'.")
    passed("The other results are still there, and nothing had to run again.")


def _fails(function, value):
    try:
        function(value)
    except Exception:
        return True
    return False


# 03 single-inference


@exercise
def check_top_three(function, logits, categories):
    answer = function(logits, categories)
    expect(answer is not None, "top_three returns None; return a list.")
    answer = list(answer)
    expect(len(answer) == 3, f"top_three returned {len(answer)} entries instead of 3.")
    expect(all(len(pair) == 2 and isinstance(pair[0], str) for pair in answer), "return pairs (category, probability).")
    probabilities, indices = logits.softmax(-1).topk(3)
    names = [categories[index] for index in indices]
    expect([name for name, _ in answer] == names, "these are not the three likeliest, in order.")
    close = all(abs(mine - p.item()) < 1e-4 for (_, mine), p in zip(answer, probabilities, strict=True))
    expect(close, "the names are right, the numbers are not: softmax over all categories, in [0, 1].")
    other = [name for name, _ in function(logits.flip(0), categories)]
    expect(other != names, "given other logits, it answers the same: use the arguments.")
    passed(", ".join(f"{name} {p:.0%}" for name, p in answer))


@exercise
def check_batch_accuracy(answer, logits, truth):
    expect(answer is not None, "accuracy is still None.")
    right = (logits.argmax(1) == truth).float().mean().item()
    expect(getattr(answer, "ndim", 0) == 0, "that is one answer per photo; take their mean.")
    expect(not float(answer) > 1, "accuracy should be a fraction between 0 and 1.")
    expect(abs(float(answer) - right) < 0.005, "compare the position of each row's largest logit with truth.")
    passed(f"{right:.0%} of {len(truth)}.")


# 04 parallel-inference


@exercise
def check_confusion(answer, frame):
    expect(answer is not None, "confusion is still None.")
    expect(isinstance(answer, tuple) and len(answer) == 2, "confusion should be a tuple (breed, prediction).")
    counts = frame[frame.correct.eq(False).fillna(False)].value_counts(["breed", "prediction"])
    expect(answer in counts.index, f"{answer!r} never happened in `seen`: (breed, prediction), in this order.")
    expect(counts[answer] == counts.max(), f"{answer!r} is there {counts[answer]} time(s); another is commoner.")
    passed(f"{answer[0]}, taken for {answer[1]}: {counts.max()} of them.")


@exercise
def check_bad_files(answer, paths):
    expect(answer is not None, "bad is still None.")
    expect(isinstance(answer, pd.DataFrame), "bad should be a DataFrame, some of the rows that classify returned.")
    expect({"path", "error"} <= set(answer), "bad should have all the columns of classify.")
    expect(len(answer) < len(paths), "these are all the rows; keep those where error is not missing.")
    expect(len(answer) and answer.error.notna().all(), "use error.notna() to choose the rows.")
    expect({path.split("/")[-1] for path in answer.path} == {"empty.jpg", "letter.jpg"}, "there are other bad files.")
    passed(f"{len(answer)} bad files named, {len(paths) - len(answer)} classified all the same.")


# 05 training-data


@exercise
def check_to_imagenet(answer, classes):
    from workshop_utils.dogs.breeds import find_breed

    expect(answer is not None, "to_imagenet is still None.")
    expect(len(answer) == len(classes), f"it has {len(answer)} entries; make one for each of {len(classes)} folders.")
    found, right = [int(index) for index in answer], [find_breed(name.split("-")[0]).index for name in classes]
    expect(found != list(range(len(classes))), "these are the labels themselves; look each folder's id up in index_of.")
    expect(sorted(found) != sorted(right) or found == right, "the numbers are right, their order is not.")
    wrong = [(name, index) for name, index, truth in zip(classes, found, right, strict=True) if index != truth]
    expect(not wrong, f"{wrong and wrong[0][0]} does not become {wrong and wrong[0][1]}: look its WordNet id up.")
    passed(f"Label {len(classes) - 1} is ImageNet's category {found[-1]}.")


@exercise
def check_order(order, n_photos):
    first = order(0, 0)
    expect(first is not None, "order returns None; return a list of indices.")
    expect(isinstance(first, list), f"order returns a {type(first).__name__}; return list(sampler).")
    expect(len(set(first)) < n_photos, "rank 0 visits every photo: tell the sampler num_replicas=2.")
    for epoch in (0, 1):
        both = order(0, epoch) + order(1, epoch)
        expect(set(both) <= set(range(n_photos)), f"indices go from 0 to {n_photos - 1}, as list(sampler) gives them.")
        expect(len(both) - len(set(both)) <= n_photos % 2, "both ranks visit the same photos: pass rank and epoch on.")
        expect(n_photos - len(set(both)) <= n_photos % 2, f"together they visit {len(set(both))} of {n_photos} photos.")
    expect(order(0, 0) == first, "asked twice for the same epoch, it answers differently: give the sampler one seed.")
    expect(order(0, 1) != first, "epoch 1 has epoch 0's order: leave shuffling on, and call set_epoch.")
    passed(f"{len(first)} photos for rank 0 and {len(both) - len(first)} for rank 1, in a new order each epoch.")


# 06 distributed-training


@exercise
def check_global_mean(function, client):
    from workshop_utils import ddp

    def on_each_rank():
        import torch.distributed as dist

        return function(10.0 * (dist.get_rank() + 1)), dist.get_world_size()

    try:
        answers = ddp.run(client, on_each_rank, timeout=30)
    except TimeoutError:
        raise NotYet("the ranks wait for each other: each of them has to call all_reduce, once.") from None
    world_size = answers[0][1]
    means = [None if mean is None else float(mean) for mean, _ in answers]
    expect(None not in means, "global_mean returns None; return the mean as a number.")
    expected = sum(10.0 * (rank + 1) for rank in range(world_size)) / world_size
    summed = means != [expected] * world_size and means == [world_size * expected] * world_size
    expect(not summed, "that is the sum: divide it by the world size.")
    expect(means == [expected] * world_size,
           f"the ranks had {[10.0 * (rank + 1) for rank in range(world_size)]} and returned {means}.")  # fmt: skip
    passed("One number, the same on every rank.")


@exercise
def check_my_share(function, *_):
    for n_images, world_size in [(8, 2), (7, 2), (96, 4), (1, 2), (5, 3)]:
        shares = [function(n_images, rank, world_size) for rank in range(world_size)]
        expect(all(share is not None for share in shares), "my_share returns None; return a list of positions.")
        shares = [list(share) for share in shares]
        given = sum(shares, [])
        about = f"with {n_images} images and {world_size} ranks, the shares are {shares}"
        expect(set(given) >= set(range(n_images)), f"{about}: somebody has to take every image.")
        expect(set(given) <= set(range(n_images)), f"{about}: there is no such image.")
        expect(len(given) == n_images, f"{about}: an image is counted twice.")
        sizes = [len(share) for share in shares]
        expect(max(sizes) - min(sizes) <= 1, f"{about}: the last rank waits for the longest; share more evenly.")
    passed("Every image counts once, whatever the world size.")


# 07 learning-results


@exercise
def check_quickest(answer, rows):
    expect(answer is not None, "quickest is still None.")
    reached = _seconds_to_90_percent(rows)
    expect(isinstance(answer, str), "quickest should be the name of a run, such as " f"{reached.index[0]!r}.")
    expect(answer in reached.index, f"{answer!r} is no run on sketches that reached 90 %: {list(reached.index)} did.")
    expect(answer == reached.idxmin(), f"{answer!r} took {reached[answer]:.1f} s, and another run was quicker.")
    passed(f"{answer} took {reached[answer]:.1f} s.")


@exercise
def check_cost(answer, rows, n_cores):
    expect(answer is not None, "cost is still None.")
    expect(isinstance(answer, pd.Series), "cost should be a Series: one number per run.")
    reached = _seconds_to_90_percent(rows)
    expect(set(answer.index) == set(reached.index), f"the index should be the runs on sketches: {list(reached.index)}.")
    sketches = rows[rows.data == "sketches"].drop_duplicates("run_of").set_index("run_of")
    uncapped = (sketches.workers * sketches.threads)[reached.index]
    expected, answer = reached * uncapped.clip(upper=n_cores), answer[reached.index].astype(float)
    right = _all_close(answer, expected)
    expect(right or not _all_close(answer, reached), "these are seconds: multiply by the cores that were in use.")
    too_many = _all_close(answer, reached * uncapped) and not right
    expect(not too_many, f"some run has more workers than the machine has cores: cap it with clip(upper={n_cores}).")
    expect(right, "seconds times workers times threads, with at most all cores.")
    passed(f"The cheapest was {expected.idxmin()}, with {expected.min():.0f} core-seconds.")


def _seconds_to_90_percent(rows):
    there = rows[(rows.data == "sketches") & (rows.val_accuracy >= 0.9)]
    return there.groupby("run_of").seconds.min()


def _all_close(one, other):
    return ((one - other).abs() < 1e-3 * other.abs()).all()


# 08 many-models


@exercise
def check_survivors(function):
    six = {"a": 2.5, "b": 2.1, "c": 2.9, "d": 2.3, "e": math.inf, "f": 3.5}
    for losses, factor in [(six, 2), (six, 3), (six, 4), ({"a": 10.0, "b": 9.0}, 2), ({"a": 2.5}, 3)]:
        left = function(dict(losses), factor)
        expect(left is not None, "survivors returns None; return a list of names.")
        expect(not isinstance(left, str), f"survivors returns the text {left!r}; put the names into a list.")
        left = list(left)
        about = f"of {losses}, with factor {factor}, {left} survive"
        expect(left, f"{about}: at least one has to.")
        expect(set(left) <= set(losses), f"{about}: return the names, the keys of the dict.")
        n_left = max(1, len(losses) // factor)
        expect(len(left) == len(set(left)) == n_left, f"{about}: it should be {n_left} of {len(losses)}.")
        gone = [losses[name] for name in losses if name not in left]
        expect(max(losses[name] for name in left) <= min(gone, default=math.inf), f"{about}: a smaller loss is better.")
    passed("The best go on, and never nobody.")


@exercise
def check_at_temperature(function):
    import torch

    for values in ([2.0, 1.0, -1.0], [0.0, 0.0], [300.0, 299.0, 0.0]):
        logits = torch.tensor(values)
        for temperature in (1.0, 0.5, 3.0):
            answer = function(logits.clone(), temperature)
            expect(answer is not None, "at_temperature returns None; return the probabilities.")
            found = torch.as_tensor(answer, dtype=torch.float32)
            expect(found.shape == logits.shape, f"its shape is {tuple(found.shape)}, not {tuple(logits.shape)}.")
            expect(not found.isnan().any(), "large logits overflow: use softmax, which takes care of them.")
            expect(found.min() >= 0 and abs(found.sum() - 1) < 1e-3, "probabilities are at least 0 and sum to 1.")
            swapped = torch.allclose(found, (logits * temperature).softmax(0), atol=1e-3)
            right = torch.allclose(found, (logits / temperature).softmax(0), atol=1e-3)
            expect(right or not swapped, "that is the other way round: a low temperature makes the likely likelier.")
            expect(right, "divide the logits by the temperature first, and then take the softmax.")
    passed("Below 1 the likely gets likelier; above 1 all come closer.")


# 09 horovod


@exercise
def check_plan(plan):
    for size, accumulate in ((2, 1), (8, 4), (1, 1), (3, 2)):
        about = f"with {size} ranks and {accumulate} parts"
        images = 16 * size * accumulate
        answer = plan(size, accumulate)
        expect(answer is not None, "plan(...) is still None.")
        expect(len(answer) == 3, "plan should return three numbers: images a step, peak rate, steps an epoch.")
        n_images, rate, n_steps = map(float, answer)
        expect(n_images != 16 * size or accumulate == 1, f"{about}, each rank computes {accumulate} times 16 images.")
        expect(n_images == images, f"{about}, {n_images:g} images a step cannot be: a part has 16, on each rank.")
        expect(abs(rate - 0.01 * images / 16) < 1e-9, f"{about}, the rate {rate:g} does not grow as the images do.")
        expect(n_steps == int(n_steps), f"{about}, {n_steps:g} is no whole number of steps: leave the rest out.")
        expect(n_steps == 640 // images, f"{about}, an epoch of 640 images has not {n_steps:g} whole steps.")
    passed("512 images a step leave one step an epoch; no rate makes up for that.")


@exercise
def check_global_accuracy(global_accuracy):
    for parts in ([(9, 10), (3, 6)], [(1, 2), (8, 10), (4, 4)]):
        right, count = (sum(numbers) for numbers in zip(*parts, strict=True))
        mean_of_ranks = sum(right / count for right, count in parts) / len(parts)
        for (own_right, own_count), answer in zip(parts, _on_ranks(global_accuracy, parts), strict=True):
            expect(answer is not None, "global_accuracy(...) is still None.")
            about = f"where ranks have (right, count) = {parts}, {float(answer):.4f}"
            own = abs(float(answer) - own_right / own_count) < 1e-6
            expect(not own, f"{about} is one rank's own accuracy: the other images count, too.")
            mixed = abs(float(answer) - mean_of_ranks) < 1e-6
            expect(not mixed, f"{about} is the mean of the accuracies, which counts small parts too much.")
            expect(abs(float(answer) - right / count) < 1e-6, f"{about} is not {right} of {count}.")
    passed("Each image counts once, on whichever rank it was.")


def _on_ranks(function, parts):
    """Return what function(*parts[rank], mean) gives on each rank; the ranks are threads."""
    everybody, values = threading.Barrier(len(parts), timeout=10), [0.0] * len(parts)

    def on(rank):
        def mean(value):
            values[rank] = float(value)
            everybody.wait()
            result = sum(values) / len(values)
            everybody.wait()
            return result

        return function(*parts[rank], mean)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(on, range(len(parts))))
