"""Checks of notebook 01 · Getting started."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from numbers import Real
from uuid import uuid4

import numpy as np
from distributed import Client, get_worker

from workshop_utils.exercises import Answer, exercise, expect, passed
from workshop_utils.photos import breed_of

_measured: set = set()  # on a worker: (which check, path) of each call of `measure`


@exercise
def check_total_bones(answer: Answer, client: Client) -> None:
    expect(answer is not None, "total_bones is still None.")
    expect(not isinstance(answer, dict), "that is one answer per worker; add up the dict's values.")
    expect(not isinstance(answer, str), f"{answer!r} is text: turn each worker's answer into an int before you add.")
    number = _one_number(answer)
    expect(isinstance(number, Real), "total_bones should be one number: the sum over all workers.")
    buried = client.run(_bones).values()
    expect(None not in buried, "a worker has no bones; it may have started anew. Run the cell with `bury` again.")
    expect(
        number == sum(map(int, buried)),
        f"{number} is not what the workers hold. Each number is in a worker's own "
        "os.environ, and `bury` draws new ones whenever it runs: ask all the workers again.",
    )
    passed("Only the workers knew.")


@exercise
def check_darkest(answer: Answer, brightness: Callable[[str], float], paths: list[str], client: Client) -> None:
    expect(callable(answer), "find_darkest should be a function of `measure` and `paths`.")
    check = uuid4().hex
    found = answer(partial(_measure, brightness, check), list(paths))
    if isinstance(found, np.ndarray):
        found = found.tolist()
    expect(found is not None, "find_darkest returns None.")
    expect(
        isinstance(found, tuple | list) and len(found) == 2,
        f"find_darkest returned {found!r}: it should be a tuple of two, path and address.",
    )
    path, worker = found if found[0] in paths else reversed(found)
    expect(path in paths, f"neither {found[0]!r} nor {found[1]!r} is one of the paths.")
    looked = client.run(_who_measured, check, path)
    expect(
        any(looked.values()), "no worker called `measure` on that path: let client.map send it, or a function with it."
    )
    expect(path == min(paths, key=brightness), "there is a darker one: take the path with the smallest value.")
    expect(
        isinstance(worker, str) and worker in looked,
        f"{worker!r} is not the address of a worker. Let the function that "
        "runs there return get_worker().address beside the number.",
    )
    expect(
        looked[worker],
        f"{worker} is a worker, but not the one that measured this path. The function that measures it has to ask "
        "get_worker() itself, in the same task.",
    )
    name = breed_of(path)[1].replace("_", " ")
    passed(f"The darkest shows a dog of the breed {name}, and the worker that you name did measure it.")


def _one_number(answer):
    # NumPy's and PyTorch's arrays of one number count as a number.
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):
        return answer.item()
    return answer


def _bones():
    return os.environ.get("BONES")


def _measure(brightness, check, path):
    with suppress(ValueError):  # not on a worker
        get_worker()
        _measured.add((check, path))
    return brightness(path)


def _who_measured(check, path):
    return (check, path) in _measured
