"""JPEGs decoded per second: by Pillow, as the workshop does it, by torchvision and torchcodec, and by a GPU.

    python benchmarks/decode.py [--photos N] [--rounds N]

All decode the same JPEGs of 500×375 from memory. The CPU's decoders use one thread per core. A GPU is given many in one
call: by torchcodec, as `classify` does, and by torchvision, whose decoder for GPUs is deprecated.
"""

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import click
import torch
import torchcodec.decoders
import torchvision.io
from dask.system import CPU_COUNT
from jpegs import write_jpegs
from record import write_result

from workshop_utils.photos import decode_photo

CALLS = (128, 256)  # JPEGs that a GPU is given at once
N_DISTINCT = 512


@click.command()
@click.option("--photos", "n_photos", type=int, help="JPEGs that each decoder gets.  [default: 512; on a GPU 4096]")
@click.option("--rounds", default=5, show_default=True, help="Times each decoder runs.")
def main(n_photos, rounds):
    on_gpu = torch.cuda.is_available()
    n_photos = n_photos or (4096 if on_gpu else 512)
    with tempfile.TemporaryDirectory() as folder:
        write_jpegs(folder, min(n_photos, N_DISTINCT))
        files = [path.read_bytes() for path in Path(folder).glob("*/*.jpg")]
    files = [files[number % len(files)] for number in range(n_photos)]
    tensors = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    torch.set_num_threads(1)
    with ThreadPoolExecutor(CPU_COUNT) as pool:
        decoders = {
            "Pillow": lambda: list(pool.map(lambda file: decode_photo(file, "a benchmark's"), files)),
            "torchvision": lambda: list(pool.map(by_torchvision, tensors)),
            "torchcodec": lambda: list(pool.map(torchcodec.decoders.decode_jpeg, tensors)),
        }
        for size in CALLS if on_gpu else ():
            parts = [tensors[start : start + size] for start in range(0, n_photos, size)]
            decoders |= {
                f"GPU, torchcodec, calls of {size}": partial(in_parts, torchcodec.decoders.decode_jpeg, parts),
                f"GPU, torchvision, calls of {size}": partial(in_parts, by_torchvision, parts),
            }
        seconds = {name: [] for name in decoders}
        for number in range(rounds + 1):
            for name, decode in decoders.items():
                start = time.perf_counter()
                decode()
                if on_gpu:
                    torch.cuda.synchronize()
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
    rates = {name: n_photos / statistics.median(values) for name, values in seconds.items()}
    lines = [f"{name:34}{rate:10.0f} images/s" for name, rate in rates.items()]
    lines.append(f"{n_photos} JPEGs, {CPU_COUNT} threads; medians of {rounds} rounds")
    print("\n".join(lines))
    path = write_result(
        "decode", {"photos": n_photos, "rounds": rounds, "images_per_s": rates, "seconds": seconds, "printed": lines}
    )
    print(f"written to {path.relative_to(Path(__file__).parents[1])}")


def by_torchvision(jpegs, device="cpu"):
    turned = device == "cpu"  # as Pillow and torchcodec do there; torchvision cannot on a GPU
    return torchvision.io.decode_jpeg(jpegs, torchvision.io.ImageReadMode.RGB, device, apply_exif_orientation=turned)


def in_parts(decode, parts):
    """Decode on the GPU in one call a part; each one's images are forgotten, as after a forward pass."""
    for part in parts:
        decode(part, device="cuda")


if __name__ == "__main__":
    main()
