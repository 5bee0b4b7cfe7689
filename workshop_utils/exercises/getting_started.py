"""Checks of notebook 01 · Getting started."""

import os
from collections.abc import Callable
from numbers import Real

from distributed import Client

from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_total_bones(answer: Answer, client: Client) -> None:
    expect(answer is not None, "total_bones is still None.")
    expect(not isinstance(answer, dict), "that is one answer per worker; add up the dict's values.")
    expect(not isinstance(answer, str), f"{answer!r} is text: turn each worker's answer into an int before you add.")
    expect(isinstance(answer, Real), "total_bones should be one number: the sum over all workers.")
    buried = client.run(_bones).values()
    expect(None not in buried, "a worker has no bones; it may have started anew. Run the cell with `bury` again.")
    expect(
        answer == sum(map(int, buried)),
        f"{answer} is not what the workers hold. Each number is in a worker's own "
        "os.environ, and `bury` draws new ones whenever it runs: ask all the workers again.",
    )
    passed("Only the workers knew.")


@exercise
def check_darkest(answer: Answer, paths: list[str], brightness: Callable[[str], float], client: Client) -> None:
    expect(answer is not None, "darkest is still None.")
    expect(isinstance(answer, tuple | list) and len(answer) == 2, "darkest should be a tuple of two: path and address.")
    path, worker = answer if answer[0] in paths else reversed(answer)
    expect(path in paths, f"neither {answer[0]!r} nor {answer[1]!r} is one of the paths in `some`.")
    expect(path == min(paths, key=brightness), "there is a darker one: take the path with the smallest value.")
    expect(
        worker in list(client.nthreads()),
        f"{worker!r} is not the address of a worker. Let the function that "
        "runs there return get_worker().address beside the brightness.",
    )
    passed("The workers looked at all of them; only their answers came back.")


def _bones():
    return os.environ.get("BONES")
