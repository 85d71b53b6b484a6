"""Read Parquet objects: rows back, and everything that may be wrong with such a file.

Strict, because it judges: columns and types must be exactly those of the format, values must be
there, texts must be texts, and the statistics that readers skip row groups by must be true.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from logmirror.errors import CorruptionError
from logmirror.wire.columns import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROWS: Final = 16_384
_NEVER_NULL: Final = ("topic", "partition", "offset", "timestamp", "timestampType", "headers")


def open_parquet(file: BinaryIO, name: str) -> Any:  # noqa: ANN401  # pyarrow has no types
    """Open an object; returns pyarrow's ParquetFile.

    Raises:
        CorruptionError: It is not Parquet, or has other columns. Facts: `name`, and `expected` and
            `found` columns.
    """
    with _translated(name):
        parquet = pq.ParquetFile(file)
        schema = parquet.schema_arrow.remove_metadata()
    if not schema.equals(SCHEMA):
        raise CorruptionError(
            "the columns are not those of a Parquet object",
            name=name,
            expected=", ".join(f"{field.name} {field.type}" for field in SCHEMA),
            found=", ".join(f"{field.name} {field.type}" for field in schema),
        )
    return parquet


def read_parquet(parquet: Any, name: str) -> Iterator[Any]:  # noqa: ANN401  # pyarrow has no types
    """Yield the rows as Arrow record batches of `wire.columns.SCHEMA`, none of them empty.

    Raises:
        CorruptionError: A page cannot be read, a value that must be there is null, or a row group's
            statistics contradict its rows.
    """
    for group in range(parquet.metadata.num_row_groups):
        extremes: dict[str, tuple[int, int]] = {}
        for batch in _group_rows(parquet, group, name):
            for column in ("offset", "timestamp"):
                values = batch.column(column).cast(pa.int64()).to_numpy()
                low, high = extremes.get(column, (values[0], values[0]))
                extremes[column] = (
                    min(int(low), int(values.min())),
                    max(int(high), int(values.max())),
                )
            yield batch
        _check_statistics(parquet.metadata, group, extremes, name)


def _group_rows(parquet: Any, group: int, name: str) -> Iterator[Any]:  # noqa: ANN401  # pyarrow has no types
    with _translated(name):
        batches = parquet.iter_batches(batch_size=_ROWS, row_groups=[group], use_threads=False)
    while True:
        with _translated(name):
            batch = next(batches, None)
            if batch is None:
                return
            batch.validate(full=True)  # finds texts that are not UTF-8
        for column in _NEVER_NULL:
            if batch.column(column).null_count:
                raise CorruptionError("null where a value must be", name=name, column=column)
        if len(batch):
            yield batch


def _check_statistics(
    metadata: Any,  # noqa: ANN401  # pyarrow has no types
    group: int,
    extremes: dict[str, tuple[int, int]],
    name: str,
) -> None:
    with _translated(name):
        columns = metadata.row_group(group)
        for index in range(columns.num_columns):
            column = columns.column(index)
            found = extremes.get(column.path_in_schema)
            statistics = column.statistics
            if found is None or statistics is None or not statistics.has_min_max:
                continue
            told = (statistics.min_raw, statistics.max_raw)
            if told != found:
                raise CorruptionError(
                    "statistics in the footer contradict the rows",
                    name=name,
                    column=column.path_in_schema,
                    expected=found,
                    found=told,
                )


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:  # a name in the footer: ValueError
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's word, not the file's
        raise CorruptionError(
            "not a whole Parquet file", name=name, reason=str(error)[:200]
        ) from error
