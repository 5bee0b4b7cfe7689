"""What PyTorch needs of Dask workers, however they are started."""

import os
import re
import shlex
import sys
from itertools import takewhile

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # PyTorch uses the smallest of them
# Of NVIDIA, of NVIDIA's Jetson boards, of WSL, of AMD.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvgpu", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")


def worker_settings(torch_threads: int) -> dict[str, str]:
    """Return the environment variables under which `dask worker` starts workers that suit PyTorch.

    torch_threads: cores that one PyTorch operation may use.
    """
    # Dask's own MALLOC_TRIM_THRESHOLD_ freezes glibc's mmap threshold at 128 KiB. Each large tensor is then mapped and
    # faulted in again, and training steps took 1.6 times as long. Dask merges settings: only None removes its value.
    before: dict[str, int | None] = {"MALLOC_TRIM_THRESHOLD_": None} | dict.fromkeys(THREADS, torch_threads)
    return {
        "DASK_DISTRIBUTED__WORKER__DAEMON": "False",  # a daemonic worker's DataLoader could have no children
        "DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON": str(before).replace("'", '"'),  # easier to quote in a shell
    }


def worker_environment(torch_threads: int) -> str:
    """Return `worker_settings` as lines to type in a shell before `dask worker`."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in worker_settings(torch_threads).items())


def given_threads() -> int | None:
    """Return how many threads this process's variables give PyTorch, None where they do not say."""
    outermost = [os.environ.get(name, "").partition(",")[0].strip() for name in THREADS]
    return min((int(number) for number in outermost if number.isdigit() and int(number)), default=None)


def n_gpus() -> int:
    """Return how many CUDA devices PyTorch sees in this process.

    PyTorch is not imported for it, which takes seconds, where this machine has no GPU.
    """
    if "torch" not in sys.modules and not any(map(os.path.exists, GPU_DEVICES)):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def own_gpu_first(position: int) -> dict[str, str]:
    """Return the variable under which each process of a machine has another GPU as cuda:0; nothing without a GPU.

    Every process still sees all of them, as a worker of dask-cuda does: NCCL needs that to copy between GPUs directly.
    position: of the process among those of this machine, from 0. Where they are more than the GPUs, some share one.
    """
    gpus = gpu_ids()
    if not gpus:
        return {}
    first = position % len(gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first:] + gpus[:first])}


def gpu_ids() -> list[str]:
    """Return the ids of the GPUs, or of slices of one (MIG), that this process may use.

    Slurm, or the user, may have chosen some of this machine's: their numbers stay. The list ends, as CUDA reads it,
    before the first entry that is no id.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return [str(number) for number in range(n_gpus())]
    is_id = re.compile(r"\d+|(GPU|MIG)-.+").fullmatch
    return list(takewhile(is_id, (entry.strip() for entry in seen.split(","))))
