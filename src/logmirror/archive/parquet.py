"""Read Parquet objects: rows back, and everything that may be wrong with such a file.

Strict, because it judges: columns and types must be exactly those of a known layout, ours or
mirror-v3's, values must be there, texts must be texts, and the statistics that readers skip row
groups by must be true.
"""

from __future__ import annotations

import contextlib
import io
import struct
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from logmirror.archive.metadata import FILE_CHECK_KEY, NO_FILE_CHECK
from logmirror.archive.parquet_columns import layout_of
from logmirror.errors import CorruptionError
from logmirror.wire.columns import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.archive.parquet_columns import Layout
    from logmirror.model import ColumnTypes

_ROWS: Final = 16_384
_MIRROR_V3_BYTES: Final = 32 << 20
"""About as much is read at once of a file of mirror-v3, whose row group is the whole file."""
_IN_MEMORY_BYTES: Final = 64 << 20
_READ_BYTES: Final = 1 << 20
_TAIL: Final = struct.Struct("<I4s")
_CHECK_BYTES: Final = len(FILE_CHECK_KEY) + 2 + len(NO_FILE_CHECK)
"""Key, two bytes of Thrift (type and length of the value), value."""

_NEVER_NULL: Final = ("topic", "partition", "offset", "timestamp", "timestampType", "headers")


def open_parquet(file: BinaryIO, name: str) -> Any:  # noqa: ANN401  # pyarrow has no types
    """Open an object; returns pyarrow's ParquetFile.

    Raises:
        CorruptionError: It is not Parquet, or has other columns. Facts: `name`, and `expected` and
            `found` columns.
    """
    with _translated(name):
        parquet = pq.ParquetFile(file)
    _layout(parquet, name)
    return parquet


def column_types(parquet: Any, name: str) -> ColumnTypes:  # noqa: ANN401  # pyarrow has no types
    """What an open object's keys and values are, as far as its columns tell."""
    return _layout(parquet, name).types


def _layout(parquet: Any, name: str) -> Layout:  # noqa: ANN401  # pyarrow has no types
    with _translated(name):
        schema = parquet.schema_arrow
        layout = layout_of(schema)
    if layout is None:
        raise CorruptionError(
            "the columns are not those of a Parquet object",
            name=name,
            expected=", ".join(f"{field.name} {field.type}" for field in SCHEMA),
            found=", ".join(f"{field.name} {field.type}" for field in schema),
        )
    return layout


def is_mirror_v3(parquet: Any) -> bool:  # noqa: ANN401  # pyarrow has no types
    """Whether mirror-v3 wrote this ParquetFile."""
    layout = layout_of(parquet.schema_arrow)
    return layout is not None and layout.is_mirror_v3


def checked_file(file: BinaryIO, size_bytes: int, name: str) -> BinaryIO:
    """Compare a file with the checksum in its footer, if one is there.

    It is looked up in the bytes, without a parser: readers of Parquet trust their input.

    Returns:
        What is to be read: the file, or its content in memory where it is small, so that a bucket
        is asked for it once.

    Raises:
        CorruptionError: The file is not as it was written.
    """
    if size_bytes <= _IN_MEMORY_BYTES:
        file = io.BytesIO(file.read())
    file.seek(max(size_bytes - _TAIL.size, 0))
    tail = file.read(_TAIL.size)
    footer_bytes = _TAIL.unpack(tail)[0] if len(tail) == _TAIL.size else 0
    begin = max(size_bytes - _TAIL.size - footer_bytes, 0)
    file.seek(begin)
    footer = file.read()
    at = footer.rfind(FILE_CHECK_KEY.encode())
    told = footer[at:][:_CHECK_BYTES].removeprefix(FILE_CHECK_KEY.encode())[2:]
    if at >= 0:
        checksum, left = xxhash.xxh3_128(), begin
        file.seek(0)
        while left:
            piece = file.read(min(left, _READ_BYTES))
            checksum.update(piece)
            left -= len(piece)
        at += len(FILE_CHECK_KEY) + 2
        checksum.update(footer[:at] + NO_FILE_CHECK.encode() + footer[at + len(told) :])
        found = f"xxh3:{checksum.hexdigest()}"
        if found.encode() != told:
            raise CorruptionError(
                "the file does not match its own checksum",
                hint="bytes of it were changed after it was written",
                name=name,
                expected=told.decode(errors="replace"),
                found=found,
            )
    file.seek(0)
    return file


def read_parquet(parquet: Any, name: str) -> Iterator[Any]:  # noqa: ANN401  # pyarrow has no types
    """Yield the rows as Arrow record batches of `wire.columns.SCHEMA`, none of them empty.

    Raises:
        CorruptionError: A page cannot be read, a value that must be there is null, or a row group's
            statistics contradict its rows.
    """
    layout = _layout(parquet, name)
    for group in range(parquet.metadata.num_row_groups):
        extremes: dict[str, tuple[int, int]] = {}
        for batch in _group_rows(parquet, group, name, layout):
            for column in ("offset", "timestamp"):
                values = batch.column(column).cast(pa.int64()).to_numpy()
                low, high = extremes.get(column, (values[0], values[0]))
                extremes[column] = (
                    min(int(low), int(values.min())),
                    max(int(high), int(values.max())),
                )
            yield batch
        _check_statistics(parquet.metadata, group, extremes, name)


def _group_rows(
    parquet: Any,  # noqa: ANN401  # pyarrow has no types
    group: int,
    name: str,
    layout: Layout,
) -> Iterator[Any]:
    rows = _ROWS
    with _translated(name):
        if layout.is_mirror_v3:
            told = parquet.metadata.row_group(group)
            rows = max(
                min(rows, told.num_rows * _MIRROR_V3_BYTES // max(told.total_byte_size, 1)), 1
            )
        batches = parquet.iter_batches(batch_size=rows, row_groups=[group], use_threads=False)
    while True:
        with _translated(name):
            batch = next(batches, None)
            if batch is None:
                return
            batch.validate(full=True)  # finds texts that are not UTF-8
        try:
            batch = layout.to_rows(batch)
        except CorruptionError as error:
            raise error.add_facts(name=name) from None
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
