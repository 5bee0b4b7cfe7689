"""Run an answer on several ranks, and say in a hint what they wait for if they do not come to an end."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from distributed import Client

import daskrun
from daskrun import JobError, WorkerDied
from workshop_utils.exercises import Answer, Function, NotYet, expect

TIMEOUT_S = 30
SHORT_S = 10  # time limit of a short function, on a quiet machine
SIGNS_OF_A_LOST_PARTNER = ("onnection", "gloo", "Read error", "Socket")  # in what gloo raises if a rank has left
CURE = "Call the same collectives on every rank, equally often."
OUR_BARRIER = re.compile(r", at ranks\.py:\d+ in says, in barrier")  # of `expect_agreement`, in what a job's end says


def run_on_ranks(
    client: Client,
    function: Callable,
    *args: Any,
    n_workers: int = 2,
    about: str = "",
    is_short: bool = False,
) -> list[Any]:
    """Return what function(*args) returns on each rank.

    about: the beginning of a hint, such as "with these losses, ". is_short: whether the function only sends some
    small messages, so that ranks which wait for each other are told sooner. Raises NotYet for such ranks, or if one of
    them died, else what a rank raised.
    """
    group: dict[str, Any] = {"n_workers": n_workers, "backend": "gloo", "wait_for_workers": 60}
    start = time.monotonic()
    daskrun.run(client, _getting_ready, **group)  # new workers take seconds, which do not count below
    empty_job_s = time.monotonic() - start  # longer on a busy machine, where a right answer takes longer, too
    timeout_s = min(TIMEOUT_S, SHORT_S + round(5 * empty_job_s)) if is_short else TIMEOUT_S
    try:
        return daskrun.run(client, function, *args, timeout=timeout_s, **group)
    except TimeoutError as error:
        why = OUR_BARRIER.sub(", after the function has returned", str(error).split(" If all is well")[0])
        raise NotYet(f"{about}the ranks wait for each other. {why} {CURE}") from None
    except WorkerDied as error:
        raise NotYet(f"{about}{error}") from None  # it says what gloo does if ranks call different collectives
    except JobError:
        raise
    except RuntimeError as error:
        if any(sign in str(error) for sign in SIGNS_OF_A_LOST_PARTNER):
            raise NotYet(f"{about}one rank waits for another, which has returned. {CURE}") from None
        raise


def _getting_ready():
    pass


def ask_ranks(
    client: Client, function: Function, arguments: Sequence[tuple], about: str, is_short: bool = False
) -> list[Answer]:
    """Return what function(*arguments[rank]) returns on each rank; there are as many ranks as `arguments`."""

    def on_each_rank():
        return function(*arguments[dist.get_rank()])

    return run_on_ranks(client, on_each_rank, n_workers=len(arguments), about=about, is_short=is_short)


def expect_agreement(
    client: Client, stop: Function, arguments: Sequence[tuple], right: bool, about: str, why: str
) -> None:
    """Raise NotYet unless stop(*arguments[rank]) is `right` on each of two ranks.

    about: the beginning of all hints, such as "with these losses, ". why: what a hint says if both ranks are wrong.
    """

    def says(*given):
        answer = stop(*given)
        dist.barrier()  # a rank that has called a broadcast alone does not wait for the others
        unfit = answer is None or isinstance(answer, str)  # a text would count as True
        expect(not unfit, f"{about}it returns {answer!r}: return whether to stop, True or False.")
        return "stop" if answer else "go on"

    first, second = ask_ranks(client, says, arguments, about, is_short=True)
    expect(
        first == second,
        f"{about}rank 0 says {first} and rank 1 says {second}. They have to agree, or one leaves the loop and the "
        "other waits: let them decide by a number that both have.",
    )
    expect(first == ("stop" if right else "go on"), f"{about}both ranks say {first}: {why}")
