"""Checks of notebook 02 · Dask basics."""

import inspect
import math
from collections.abc import Callable
from numbers import Real

from dask.delayed import Delayed
from dask.utils import key_split
from distributed import Client, Future

from workshop_utils.cluster import known_workers
from workshop_utils.exercises import Answer, exercise, expect, passed, which_mistake


@exercise
def check_tree(answer: Answer, numbers: list[int]) -> None:
    expect(answer is not None, "total is still None.")
    expect(
        not isinstance(answer, Real),
        "total is a number already: call dask.delayed(add_pair), and leave compute() to the check.",
    )
    expect(not isinstance(answer, list) or len(answer) != 1, "that is a list of one: take the Delayed out of it.")
    expect(isinstance(answer, Delayed), "total should be one Delayed: the last call of dask.delayed(add_pair).")
    graph = dict(answer.__dask_graph__())
    calls = {
        key: {need for need in graph[key].dependencies if key_split(need) == "add_pair"}
        for key in graph
        if key_split(key) == "add_pair"
    }
    enough, needed = math.ceil(math.log2(len(numbers))), len(numbers) - 1
    expect(calls, "no task in the graph is a call of dask.delayed(add_pair).")
    expect(
        len(calls) == needed,
        f"the calls of add_pair in the graph are {len(calls)}, and adding up "
        f"{len(numbers)} numbers takes {needed}. In each round, half as many values are left.",
    )
    longest = _longest_chain(answer.key, calls)
    expect(
        longest <= enough,
        f"{longest} calls wait for each other, one after the other, where {enough} are enough: "
        "add neighbours first, and then their sums.",
    )
    expect(answer.compute() == sum(numbers), "the graph computes another number; does each number go in once?")
    passed(f"{len(calls)} calls, of which at most {longest} wait for each other.")


@exercise
def check_first_three(answer: Answer, naps: list[float], client: Client) -> None:
    expect(answer is not None, "first_three is still None.")
    expect(isinstance(answer, list | tuple) and len(answer) == 3, "first_three should be a list of three results.")
    expect(not any(isinstance(one, Future) for one in answer), "append future.result(), not the future.")
    pairs = all(isinstance(one, list | tuple) and len(one) == 2 for one in answer)
    expect(pairs, "each of the three should be what `nap` returns: the seconds and the worker's name.")
    names = [worker["name"] for worker in known_workers(client).values()]
    expect(
        all(seconds in naps and name in names for seconds, name in answer),
        "these are not results of `nap` on your workers: let client.map send it there, with `naps`.",
    )
    seconds = [seconds for seconds, _ in answer]
    expect(len(set(seconds)) == 3, "the same result is there twice.")
    one_at_a_time = sum(client.nthreads().values()) == 1  # naps then end in the order in which they were submitted
    expect(
        one_at_a_time or max(naps) not in seconds,
        "the longest nap is among them, as with gather: loop over "
        "as_completed, in the cell that starts the naps. If you do, a long nap of your last try still had a worker: "
        f"wait {max(naps):.0f} s and run that cell again.",
    )
    passed("No need to wait for the longest nap.")


@exercise
def check_culprits(answer: Answer, inputs: list[int], function: Callable[[int], object], client: Client) -> None:
    expect(answer is not None, "culprits is still None.")
    expect(isinstance(answer, dict), "culprits should be a dict: input, then the type of its exception.")
    expect(answer, "it is empty: wait(futures) first, and then look at each future's status.")
    expect(all(isinstance(key, Real) for key in answer), "the keys should be the inputs, which are numbers.")
    expect(
        not any(value in (None, type(None)) for value in answer.values()),
        "the future of a result that is there has no exception: keep the inputs whose future has the status 'error'.",
    )
    truth = dict(zip(inputs, client.gather(client.map(_failure, [function] * len(inputs), inputs)), strict=True))
    truth = {key: name for key, name in truth.items() if name}
    mistakes = {"every input is in there. `puzzle` fails everywhere but on a worker: let client.map send it.": inputs}
    otherwise = "not the inputs that fail: take x where the future's status is 'error'."
    hint = which_mistake(lambda wrong: set(answer) == set(wrong), mistakes, otherwise)
    expect(set(answer) == set(truth), hint)
    for key, value in answer.items():
        expect(
            _name(value) == truth[key],
            f"{value!r} is not the type of the exception for input {key}: ask its "
            "future for exception(), and take the type of that.",
        )
    passed("The other results are still there, and nothing had to run again.")


def _longest_chain(key, calls):
    if key not in calls:
        return 0
    return 1 + max((_longest_chain(need, calls) for need in calls[key]), default=0)


def _failure(function, value):
    # Returns the name of the exception's type, or None.
    try:
        function(value)
    except Exception as error:
        return type(error).__name__


def _name(value):
    if isinstance(value, str):
        return value.split("(")[0]  # "ValueError" and "ValueError('odd')"
    return value.__name__ if inspect.isclass(value) else type(value).__name__
