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


RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}  # calls that PyTorch's flight recorder keeps; it reads this once a process


def forget_collectives() -> None:
    """Drop what the flight recorder has of this process, so that a job meets nothing of the one before."""
    if reset := getattr(_c10d(), "_reset_fr_trace", None):
        reset()


def recorded_collectives() -> tuple[list[str], list[dict[str, Any]]]:
    """Return (names of this process's groups, what the flight recorder has of each of their collectives, in order).

    Nothing where PyTorch has no recorder, or no group has been made.
    """
    import json
    import sys

    dump = getattr(_c10d(), "_dump_fr_trace_json", None)
    home = sys.modules.get("torch.distributed.distributed_c10d")
    if dump is None or home is None:
        return [], []
    groups = list(home._world.pg_names.values())
    entries = json.loads(dump()).get("entries", [])  # none at all before the first one
    latest = {entry["process_group"][0]: entry["pg_id"] for entry in entries}  # a name can be used again
    collectives = [e for e in entries if not e["is_p2p"] and e["pg_id"] == latest[e["process_group"][0]]]
    return groups, [entry for entry in collectives if entry["process_group"][0] in groups]


def _c10d() -> Any:
    """Return PyTorch's native module for process groups, None where it is not imported: importing it takes seconds."""
    import sys

    return sys.modules.get("torch._C._distributed_c10d")
