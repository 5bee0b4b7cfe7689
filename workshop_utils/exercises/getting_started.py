"""Checks of notebook 01 · Getting started."""

import os
import random
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest.mock import patch
from uuid import uuid4

from distributed import Client

from workshop_utils.exercises import Function, exercise, expect, number, pair, passed, shown
from workshop_utils.photos import breed_of

LONGEST_PAUSE_S = 0.01  # tasks of equal length would go to the same workers in each try
TRIES = 10  # on two workers, an address that another task asked for is right in half of the tries
NO_WORKER_HERE = (
    "get_worker() was called in the notebook, which is no worker. Call it in the function that client.map sends, "
    "beside `measure`."
)
NO_WORKER_IN_RUN = (
    "get_worker() finds a worker only in a task, and client.run makes none. Send the function with client.map, or take "
    "the address from the keys of the dict that client.run returns."
)
_measured: set = set()  # in each process: (which try, path) of each call of `measure`


@exercise
def check_total_bones(total_bones: Function, client: Client) -> None:
    buried = client.run(_bones).values()
    expect(None not in buried, "a worker has no bones; it may have been restarted. Run the cell with `bury` again.")
    with _tasks_counted() as tasks:
        answer = total_bones(client)
    expect(answer is not None, "total_bones returns None: return the sum.")
    expect(not isinstance(answer, dict), "that's one answer per worker; add up the dict's values.")
    text = f"{shown(answer)} is text: turn each worker's answer into an int before you add."
    expect(not isinstance(answer, str), text)
    total = number(answer, "total_bones should return one number, the sum over all workers")
    expect(
        not tasks,
        "client.map and client.submit let Dask choose the workers. It may ask one of them twice and another one never, "
        "so a right sum would be luck. Which call asks every worker once?",
    )
    expect(
        total == sum(map(int, buried)),
        f"{shown(answer)} isn't what the workers hold. Each number is in a worker's own os.environ: ask all of them.",
    )
    passed("Only the workers knew, and `client.run` asked each of them once.")


@exercise
def check_darkest(find_darkest: Function, brightness: Callable[[str], float], paths: list[str], client: Client) -> None:
    for _ in range(TRIES):
        half = random.sample(paths, (len(paths) + 1) // 2)
        _try_darkest(find_darkest, brightness, half, client)
    name = breed_of(min(paths, key=brightness))[1].replace("_", " ")
    passed(f"The darkest of all shows a dog of the breed {name}. Each worker that you named did measure its dog.")


def _try_darkest(find_darkest, brightness, paths, client):
    this_try, least = uuid4().hex, min(map(brightness, paths))
    try:
        answer = find_darkest(partial(_measure, brightness, this_try), list(paths))
    except Exception as error:
        no_worker = NO_WORKER_HERE if isinstance(error, ValueError) else NO_WORKER_IN_RUN  # which wraps a ValueError
        expect("No worker found" not in str(error), no_worker)
        expect("object of type Worker" not in str(error), "a worker cannot be sent: return get_worker().address.")
        raise
    path, worker = pair(answer, "find_darkest should return a tuple (path, address)")
    if path not in paths:
        path, worker = worker, path
    expect(path in paths, f"neither {worker!r} nor {path!r} is one of the paths that it was called with.")
    looked = client.run(_who_measured, this_try, path)
    expect(
        any(looked.values()), "no worker called `measure` on that path: let client.map send it, or a function with it."
    )
    expect(brightness(path) == least, "there is a darker one: take the path with the smallest value.")
    expect(
        isinstance(worker, str) and worker in looked,
        f"{shown(worker)} is not the address of a worker. Let the function that "
        "runs there return get_worker().address beside the number.",
    )
    expect(
        looked[worker],
        f"{worker} is a worker, but not the one that measured this path. The function that measures it has to ask "
        "get_worker() itself, in the same task.",
    )


@contextmanager
def _tasks_counted():
    """Yield a list that gets an item for each call of `client.map` and `client.submit`."""
    calls: list[str] = []
    with ExitStack() as stack:
        for name in ("map", "submit"):
            method = getattr(Client, name)
            counted = partial(_counted, method, calls)
            stack.enter_context(patch.object(Client, name, lambda *args, _of=counted, **named: _of(*args, **named)))
        yield calls


def _counted(method, calls, *args, **named):
    calls.append(method.__name__)
    return method(*args, **named)


def _bones():
    return os.environ.get("BONES")


def _measure(brightness, this_try, path):
    _measured.add((this_try, path))
    time.sleep(random.uniform(0, LONGEST_PAUSE_S))
    return brightness(path)


def _who_measured(this_try, path):
    return (this_try, path) in _measured
