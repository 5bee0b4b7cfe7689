"""JPEGs decoded per second: by Pillow, as the workshop does it, by torchvision on the CPU, and by nvJPEG on a GPU.

    python benchmarks/decode.py [--photos N] [--rounds N]

All decode the same JPEGs of 500×375 from memory. The CPU's decoders use one thread per core.
"""

import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import torch
from dask.system import CPU_COUNT
from inference import write_jpegs
from record import write_result
from torchvision.io import ImageReadMode, decode_jpeg

from workshop_utils.data import decode_photo


@click.command()
@click.option("--photos", "n_photos", default=512, show_default=True, help="JPEGs that each decoder gets.")
@click.option("--rounds", default=5, show_default=True, help="Times each decoder runs.")
def main(n_photos, rounds):
    with tempfile.TemporaryDirectory() as folder:
        write_jpegs(folder, n_photos)
        files = [path.read_bytes() for path in Path(folder).glob("*/*.jpg")]
    tensors = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    torch.set_num_threads(1)
    with ThreadPoolExecutor(CPU_COUNT) as pool:
        decoders = {
            "Pillow": lambda: list(pool.map(lambda file: decode_photo(file, "a benchmark's"), files)),
            "torchvision": lambda: list(pool.map(lambda file: decode_jpeg(file, ImageReadMode.RGB), tensors)),
        }
        if torch.cuda.is_available():
            decoders["nvJPEG"] = lambda: decode_jpeg(tensors, ImageReadMode.RGB, device="cuda")
        seconds = {name: [] for name in decoders}
        for number in range(rounds + 1):
            for name, decode in decoders.items():
                start = time.perf_counter()
                decode()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - start)
    rates = {name: n_photos / statistics.median(values) for name, values in seconds.items()}
    lines = [f"{name:12}{rate:10.0f} images/s" for name, rate in rates.items()]
    print("\n".join(lines))
    path = write_result("decode", {"photos": n_photos, "rounds": rounds, "images_per_s": rates, "printed": lines})
    print(f"written to {path.relative_to(Path(__file__).parents[1])}")


if __name__ == "__main__":
    main()
