"""How a rank tells what it failed with: an error that can be sent, where it was raised, what had happened before."""

import traceback
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import cloudpickle
from distributed import get_worker
from distributed.core import error_message

from daskrun.errors import JobError, Stopped, WorkerDied, ranks_named
from daskrun.private import recorded_collectives
from daskrun.why.look import described, may_follow_a_death

if TYPE_CHECKING:
    from torch.distributed import TCPStore

MAX_FRAMES = 30  # the innermost ones of a traceback that travels; Dask drops one of over 10 kB


def failure(
    store: "TCPStore", rank: int, world_size: int, error: BaseException
) -> tuple[Exception, tuple[Any, Any, str, bool] | None]:
    """Return (the error that a rank ends with, what its client is told of it).

    They are its own error, and as `clean_exception` of `distributed` reads it: the exception, its traceback, a note,
    and whether it may follow another rank's death. Where another rank failed before, they are Stopped and None.
    """
    first = rank
    with suppress(Exception):  # rank 0's process is gone, and the store with it
        first = int(store.compare_set("failed", "", str(rank)))
    if first != rank:
        return Stopped(f"Rank {rank} ended because rank {first} failed first."), None
    follows = may_follow_a_death(error)
    if not isinstance(error, Exception):  # a worker would take SystemExit for its own end
        end = JobError(_of_an_end(rank, error)).with_traceback(error.__traceback__)
        end.__cause__ = error.__cause__ or error.__context__  # why the function called sys.exit, for example
        error = end
    error = error.with_traceback(_innermost(error.__traceback__))
    try:
        message = _as_message(error)
    except Exception:
        error = JobError(f"Rank {rank} raised a {type(error).__name__}, of which no text can be made.")
        message = _as_message(error)
    exception, remote = (getattr(message[name], "data", None) for name in ("exception", "traceback"))
    about = "" if isinstance(error, WorkerDied) else _about(store, rank, world_size, error)  # it names its rank itself
    return error, (exception, remote, about, follows)


def _as_message(error: Exception) -> Any:
    context = error.__context__
    try:
        raise error  # error_message takes the traceback of what is being handled
    except Exception:
        with suppress(Exception):  # not every error takes it
            error.__context__ = context  # without what is handled further up, which may be no Exception
            _shorten_chain(error)
        return error_message(error)


def _shorten_chain(error: BaseException) -> None:
    """Drop the causes of an error that come round in a circle, or cannot be pickled, and name them in a note."""
    chain = [error]
    while cause := chain[-1].__cause__ or chain[-1].__context__:
        if any(cause is one for one in chain):  # as of `raise error from error`
            chain[-1].__cause__ = chain[-1].__context__ = None
            break
        chain.append(cause)
    for effect, cause in reversed(list(pairwise(chain))):
        try:
            cloudpickle.loads(cloudpickle.dumps(cause))
        except Exception:
            effect.__cause__ = effect.__context__ = None
            effect.add_note(f"Its cause cannot be sent: {cause!r}")


def _of_an_end(rank: int, error: BaseException) -> str:
    """Return what to say of what is no Exception."""
    if isinstance(error, SystemExit):
        return f"Rank {rank} called sys.exit({error.code!r}): let the function return, or raise an error, instead."
    if isinstance(error, KeyboardInterrupt):
        return f"Rank {rank} was interrupted (KeyboardInterrupt), by a signal or by its own code."
    return f"Rank {rank} ended with {error!r}."


def _innermost(stack: Any) -> Any:
    """Return the last MAX_FRAMES of a traceback: the client could not read that of an endless recursion."""
    for _ in range(len(list(traceback.walk_tb(stack))) - MAX_FRAMES):
        stack = stack.tb_next
    return stack


def _about(store: "TCPStore", rank: int, world_size: int, error: Exception) -> str:
    note = f"From rank {rank} of {world_size}, on worker {get_worker().address}."
    with suppress(Exception):  # rank 0's process may be gone, and the store with it
        if "default process group twice" in str(error) and store.check([f"joined-{rank}"]):
            note += " launch has made the group already: give launch backend=None, and the function makes its own."
        if collectives := recorded_collectives()[1]:
            note += f" Its last collective was {described(collectives[-1])}."
        if returned := [other for other in range(world_size) if store.check([f"returned-{other}"])]:
            note += f" {ranks_named(returned).capitalize()} had returned by then, and called no more collectives."
    return note
