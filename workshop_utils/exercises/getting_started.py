"""Checks of notebook 01 · Getting started."""

from collections.abc import Callable

import torch
from distributed import Client

from workshop_utils.exercises import Answer, exercise, expect, passed


@exercise
def check_total_threads(answer: Answer, client: Client) -> None:
    expect(answer is not None, "total_threads is still None.")
    expect(not isinstance(answer, dict), "that is one answer per worker; add up the dict's values.")
    expect(answer == sum(client.run(torch.get_num_threads).values()), f"{answer!r} is not the sum over all workers.")
    passed("PyTorch may use that many cores at once.")


@exercise
def check_darkest(answer: Answer, paths: list[str], brightness: Callable[[str], float]) -> None:
    expect(answer is not None, "darkest is still None.")
    expect(answer in paths, "darkest should be one of the paths in `some`: neither a number nor a list.")
    expect(answer == min(paths, key=brightness), "there is a darker one: take the path with the smallest value.")
    passed("The workers looked at all of them; only the numbers came back.")
