"""Tell a rank's process from its children, such as a DataLoader's, from which no row would reach the client."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import current_process, parent_process

OF_RANK = "DASKRUN_RANK_PID"  # which children inherit
ROWS = "DASKRUN_ROWS"  # names the file to which a rank's script writes rows of metrics, one in a line, as JSON
RANK = "A rank of a job"  # a process's name, which its children know


@contextmanager
def known_to_children() -> Iterator[None]:
    """Let children that this process starts in the block know that they are a rank's."""
    process = current_process()
    name = process.name
    os.environ[OF_RANK], process.name = str(os.getpid()), RANK
    try:
        yield
    finally:
        process.name = name
        os.environ.pop(OF_RANK, None)


def is_ranks_child() -> bool:
    """Return whether this process was started by a rank, or by a child of one."""
    if is_ranks_script():
        return False
    parent, of_rank = parent_process(), os.environ.get(OF_RANK)
    # A fork server keeps the environment of its own start, which may be before the job or in an earlier one.
    if parent and str(parent.pid) == of_rank:
        return parent.name == RANK
    return of_rank != str(os.getpid()) and bool(of_rank or (parent and parent.name == RANK))


def is_ranks_script() -> bool:
    """Return whether this process is the script of a rank, which a worker has started."""
    return os.environ.get(OF_RANK) == f"script {os.getpid()}"
