"""Notebook 02: wrong answers get a hint, never a traceback, and right ones pass in any sensible type."""

import dask
import numpy as np
import pandas as pd
from answers import judged
from distributed import wait

from workshop_utils.exercises import dask_basics


class Client:
    """Runs tasks here."""

    def map(self, function, *arguments):
        return list(map(function, *arguments))

    def gather(self, results):
        return results


def puzzle(x):
    return [1, 2, 3, 4, 5][x] / (x % 3)


def throw_and_count():
    """Return (throw, count) of the notebook, as functions whose code travels to the workers with them."""

    def throw(seed=None):
        return np.random.default_rng(seed).random((250_000, 2))

    def count(darts):
        return int(((darts**2).sum(axis=1) < 1).sum())

    return throw, count


throw, count = throw_and_count()
EIGHT = range(8)


def careless(client):
    counts = []
    for _ in EIGHT:
        darts = client.submit(throw)
        counts.append(client.submit(count, darts.result()).result())
    return counts


def with_darts_that_come_here(client):
    darts = client.gather([client.submit(throw, pure=False) for _ in EIGHT])
    return client.gather([client.submit(count, each, pure=False) for each in darts])


def one_round_after_another(client):
    return [client.submit(count, client.submit(throw, pure=False)).result() for _ in EIGHT]


def one_count_after_another(client):
    darts = [client.submit(throw, pure=False) for _ in EIGHT]
    return [client.submit(count, each).result() for each in darts]


def half_after_half(client):  # alone in waiting for counts in gather
    first = client.gather(client.map(count, client.map(throw, range(4))))
    return first + client.gather(client.map(count, client.map(throw, range(4, 8))))


def mapped(client):
    darts = [client.submit(throw, pure=False) for _ in EIGHT]
    return client.gather(client.map(count, darts))


def mapped_with_a_seed_per_call(client):
    return client.gather(client.map(count, client.map(throw, EIGHT)))


def with_darts_from_the_notebook(client):
    return client.gather(client.map(count, [throw(seed) for seed in EIGHT]))


def with_scattered_darts(client):
    return client.gather(client.map(count, client.scatter([throw(seed) for seed in EIGHT])))


def with_two_seeds(client):
    return client.gather(client.map(count, client.map(throw, [0, 1] * 4, pure=False), pure=False))


def counted_after_a_wait_for_all_darts(client):
    darts = client.map(throw, EIGHT)
    wait(darts)
    return client.gather(client.map(count, darts))


def several_rounds_in_a_task(n_tasks):
    def rounds(first):
        return [count(throw(seed)) for seed in EIGHT[first::n_tasks]]

    return lambda client: sum(client.gather(client.map(rounds, range(n_tasks))), [])


def planned(client):
    return dask.compute(*[dask.delayed(count)(dask.delayed(throw)()) for _ in EIGHT])


test_careful_counts = judged(
    dask_basics.check_careful_counts,
    (mapped, "Correct"),
    (mapped_with_a_seed_per_call, "Correct"),
    (counted_after_a_wait_for_all_darts, "Correct"),
    (planned, "Correct"),
    (several_rounds_in_a_task(2), "Correct"),
    (lambda client: np.array(mapped(client)), "Correct"),
    (several_rounds_in_a_task(1), "tasks sent: 1, for 2 threads"),
    (lambda client: None, "nothing was sent"),
    (lambda client: client.submit(throw) and None, "a list of 8 counts, not None"),
    (lambda client: [client.submit(count, client.submit(throw)).result()], "8 counts, not 1"),
    (lambda client: client.map(lambda n: 196_350 + n, EIGHT), "client.gather"),
    (lambda client: client.gather(client.map(lambda n: n, EIGHT)), "are not 8 counts"),
    (careless, "different numbers among the 8 counts: 1"),
    (with_two_seeds, "different numbers among the 8 counts: 2"),
    (with_darts_that_come_here, "32.0 MB"),
    (with_darts_from_the_notebook, "32.0 MB of arguments"),
    (with_scattered_darts, "32.0 MB of arguments"),
    (lambda client: client.gather(client.map(count, client.map(throw, [0] * 4 + [1, 2, 3, 4]))), "8 counts: 5"),
    (one_round_after_another, "before the first result was asked for: 2"),
    (one_count_after_another, "waited .* before it had sent"),
    (half_after_half, "waited .* before it had sent"),
)


RIGHT = {0: ZeroDivisionError, 3: ZeroDivisionError, 5: IndexError, 6: IndexError}


test_culprits = judged(
    lambda answer: dask_basics.check_culprits(answer, list(range(7)), puzzle, Client()),
    (RIGHT, "Correct"),
    (pd.Series(RIGHT), "Correct"),
    ({key: kind("why") for key, kind in RIGHT.items()}, "Correct"),
    ({key: f"builtins.{kind.__name__}: why" for key, kind in RIGHT.items()}, "Correct"),
    ({}, "it is empty"),
    ([0, 3, 5, 6], "should be a dict.*not .0, 3, 5, 6"),
    (dict.fromkeys("abcd", IndexError), "numbers"),
    (dict.fromkeys(range(7), ValueError), "on a worker"),
    ({0: ZeroDivisionError}, "look at 3, 5, 6, too"),
    ({0: ZeroDivisionError, 1: IndexError}, "some of these do not fail"),
    (RIGHT | {4: None}, "no exception"),
    (RIGHT | {6: ZeroDivisionError}, "exception for input 6"),
)
