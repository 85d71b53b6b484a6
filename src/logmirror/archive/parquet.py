"""Read Parquet objects and detect damage in them.

Strict: columns and types must be exactly those of a known layout, logmirror's or mirror-v3's;
required values must not be null; text must be valid UTF-8; and the statistics by which readers skip
row groups must be correct.
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
"""Approximate read size for files of mirror-v3, whose only row group is the whole file."""
_IN_MEMORY_BYTES: Final = 64 << 20
_READ_BYTES: Final = 1 << 20
_TAIL: Final = struct.Struct("<I4s")
_CHECK_BYTES: Final = len(FILE_CHECK_KEY) + 2 + len(NO_FILE_CHECK)
"""The key, two bytes of Thrift (type and length of the value), the value."""

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
    """Return the types of the key and value columns of an open object."""
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
    """Return whether mirror-v3 wrote this ParquetFile."""
    layout = layout_of(parquet.schema_arrow)
    return layout is not None and layout.is_mirror_v3


def checked_file(file: BinaryIO, size_bytes: int, name: str) -> BinaryIO:
    """Compare a file with the checksum in its footer, if it has one.

    The checksum is found in the raw bytes, without a parser: Parquet readers trust their input.

    Returns:
        The file to read: the same file, or the content of a small file in memory, so that it is
        fetched from a bucket only once.

    Raises:
        CorruptionError: The file was changed after it was written.
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
    stated = footer[at:][:_CHECK_BYTES].removeprefix(FILE_CHECK_KEY.encode())[2:]
    if at >= 0:
        checksum, left = xxhash.xxh3_128(), begin
        file.seek(0)
        while left:
            piece = file.read(min(left, _READ_BYTES))
            checksum.update(piece)
            left -= len(piece)
        at += len(FILE_CHECK_KEY) + 2
        checksum.update(footer[:at] + NO_FILE_CHECK.encode() + footer[at + len(stated) :])
        found = f"xxh3:{checksum.hexdigest()}"
        if found.encode() != stated:
            raise CorruptionError(
                "the file does not match its own checksum",
                hint="the file was changed after it was written",
                name=name,
                expected=stated.decode(errors="replace"),
                found=found,
            )
    file.seek(0)
    return file


def read_parquet(
    parquet: Any,  # noqa: ANN401  # pyarrow has no types
    name: str,
    *,
    last_group: bool = False,
) -> Iterator[Any]:
    """Yield the rows as Arrow record batches of `wire.columns.SCHEMA`, none of them empty.

    Args:
        parquet: The open object.
        name: Its name, for errors.
        last_group: Read the last row group only.

    Raises:
        CorruptionError: A page cannot be read, a required value is null, or a row group's
            statistics contradict its rows.
    """
    layout = _layout(parquet, name)
    groups = range(parquet.metadata.num_row_groups)
    for group in groups[-1:] if last_group else groups:
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
            size = parquet.metadata.row_group(group)
            rows = max(
                min(rows, size.num_rows * _MIRROR_V3_BYTES // max(size.total_byte_size, 1)), 1
            )
        batches = parquet.iter_batches(batch_size=rows, row_groups=[group], use_threads=False)
    while True:
        with _translated(name):
            batch = next(batches, None)
            if batch is None:
                return
            batch.validate(full=True)  # finds text that is not UTF-8
        try:
            batch = layout.to_rows(batch)
        except CorruptionError as error:
            raise error.add_facts(name=name) from None
        for column in _NEVER_NULL:
            if batch.column(column).null_count:
                raise CorruptionError("null in a column without nulls", name=name, column=column)
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
            stated = (statistics.min_raw, statistics.max_raw)
            if stated != found:
                raise CorruptionError(
                    "statistics in the footer contradict the rows",
                    name=name,
                    column=column.path_in_schema,
                    expected=found,
                    found=stated,
                )


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:  # a name in the footer: ValueError
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the file
        raise CorruptionError(
            "not a whole Parquet file", name=name, reason=str(error)[:200]
        ) from error
