"""`classify` gives each image its row, whatever dies, stops, or is damaged meanwhile."""

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from io import BytesIO

import pytest
from PIL import Image
from processes import dask_cluster
from waiting import until, until_replaced

from workshop_utils.classify import classify
from workshop_utils.photos import list_photos

PAUSE_S = 10
FORMATS = {  # the six that people have: what Pillow is told to write
    "jpg": {"format": "JPEG"},
    "progressive.jpg": {"format": "JPEG", "progressive": True},
    "png": {"format": "PNG"},
    "webp": {"format": "WEBP"},
    "gif": {"format": "GIF"},
    "bmp": {"format": "BMP"},
}


@pytest.mark.weekly
def test_each_worker_killed_once_costs_no_image_and_doubles_none(client, dogs, weights, told):
    photos = list_photos(dogs)
    many = [*photos * (2000 // len(photos) + 1)][:2000]
    killed = list(client.run(os.getpid).values())
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(classify, client, many, batch_size=8, weights=weights)
        for pid in killed:
            until(lambda: any(client.processing().values()))
            os.kill(pid, signal.SIGKILL)
            until_replaced(client, pid)
        frame = result.result(timeout=280)
    assert frame.path.tolist() == many and frame.error.isna().all()
    assert not set(killed) & set(client.run(os.getpid).values())
    told(f"each of {len(killed)} workers killed once during classify", f"{len(frame):,} of 2,000 images, each once")


@pytest.mark.weekly
def test_a_scheduler_that_stands_still_for_ten_seconds_costs_these_seconds_alone(dogs, weights, tmp_path, told):
    many = list_photos(dogs) * 60
    with dask_cluster(tmp_path, 2) as (client, scheduler), ThreadPoolExecutor(1) as pool:
        before = set(client.run(os.getpid).values())
        result = pool.submit(classify, client, many, batch_size=8, weights=weights)
        until(lambda: any(client.processing().values()))
        scheduler.send_signal(signal.SIGSTOP)
        threading.Timer(PAUSE_S, scheduler.send_signal, [signal.SIGCONT]).start()
        frame = result.result(timeout=280)
        assert frame.path.tolist() == many and frame.error.isna().all()
        assert set(client.run(os.getpid).values()) == before
    told(f"the scheduler stopped for {PAUSE_S} s", f"{len(frame):,} of {len(many):,} images, same workers")


def mutated(content, draw):
    """Return the bytes of a file after one of the accidents that happen to files."""
    content, at = bytearray(content), draw.randrange(len(content))
    accident = draw.choice(["bits", "bytes", "cut", "doubled", "zeros", "swapped"])
    if accident == "bits":
        for _ in range(draw.randrange(1, 20)):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif accident == "bytes":
        content[at : at + 64] = draw.randbytes(64)
    elif accident == "cut":
        del content[at:]
    elif accident == "doubled":
        content[at:at] = content[at : at + 500]
    elif accident == "zeros":
        content[at : at + 4096] = bytes(4096)
    else:
        content[at : at + 200], content[:200] = content[:200], content[at : at + 200]
    return bytes(content)


def files_of_the_week(dogs, folder, n_files):
    """Write damaged files of each format, each week others; return their paths."""
    draw = random.Random(f"{date.today().isocalendar()[:2]}")
    photos, paths = [Image.open(path).convert("RGB") for path in list_photos(dogs)], []
    for number in range(n_files):
        ending, how = list(FORMATS.items())[number % len(FORMATS)]
        whole = BytesIO()
        draw.choice(photos).save(whole, **how)
        paths.append(folder / "n02085620-Chihuahua" / f"{number}.{ending}")
        paths[-1].write_bytes(mutated(whole.getvalue(), draw))
    return [str(path) for path in paths]


@pytest.mark.weekly
def test_damaged_files_are_named_or_classified_and_no_worker_dies(client, dogs, weights, tmp_path, told, n_files=1000):
    (tmp_path / "n02085620-Chihuahua").mkdir()
    paths, before = files_of_the_week(dogs, tmp_path, n_files), set(client.run(os.getpid).values())
    frame = classify(client, paths, batch_size=8, weights=weights)
    assert frame.path.tolist() == paths
    assert (frame.error.isna() == frame.prediction.notna()).all()  # a row has one of the two
    refused = frame[frame.error.notna()]
    assert [path for path, error in zip(refused.path, refused.error, strict=True) if path not in error] == []
    assert 0 < len(refused) < len(frame)
    assert set(client.run(os.getpid).values()) == before
    classified = len(frame) - len(refused)
    told(
        "damaged files of six formats",
        f"of {n_files:,}, {classified} classified, {len(refused)} refused by name, 0 crashes",
    )
