"""Checks of notebook 09 · Horovod."""

import threading
from concurrent.futures import ThreadPoolExecutor

from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_plan(plan: Answer) -> None:
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
def check_global_accuracy(global_accuracy: Answer) -> None:
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
