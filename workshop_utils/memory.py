"""The most memory that a block of code needs: of the GPU where PyTorch sees one, else of this process."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

EVERY_S = 0.005  # how often the size of a process is looked at


@contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """Measure this process in the block: on the GPU if PyTorch sees one, else its size in main memory (RSS).

    Yields a dict, which has two numbers in MB (10^6 bytes) after the block, also if that raises an error: "idle MB",
    before the block, without the pages that it shares with other processes, and "peak MB", what the block needs beyond
    that. On a GPU it counts what PyTorch reserves; in main
    memory, a peak between two looks, which are 5 ms apart, is missed. Before the block, freed memory goes back to the
    system, or would hide a part of the need; only glibc does so when asked.

    >>> with peak_memory() as memory:
    ...     numbers = torch.ones(12_500_000)  # 50 MB
    >>> memory["peak MB"] > 40
    True
    """
    gc.collect()
    found: dict[str, float] = {}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        idle = torch.cuda.memory_reserved()
        try:
            yield found
        finally:
            found |= {"idle MB": idle / 1e6, "peak MB": (torch.cuda.max_memory_reserved() - idle) / 1e6}
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    process, done = psutil.Process(), threading.Event()
    idle, sizes = process.memory_full_info().uss, [process.memory_info().rss]

    def watch() -> None:
        while not done.wait(EVERY_S):
            sizes.append(process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        sizes.append(process.memory_info().rss)  # what the block still holds
        done.set()
        watcher.join()
        found |= {"idle MB": idle / 1e6, "peak MB": (max(sizes) - sizes[0]) / 1e6}
