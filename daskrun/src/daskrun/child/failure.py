"""How a rank tells what it failed with: an error that can be sent, where it was raised, what had happened before."""

import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cloudpickle
from tblib import pickling_support

from daskrun.child.context import current
from daskrun.child.stack import from_the_program
from daskrun.errors import JobError, RankExited, add_note
from daskrun.private import described, recorded_collectives
from daskrun.protocol import Failure

if TYPE_CHECKING:
    from torch.distributed import TCPStore

COMMUNICATION = re.compile("gloo|nccl|horovod", re.IGNORECASE)  # in the texts of its errors
MOST_TEXT = 10_000  # characters
MAX_FRAMES = 30  # the innermost ones of a traceback that travels


def failure(error: BaseException, store: "TCPStore | None", world_size: int) -> Failure:
    """Return what this rank's client is told of an error."""
    follows, rank = may_follow(error), current().mine.rank  # type: ignore[union-attr]
    if not isinstance(error, Exception):  # it would end the client's own process
        end = _of_an_end(rank, error).with_traceback(error.__traceback__)
        end.__cause__ = error.__cause__ or error.__context__  # why the function called sys.exit, for example
        error = end
    last, returned = "", []
    with suppress(Exception):  # PyTorch's private names; the store's process may be gone
        last = described(collectives[-1]) if (collectives := recorded_collectives()[1]) else ""
        returned = [other for other in range(world_size) if store and store.check([f"returned-{other}"])]
    if store and "default process group twice" in _text(str, error):
        add_note(error, "launch has made the group already: give launch backend=None, and the function makes its own.")
    with suppress(Exception):  # not every error takes it
        for one in _chain(error):
            one.__traceback__ = _innermost(from_the_program(one.__traceback__))
    error, pickled = _pickled(rank, error)
    text = _text(lambda one: "".join(traceback.format_exception(one)), error)[-MOST_TEXT:]
    return Failure(pickled, text, follows, last, returned)


def may_follow(error: BaseException) -> bool:
    """Return whether an error, or one in its chain or group, came out of the ranks' communication.

    That breaks when another rank ends. The texts of gloo's and NCCL's errors name them.
    """
    import torch.distributed as dist

    seen: list[BaseException] = []
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None or any(link is one for one in seen):
            continue
        seen.append(link)
        links += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]
        if isinstance(link, dist.DistError) or type(link).__name__ == "HorovodInternalError":
            return True
        with suppress(Exception):  # not every exception has a text
            if isinstance(link, RuntimeError) and COMMUNICATION.search(str(link)):
                return True
    return False


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error, its cause, and so on."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and not any(cause is one for one in chain):
        chain.append(cause)
    return chain


def _pickled(rank: int, error: BaseException) -> tuple[BaseException, bytes]:
    """Return an error that can be sent: this one, else without its cause, else its text. And its bytes."""
    for change in (lambda: error, lambda: _without_cause(error), lambda: _as_text(rank, error)):
        with suppress(Exception):  # pickling raises many kinds
            one = change()
            pickling_support.install(*_chain(one))
            pickled = cloudpickle.dumps(one)
            cloudpickle.loads(pickled)
            return one, pickled
    raise AssertionError("a JobError can be pickled")


def _without_cause(error: BaseException) -> BaseException:
    cause = error.__cause__ or error.__context__
    error.__cause__ = error.__context__ = None
    add_note(error, f"Its cause cannot be sent: {_text(repr, cause)}" if cause else "")
    return error


def _as_text(rank: int, error: BaseException) -> JobError:
    """Return an error that can be sent in place of one that can't."""
    instead = JobError(f"Rank {rank} raised what cannot be sent: {_text(repr, error)}.")
    return instead.with_traceback(error.__traceback__)


def _text(make: Callable[[BaseException], str], error: BaseException) -> str:
    try:
        return make(error)
    except Exception:  # not every error has a text
        return type(error).__name__


def _of_an_end(rank: int, error: BaseException) -> JobError:
    """Return the error that stands for what is no Exception."""
    if isinstance(error, SystemExit):
        return RankExited(rank, error.code)
    if isinstance(error, KeyboardInterrupt):
        return JobError(f"Rank {rank} was interrupted (KeyboardInterrupt), by a signal or by its own code.")
    return JobError(f"Rank {rank} ended with {error!r}.")


def _innermost(stack: Any) -> Any:
    """Return the last MAX_FRAMES of a traceback: that of an endless recursion can't be pickled."""
    for _ in range(len(list(traceback.walk_tb(stack))) - MAX_FRAMES):
        stack = stack.tb_next
    return stack
