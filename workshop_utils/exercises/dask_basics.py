"""Checks of notebook 02 · Dask basics."""

from collections.abc import Callable

from dask.delayed import Delayed
from distributed import Client

from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_one_graph(answer: Answer, expected: list[int]) -> None:
    expect(answer is not None, "total is still None.")
    expect(not isinstance(answer, (int, float)), "total is a number already: leave out compute(), the check calls it.")
    expect(isinstance(answer, Delayed), "total should be one Delayed: the delayed sum of a list of delayed cubes.")
    n_tasks = len(dict(answer.__dask_graph__()))
    expect(n_tasks > 1, "the graph has one task: give the delayed sum a list, as Dask does not look into generators.")
    expect(n_tasks > len(expected), f"the graph has {n_tasks} tasks; make one for each number and one for the sum.")
    expect(answer.compute() == sum(expected), "the graph computes another number; does each call go through delayed?")
    passed(f"{n_tasks} tasks in one graph, computed in one call.")


@exercise
def check_first_three(answer: Answer, naps: list[float], client: Client) -> None:
    expect(answer is not None, "first_three is still None.")
    expect(isinstance(answer, list) and len(answer) == 3, "first_three should be a list of three results.")
    expect(set(answer) <= set(naps), "append future.result(), not the future.")
    expect(len(set(answer)) == 3, "the same result is there twice.")
    alone = sum(client.nthreads().values()) == 1  # then naps end in the order in which they were submitted
    expect(alone or max(naps) not in answer, "you waited for the longest nap: start the naps in the cell that loops "
           "over as_completed(sleepers); naps that are over before you look come in any order.")
    passed("No need to wait for the longest nap.")


@exercise
def check_culprits(answer: Answer, inputs: list[int], function: Callable[[int], object]) -> None:
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
