"""Batches of `map_batches` on a worker: one object for a process, batches loaded ahead, a DataFrame for each task."""

import os
import pickle
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from daskrun.errors import add_note

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MOST_MADE = 8  # of calls at the same time, and of programs that were killed
MOST_SHOWN = 200  # characters of an item


_made: dict[str, Callable] = {}  # by call
_making = threading.Lock()


@dataclass(frozen=True)
class Rows:
    """Some rows of a Parquet file's row group: a batch that is read where it's needed. It's sliced as a list is."""

    path: str
    version: str  # of the file, which changes when it's written again
    group: int
    start: int
    stop: int
    columns: tuple[str, ...] | None
    storage_options: bytes  # pickled, as a dict has no hash

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, rows: slice) -> "Rows":
        chosen = range(self.start, self.stop)[rows]
        return replace(self, start=chosen.start, stop=chosen.stop)

    def __repr__(self) -> str:
        return f"row {self.start} of row group {self.group} of {self.path}"

    def read(self) -> "pd.DataFrame":
        """Return the rows. Integers with a missing value stay integers, beside None."""
        table = _row_group(self.path, self.version, self.group, self.columns, self.storage_options)
        return table.slice(self.start, self.stop - self.start).to_pandas(integer_object_nulls=True)


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


def run_task(call: str, make: bytes, batches: list[Batch], row_errors: bool, ahead: int, part: Part | None) -> Any:
    """Return a DataFrame of what the maker's object says of these batches, or the Part that was written of it.

    Args:
        call: Of `map_batches`: each has objects of its own.
        make: The pickled maker.
        row_errors: Whether an item that fails becomes a row with an error.
        ahead: Batches that are loaded while one is computed.
    """
    if part and part.is_there:
        return part._replace(schema=_packed(_parquet_file(part.path, part.storage_options).schema_arrow))
    made = _object_of(call, make)
    load, convert = getattr(made, "load", None), _as_table if part else _as_frame
    loaded = _loaded_ahead(load, batches, ahead)
    found = [rows for one in loaded for rows in _rows(made, load, convert, *one, row_errors)]
    if part is None:
        import pandas as pd

        return pd.concat(found, ignore_index=True)
    import pyarrow as pa

    return write(pa.concat_tables(found, promote_options="permissive"), part)


def _object_of(call: str, make: bytes) -> Any:
    """Return the maker's object of this process; the first task makes it, and others of the call wait."""
    with _making:
        made = _made.pop(call, None)
        if made is None:
            made = cloudpickle.loads(make)()
        if not callable(made):
            raise TypeError(f"The maker returned a {type(made).__name__}, which can't be called.")
        _made[call] = made  # it was used last
        while len(_made) > MOST_MADE:
            del _made[next(iter(_made))]
        return made


def forget(call: str) -> None:
    """Drop what a call has made in this process, and its memory."""
    _made.pop(call, None)


def _loaded_ahead(
    load: Callable | None, batches: list[Batch], n_ahead: int
) -> Iterator[tuple[Batch, Callable[[], Any]]]:
    """Yield each batch and what returns it loaded, once the next ones are being loaded, too."""
    with ThreadPoolExecutor(n_ahead or 1) as pool:
        started: deque[tuple[Batch, Future]] = deque()
        for batch in [*batches, None]:
            if batch is not None:  # in this task's context, by which a warning reaches the client
                started.append((batch, pool.submit(copy_context().run, _load, load, batch)))
            while started and (batch is None or len(started) > n_ahead):
                first, future = started.popleft()
                yield first, future.result


def _load(load: Callable | None, batch: Batch) -> Any:
    items = batch.read() if isinstance(batch, Rows) else batch
    return load(items) if load else items


def _rows(
    made: Callable, load: Callable | None, convert: Callable, batch: Batch, loaded: Callable[[], Any], row_errors: bool
) -> list[Any]:
    """Return the rows of a batch, in pieces, as `convert` makes them."""
    import pandas as pd

    try:
        frame = _as_frame(made(loaded()))
        if row_errors:
            frame["error"] = frame.get("error", pd.Series([None] * len(frame))).astype("string")
        return [convert(frame)]
    except Exception as error:
        if not row_errors:
            add_note(error, f"In the batch that begins with {_shown(batch)}.")
            raise
        if len(batch) > 1:  # which of them fails?
            items = [batch[n : n + 1] for n in range(len(batch))]
            alone = [_rows(made, load, convert, item, partial(_load, load, item), True) for item in items]
            return [piece for pieces in alone for piece in pieces]
        why = pd.Series([f"{_shown(batch)}: {type(error).__name__}: {error}"], dtype="string")
        return [convert(pd.DataFrame({"error": why}))]


def _as_frame(answer: Any) -> "pd.DataFrame":
    import pandas as pd

    if isinstance(answer, pd.DataFrame):
        return answer
    if not isinstance(answer, Mapping):
        raise TypeError(f"A batch became a {type(answer).__name__}: return a dict of columns, or a DataFrame.")
    return pd.DataFrame({str(name): _column(values) for name, values in answer.items()})


def _as_table(frame: "pd.DataFrame") -> "pa.Table":
    import pyarrow as pa

    return pa.Table.from_pandas(frame, preserve_index=False)


def _column(values: Any) -> Any:
    """Return a column: tensors become NumPy's arrays, each row of several dimensions a value, and paths texts."""
    if hasattr(values, "reset_index"):  # pandas would align the columns by their indices
        return values.reset_index(drop=True)
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()
    if (n_dimensions := getattr(values, "ndim", 1)) > 1:
        return list(values) if n_dimensions == 2 else values.tolist()
    if isinstance(values, Iterable) and not isinstance(values, (str, bytes)) and not hasattr(values, "dtype"):
        plain = (os.fspath(value) if isinstance(value, os.PathLike) else value for value in values)
        return [_column(value) if hasattr(value, "detach") else value for value in plain]
    return values


def _shown(batch: Batch) -> str:
    return repr(batch if isinstance(batch, Rows) else batch[0])[:MOST_SHOWN]


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


def merged(schemas: Sequence[bytes]) -> bytes:
    """Return the schema that all of these fit into. Raises pyarrow.ArrowTypeError, which names a column."""
    import pyarrow as pa

    read = [pa.ipc.read_schema(pa.py_buffer(schema)) for schema in schemas]
    return _packed(pa.unify_schemas(read, promote_options="permissive"))


def retype(part: Part, schema: bytes) -> Part:
    """Give a part that has been written these types, which are wider than its own."""
    import pyarrow as pa

    wanted = pa.ipc.read_schema(pa.py_buffer(schema))
    table = _parquet_file(part.path, part.storage_options).read()
    there = {name: table[name] for name in table.column_names}
    columns = [
        there[field.name].cast(field.type) if field.name in there else pa.nulls(len(table), field.type)
        for field in wanted
    ]
    return write(pa.table(columns, schema=wanted), part)


@lru_cache(maxsize=2)  # the next batches are of the same group
def _row_group(
    path: str, version: str, group: int, columns: tuple[str, ...] | None, storage_options: bytes
) -> "pa.Table":
    file = _parquet_file(path, pickle.loads(storage_options))
    return file.read_row_group(group, columns=columns and list(columns))


def row_groups(path: str, columns: tuple[str, ...] | None, storage_options: dict[str, Any]) -> list[Rows]:
    """Return the row groups of a Parquet file. Raises ValueError for a column that it doesn't have."""
    from fsspec.core import url_to_fs

    fs, key = url_to_fs(path, **storage_options)
    try:
        file = _parquet_file(path, storage_options)
    except ValueError as error:
        raise ValueError(f"{path} is no Parquet file: {error}") from error
    if unknown := set(columns or ()) - set(file.schema_arrow.names):
        raise ValueError(
            f"{path} has no column {', '.join(sorted(unknown))}: its columns are {file.schema_arrow.names}."
        )
    about = file.metadata
    sizes = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
    options = pickle.dumps(storage_options)
    return [Rows(path, fs.ukey(key), group, 0, size, columns, options) for group, size in enumerate(sizes)]


def _parquet_file(path: str, storage_options: Mapping[str, Any]) -> Any:
    import pyarrow.parquet as pq
    from fsspec.core import url_to_fs

    fs, path = url_to_fs(path, **storage_options)
    return pq.ParquetFile(fs.open(path, "rb"))
