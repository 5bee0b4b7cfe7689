"""Batches of `map_batches` on a worker: one object for a process, batches loaded ahead, a DataFrame for each task."""

import hashlib
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache, partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from daskrun.errors import add_note

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MOST_MADE = 2  # two calls may take turns on a worker
MOST_SHOWN = 200  # characters of an item
_made: dict[str, Any] = {}
_making = threading.Lock()


class Rows(NamedTuple):
    """Some rows of a Parquet file's row group: a batch that is read where it's needed."""

    path: str
    group: int
    start: int
    stop: int
    columns: tuple[str, ...] | None
    storage_options: tuple[tuple[str, Any], ...]

    def read(self) -> "pd.DataFrame":
        """Return the rows."""
        table = _row_group(self.path, self.group, self.columns, self.storage_options)
        return table.slice(self.start, self.stop - self.start).to_pandas()


Batch = list | Rows


class Part(NamedTuple):
    """Where a task writes its rows.

    Attributes:
        path: Of its file.
        storage_options: For fsspec.
        is_there: Whether it was written before, so that nothing has to be computed.
        schema: Its types, as Arrow serializes them, once it's written.
    """

    path: str
    storage_options: dict[str, Any]
    is_there: bool = False
    schema: bytes = b""


def n_items(batch: Batch) -> int:
    """Return how many items, or rows of a table, a batch has."""
    return batch.stop - batch.start if isinstance(batch, Rows) else len(batch)


def run_task(make: bytes, batches: list[Batch], row_errors: bool, ahead: int, part: Part | None) -> Any:
    """Return a DataFrame of what the maker's object says of these batches, or the Part that was written of it.

    Args:
        make: The pickled maker.
        row_errors: Whether an item that fails becomes a row with an error.
        ahead: Batches that are loaded while one is computed.
    """
    import pandas as pd

    if part and part.is_there:
        return part._replace(schema=_packed(_parquet_file(part.path, part.storage_options).schema_arrow))
    call = _object_of(make)
    load = getattr(call, "load", None)
    loaded = _loaded_ahead(load, batches, ahead)
    frame = pd.concat([_frame(call, load, *one, row_errors) for one in loaded], ignore_index=True)
    if part is None:
        return frame
    import pyarrow as pa

    return write(pa.Table.from_pandas(frame, preserve_index=False), part)


def _object_of(make: bytes) -> Any:
    """Return the maker's object of this process; the first task makes it, and others wait."""
    key = hashlib.sha256(make).hexdigest()
    with _making:
        if key in _made:
            _made[key] = _made.pop(key)  # it was used last
        else:
            while len(_made) >= MOST_MADE:
                del _made[next(iter(_made))]
            _made[key] = cloudpickle.loads(make)()
        return _made[key]


def _loaded_ahead(
    load: Callable | None, batches: list[Batch], n_ahead: int
) -> Iterator[tuple[Batch, Callable[[], Any]]]:
    """Yield each batch and what returns it loaded, once the next ones are being loaded, too."""
    with ThreadPoolExecutor(n_ahead or 1) as pool:
        started: deque[tuple[Batch, Future]] = deque()
        for batch in batches:
            # In this task's context, by which a warning reaches the client.
            started.append((batch, pool.submit(copy_context().run, _load, load, batch)))
            if len(started) > n_ahead:
                first, future = started.popleft()
                yield first, future.result
        while started:
            first, future = started.popleft()
            yield first, future.result


def _load(load: Callable | None, batch: Batch) -> Any:
    items = batch.read() if isinstance(batch, Rows) else batch
    return load(items) if load else items


def _frame(
    call: Callable, load: Callable | None, batch: Batch, loaded: Callable[[], Any], row_errors: bool
) -> "pd.DataFrame":
    import pandas as pd

    try:
        frame = _as_frame(call(loaded()))
    except Exception as error:
        if not row_errors:
            add_note(error, f"In the batch that begins with {_shown(batch)}.")
            raise
        if n_items(batch) > 1:  # which of them fails?
            alone = [_frame(call, load, one, partial(_load, load, one), True) for one in _one_by_one(batch)]
            return pd.concat(alone, ignore_index=True)
        frame = pd.DataFrame({"error": [f"{_shown(batch)}: {type(error).__name__}: {error}"]})
    if row_errors:
        frame["error"] = frame.get("error", pd.Series([None] * len(frame))).astype("string")
    return frame


def _as_frame(answer: Any) -> "pd.DataFrame":
    import pandas as pd

    if isinstance(answer, pd.DataFrame):
        return answer
    if not isinstance(answer, Mapping):
        raise TypeError(f"A batch became a {type(answer).__name__}: return a dict of columns, or a DataFrame.")
    return pd.DataFrame({str(name): _column(values) for name, values in answer.items()})


def _column(values: Any) -> Any:
    """Return a column: tensors become NumPy's arrays on the CPU, and each row of several dimensions a value."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()
    if getattr(values, "ndim", 1) > 1:
        return list(values)
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) and not hasattr(values, "dtype"):
        return [_column(value) if hasattr(value, "detach") else value for value in values]
    return values


def _one_by_one(batch: Batch) -> list[Batch]:
    if isinstance(batch, Rows):
        return [batch._replace(start=row, stop=row + 1) for row in range(batch.start, batch.stop)]
    return [[item] for item in batch]


def _shown(batch: Batch) -> str:
    if isinstance(batch, Rows):
        return f"row {batch.start} of row group {batch.group} of {batch.path}"
    return repr(batch[0])[:MOST_SHOWN]


# --- Parquet


def write(table: "pa.Table", part: Part) -> Part:
    """Write a part atomically."""
    import pyarrow.parquet as pq
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    content = BytesIO()
    pq.write_table(table, content)
    fs, path = url_to_fs(part.path, **part.storage_options)
    if isinstance(fs, LocalFileSystem):
        beside = f"{os.path.dirname(path)}/.{uuid.uuid4().hex}"
        fs.pipe_file(beside, content.getvalue())
        fs.mv(beside, path)
    else:  # an object store shows a file once all of it is there
        fs.pipe_file(path, content.getvalue())
    return part._replace(schema=_packed(table.schema))


def _packed(schema: "pa.Schema") -> bytes:
    return schema.remove_metadata().serialize().to_pybytes()


def one_schema(schemas: list[bytes]) -> bytes:
    """Return a schema for all parts: each column has the type of the first part in which it has values."""
    import pyarrow as pa

    if not schemas:
        return b""
    read = [pa.ipc.read_schema(pa.py_buffer(schema)) for schema in dict.fromkeys(schemas)]
    types: dict[str, pa.DataType] = {}
    for field in (field for schema in read for field in schema if not pa.types.is_null(field.type)):
        types.setdefault(field.name, field.type)
    names = dict.fromkeys([*max(read, key=len).names, *(name for schema in read for name in schema.names)])
    return pa.schema([(name, types.get(name, pa.null())) for name in names]).serialize().to_pybytes()


def retype(part: Part, schema: bytes) -> Part:
    """Give a part that has been written these types. Raises ValueError if its values don't have them."""
    import pyarrow as pa

    wanted = pa.ipc.read_schema(pa.py_buffer(schema))
    table = _parquet_file(part.path, part.storage_options).read()
    columns = []
    for field in wanted:
        try:
            there = field.name in table.column_names
            columns.append(table[field.name].cast(field.type) if there else pa.nulls(len(table), field.type))
        except pa.ArrowInvalid as error:
            raise ValueError(f"The column {field.name!r} of {part.path} is no {field.type}: {error}") from error
    return write(pa.table(columns, schema=wanted), part)


@lru_cache(maxsize=2)  # the next batches are of the same group
def _row_group(
    path: str, group: int, columns: tuple[str, ...] | None, storage_options: tuple[tuple[str, Any], ...]
) -> "pa.Table":
    return _parquet_file(path, dict(storage_options)).read_row_group(group, columns=columns and list(columns))


def sizes_of_row_groups(path: str, storage_options: Mapping[str, Any]) -> list[int]:
    """Return how many rows each row group of a Parquet file has."""
    about = _parquet_file(path, storage_options).metadata
    return [about.row_group(group).num_rows for group in range(about.num_row_groups)]


def _parquet_file(path: str, storage_options: Mapping[str, Any]) -> Any:
    import pyarrow.parquet as pq
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(path, **storage_options)
    return pq.ParquetFile(fs.open(path, "rb"))
