"""Run an answer on several ranks, and say in a hint what they wait for if they do not come to an end."""

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import daskrun
from daskrun import JobError, WorkerDied
from workshop_utils.exercises import Answer, Function, NotYet, expect, shown

if TYPE_CHECKING:  # ranks import this module, and Dask would take them most of a second
    from distributed import Client

# Time limits in seconds of a function, and of one that only sends small messages. A right answer takes 1 to 3, or 5
# more where each rank has to import PyTorch first; a busy machine needs several times that.
LONG_S, SHORT_S = 40, 20
SIGNS_OF_A_LOST_PARTNER = ("onnection", "gloo", "Read error", "Socket")  # in what gloo raises if a rank has left
CURE = "Call the same collectives on every rank, the same number of times."
BUSY = "Your machine is busy, or a loop has no end: run the cell again."
NOT_CALLED = "has not called it"  # of a rank that another one waits for, and which may only be slow
HAS_LEFT = "returned, or raised an error"  # of a rank for which another one may wait outside a collective
NOT_AWAITED = " With async_op=True, a collective returns at once: wait() for its work before you read the tensor."
# In what a job's end says of ranks that compute.
AT_WORK = ("it is under way", "No rank waits for another in a collective")
OUR_BARRIER = re.compile(r", at ranks\.py:\d+ in says, in barrier")  # of `expect_agreement`, in what a job's end says


def run_on_ranks(
    client: "Client", function: Callable, *args: Any, n_workers: int = 2, about: str = "", is_short: bool = False
) -> list[Any]:
    """Run an answer on ranks, with a time limit, and return what function(*args) returns on each.

    Args:
        about: The beginning of a hint, such as "with these losses, ".
        is_short: Whether the function only sends a few small messages, so that ranks that wait for each other get
            their hint sooner.

    Raises:
        NotYet: If the ranks don't come to an end, or one of them dies.

    What a rank raises is raised here.
    """
    limit_s = SHORT_S if is_short else LONG_S
    try:
        return daskrun.run(
            client, function, *args, n_workers=n_workers, backend="gloo", time_limit=limit_s, wait_for_workers=60
        )
    except TimeoutError as error:
        why = OUR_BARRIER.sub(", after the function has returned", str(error).split(" If all is well")[0])
        if any(sign in why for sign in AT_WORK) and HAS_LEFT not in why:
            raise NotYet(f"{about}the ranks are still at work. {why} {BUSY}") from None
        cure = f"{CURE} If they do, your machine is busy: run the cell again." if NOT_CALLED in why else CURE
        raise NotYet(f"{about}the ranks wait for each other. {why} {cure}") from None
    except WorkerDied as error:
        raise NotYet(f"{about}{error}") from None  # it says what gloo does if ranks call different collectives
    except JobError:
        raise
    except RuntimeError as error:
        if any(sign in str(error) for sign in SIGNS_OF_A_LOST_PARTNER):
            raise NotYet(f"{about}one rank waits for another, which has returned. {CURE}") from None
        raise


def run_ours(client: "Client", function: Callable, *args: Any) -> list[Any]:
    """Return what function(*args) returns on each of two ranks. It has no time limit, and no answer is called in it."""
    return daskrun.run(client, function, *args, n_workers=2, backend="gloo", wait_for_workers=60)


def ask_ranks(
    client: "Client", function: Function, arguments: Sequence[tuple], about: str, is_short: bool = False
) -> list[Answer]:
    """Return what function(*arguments[rank]) returns on each rank; there are as many ranks as `arguments`."""

    def on_each_rank():
        return function(*arguments[dist.get_rank()])

    return run_on_ranks(client, on_each_rank, n_workers=len(arguments), about=about, is_short=is_short)


def expect_agreement(
    client: "Client", stop: Function, arguments: Sequence[tuple], right: bool, about: str, why: str
) -> None:
    """Raise NotYet unless stop(*arguments[rank]) is `right` on each of two ranks.

    about: the beginning of all hints, such as "with these losses, ". why: what a hint says if both ranks are wrong.
    """

    def says(*given):
        answer = stop(*given)
        dist.barrier()  # a rank that has called a broadcast alone does not wait for the others
        unfit = answer is None or isinstance(answer, str)  # a text would count as True
        expect(not unfit, f"{about}it returns {shown(answer)}: return whether to stop, True or False.")
        return "stop" if answer else "go on"

    first, second = ask_ranks(client, says, arguments, about, is_short=True)
    maybe = NOT_AWAITED if _forgets_to_wait(stop) else ""
    expect(
        first == second,
        f"{about}rank 0 says {first} and rank 1 says {second}. They have to agree, or one leaves the loop and the "
        f"other waits: let them decide by a number that both have.{maybe}",
    )
    expect(first == ("stop" if right else "go on"), f"{about}both ranks say {first}: {why}{maybe}")


def _forgets_to_wait(function: Function) -> bool:
    with suppress(OSError, TypeError):  # it has no source
        source = inspect.getsource(function)
        return bool(re.search(r"async_op *= *True", source)) and ".wait(" not in source
    return False
