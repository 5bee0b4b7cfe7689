"""Print what a GPU run depends on: versions, driver, cores and their affinity, and one JPEG decode of each decoder.

    python tools/gpu_environment.py [--device cpu]

Exits with 1 where one of them fails, after it has printed the others.
"""

import importlib.metadata
import io
import os
import platform
import subprocess
import sys
import time
import traceback

N_PHOTOS = 256


def main(device):
    failed = []
    for what in (software, driver, cores, affinity, torchcodec, torchvision):
        try:
            print(f"{what.__name__}: {what(device)}", flush=True)
        except Exception as error:
            failed.append(what.__name__)
            traceback.print_exc()
            print(f"{what.__name__}: failed, {type(error).__name__}: {error}", flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def software(device):
    import torch

    found = sorted({(one.name.lower(), one.version) for one in importlib.metadata.distributions()})
    return (
        f"Python {platform.python_version()}, PyTorch {torch.__version__} for CUDA {torch.version.cuda}, "
        f"NCCL {'.'.join(map(str, torch.cuda.nccl.version())) if device == 'cuda' else 'not asked'}; "
        + " ".join(f"{name}=={version}" for name, version in found)
    )


def driver(device):
    asked = "name,driver_version,memory.total,mig.mode.current,pci.bus_id"
    smi = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    return subprocess.run(smi, check=True, capture_output=True, text=True).stdout.strip()


def cores(device):
    from dask.system import CPU_COUNT

    return f"{os.cpu_count()} in the machine, {len(os.sched_getaffinity(0))} for this process, {CPU_COUNT} by Dask"


def affinity(device):
    from dask_cuda.utils import get_cpu_affinity

    return f"{get_cpu_affinity(0)}, to which dask-cuda binds the worker of GPU 0"


def torchcodec(device):
    from torchcodec.decoders import decode_jpeg

    return decoded(lambda files: decode_jpeg(files, device=device), device)


def torchvision(device):
    from torchvision.io import ImageReadMode, decode_jpeg

    return decoded(lambda files: decode_jpeg(files, ImageReadMode.RGB, device=device), device)


def decoded(decode, device):
    """Return the time of a second call on the same JPEGs; raise where the images are not what was encoded."""
    import torch

    files = [torch.frombuffer(bytearray(jpeg()), dtype=torch.uint8)] * N_PHOTOS
    for _ in range(2):  # the first call makes the decoder
        start = time.perf_counter()
        images = decode(files)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    shape, mean = tuple(images[0].shape), images[-1].float().mean().item()
    if len(images) != N_PHOTOS or shape != (3, 375, 500) or not 125 <= mean <= 129:
        raise ValueError(f"{len(images)} images of {shape} with mean {mean:.1f}, not {N_PHOTOS} of (3, 375, 500) grey")
    return f"{N_PHOTOS} JPEGs of 500x375 on {images[0].device} in {seconds * 1e3:.1f} ms"


def jpeg():
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (500, 375), (127, 127, 127)).save(file, "JPEG")
    return file.getvalue()


if __name__ == "__main__":
    main("cpu" if sys.argv[1:] == ["--device", "cpu"] else "cuda")
