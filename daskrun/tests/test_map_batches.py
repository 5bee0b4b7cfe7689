"""Rows of all items come once and in order, whatever happens to workers, batches and the program."""

import gc
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from distributed import Client
from processes import has_ended
from waiting import until

from daskrun import SchedulerLost, map_batches, parquet_batches
from daskrun.client.map_batches import LARGE, TASKS_PER_THREAD
from daskrun.worker import batches

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import it
WORDS = ["x" * (number % 7 + 1) for number in range(400)]


class Lengths:
    """What an engineer would write: it loads ahead, and returns tensors."""

    def __init__(self, delay_s=0.0):
        self.delay_s, self.model = delay_s, torch.ones(2, dtype=torch.bfloat16)

    def load(self, words):
        return [len(word) for word in words]

    def __call__(self, lengths):
        time.sleep(self.delay_s)
        n = torch.tensor(lengths)
        return {"n": n, "embedding": n[:, None] * self.model, "pid": [os.getpid()] * len(n)}


class Picky(Lengths):
    def __call__(self, lengths):
        if 4 in lengths:
            raise ZeroDivisionError("a four")
        return {"n": lengths}


def wait_until_idle(client):
    until(lambda: not any(client.processing().values()))


@pytest.mark.smoke
def test_rows_come_in_the_order_of_the_items_from_all_workers(client):
    frame = pd.concat(map_batches(client, partial(Lengths, 0.02), WORDS, batch_size=16))
    assert frame.n.tolist() == [len(word) for word in WORDS]
    assert all(np.array_equal(row, [n, n]) for row, n in zip(frame.embedding, frame.n, strict=True))
    assert frame.pid.nunique() == len(client.nthreads())


def test_one_object_is_made_in_a_process_for_a_call_and_goes_with_it(client):
    class Counts:
        def __init__(self):
            time.sleep(0.2)
            self.made = os.urandom(8).hex()

        def __call__(self, batch):
            return {"made": [self.made] * len(batch), "pid": [os.getpid()] * len(batch)}

    frames = [pd.concat(map_batches(client, Counts, range(200), batch_size=4)) for _ in range(2)]
    assert [one.made.nunique() for one in frames] == [one.pid.nunique() for one in frames]
    assert not set(frames[0].made) & set(frames[1].made)  # what it has loaded may be another file by now
    until(lambda: not any(client.run(lambda: len(batches._made)).values()))


def test_a_large_maker_is_sent_once_to_a_worker_and_to_its_successor(client):
    class Sums:
        def __init__(self, table):
            self.table = table

        def __call__(self, batch):
            time.sleep(0.02)
            return {"sum": [float(self.table.sum())] * len(batch), "pid": [os.getpid()] * len(batch)}

    make = partial(Sums, np.ones(LARGE))
    stream = map_batches(client, make, range(400), batch_size=4)
    frames = [next(stream)]
    os.kill(frames[0].pid.iloc[0], signal.SIGKILL)
    frames += stream
    frame = pd.concat(frames)
    assert len(frame) == 400 and set(frame["sum"]) == {LARGE} and frame.pid.nunique() > 1


def test_a_killed_worker_costs_no_rows(client):
    pids = client.run(os.getpid)
    with ThreadPoolExecutor(1) as pool:
        rows = pool.submit(lambda: pd.concat(map_batches(client, partial(Lengths, 0.05), WORDS, batch_size=8)))
        until(lambda: any(client.processing().values()))
        busy = next(address for address, tasks in client.processing().items() if tasks)
        os.kill(pids[busy], signal.SIGKILL)
        frame = rows.result(timeout=100)
    assert frame.n.tolist() == [len(word) for word in WORDS]
    client.wait_for_workers(len(pids), timeout=100)


def test_a_result_that_was_taken_is_not_kept_however_long_it_took(client, monkeypatch):
    class Slow:
        def __call__(self, items):
            time.sleep(0.3)
            return {"item": items}

    monkeypatch.setattr(sys.modules["daskrun.client.map_batches"], "LOOK_S", 0.1)  # the wait for it is in steps
    gc.disable()
    try:
        assert len(list(map_batches(client, Slow, [1]))) == 1
        keys = lambda dask_scheduler: list(dask_scheduler.tasks)  # noqa: E731
        until(lambda: not [key for key in client.run_on_scheduler(keys) if str(key).startswith("Slow")])
    finally:
        gc.enable()


def test_items_without_end_are_taken_as_they_are_needed_and_leaving_frees_the_workers(client):
    taken = []

    def items():
        while True:
            taken.append(1)
            yield "word"

    stream, n_threads = map_batches(client, Lengths, items(), batch_size=2), sum(client.nthreads().values())
    for n_frames in range(1, 5):
        next(stream)
        assert len(taken) <= (n_frames + (TASKS_PER_THREAD + 3) * n_threads) * 16
    stream.close()
    wait_until_idle(client)


@pytest.mark.parametrize("fails", ["make", "load", "call", "items"])
def test_what_a_users_code_raises_is_raised_and_frees_the_workers(client, fails):
    class Broken(Lengths):
        def __init__(self):
            super().__init__()
            if fails == "make":
                raise ZeroDivisionError("of the maker")

        def load(self, words):
            return 1 / 0 if fails == "load" else super().load(words)

        def __call__(self, lengths):
            return 1 / 0 if fails == "call" else super().__call__(lengths)

    def items():
        yield from WORDS
        if fails == "items":
            raise ZeroDivisionError("of the items")

    with pytest.raises(ZeroDivisionError):
        list(map_batches(client, Broken, items(), batch_size=8))
    wait_until_idle(client)


def test_of_a_batch_that_fails_only_the_items_that_do_are_rows_with_an_error(client):
    frame = pd.concat(map_batches(client, Picky, WORDS, on_error="row"), ignore_index=True)
    failed = frame.error.notna()
    assert failed.tolist() == [len(word) == 4 for word in WORDS] and frame.n.isna().tolist() == failed.tolist()
    assert frame.n[~failed].tolist() == [len(word) for word in WORDS if len(word) != 4]
    assert frame.error[failed].str.contains("ZeroDivisionError").all()


@pytest.mark.parametrize("where", ["disk", "memory of one process"])
def test_parts_are_one_table_whatever_is_missing_in_one_of_them(where, client, tmp_path):
    def work(client, output):
        items = [4] * 60 + [1, 2] * 30 + [4] * 60  # the first and the last parts have errors alone

        class Numbers:
            def __call__(self, batch):
                if 4 in batch:
                    raise ValueError("a four")
                return {"n": batch, "text": [str(one) if one == 1 else None for one in batch]}

        parts = map_batches(client, Numbers, items, batch_size=5, batches_per_task=2, output=output, on_error="row")
        return items, parts

    if where == "disk":
        items, parts = work(client, tmp_path / "answers")
        table = pq.read_table(tmp_path / "answers")
    else:
        import fsspec

        with Client(processes=False, n_workers=1, dashboard_address="127.0.0.1:0", set_as_default=False) as alone:
            items, parts = work(alone, "memory://bucket/answers")
        fs = fsspec.filesystem("memory")
        table = pa.concat_tables(pq.read_table(fs.open(path)) for path in sorted(fs.glob("/bucket/answers/*.parquet")))
    frame = table.to_pandas()
    assert len(parts) == len(items) // 10 and frame.n.fillna(4).astype(int).tolist() == items
    assert (frame.error.notna() == (frame.n.isna())).all() and frame.text.dropna().tolist() == ["1"] * 30


PROGRAM = """
import sys, time
import daskrun

class Slow:
    def __call__(self, batch):
        time.sleep(0.2)
        open(sys.argv[2], "a").write("".join(f"{one}\\n" for one in batch))
        return {"square": [one**2 for one in batch]}

if __name__ == "__main__":
    client = daskrun.start_local(2)
    parts = daskrun.map_batches(client, Slow, range(96), batch_size=4, batches_per_task=2, output=sys.argv[1])
    print(len(parts))
    client.shutdown()
"""


def test_a_program_that_was_killed_goes_on_with_the_parts_that_are_missing(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    output, done = tmp_path / "answers", tmp_path / "done"
    command = [sys.executable, "program.py", output, done]
    with subprocess.Popen(command, cwd=tmp_path) as first:
        until(lambda: len(list(output.glob("*.parquet"))) >= 3)
        first.kill()
    until(lambda: has_ended(first.pid))
    time.sleep(2)  # its workers end with it
    kept = {path: path.stat().st_mtime_ns for path in output.glob("*.parquet")}
    assert 3 <= len(kept) < 12
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert again.stdout == "12\n", again.stderr
    assert all(path.stat().st_mtime_ns == at for path, at in kept.items())
    frame = pq.read_table(output).to_pandas()
    assert frame.square.tolist() == [number**2 for number in range(96)]
    counts = pd.Series(done.read_text().split()).value_counts()
    assert set(counts.index.astype(int)) == set(range(96)) and (counts == 1).sum() >= len(kept) * 8
    assert not [path for path in output.iterdir() if path.suffix != ".parquet"]


def test_parts_of_other_items_are_refused_and_kept(client, tmp_path):
    parts = map_batches(client, Lengths, WORDS, output=tmp_path)
    for others in (WORDS[1:], WORDS[:256]):  # the last are a whole task of them
        with pytest.raises(ValueError, match="other items"):
            map_batches(client, Lengths, others, output=tmp_path)

    class Others(Lengths):
        pass

    with pytest.raises(ValueError, match="another class"):
        map_batches(client, Others, WORDS, output=tmp_path)
    assert sorted(parts) == sorted(map(str, tmp_path.glob("*.parquet")))


@pytest.mark.parametrize(
    ("first", "later", "both"),
    [
        (1, 1.5, "double"),
        (None, 3, "int64"),
        ([], [1.5, 2.0], "list<element: double>"),
        (2**60 + 1, None, "int64"),
        (Path("a.jpg"), Path("b.jpg"), "string"),
        ([[1, 2]], [[3]], "list<element: list<element: int64>>"),
    ],
)
def test_types_are_widened_where_parts_differ(client, tmp_path, first, later, both):
    def make():
        return lambda batch: {"value": [first if one < 50 else later for one in batch]}

    map_batches(client, make, range(100), batch_size=10, batches_per_task=1, output=tmp_path)
    table = pq.read_table(tmp_path)
    assert str(table.schema.field("value").type).replace("large_", "").replace("item", "element") == both
    plain = [os.fspath(one) if isinstance(one, Path) else one for one in (first, later)]
    assert table["value"].to_pylist() == [plain[0]] * 50 + [plain[1]] * 50


@pytest.mark.parametrize(("first", "later"), [(True, 2), ({"a": 1}, "text"), (1, "text")])
def test_types_that_do_not_go_together_are_named_and_nothing_is_changed(client, tmp_path, first, later):
    def make():
        return lambda batch: {"value": [first if one < 50 else later for one in batch]}

    with pytest.raises(ValueError, match="value"):
        map_batches(client, make, range(100), batch_size=10, batches_per_task=1, output=tmp_path)
    found = [value for path in tmp_path.glob("*.parquet") for value in pq.read_table(path)["value"].to_pylist()]
    assert first in found and all(type(value) in (type(first), type(later)) for value in found)


def test_ids_stay_whole_beside_rows_with_an_error(client, tmp_path):
    ids = [2**60 + number for number in range(40)]

    class Fails:
        def __call__(self, batch):
            if any(one % 7 == 0 for one in batch):
                raise ValueError("seven")
            return {"id": batch}

    map_batches(client, Fails, ids, batch_size=4, output=tmp_path, on_error="row")
    found = pq.read_table(tmp_path)["id"].to_pylist()
    assert found == [one if one % 7 else None for one in ids]


def test_equal_items_are_the_same_whichever_objects_they_are(client, tmp_path):
    one = "".join(["a", "b"])
    assert map_batches(client, Lengths, [one, one, {"k": 1}.popitem()[0]], output=tmp_path) == map_batches(
        client, Lengths, ["".join(["a", "b"]), "ab", "k"], output=tmp_path
    )


def test_rows_of_parquet_are_dataframes_of_the_batch_size(client, tmp_path):
    for name, start in (("a", 0), ("b", 700)):
        frame = pd.DataFrame({"text": [f"text {number}" for number in range(start, start + 700)], "k": 1, "other": 2})
        frame.to_parquet(tmp_path / f"{name}.parquet", row_group_size=300)

    class Text:
        def __call__(self, frame):
            return frame.assign(rows=len(frame), columns=",".join(frame))

    batches = parquet_batches(tmp_path, columns=["text", "k"])
    frame = pd.concat(map_batches(client, Text, batches, batch_size=64))
    assert frame.text.tolist() == [f"text {number}" for number in range(1400)] and len(batches) == 6
    assert frame.rows.max() == 64 and set(frame["columns"]) == {"text,k"}
    with pytest.raises(FileNotFoundError):
        parquet_batches(tmp_path / "none")
    with pytest.raises(ValueError, match="nope"):
        parquet_batches(tmp_path, columns=["nope"])


def test_parquet_that_was_written_again_is_read_again_and_its_integers_stay_whole(client, tmp_path):
    class Text:
        def __call__(self, frame):
            return frame

    for ids in ([2**60 + 1, None], [5, 6]):
        pq.write_table(pa.table({"id": ids}), tmp_path / "a.parquet")
        frames = list(map_batches(client, Text, parquet_batches(tmp_path, storage_options={"auto_mkdir": True})))
        assert [one for frame in frames for one in frame["id"]] == ids


def test_the_next_batches_are_loaded_while_one_is_computed(client):
    class Notes:
        def load(self, batch):
            began = time.time()
            time.sleep(0.03)
            return began, batch

        def __call__(self, loaded):
            began, batch = loaded
            at = time.time()
            time.sleep(0.03)
            return {"loading": [began] * len(batch), "computing": [at] * len(batch), "pid": [os.getpid()] * len(batch)}

    frame = pd.concat(map_batches(client, Notes, range(400), batch_size=2))
    for _, of_worker in frame.drop_duplicates("computing").groupby("pid"):
        ahead = of_worker.loading.iloc[1:].to_numpy() < of_worker.computing.iloc[:-1].to_numpy() + 0.03
        assert ahead.mean() > 0.5  # but the first batch of a task


def test_a_closed_client_is_one_error(client):
    other = Client(client.scheduler.address, set_as_default=False)
    stream = map_batches(other, partial(Lengths, 0.05), WORDS, batch_size=4)
    next(stream)
    other.close()
    with pytest.raises(SchedulerLost):
        list(stream)


@pytest.mark.parametrize(
    "arguments",
    [
        {"items": "one"},
        {"items": pd.DataFrame({"a": [1]})},
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"ahead": -1},
        {"on_error": "skip"},
        {"make": Lengths()},
        {"make": len},
    ],
)
def test_invalid_arguments_are_refused_at_once(client, arguments):
    with pytest.raises((ValueError, TypeError)):
        map_batches(client, **{"make": Lengths, "items": WORDS} | arguments)


def test_a_task_of_dask_may_call_it(client):
    def outer():
        from distributed import get_client

        return sum(frame.n.sum() for frame in map_batches(get_client(), Lengths, WORDS[:50], progress=False))

    assert client.submit(outer, pure=False).result() == sum(map(len, WORDS[:50]))


def test_a_timeout_of_the_users_code_is_raised(client):
    def make():
        raise TimeoutError("of a server")

    with pytest.raises(TimeoutError, match="of a server"):
        list(map_batches(client, make, WORDS))
