"""The private names of torch and distributed that the launcher needs, each in a function that a test holds.

Where one is gone after an update, its test says what the function has to achieve.
"""

from typing import Any


def forget_topic(scheduler: Any, topic: str) -> None:
    """Drop a topic with its events from the scheduler, which would keep them for good; no public call does that."""
    scheduler._broker._topics.pop(topic, None)


def truncate_topic(scheduler: Any, topic: str) -> None:
    """Drop a topic's events from the scheduler, and keep its subscribers."""
    scheduler._broker.truncate(topic)


def name_groups_from_zero() -> None:
    """Make the next process group of this process the first one by name.

    A group that could not be made has been counted on some ranks only. The next one's name would then differ from rank
    to rank, and the ranks would wait for each other.
    """
    import torch.distributed as dist

    dist.distributed_c10d._world.group_count = 0


def stack_of(thread: int) -> Any:
    """Return the frame in which a thread of this process stands."""
    import sys

    return sys._current_frames()[thread]
