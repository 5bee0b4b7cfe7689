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


def frames_of_threads() -> dict[int, Any]:
    """Return the frame in which each thread of this process stands, by its identifier."""
    import sys

    return sys._current_frames()


def names_of_main(function: Any) -> dict[str, Any]:
    """Return what of a program's `__main__` cloudpickle has made here for a function: classes, and what it names."""
    from cloudpickle import cloudpickle

    made = [*cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.values(), function]
    named = {one.__name__: one for one in made if getattr(one, "__qualname__", ".") == getattr(one, "__name__", "")}
    of_main = {name: one for name, one in named.items() if one.__module__ == "__main__"}
    used = getattr(function, "__globals__", {}) if getattr(function, "__module__", "") == "__main__" else {}
    return {name: one for name, one in used.items() if not name.startswith("__")} | of_main


RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000"}  # calls that PyTorch's flight recorder keeps; it reads this once a process


def recorded_collectives() -> tuple[list[str], list[dict[str, Any]]]:
    """Return (names of this process's groups, what the flight recorders have of each of their collectives, in order).

    Each has as "recorder" the one that has it: backends of one group number their collectives apart. Nothing where
    PyTorch has no recorder, or no group has been made.
    """
    import json
    import sys

    home = sys.modules.get("torch.distributed.distributed_c10d")
    if home is None:
        return [], []
    groups, collectives = list(home._world.pg_names.values()), []
    for recorder, read in _recorders().items():
        entries = json.loads(read()).get("entries", [])  # none at all before the first one
        latest = {entry["process_group"][0]: entry["pg_id"] for entry in entries}  # a name can be used again
        for entry in entries:
            name = entry["process_group"][0]
            if name in groups and not entry["is_p2p"] and entry["pg_id"] == latest[name]:
                collectives.append(entry | {"recorder": recorder})
    return groups, sorted(collectives, key=lambda entry: entry["time_created_ns"])


def _recorders() -> dict[str, Any]:
    """Return the function that reads each flight recorder of this PyTorch, by a backend's name.

    Since 2.15 each backend has one, and "nccl" is nccl2. NCCL's older implementation has one of another kind.
    """
    import sys
    from functools import partial

    # Not imported here: that takes seconds.
    c10d, home = map(sys.modules.get, ("torch._C._distributed_c10d", "torch.distributed.distributed_c10d"))
    read_nccl, read = (getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"))
    found = {"older nccl": read_nccl} if read_nccl else {}
    if not read:
        return found
    if "backend: str" not in read.__doc__:  # before 2.15
        return found | {"gloo": read}
    groups = list(home._world.pg_names) if home else []  # the rank may be making another
    in_use = (group._get_backend(device).name() for group in groups for device in group._device_types)
    backends = {"gloo", "nccl", "nccl2", "nccl-lazy", *in_use}
    return found | {name: partial(read, backend=name) for name in sorted(backends)}


def described(entry: dict[str, Any]) -> str:
    """Return a collective of the flight recorder as text, such as "all_reduce of [10]"."""
    name = entry["profiling_name"].partition(":")[2]  # "gloo:all_reduce"
    return f"{name} of {_shapes(entry)}" if entry["input_sizes"] else name


def _shapes(entry: dict[str, Any]) -> str:
    kinds = zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
    sizes = ((size or "one number", kind) for size, kind in kinds)
    shapes = [str(size) if kind == "Float" else f"{size} ({kind})" for size, kind in sizes]
    return ", ".join(shapes[:3]) + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")
