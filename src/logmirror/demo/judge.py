"""Compares each record of the replicas with the flight that it was produced from.

The readers share no code with the writers. pyarrow reads Parquet; the plain-Python decoder that the
compiled kernels are tested against reads native objects; librdkafka reads the topic in the second
broker. The expected records come from the CSV and from the broker's acknowledgements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyarrow import parquet

from logmirror.errors import CorruptionError
from logmirror.wire.records import decode_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from logmirror.demo.flights import Flights
    from logmirror.demo.replicas import Row

COLUMNS: Final = ("offset", "timestamp", "key", "value")


def compare(
    folder: Path,
    extension: str,
    flights: Flights,
    receipts: Mapping[int, Sequence[int]],
    on_object: Callable[[Path], None] = lambda _: None,
) -> int:
    """Compare a replica in files with the acknowledged records; returns the number of records.

    Args:
        folder: Contains one folder per partition.
        extension: `parquet` or `batches`.
        flights: The produced records.
        receipts: For each partition, the index of the flight at each offset, from 0.
        on_object: Called after each object.

    Raises:
        CorruptionError: A record is missing, differs, or was never produced. The facts name the
            first one.
    """
    read = {"parquet": _parquet_rows, "batches": _native_rows}[extension]
    equal = 0
    for partition, indices in sorted(receipts.items()):
        found = pa.concat_tables(
            _counted(read, sorted((folder / str(partition)).glob(f"*.{extension}")), on_object)
        )
        _check(found, _expected(flights, indices), partition=partition)
        equal += len(indices)
    return equal


def compare_topic(
    read: Callable[[int, int], Iterable[Row]],
    flights: Flights,
    receipts: Mapping[int, Sequence[int]],
) -> int:
    """Compare a replica in another broker; see `compare`.

    Args:
        read: Yields the records of a partition: the expected number, and one more if it exists.
        flights: The produced records.
        receipts: See `compare`.
    """
    equal = 0
    for partition, indices in sorted(receipts.items()):
        rows = list(read(partition, len(indices)))
        columns = zip(*rows, strict=True) if rows else ([], [], [], [])
        found = _table(*(list(column) for column in columns))
        _check(found, _expected(flights, indices), partition=partition)
        equal += len(indices)
    return equal


def _counted(
    read: Callable[[Path], pa.Table], paths: Sequence[Path], on_object: Callable[[Path], None]
) -> Iterator[pa.Table]:
    yield _table([], [], [], [])
    for path in paths:
        yield read(path)
        on_object(path)


def _expected(flights: Flights, indices: Sequence[int]) -> pa.Table:
    rows = pa.array(indices, pa.int64())
    return _table(
        range(len(indices)),
        flights.timestamps_ms.take(rows),
        flights.keys.take(rows),
        flights.values.take(rows),
    )


def _parquet_rows(path: Path) -> pa.Table:
    found = parquet.ParquetFile(path).read(columns=list(COLUMNS))
    return _table(
        found["offset"],
        found["timestamp"].cast(pa.timestamp("ms", "UTC")).cast(pa.int64()),
        found["key"],
        found["value"],
    )


def _native_rows(path: Path) -> pa.Table:
    records = decode_reference(path.read_bytes(), check_crc=False)
    return _table(
        [record.offset for record in records],
        [record.timestamp_ms for record in records],
        [record.key for record in records],
        [record.value for record in records],
    )


def _table(offsets: object, timestamps_ms: object, keys: object, values: object) -> pa.Table:
    types = (pa.int64(), pa.int64(), pa.binary(), pa.binary())
    columns = [
        column if isinstance(column, pa.Array | pa.ChunkedArray) else pa.array(column, type_)
        for column, type_ in zip((offsets, timestamps_ms, keys, values), types, strict=True)
    ]
    return pa.table(columns, names=list(COLUMNS))


def _check(found: pa.Table, expected: pa.Table, *, partition: int) -> None:
    if found.equals(expected):
        return
    for name in COLUMNS:
        pairs = zip(found[name].to_pylist(), expected[name].to_pylist(), strict=False)
        for offset, (actual, wanted) in enumerate(pairs):
            if actual != wanted:
                raise CorruptionError(
                    "a record differs from the one that was produced at this offset",
                    partition=partition,
                    column=name,
                    offset=offset,
                    expected=wanted,
                    found=actual,
                )
    raise CorruptionError(
        "the replica does not have as many records as were produced",
        partition=partition,
        expected=expected.num_rows,
        found=found.num_rows,
    )
